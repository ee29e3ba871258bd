"""Initialization of CUDA, and re-exported names."""

from .. import _C
from . import memory
from .memory import (
    MemPool,
    empty_cache,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    use_mem_pool,
)


def init() -> None:
    if not _C.initialised:
        _C.initialised = True
        hooks = getattr(_C.current, "hooks", {})
        if "set_init_fn" in hooks:
            hooks["set_init_fn"](1)


def current_device() -> int:
    return 0


def is_initialized() -> bool:
    return _C.initialised


def is_available() -> bool:
    return False
