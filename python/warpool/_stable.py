"""Memory that others register: the public function is in `warpool.torch`."""

import ctypes
import importlib
from typing import Any, Dict, Optional, Sequence

from . import _memory_saver, _native


class _PoolId(ctypes.Structure):
    _fields_ = [("graph", ctypes.c_uint64), ("user", ctypes.c_uint64)]


# Argument types of the functions that return a status.
STATUS: Dict[str, Sequence[Any]] = {"warpool_pool_stable": (ctypes.c_int, _PoolId)}


def stable_pool(device: Optional[int] = None) -> Any:
    """A `torch.cuda.MemPool` whose memory others can register, for `with torch.cuda.use_mem_pool(pool)`.

    Each segment is one physical allocation, mapped once: it is never moved, never asleep, and stays as long as the pool
    exists. Its address and size are multiples of 2 MiB and of the device's granularity for multicast; it can be shared
    as a file descriptor and accessed by network cards where the device can. Keep the pool as long as memory of it is
    registered. The device is the current one by default.

    Raises `Error` with a backend that has no such pools.
    """
    _memory_saver.check_enabled("warpool.torch.stable_pool")
    cuda = importlib.import_module("torch").cuda
    device = cuda.current_device() if device is None else device
    with cuda.device(device):
        pool = cuda.MemPool()
    make_stable(device, pool.id)
    return pool


def make_stable(device: int, pool: Sequence[int]) -> None:
    """Makes PyTorch's pool of that id stable, before it is first used."""
    _native.call(STATUS, "warpool_pool_stable", device, _PoolId(*pool))
