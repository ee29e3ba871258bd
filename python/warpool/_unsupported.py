"""What cannot work with another allocator than PyTorch's: each becomes a RuntimeError that says so and what to do.

Without these PyTorch would raise an error about "pluggable", or silently allocate from another pool than requested.
Only cuDNN's benchmark mode, which programs do not depend on, is left off with a warning instead.
"""

import warnings
from typing import Any, Callable, Dict, List, Tuple

_POOLS = (
    "PyTorch neither lets another allocator own a torch.cuda.MemPool nor tells it which allocations belong there. "
    "Allocate without the pool, or run this program with PyTorch's own allocator. "
    "The pools of plain torch.cuda.graph captures work."
)
_TREES = (
    "Inductor's graph trees (torch.compile with mode='reduce-overhead' or 'max-autotune') save and restore the state "
    "of PyTorch's own allocator. Set torch._inductor.config.triton.cudagraph_trees = False before compiling: Inductor "
    "then captures plain CUDA graphs, which work; or compile without CUDA graphs."
)
_SHARING = (
    "PyTorch shares CUDA tensors between processes only with its own allocator. Send a copy in host memory "
    "(tensor.cpu()), or use torch.distributed; or run this program with PyTorch's own allocator."
)
_OBSERVERS = (
    "PyTorch calls out-of-memory observers only from its own allocator. Catch torch.cuda.OutOfMemoryError instead: its "
    "text has the report; the history has an entry for it, and torch.cuda.memory_stats() counts them as num_ooms."
)
_CACHING = (
    "Warpool's caching cannot be switched off at run time. Start this program with PyTorch's own allocator and "
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1 to make every allocation a driver call."
)

_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays off with Warpool as PyTorch's allocator: benchmark mode queries the cached "
    "memory, which PyTorch implements only for its own allocator, and every convolution would fail. cuDNN chooses "
    "algorithms by its heuristics."
)


def unsupported(name: str, advice: str) -> Callable[..., Any]:
    """A replacement for `name` that raises, whatever its arguments are."""

    def raise_unsupported(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(f"{name} is not possible with Warpool as PyTorch's allocator. {advice}")

    raise_unsupported.__name__ = raise_unsupported.__qualname__ = name.rsplit(".", 1)[-1]
    return raise_unsupported


def keep_caching(value: bool) -> None:
    """Accepts switching caching on, which it is; raises for switching it off."""
    if not value:
        unsupported("torch.cuda.caching_allocator_enable(False)", _CACHING)()


# Inductor's graph trees call `_cuda_beginAllocateCurrentThreadToPool` first, so its text is about them.
# torch.cuda.use_mem_pool imported the function by name and gets another text below.
BINDINGS: Dict[str, Callable[..., Any]] = {
    "_cuda_beginAllocateCurrentThreadToPool": unsupported("torch._C._cuda_beginAllocateCurrentThreadToPool", _TREES),
    "_cuda_beginAllocateCurrentStreamToPool": unsupported("torch._C._cuda_beginAllocateCurrentStreamToPool", _POOLS),
    "_cuda_beginAllocateToPool": unsupported("torch._C._cuda_beginAllocateToPool", _POOLS),
    "_cuda_getCheckpointState": unsupported("torch._C._cuda_getCheckpointState", _TREES),
    "_cuda_setCheckpointPoolState": unsupported("torch._C._cuda_setCheckpointPoolState", _TREES),
    "_cuda_checkPoolLiveAllocations": unsupported("torch._C._cuda_checkPoolLiveAllocations", _TREES),
    "_cuda_attach_out_of_memory_observer": unsupported("torch._C._cuda_attach_out_of_memory_observer", _OBSERVERS),
    "_cuda_cudaCachingAllocator_enable": keep_caching,
}


def other_replacements(torch: Any) -> List[Tuple[Any, str, Any]]:
    """Replacements outside `torch._C`, as (owner, name, value): memory pools, shared storages, cuDNN's benchmark."""
    memory, storage = torch.cuda.memory, torch.UntypedStorage
    replacements = [
        (memory, "_cuda_beginAllocateCurrentThreadToPool", unsupported("torch.cuda.use_mem_pool", _POOLS)),
        (getattr(memory, "MemPool", None), "__init__", unsupported("torch.cuda.MemPool", _POOLS)),
        (storage, "_share_cuda_", unsupported("torch.UntypedStorage._share_cuda_", _SHARING)),
        (storage, "_new_shared_cuda", classmethod(unsupported("torch.UntypedStorage._new_shared_cuda", _SHARING))),
    ]
    if hasattr(torch._C, "_set_cudnn_benchmark"):
        native = torch._C._set_cudnn_benchmark

        def set_benchmark(value: Any) -> None:
            # PyTorch raises for a value that is not a bool. The warning comes last: it may be raised as an exception.
            native(False if isinstance(value, bool) else value)
            if value is True:
                warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=3)

        replacements.append((torch._C, "_set_cudnn_benchmark", set_benchmark))
        # `torch.backends.cudnn.benchmark = …` holds its own reference to the setter.
        replacements.append((vars(type(torch.backends.cudnn)).get("benchmark"), "setter", set_benchmark))
    # Skip what this PyTorch does not have.
    return [(owner, name, value) for owner, name, value in replacements if owner is not None and hasattr(owner, name)]


def switch_benchmark_off(torch: Any) -> None:
    """Switches cuDNN's benchmark mode off, with a warning. Called before anything else is changed, since the warning
    may be raised as an exception."""
    if warn_benchmark(torch):
        torch._C._set_cudnn_benchmark(False)


def warn_benchmark(torch: Any) -> bool:
    """Warns that cuDNN's benchmark mode will be switched off, if it is on. Returns whether it is."""
    is_on = hasattr(torch._C, "_set_cudnn_benchmark") and torch._C._get_cudnn_benchmark()
    if is_on:
        warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=5)
    return bool(is_on)
