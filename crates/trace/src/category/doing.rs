//! What a program was doing when it allocated: from the call stack, or from a region that the program named.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpool::memory::report::{Annotation, Frame, StackId};

use crate::stacks::{autograd_node, is_python, operator, short_path};

/// What a program was doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Doing {
    /// There is no stack.
    #[default]
    Unknown,
    /// A module was made, moved to the device, or loaded.
    ModuleSetup,
    /// A module was called.
    Forward,
    /// A checkpointed part of the forward pass was computed again, in the backward pass.
    Recompute,
    /// The backward pass.
    Backward,
    /// An optimizer made its state.
    OptimizerSetup,
    /// An optimizer's step.
    OptimizerStep,
    /// The program's own code, or a loader of data, outside of all these.
    Program,
}

impl Doing {
    pub fn is_backward(self) -> bool {
        matches!(self, Self::Backward | Self::Recompute)
    }

    pub fn is_optimizer(self) -> bool {
        matches!(self, Self::OptimizerSetup | Self::OptimizerStep)
    }
}

/// What the call stack of an allocation shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StackKind {
    pub doing: Doing,
    pub makes: Makes,
}

/// What the allocation is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Makes {
    /// The result of a computation, or not known.
    #[default]
    Result,
    /// A tensor of random numbers, or a copy of a host tensor (`cuda`).
    Tensor,
    /// A tensor to be filled (`zeros`, `empty`).
    Buffer,
    /// A copy, maybe from the host (`to`), or anything if there are no frames of compiled code.
    MaybeTensor,
    /// A workspace of a library.
    Workspace,
    /// A bucket in which gradients are exchanged between ranks.
    GradientBucket,
    /// Parameters that are sharded over ranks, or gathered from them.
    ShardedParameter,
}

impl StackKind {
    pub const NONE: Self = Self { doing: Doing::Unknown, makes: Makes::Result };

    fn of(stack: &[Frame]) -> Self {
        if stack.is_empty() {
            return Self::NONE;
        }
        let makes = makes(stack);
        Self { doing: doing(stack), makes }
    }
}

/// A cache: each stack is examined once.
#[derive(Clone, Debug, Default)]
pub(super) struct StackKinds(FxHashMap<StackId, StackKind>);

impl StackKinds {
    pub fn of(&mut self, stack: StackId, stacks: &[Arc<[Frame]>]) -> StackKind {
        let kind = || stacks.get(stack.index()).map_or(StackKind::NONE, |frames| StackKind::of(frames));
        *self.0.entry(stack).or_insert_with(kind)
    }
}

/// Frames from the innermost on. The enclosing call decides: a module that is called by a checkpoint's recomputation is
/// recomputed, one that is called by an optimizer's closure is the forward pass.
fn doing(stack: &[Frame]) -> Doing {
    let (mut found, mut own_seen) = (None, false);
    for frame in stack.iter().filter(|frame| is_python(frame)) {
        let file = &short_path(&frame.filename).replace('\\', "/");
        let part = part_of(file, &frame.name).or_else(|| {
            // The constructor of a module of the program, and it calls no other code of the program.
            (frame.name == "__init__" && !own_seen && !file.starts_with("torch/")).then_some(Doing::ModuleSetup)
        });
        own_seen |= !file.starts_with("torch/");
        match (found, part) {
            (_, None) => {}
            // A recomputation calls modules, and the backward pass calls recomputations: both count as the
            // recomputation.
            (None | Some(Doing::Forward), Some(Doing::Recompute)) => return Doing::Recompute,
            (None, Some(Doing::Backward)) => found = Some(Doing::Backward),
            // A module that creates its parameters when it is first called.
            (Some(Doing::ModuleSetup), Some(Doing::Forward)) => found = Some(Doing::Forward),
            (None, part) => found = part,
            // The inner call decides.
            (Some(_), _) => {}
        }
    }
    let runs_backward = autograd_node(stack).is_some() || runs_engine(stack);
    match found {
        Some(Doing::Recompute) => Doing::Recompute,
        Some(found) if found.is_optimizer() => found,
        _ if runs_backward => Doing::Backward,
        Some(found) => found,
        None => Doing::Program,
    }
}

/// Whether autograd's engine is on the stack, or the outermost line of Python is a function that only it calls.
fn runs_engine(stack: &[Frame]) -> bool {
    let engine = |frame: &Frame| frame.name.starts_with("torch::autograd::Engine::");
    let outermost = stack.iter().rev().find(|frame| is_python(frame));
    let is_called =
        |frame: &Frame| frame.name == "apply" && short_path(&frame.filename).ends_with("torch/autograd/function.py");
    outermost.is_some_and(is_called) || stack.iter().any(|frame| !is_python(frame) && engine(frame))
}

/// The activity that a function of a framework belongs to.
fn part_of(file: &str, name: &str) -> Option<Doing> {
    const STATE_MAKERS: [&str; 5] = ["_init_group", "__init__", "load_state_dict", "init_state", "__setstate__"];
    /// In the file of `torch.nn.Module`.
    const MOVERS: [&str; 5] = ["_apply", "convert", "to_empty", "_load_from_state_dict", "register_buffer"];
    /// Names of functions that create or load weights, in frameworks and programs.
    const MAKERS: [&str; 8] = [
        "load_state_dict",
        "reset_parameters",
        "_init_weights",
        "_initialize_weights",
        "from_pretrained",
        "load_weights",
        "load_model",
        "__deepcopy__",
    ];
    let in_file = |end: &str| file.ends_with(end);
    if in_file("torch/optim/swa_utils.py") {
        // An average of parameters counts as parameters.
        return (name == "__init__").then_some(Doing::ModuleSetup);
    }
    let is_optimizer = file.contains("torch/optim/") || file.contains("/optim/") || file.contains("/optimizers/");
    if is_optimizer {
        return match name {
            name if STATE_MAKERS.contains(&name) => Some(Doing::OptimizerSetup),
            "zero_grad" => None,
            _ => Some(Doing::OptimizerStep),
        };
    }
    if in_file("torch/utils/checkpoint.py") {
        return matches!(name, "unpack_hook" | "recompute_fn" | "backward").then_some(Doing::Recompute);
    }
    if in_file("torch/_tensor.py") || in_file("torch/autograd/__init__.py") || in_file("torch/autograd/graph.py") {
        if name == "__deepcopy__" {
            return Some(Doing::ModuleSetup);
        }
        return matches!(name, "backward" | "grad" | "_make_grads" | "_engine_run_backward").then_some(Doing::Backward);
    }
    if matches!(name, "_call_impl" | "_wrapped_call_impl") && in_file("torch/nn/modules/module.py") {
        return Some(Doing::Forward);
    }
    let loads = ["torch/serialization.py", "safetensors/torch.py", "torch/nn/init.py", "torch/nn/parameter.py"];
    let is_mover = in_file("torch/nn/modules/module.py") && MOVERS.contains(&name);
    let is_constructor = name == "__init__" && file.contains("torch/nn/modules/");
    let sets_up = is_mover || is_constructor || MAKERS.contains(&name) || loads.iter().any(|end| in_file(end));
    sets_up.then_some(Doing::ModuleSetup)
}

/// What the frames of compiled code below the innermost line of Python show.
fn makes(stack: &[Frame]) -> Makes {
    let native = || stack.iter().take_while(|frame| !is_python(frame)).map(|frame| frame.name.as_str());
    let has = |part: &str| native().any(|name| name.contains(part));
    if has("Workspace") && (has("at::cuda::") || has("cublas") || has("Blas")) {
        return Makes::Workspace;
    }
    if has("c10d::Reducer::") {
        return Makes::GradientBucket;
    }
    if let Some(sharding) = stack.iter().find(|frame| is_python(frame) && is_sharding(&frame.filename)) {
        // FSDP gathers parameters for a pass, and reduces and scatters their gradients.
        return match sharding.name.contains("reduce") {
            true => Makes::GradientBucket,
            false => Makes::ShardedParameter,
        };
    }
    if native().next().is_none() {
        return Makes::MaybeTensor;
    }
    // `x.cuda()`, or `x.to()` with a device among its arguments.
    if has("THPVariable_cuda") || has("dispatch_to(at::Tensor const&, c10::Device") {
        return Makes::Tensor;
    }
    match operator(stack) {
        Some("_to_copy" | "copy_" | "clone" | "contiguous") => Makes::MaybeTensor,
        Some(name) if name == "to" || name.starts_with("to_") => Makes::MaybeTensor,
        Some(name) if is_buffer(name) => Makes::Buffer,
        Some(name) if is_factory(name) => Makes::Tensor,
        // No operator in between: `torch.tensor`, `torch.from_dlpack`.
        None => Makes::MaybeTensor,
        Some(_) => Makes::Result,
    }
}

/// Whether an operator creates a tensor without input tensors.
fn is_factory(operator: &str) -> bool {
    let starts = ["rand", "ones", "arange", "linspace", "eye", "normal", "tensor"];
    starts.iter().any(|start| operator.starts_with(start))
}

/// Whether an operator creates a tensor that is filled later.
fn is_buffer(operator: &str) -> bool {
    ["zeros", "empty", "full", "new_"].iter().any(|start| operator.starts_with(start))
}

/// Whether a file is of PyTorch's sharding of parameters.
fn is_sharding(file: &str) -> bool {
    let file = short_path(file);
    file.starts_with("torch/distributed/fsdp") || file.starts_with("torch/distributed/_composable/fsdp")
}

/// Regions that the program, or PyTorch for it, named: `Optimizer.step#AdamW.step`.
pub(super) struct Regions(Vec<(i64, i64, Doing)>);

impl Regions {
    pub fn new(annotations: &[Annotation]) -> Self {
        let mut open: Vec<(&str, i64)> = Vec::new();
        let mut regions = Vec::new();
        for Annotation { name, stage, time_us, .. } in annotations {
            match stage.as_str() {
                "START" => open.push((name, *time_us)),
                "END" => {
                    let Some(at) = open.iter().rposition(|&(open, _)| open == name) else { continue };
                    let (_, start) = open.remove(at);
                    regions.extend(doing_in(name).map(|doing| (start, *time_us, doing)));
                }
                _ => {}
            }
        }
        regions.sort_unstable_by_key(|&(start, ..)| start);
        Self(regions)
    }

    /// The last region that began before a time, if it had not ended.
    pub fn doing_at(&self, time_us: i64) -> Doing {
        let after = self.0.partition_point(|&(start, ..)| start <= time_us);
        let last = self.0[..after].last().filter(|&&(_, end, _)| time_us <= end);
        last.map_or(Doing::Unknown, |&(_, _, doing)| doing)
    }
}

fn doing_in(region: &str) -> Option<Doing> {
    let region = region.to_ascii_lowercase();
    if region.starts_with("optimizer.step#") {
        Some(Doing::OptimizerStep)
    } else if region.contains("backward") {
        Some(Doing::Backward)
    } else if region.contains("forward") {
        Some(Doing::Forward)
    } else {
        None
    }
}
