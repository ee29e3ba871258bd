//! Which frames of a call stack tell a reader something: the program's own code, and what it called.

use warpool::memory::Frame;

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

/// Functions that only call on.
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

    /// Only these.
    #[must_use]
    pub fn only(names: &[String]) -> Self {
        Self { names: names.to_vec() }
    }

    /// Whether a file is a framework's, or Python's own.
    #[must_use]
    pub fn contains(&self, file: &str) -> bool {
        let in_package = |name: &String| match name.contains(['/', '.']) {
            true => file.contains(name.as_str()),
            false => file.split('/').rev().skip(1).any(|folder| folder == name),
        };
        is_python_library(file) || self.names.iter().any(in_package)
    }
}

/// Whether a file is of Python's standard library.
fn is_python_library(file: &str) -> bool {
    let in_library = file.split_once("/lib/python3").is_some_and(|(_, rest)| !rest.contains("-packages/"));
    in_library || file.starts_with('<')
}

/// Whether a frame is of Python code, and not of compiled code.
fn is_python(frame: &Frame) -> bool {
    frame.filename.ends_with(".py") || frame.filename.starts_with('<') || frame.filename.ends_with(".ipynb")
}

/// What a call stack tells.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallSite {
    /// The innermost line that is not a framework's; the outermost one, if all are.
    pub line: String,
    /// The innermost call.
    pub call: String,
    /// The Python module of the innermost call.
    pub module: String,
    /// The calls from the line to the innermost one, without those that only call on.
    pub path: Vec<String>,
}

impl CallSite {
    /// What a stack tells, its innermost frame first; `None` if it has no Python frames and no others.
    #[must_use]
    pub fn of(stack: &[Frame], frameworks: &Frameworks) -> Option<Self> {
        let python: Vec<&Frame> = stack.iter().filter(|frame| is_python(frame)).collect();
        let frames: Vec<&Frame> = if python.is_empty() { stack.iter().collect() } else { python };
        let own = frames.iter().position(|frame| !frameworks.contains(&frame.filename));
        let own = own.or_else(|| frames.len().checked_sub(1))?;
        let telling = |frame: &&&Frame| !Self::passes_through(frame);
        let inner: Vec<&&Frame> = frames[..own].iter().filter(telling).collect();
        let innermost = inner.first().map_or(frames[own], |frame| **frame);
        Some(Self {
            line: place(frames[own]),
            call: place(innermost),
            module: module(&innermost.filename),
            path: inner.iter().rev().map(|frame| place(frame)).collect(),
        })
    }
}

impl CallSite {
    /// Whether a frame only calls on, and tells a reader nothing.
    #[must_use]
    pub fn passes_through(frame: &Frame) -> bool {
        PASS_THROUGH.contains(&frame.name.as_str())
    }
}

/// A function with its file and line.
fn place(frame: &Frame) -> String {
    let Frame { name, filename, line } = frame;
    format!("{name} ({}:{line})", short_path(filename))
}

/// A file without the folder that packages are installed in.
pub(crate) fn short_path(file: &str) -> &str {
    let installed = ["site-packages/", "dist-packages/"].into_iter().find_map(|folder| file.rsplit_once(folder));
    installed.map_or(file, |(_, path)| path)
}

/// The Python module of a file.
fn module(file: &str) -> String {
    let path = short_path(file);
    let path = path.strip_suffix(".py").unwrap_or(path);
    match path.starts_with('/') {
        true => path.rsplit('/').next().unwrap_or(path).to_owned(),
        false => path.strip_suffix("/__init__").unwrap_or(path).replace('/', "."),
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
        assert_eq!(site.line, "mlp (transformers/models/llama.py:77)");
        assert_eq!(site.call, "dropout (torch/nn/functional.py:1443)");
        assert_eq!(site.module, "torch.nn.functional");
        assert_eq!(site.path, ["dropout (torch/nn/functional.py:1443)"]);
        let with = Frameworks::default().with(&["transformers".to_owned()]);
        let site = CallSite::of(&stack, &with).expect("frames");
        assert_eq!(site.line, "main (/home/me/train.py:19)");
        assert_eq!(site.path, ["mlp (transformers/models/llama.py:77)", "dropout (torch/nn/functional.py:1443)"]);
    }

    #[test]
    fn stacks_without_own_code_have_their_outermost_line() {
        let inner = stack(&[("f", "torch/a.py", 1), ("g", "torch/b.py", 2)]);
        let site = CallSite::of(&inner, &Frameworks::default()).expect("frames");
        assert_eq!((site.line.as_str(), site.call.as_str()), ("g (torch/b.py:2)", "f (torch/a.py:1)"));
        assert_eq!(CallSite::of(&[], &Frameworks::default()), None);
        let compiled = stack(&[("malloc", "alloc.cpp", 3)]);
        assert_eq!(CallSite::of(&compiled, &Frameworks::default()).expect("frames").line, "malloc (alloc.cpp:3)");
    }

    #[test]
    fn frameworks_are_packages_or_parts_of_paths() {
        let frameworks = Frameworks::default().with(&["lib/util".to_owned()]);
        for file in
            ["torch/x.py", "/a/torch/nn/x.py", "my/lib/utils.py", "/usr/lib/python3.12/threading.py", "<frozen runpy>"]
        {
            assert!(frameworks.contains(file), "{file}");
        }
        for file in ["train.py", "my_torch/x.py", "torch.py", "/usr/lib/python3/site-packages/timm/x.py"] {
            assert!(!frameworks.contains(file), "{file}");
        }
    }
}
