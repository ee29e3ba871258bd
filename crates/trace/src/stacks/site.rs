//! What a call stack shows a reader: the program's own line, and what it called.

use warpool::memory::report::Frame;

use super::native::{NativeFrame, classify, short_name};

/// Packages whose code is not the program's own.
const FRAMEWORKS: [&str; 12] = [
    "torch",
    "torch_xla",
    "functorch",
    "triton",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "accelerate",
    "deepspeed",
    "ignite",
    "apex",
    "importlib",
];

/// Python functions that only call another function.
const PASS_THROUGH: [&str; 12] = [
    "_call_impl",
    "_wrapped_call_impl",
    "wrapper",
    "wrapped",
    "_use_grad",
    "decorate_context",
    "decorate_autocast",
    "maybe_fallback",
    "_fn",
    "inner",
    "__call__",
    "_engine_run_backward",
];

/// Files whose functions only call another function: the wrappers of compiled graphs, and autograd's functions.
const PASS_THROUGH_FILES: [&str; 6] = [
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_inductor/",
    "torch/_compile.py",
    "torch/utils/_contextlib.py",
    "torch/autograd/function.py",
];

/// Which code is a framework's.
#[derive(Clone, Debug)]
pub struct Frameworks {
    names: Vec<String>,
}

impl Default for Frameworks {
    fn default() -> Self {
        Self { names: FRAMEWORKS.map(ToOwned::to_owned).to_vec() }
    }
}

impl Frameworks {
    /// Adds packages, such as `transformers`, or parts of paths, such as `my_project/utils/`.
    #[must_use]
    pub fn with(mut self, names: &[String]) -> Self {
        self.names.extend(names.iter().cloned());
        self
    }

    /// Only these packages, instead of the default ones.
    #[must_use]
    pub fn only(names: &[String]) -> Self {
        Self { names: names.to_vec() }
    }

    /// Whether a file is a framework's, or Python's own.
    #[must_use]
    pub fn contains(&self, file: &str) -> bool {
        let in_package = |name: &String| match name.contains(['/', '.']) {
            true => file.contains(name.as_str()),
            false => is_in_package(file, name),
        };
        is_python_library(file) || is_generated(file) || self.names.iter().any(in_package)
    }
}

/// Paths of Windows too.
const SEPARATORS: [char; 2] = ['/', '\\'];

/// Whether a file belongs to a package. For an installed package only its folder in `site-packages` counts:
/// environments and projects are often named after a package that they use, such as `/opt/torch/lib/...`.
fn is_in_package(file: &str, name: &str) -> bool {
    let path = short_path(file);
    if path.len() < file.len() {
        return path.split(SEPARATORS).next() == Some(name);
    }
    let mut folders = path.split(SEPARATORS).peekable();
    while let Some(folder) = folders.next() {
        // A checkout of PyTorch, not a project in a folder of that name.
        let is_checkout = name != "torch" || folders.peek().is_some_and(|next| TORCH_PARTS.contains(next));
        if folder == name && folders.peek().is_some() && is_checkout {
            return true;
        }
    }
    false
}

/// What is in the folder of PyTorch's Python code.
const TORCH_PARTS: [&str; 27] = [
    "__init__.py",
    "_C",
    "_compile.py",
    "_dynamo",
    "_functorch",
    "_inductor",
    "_ops.py",
    "_subclasses",
    "_tensor.py",
    "_utils.py",
    "_utils_internal.py",
    "amp",
    "autograd",
    "cuda",
    "distributed",
    "distributions",
    "fft",
    "func",
    "functional.py",
    "fx",
    "jit",
    "linalg",
    "nn",
    "optim",
    "random.py",
    "serialization.py",
    "utils",
];

/// Whether a file is of Python's standard library, or was made by it.
fn is_python_library(file: &str) -> bool {
    let in_library = file.split_once("/lib/python3").is_some_and(|(_, rest)| !rest.contains("-packages/"))
        || file.split_once("\\Lib\\").is_some_and(|(_, rest)| !rest.contains("-packages\\"));
    // A program that was typed in has files in angle brackets too.
    let is_typed_in = ["<stdin>", "<ipython-input", "<cell"].iter().any(|start| file.starts_with(start));
    in_library || (file.starts_with('<') && !is_typed_in)
}

/// Whether a file is code that a compiler wrote for a graph.
fn is_generated(file: &str) -> bool {
    file.contains("/torchinductor_") || file.starts_with("<eval_with_key>")
}

/// Whether a frame is of Python code, and not of compiled code.
pub(crate) fn is_python(frame: &Frame) -> bool {
    frame.filename.ends_with(".py") || frame.filename.starts_with('<') || frame.filename.ends_with(".ipynb")
}

/// The program's line of a call stack, and the calls below it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallSite {
    /// The innermost Python line that is not a framework's; the outermost one, if all are; `None` without Python lines.
    pub line: Option<String>,
    /// The innermost call: of Python, or else a node of autograd's graph, a function of an extension, an operator.
    pub call: String,
    /// The Python module of the innermost call; `autograd` in the backward pass, `native` for other compiled code.
    pub module: String,
    /// The calls from the line to the innermost one, without pass-through functions.
    pub path: Vec<String>,
}

impl CallSite {
    /// The call site of a stack, given with its innermost frame first; `None` if the stack is empty.
    #[must_use]
    pub fn of(stack: &[Frame], frameworks: &Frameworks) -> Option<Self> {
        if stack.is_empty() {
            return None;
        }
        let frames: Vec<&Frame> = stack.iter().filter(|frame| is_python(frame)).collect();
        let own = frames.iter().position(|frame| !frameworks.contains(&frame.filename));
        // Autograd's thread runs a function of the program or of a compiled graph: its node says more than a line of
        // the framework.
        let node = autograd_node(stack).filter(|_| own.is_none());
        let own = own.or_else(|| frames.len().checked_sub(1)).filter(|_| node.is_none());
        let Some(own) = own else { return Some(Self::without_lines(stack, node)) };
        let telling = |frame: &&&Frame| !Self::passes_through(frame);
        let inner: Vec<&&Frame> = frames[..own].iter().filter(telling).collect();
        let innermost = inner.first().map_or(frames[own], |frame| **frame);
        Some(Self {
            line: Some(place(frames[own])),
            call: place(innermost),
            module: module(&innermost.filename),
            path: inner.iter().rev().map(|frame| place(frame)).collect(),
        })
    }

    /// A stack without a line of Python.
    fn without_lines(stack: &[Frame], node: Option<&str>) -> Self {
        if let Some(node) = node {
            return Self { line: None, call: node.to_owned(), module: "autograd".to_owned(), path: Vec::new() };
        }
        let other = stack.iter().find(|frame| classify(&frame.name) == NativeFrame::Other);
        let call = match (other, operator(stack)) {
            (Some(frame), _) => native_place(frame),
            (None, Some(operator)) => operator.to_owned(),
            (None, None) => "native code".to_owned(),
        };
        Self { line: None, call, module: "native".to_owned(), path: Vec::new() }
    }

    /// Whether a frame only calls another function, and is not useful to a reader.
    #[must_use]
    pub fn passes_through(frame: &Frame) -> bool {
        let file = short_path(&frame.filename).replace('\\', "/");
        PASS_THROUGH.contains(&frame.name.as_str()) || PASS_THROUGH_FILES.iter().any(|start| file.starts_with(start))
    }
}

/// The frames of a stack that a person reads, the innermost first: lines of Python, the node of autograd's graph, the
/// operator that the innermost line called, and functions of extensions. Frames between Python and the allocator are
/// left out.
#[must_use]
pub fn readable(stack: &[Frame]) -> Vec<Frame> {
    let has_python = stack.iter().any(is_python);
    let native = |name: &str| Frame { name: name.to_owned(), filename: String::new(), line: 0 };
    let mut readable = Vec::new();
    if let Some(operator) = operator(stack) {
        readable.push(native(operator));
    }
    let mut node_seen = false;
    for frame in stack {
        if is_python(frame) {
            readable.push(frame.clone());
            continue;
        }
        match classify(&frame.name) {
            NativeFrame::AutogradNode(node) if !node_seen => {
                node_seen = true;
                readable.push(native(node));
            }
            // The start of the interpreter, where Python is seen to run in it.
            NativeFrame::Other if !(has_python && frame.name == "main") => {
                readable.push(Frame { name: short_name(&frame.name), ..frame.clone() });
            }
            _ => {}
        }
    }
    readable
}

/// The innermost node of autograd's graph that a stack runs.
pub(crate) fn autograd_node(stack: &[Frame]) -> Option<&str> {
    stack.iter().filter(|frame| !is_python(frame)).find_map(|frame| match classify(&frame.name) {
        NativeFrame::AutogradNode(node) => Some(node),
        _ => None,
    })
}

/// The operator that the innermost line of Python, or a node of autograd's graph, called.
pub(crate) fn operator(stack: &[Frame]) -> Option<&str> {
    let mut operator = None;
    for frame in stack.iter().take_while(|frame| !is_python(frame)) {
        match classify(&frame.name) {
            NativeFrame::Operator(name) => operator = Some(name),
            NativeFrame::AutogradNode(_) => break,
            _ => {}
        }
    }
    operator
}

/// All operators that the innermost line of Python called, one inside of another.
pub(crate) fn operators(stack: &[Frame]) -> impl Iterator<Item = &str> {
    let native = stack.iter().take_while(|frame| !is_python(frame));
    native.filter_map(|frame| match classify(&frame.name) {
        NativeFrame::Operator(name) => Some(name),
        _ => None,
    })
}

/// A function with its file and line.
fn place(frame: &Frame) -> String {
    let Frame { name, filename, line } = frame;
    if is_generated(filename) {
        return format!("compiled graph (line {line} of its code)");
    }
    format!("{name} ({}:{line})", short_path(filename))
}

/// A function of compiled code, with its file where that is known.
fn native_place(frame: &Frame) -> String {
    let name = short_name(&frame.name);
    match frame.filename.as_str() {
        "" | "??" => name,
        file => format!("{name} ({}:{})", short_path(file), frame.line),
    }
}

/// A file without the folder that packages are installed in.
pub(crate) fn short_path(file: &str) -> &str {
    const FOLDERS: [&str; 4] = ["site-packages/", "dist-packages/", "site-packages\\", "dist-packages\\"];
    let installed = FOLDERS.into_iter().find_map(|folder| file.rsplit_once(folder));
    installed.map_or(file, |(_, path)| path)
}

/// The Python module of a file.
fn module(file: &str) -> String {
    let path = short_path(file);
    let path = path.strip_suffix(".py").unwrap_or(path);
    let is_absolute = path.starts_with('/') || path.contains(":\\");
    match is_absolute {
        true => path.rsplit(SEPARATORS).next().unwrap_or(path).to_owned(),
        false => path.strip_suffix("/__init__").unwrap_or(path).replace(SEPARATORS, "."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &[(&str, &str, u64)]) -> Vec<Frame> {
        let frame = |&(name, filename, line): &(&str, &str, u64)| Frame {
            name: name.to_owned(),
            filename: filename.to_owned(),
            line,
        };
        frames.iter().map(frame).collect()
    }

    #[test]
    fn innermost_own_line_and_the_calls_from_it_are_told() {
        let stack = stack(&[
            ("c10::cuda::malloc", "??", 0),
            ("dropout", "/usr/lib/python3.12/site-packages/torch/nn/functional.py", 1443),
            ("_call_impl", "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 1790),
            ("mlp", "/usr/lib/python3.12/site-packages/transformers/models/llama.py", 77),
            ("_call_impl", "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 1790),
            ("main", "/home/me/train.py", 19),
        ]);
        let site = CallSite::of(&stack, &Frameworks::default()).expect("frames");
        assert_eq!(site.line.as_deref(), Some("mlp (transformers/models/llama.py:77)"));
        assert_eq!(site.call, "dropout (torch/nn/functional.py:1443)");
        assert_eq!(site.module, "torch.nn.functional");
        assert_eq!(site.path, ["dropout (torch/nn/functional.py:1443)"]);
        let with = Frameworks::default().with(&["transformers".to_owned()]);
        let site = CallSite::of(&stack, &with).expect("frames");
        assert_eq!(site.line.as_deref(), Some("main (/home/me/train.py:19)"));
        assert_eq!(site.path, ["mlp (transformers/models/llama.py:77)", "dropout (torch/nn/functional.py:1443)"]);
    }

    #[test]
    fn stacks_without_own_code_have_their_outermost_line() {
        let inner = stack(&[("f", "torch/nn/a.py", 1), ("g", "torch/nn/b.py", 2)]);
        let site = CallSite::of(&inner, &Frameworks::default()).expect("frames");
        assert_eq!((site.line.as_deref(), site.call.as_str()), (Some("g (torch/nn/b.py:2)"), "f (torch/nn/a.py:1)"));
        assert_eq!(CallSite::of(&[], &Frameworks::default()), None);
        let compiled = stack(&[("malloc", "alloc.cpp", 3)]);
        let site = CallSite::of(&compiled, &Frameworks::default()).expect("frames");
        assert_eq!((site.line, site.call.as_str()), (None, "malloc (alloc.cpp:3)"));
    }

    /// As PyTorch records it by default: the unwinder, the allocator and the interpreter between the lines.
    fn default_stack() -> Vec<Frame> {
        stack(&[
            ("torch::unwind::unwind()", "??", 0),
            ("c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long)", "??", 0),
            ("at::_ops::empty::redispatch(c10::DispatchKeySet)", "??", 0),
            ("at::_ops::addmm::call(at::Tensor const&)", "??", 0),
            ("at::_ops::linear::call(at::Tensor const&)", "??", 0),
            ("_object* torch::autograd::THPVariable_linear(_object*)", "python_nn_functions.cpp", 0),
            ("_PyEval_EvalFrameDefault", "??", 0),
            ("forward", "/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134),
            ("_PyEval_EvalFrameDefault", "??", 0),
            ("Py_RunMain", "??", 0),
            ("main", "??", 0),
            ("_call_impl", "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 1790),
            ("train", "/home/me/train.py", 19),
        ])
    }

    #[test]
    fn way_from_python_to_the_allocator_is_left_out() {
        let site = CallSite::of(&default_stack(), &Frameworks::default()).expect("frames");
        assert_eq!(site.line.as_deref(), Some("train (/home/me/train.py:19)"));
        assert_eq!(site.path, ["forward (torch/nn/modules/linear.py:134)"]);
        let names: Vec<String> = readable(&default_stack()).into_iter().map(|frame| frame.name).collect();
        assert_eq!(names, ["linear", "forward", "_call_impl", "train"]);
    }

    #[test]
    fn memory_of_the_backward_pass_is_named_by_its_node() {
        let stack = stack(&[
            ("torch::unwind::unwind()", "??", 0),
            ("at::_ops::bmm::call(at::Tensor const&)", "??", 0),
            ("torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)", "??", 0),
            ("torch::autograd::Engine::thread_main(int)", "??", 0),
            ("__clone", "??", 0),
        ]);
        let site = CallSite::of(&stack, &Frameworks::default()).expect("frames");
        assert_eq!((site.line, site.call.as_str(), site.module.as_str()), (None, "BmmBackward0", "autograd"));
        let names: Vec<String> = readable(&stack).into_iter().map(|frame| frame.name).collect();
        assert_eq!(names, ["bmm", "BmmBackward0"]);
    }

    #[test]
    fn compiled_code_of_the_program_is_kept() {
        let stack = stack(&[
            ("c10::cuda::CUDACachingAllocator::raw_alloc(unsigned long)", "??", 0),
            ("my_ext::scan(at::Tensor)", "/home/me/ext.cpp", 12),
            ("_PyEval_EvalFrameDefault", "??", 0),
            ("step", "/home/me/train.py", 7),
        ]);
        let names: Vec<String> = readable(&stack).into_iter().map(|frame| frame.name).collect();
        assert_eq!(names, ["my_ext::scan", "step"]);
        let site = CallSite::of(&stack[..2], &Frameworks::default()).expect("frames");
        assert_eq!(site.call, "my_ext::scan (/home/me/ext.cpp:12)");
    }

    #[test]
    fn cells_of_notebooks_are_the_programs_own() {
        let frameworks = Frameworks::default();
        assert!(!frameworks.contains("<ipython-input-3-abc>") && !frameworks.contains("/tmp/ipykernel_7/1.py"));
        assert!(frameworks.contains("/tmp/torchinductor_me/7j/c7.py"), "written by a compiler");
    }

    #[test]
    fn frameworks_are_packages_or_parts_of_paths() {
        let frameworks = Frameworks::default().with(&["lib/util".to_owned()]);
        for file in [
            "torch/nn/x.py",
            "/a/torch/nn/x.py",
            "C:\\py\\Lib\\site-packages\\torch\\functional.py",
            "my/lib/utils.py",
            "/usr/lib/python3.12/threading.py",
            "<frozen runpy>",
        ] {
            assert!(frameworks.contains(file), "{file}");
        }
        for file in [
            "train.py",
            "my_torch/x.py",
            "torch.py",
            "/usr/lib/python3/site-packages/timm/x.py",
            "/opt/torch/lib/python3.12/site-packages/timm/x.py",
            "/home/me/torch/train.py",
            "C:\\py\\Lib\\site-packages\\einops\\_backends.py",
        ] {
            assert!(!frameworks.contains(file), "{file}");
        }
    }
}
