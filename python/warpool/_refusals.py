"""What cannot work with an exchanged allocator, and what to do instead: each becomes a RuntimeError that says both.

Without these PyTorch would say that "pluggable" does not support something, or go on and hand out memory that is not what was asked for.
One thing is left off with a warning instead, since programs work without it: cuDNN's search for the quickest algorithm.
"""

import warnings
from typing import Any, Callable, Dict, List, Tuple

_POOLS = (
    "PyTorch does not let an exchanged allocator own a torch.cuda.MemPool, nor tell it which allocations belong there. "
    "Allocate without the pool, or run this program with PyTorch's own allocator. The pools of plain torch.cuda.graph captures work."
)
_TREES = (
    "Inductor's graph trees (torch.compile with mode='reduce-overhead' or 'max-autotune') save and restore the state of PyTorch's own "
    "allocator, which Warpool is not. Set torch._inductor.config.triton.cudagraph_trees = False before compiling: Inductor then "
    "captures plain CUDA graphs, which work; or compile without CUDA graphs."
)
_SHARING = (
    "PyTorch shares CUDA tensors between processes through its own allocator only. "
    "Send a copy in host memory (tensor.cpu()), or use torch.distributed; or run this program with PyTorch's own allocator."
)
_OBSERVERS = (
    "PyTorch tells its out-of-memory observers from its own allocator only. Catch torch.cuda.OutOfMemoryError instead: its text holds the "
    "report; the history has an entry for it, and torch.cuda.memory_stats() counts them as num_ooms."
)
_CACHING = (
    "Warpool's caching cannot be switched off while it runs. Start this program with PyTorch's own allocator and "
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1 to have every allocation straight from the driver."
)

_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays off with Warpool as PyTorch's allocator: its search asks how much memory is cached, which PyTorch "
    "answers only for its own allocator, and every convolution would fail. cuDNN chooses the algorithms without a search."
)


def refuse(what: str, why: str) -> Callable[..., Any]:
    """A function that raises, whatever it is called with."""

    def refused(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(f"{what} is not possible with Warpool as PyTorch's allocator. {why}")

    refused.__name__ = refused.__qualname__ = what.rsplit(".", 1)[-1]
    return refused


def keep_caching(value: bool) -> None:
    """Caching is on; switching it on once more is fine."""
    if not value:
        refuse("torch.cuda.caching_allocator_enable(False)", _CACHING)()


# Inductor's graph trees begin with `_cuda_beginAllocateCurrentThreadToPool`, so it speaks of them;
# torch.cuda.use_mem_pool has imported it by name and gets a sentence of its own, below.
BINDINGS: Dict[str, Callable[..., Any]] = {
    "_cuda_beginAllocateCurrentThreadToPool": refuse("torch._C._cuda_beginAllocateCurrentThreadToPool", _TREES),
    "_cuda_beginAllocateCurrentStreamToPool": refuse("torch._C._cuda_beginAllocateCurrentStreamToPool", _POOLS),
    "_cuda_beginAllocateToPool": refuse("torch._C._cuda_beginAllocateToPool", _POOLS),
    "_cuda_getCheckpointState": refuse("torch._C._cuda_getCheckpointState", _TREES),
    "_cuda_setCheckpointPoolState": refuse("torch._C._cuda_setCheckpointPoolState", _TREES),
    "_cuda_checkPoolLiveAllocations": refuse("torch._C._cuda_checkPoolLiveAllocations", _TREES),
    "_cuda_attach_out_of_memory_observer": refuse("torch._C._cuda_attach_out_of_memory_observer", _OBSERVERS),
    "_cuda_cudaCachingAllocator_enable": keep_caching,
}


def elsewhere(torch: Any) -> List[Tuple[Any, str, Any]]:
    """The refusals that are no bindings of `torch._C`, as (owner, name, value): pools, storages shared with another process, and cuDNN's search."""
    memory, storage = torch.cuda.memory, torch.UntypedStorage
    found = [
        (memory, "_cuda_beginAllocateCurrentThreadToPool", refuse("torch.cuda.use_mem_pool", _POOLS)),
        (getattr(memory, "MemPool", None), "__init__", refuse("torch.cuda.MemPool", _POOLS)),
        (storage, "_share_cuda_", refuse("torch.UntypedStorage._share_cuda_", _SHARING)),
        (storage, "_new_shared_cuda", classmethod(refuse("torch.UntypedStorage._new_shared_cuda", _SHARING))),
    ]
    if hasattr(torch._C, "_set_cudnn_benchmark"):
        native = torch._C._set_cudnn_benchmark

        def set_benchmark(value: Any) -> None:
            # What is no bool is PyTorch's to refuse. The warning is last: it may be an exception.
            native(False if isinstance(value, bool) else value)
            if value is True:
                warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=3)

        found.append((torch._C, "_set_cudnn_benchmark", set_benchmark))
        # `torch.backends.cudnn.benchmark = …` kept the function that it was made with.
        found.append((vars(type(torch.backends.cudnn)).get("benchmark"), "setter", set_benchmark))
    # What this PyTorch does not have is used by nobody.
    return [(owner, name, value) for owner, name, value in found if owner is not None and hasattr(owner, name)]


def switch_benchmark_off(torch: Any) -> None:
    """cuDNN's search goes off, with a warning. To be called before anything is changed: the warning may be an exception."""
    if hasattr(torch._C, "_set_cudnn_benchmark") and torch._C._get_cudnn_benchmark():
        warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=4)
        torch._C._set_cudnn_benchmark(False)
