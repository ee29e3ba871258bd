"""Calls the bindings as PyTorch's module does: through `torch._C`, and one by an imported name."""

import ctypes
from typing import Any, Dict, List, Optional

from .. import _C
from .._C import _cuda_beginAllocateCurrentThreadToPool  # noqa: F401


class CUDAPluggableAllocator:
    def __init__(self, path: str, alloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        addresses = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (alloc, free))
        self._allocator = _C._cuda_customAllocator(*addresses)

    def allocator(self) -> Any:
        return self._allocator


def change_current_allocator(allocator: CUDAPluggableAllocator) -> None:
    _C._cuda_changeCurrentAllocator(allocator.allocator())


class MemPool:
    id = (0, 1)

    def __init__(self) -> None:
        pass


def use_mem_pool(pool: MemPool) -> None:
    _cuda_beginAllocateCurrentThreadToPool(0, pool.id)


def memory_stats(device: int = 0) -> Dict[str, Any]:
    flat: Dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", _C._cuda_memoryStats(device))
    return flat


def memory_allocated(device: int = 0) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def memory_reserved(device: int = 0) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def empty_cache() -> None:
    _C._cuda_emptyCache()


def memory_snapshot(pool: Any = None, include_traces: bool = True) -> List[Any]:
    first, second = pool or (0, 0)
    return _C._cuda_memorySnapshot((first, second, include_traces))["segments"]


def _record_memory_history(
    enabled: Optional[str] = "all",
    context: Optional[str] = "all",
    stacks: str = "all",
    max_entries: int = 2**63 - 1,
    skip: Any = (),
) -> None:
    _C._cuda_record_memory_history(enabled, context, stacks, max_entries, False, False, False, list(skip))


def _snapshot() -> Dict[str, Any]:
    return _C._cuda_memorySnapshot(None)
