//! Frames of compiled code, as PyTorch records them by default: symbol names without lines. Most of them lead from
//! Python to the allocator and are not useful to a reader. Useful are operators, nodes of autograd's graph, and code
//! that is not PyTorch's.

/// What a frame of compiled code is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NativeFrame<'a> {
    /// The entry of an operator, such as `addmm`.
    Operator(&'a str),
    /// A node of autograd's graph, such as `BmmBackward0`.
    AutogradNode(&'a str),
    /// Autograd's engine: this is the backward pass.
    AutogradEngine,
    /// The unwinder, the allocator, the dispatcher, the interpreter, a thread's start.
    Plumbing,
    /// Code of somebody else: an extension of the program, another library.
    Other,
}

/// Namespaces and prefixes of PyTorch, its bindings, and the C and C++ libraries.
const PREFIXES: &[&str] = &[
    "torch::",
    "at::",
    "c10::",
    "c10d::",
    "caffe2::",
    "pybind11::",
    "pybind11_",
    "std::",
    "__gnu_cxx::",
    "__cxxabiv1::",
    "(anonymous namespace)::",
    "THP",
    "_object",
    "dynamo_",
    "cfunction_",
    "slot_tp_",
    "slot_nb_",
    "pymain_",
    "run_eval_code",
    "pthread_",
    "__libc",
    "__GI_",
    "operator new",
    "ffi_",
    "??",
];

/// Functions of the interpreter, and of the start of threads and processes, matched by their whole name.
const FUNCTIONS: &[&str] = &[
    "_start",
    "_init",
    "_fini",
    "clone",
    "clone3",
    "__clone",
    "__clone3",
    "start_thread",
    "thread_run",
    "pythread_wrapper",
    "execute_native_thread_routine",
    "method_vectorcall",
    "type_call",
    "object_vacall",
    "partial_call",
    "context_run",
    "run_mod",
];

/// Words that only PyTorch's own symbols have, whatever their return type and namespace.
const PLUMBING_WITHIN: &[&str] = &["c10::", "at::native::", "at::cuda::", "torch::autograd::", "at::Tensor (*)"];

pub(crate) fn classify(name: &str) -> NativeFrame<'_> {
    if let Some(rest) = name.strip_prefix("at::_ops::") {
        return NativeFrame::Operator(without_overload(rest.split("::").next().unwrap_or(rest)));
    }
    if let Some(node) = autograd_node(name) {
        return NativeFrame::AutogradNode(node);
    }
    if name.starts_with("torch::autograd::Engine::") || name.starts_with("torch::autograd::python::PythonEngine::") {
        return NativeFrame::AutogradEngine;
    }
    let function = without_return_type(name);
    let starts = |text: &str| PREFIXES.iter().any(|prefix| text.starts_with(prefix));
    let is_unnamed = function.is_empty() || function.starts_with("0x");
    let is_known = FUNCTIONS.contains(&function) || is_python_api(function) || is_cuda_api(function);
    // Functions of PyTorch in no namespace take its tensors or are templates over its types. An extension of the
    // program takes tensors too, but in a function that is not a template.
    let is_internal = name.contains('<') && PLUMBING_WITHIN.iter().any(|word| name.contains(word));
    if is_unnamed || is_known || starts(name) || starts(function) || is_internal {
        NativeFrame::Plumbing
    } else {
        NativeFrame::Other
    }
}

/// `add` of `add_Tensor`: the name of an overload begins with a capital letter.
fn without_overload(operator: &str) -> &str {
    let starts = |&(at, _): &(usize, &str)| operator[at + 1..].starts_with(|letter: char| letter.is_ascii_uppercase());
    operator.match_indices('_').find(starts).map_or(operator, |(at, _)| &operator[..at])
}

/// `PyObject_Call`, `_PyEval_EvalFrameDefault`, `Py_RunMain`.
fn is_python_api(function: &str) -> bool {
    let rest = function.strip_prefix("_Py").or_else(|| function.strip_prefix("Py"));
    rest.is_some_and(|rest| rest.contains('_') && !rest.contains("::"))
}

/// `cudaMalloc`, `cuMemCreate`, `cublasLtMatmul`, `cudnnConvolutionForward`, `ncclAllReduce`.
fn is_cuda_api(function: &str) -> bool {
    let libraries = ["cuda", "cublasLt", "cublas", "cudnn", "cusolver", "cusparse", "cufft", "curand", "nccl", "cu"];
    let rest = libraries.into_iter().find_map(|library| function.strip_prefix(library));
    rest.is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_uppercase()))
}

/// The node whose function it is: `BmmBackward0` of `torch::autograd::generated::BmmBackward0::apply(...)`.
fn autograd_node(name: &str) -> Option<&str> {
    let generated = name.strip_prefix("torch::autograd::generated::").or_else(|| {
        let node = name.strip_prefix("torch::autograd::")?;
        node.starts_with("AccumulateGrad").then_some(node)
    })?;
    let node = generated.split(['(', ':']).next()?;
    let node = node.strip_suffix("_apply_functional").unwrap_or(node);
    (node.contains("Backward") || node == "AccumulateGrad").then_some(node)
}

/// `f(int)` of `void f(int)`: what comes after the last space outside of brackets and before the arguments.
fn without_return_type(name: &str) -> &str {
    let (mut depth, mut start) = (0_i32, 0);
    for (at, letter) in name.char_indices() {
        match letter {
            '<' => depth += 1,
            '>' => depth -= 1,
            // `(anonymous namespace)::f` begins with its bracket.
            '(' if depth == 0 && !name[at..].starts_with("(anonymous namespace)") => break,
            ' ' if depth == 0 && !name[..at].ends_with("(anonymous") => start = at + 1,
            _ => {}
        }
    }
    &name[start..]
}

/// A symbol without its arguments, template arguments and return type.
pub(crate) fn short_name(name: &str) -> String {
    const LETTERS_MAX: usize = 80;
    let mut depth = 0_i32;
    let mut short = String::new();
    for letter in without_return_type(name).replace("(anonymous namespace)::", "").chars() {
        match letter {
            '<' => depth += 1,
            '>' => depth -= 1,
            '(' if depth == 0 => break,
            letter if depth == 0 => short.push(letter),
            _ => {}
        }
    }
    short.chars().take(LETTERS_MAX).collect()
}

/// Whether an autograd node computes the gradient of an operator, by their names: `ToCopyBackward0` belongs to
/// `_to_copy`.
pub(crate) fn is_backward_of(node: &str, operator: &str) -> bool {
    let Some((forward, _)) = node.split_once("Backward") else { return false };
    let letters = |text: &str| -> Vec<u8> {
        text.bytes().filter(u8::is_ascii_alphanumeric).map(|it| it.to_ascii_lowercase()).collect()
    };
    !forward.is_empty() && letters(forward) == letters(operator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_pytorch_and_python_are_plumbing() {
        for name in [
            "torch::unwind::unwind()",
            "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
            "void at::cuda::cub::detail::radix_sort_pairs_impl<long, 8>(long const*, long*)",
            "_PyEval_EvalFrameDefault",
            "_object* torch::autograd::THPVariable_linear(_object*)",
            "std::error_code::default_error_condition() const",
            "__libc_start_main",
            "PyObject_Vectorcall",
            "cudaMalloc",
            "(anonymous namespace)::pythonFallback(c10::OperatorHandle const&)",
            "void dispatch_cutlassB<cutlass::half_t, f(c10::Half)::{lambda()#1}>(int)",
            "",
            "??",
        ] {
            assert_eq!(classify(name), NativeFrame::Plumbing, "{name}");
        }
    }

    #[test]
    fn what_tells_is_found() {
        let gemm = "at::_ops::addmm::call(at::Tensor const&, at::Tensor const&, c10::Scalar const&)";
        assert_eq!(classify(gemm), NativeFrame::Operator("addmm"));
        assert_eq!(classify("at::_ops::add_Tensor::call(at::Tensor const&)"), NativeFrame::Operator("add"));
        let node = "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)";
        assert_eq!(classify(node), NativeFrame::AutogradNode("BmmBackward0"));
        let functional = "torch::autograd::generated::SplitBackward0_apply_functional(std::vector<at::Tensor>&&)";
        assert_eq!(classify(functional), NativeFrame::AutogradNode("SplitBackward0"));
        assert_eq!(
            classify("torch::autograd::AccumulateGrad::apply(int)"),
            NativeFrame::AutogradNode("AccumulateGrad")
        );
        let engine = "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)";
        assert_eq!(classify(engine), NativeFrame::AutogradEngine);
        for name in [
            "my_ext::forward(at::Tensor, at::Tensor)",
            "at_home::run()",
            "train(int)",
            "main",
            "custom::op(int)",
            "Pyramid::forward()",
        ] {
            assert_eq!(classify(name), NativeFrame::Other, "{name}: an extension of the program");
        }
    }

    #[test]
    fn names_are_shortened() {
        assert_eq!(short_name("at::Tensor my_ext::(anonymous namespace)::scan<float, 4>(at::Tensor)"), "my_ext::scan");
        assert_eq!(short_name("main"), "main");
    }

    #[test]
    fn nodes_are_matched_with_their_operators() {
        assert!(is_backward_of("BmmBackward0", "bmm") && is_backward_of("ToCopyBackward0", "_to_copy"));
        assert!(is_backward_of("NativeLayerNormBackward0", "native_layer_norm"));
        assert!(!is_backward_of("MmBackward0", "bmm") && !is_backward_of("AccumulateGrad", "accumulate_grad"));
    }
}
