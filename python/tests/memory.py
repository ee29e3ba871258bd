"""Memory for tests, from the shared object's functions for C programs, and its statistics."""

import ctypes
from typing import Dict

from warpool import _native

_SIZES = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def malloc(size: int) -> int:
    """Allocates memory on the first device."""
    function = _native.library().warpool_try_malloc
    function.restype, function.argtypes = ctypes.c_void_p, _SIZES
    ptr = function(size, 0, None)
    if not ptr:
        raise _native.Error(_native.last_error())
    return ptr


def free(ptr: int) -> None:
    """Frees it."""
    function = _native.library().warpool_free
    function.restype, function.argtypes = None, (ctypes.c_void_p, *_SIZES)
    function(ptr, 0, 0, None)


def stats() -> Dict[str, int]:
    """The statistics of the first device, by PyTorch's flattened names."""
    return _native.visited("warpool_stats", 0)
