"""The bindings: each returns "native", or raises once the allocator is replaced, as in PyTorch."""

import ctypes
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

initialised = False
settings_received = []


class _Native:
    used = False

    def malloc(self, size: int) -> int:
        self.used = True
        return 0x1000

    def free(self, ptr: int, size: int) -> None:
        pass


class _CUDAPluggableAllocator:
    """Calls functions by their addresses; the hooks with PyTorch's types."""

    _TYPES = {
        "set_init_fn": (None, ctypes.c_int),
        "set_reset_fn": (None,),
        "set_memory_fraction_fn": (None, ctypes.c_double, ctypes.c_int),
        "set_base_alloc_fn": (ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)),
        "set_record_stream_fn": (None, ctypes.c_void_p, ctypes.c_void_p),
        "set_begin_allocate_to_pool": (None,),
        "set_end_allocate_to_pool_fn": (None,),
        "set_release_pool": (None,),
    }

    def __init__(self, alloc: int, free: int) -> None:
        self._alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(alloc)
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(free)
        self.hooks: Dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[[int], None]:
        if name not in self._TYPES:
            raise AttributeError(name)

        def setter(address: int) -> None:
            self.hooks[name] = ctypes.CFUNCTYPE(*self._TYPES[name])(address)

        return setter

    def malloc(self, size: int) -> int:
        return self._alloc(size, 0, None) or 0

    def free(self, ptr: int, size: int) -> None:
        self._free(ptr, size, 0, None)


current: Any = _Native()


def _cuda_customAllocator(alloc: int, free: int) -> _CUDAPluggableAllocator:
    return _CUDAPluggableAllocator(alloc, free)


def _cuda_changeCurrentAllocator(allocator: _CUDAPluggableAllocator) -> None:
    global current
    if not isinstance(current, _Native) or current.used:
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator


def _binding(name: str) -> Callable[..., Any]:
    def binding(*_arguments: Any) -> Any:
        if not isinstance(current, _Native):
            raise RuntimeError(f"CUDAPluggableAllocator does not yet support {name}")
        return "native"

    return binding


_cuda_memoryStats = _binding("getDeviceStats")
_cuda_resetPeakMemoryStats = _binding("resetPeakStats")
_cuda_resetAccumulatedMemoryStats = _binding("resetAccumulatedStats")
_cuda_memorySnapshot = _binding("snapshot")
_cuda_getMemoryFraction = _binding("getMemoryFraction")
_cuda_setMemoryFraction = _binding("setMemoryFraction")
_cuda_emptyCache = _binding("emptyCache")
_cuda_record_memory_history = _binding("recordHistory")
_cuda_record_memory_history_legacy = _binding("recordHistory")
_cuda_isHistoryEnabled = _binding("recordHistory")
_cuda_setMemoryMetadata = _binding("setMetadata")
_cuda_getMemoryMetadata = _binding("getMetadata")
_cuda_beginAllocateCurrentThreadToPool = _binding("beginAllocateToPool")
_cuda_beginAllocateToPool = _binding("beginAllocateToPool")
_cuda_getCheckpointState = _binding("getCheckpointState")
_cuda_setCheckpointPoolState = _binding("setCheckpointPoolState")
_cuda_checkPoolLiveAllocations = _binding("checkPoolLiveAllocations")
_cuda_attach_out_of_memory_observer = _binding("attachOutOfMemoryObserver")
_cuda_cudaCachingAllocator_enable = _binding("enable")


def _accelerator_isAllocatorInitialized() -> bool:
    """Of the native allocator only, as in PyTorch 2.11."""
    return isinstance(current, _Native) and current.used


_accelerator_getDeviceStats = _binding("getDeviceStats")
_accelerator_resetPeakStats = _binding("resetPeakStats")
_accelerator_resetAccumulatedStats = _binding("resetAccumulatedStats")
_accelerator_emptyCache = _binding("emptyCache")


def _accelerator_setAllocatorSettings(conf: str) -> None:
    if "cap_mb" in conf:
        raise ValueError("Unrecognized key in the settings")
    settings_received.append(conf)


_benchmark = False


def _get_cudnn_benchmark() -> bool:
    return _benchmark


def _set_cudnn_benchmark(value: bool) -> None:
    global _benchmark
    if not isinstance(value, bool):
        raise TypeError("set_benchmark_cudnn expects a bool")
    _benchmark = value
