"""Replacements of PyTorch's memory bindings: `BINDINGS` maps names in `torch._C` to functions that call Warpool.

PyTorch's Python code (`torch.cuda.memory`, `torch.accelerator.memory`) is unchanged and calls these, so argument checks
and summaries remain PyTorch's. The only state here is whether the history is on, and the metadata of each thread, which
the shared object cannot return.
"""

import os
import pickle
import tempfile
import threading
import warnings
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from . import _native, _stacks

_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}

# Settings of pinned memory that PyTorch does not have.
_WARPOOL_PINNED = ("pinned_cap_mb", "pinned_device_cap_mb")

_history_on = False
_metadata = threading.local()


def memory_stats(device: int) -> Dict[str, Any]:
    """Statistics as PyTorch nests them: {"allocated_bytes": {"all": {"current": …}}, …}."""
    nested: Dict[str, Any] = {}
    for name, value in _native.stats(device).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def memory_snapshot(selection: Optional[Tuple[Any, ...]] = None) -> Dict[str, Any]:
    """The snapshot as a dictionary. `selection` is a pool id, optionally followed by whether to include traces; pool id
    (0, 0) selects all pools."""
    handle, path = tempfile.mkstemp(prefix="warpool-", suffix=".pickle")
    os.close(handle)
    try:
        _native.snapshot(path)
        with open(path, "rb") as file:
            snapshot: Dict[str, Any] = pickle.load(file)
    finally:
        os.unlink(path)
    if selection is not None:
        pool, with_traces = tuple(selection[:2]), len(selection) < 3 or bool(selection[2])
        if pool != (0, 0):
            segments = snapshot["segments"]
            snapshot["segments"] = [segment for segment in segments if tuple(segment["segment_pool_id"]) == pool]
        if not with_traces:
            snapshot["device_traces"] = [[] for _ in snapshot["device_traces"]]
    return snapshot


def record_memory_history(
    enabled: Optional[str] = "all",
    context: Optional[str] = "all",
    stacks: str = "all",
    max_entries: int = 2**63 - 1,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Sequence[str] = (),
) -> None:
    """The history, with the arguments of `torch.cuda.memory._record_memory_history`."""
    if enabled not in (None, "state", "all"):
        raise RuntimeError(f"enabled is {enabled!r}: it must be None, 'state' or 'all'")
    if context not in _LEVELS:
        raise RuntimeError(f"context is {context!r}: it must be None, 'state', 'alloc' or 'all'")
    if stacks not in ("python", "all"):
        raise RuntimeError(f"stacks is {stacks!r}: it must be 'python' or 'all'")
    _warn_unsupported(compile_context, global_record_annotations)
    _record(enabled is not None, max_entries if enabled == "all" else 1, _LEVELS[context], clear_history, skip_actions)


def record_memory_history_legacy(
    enabled: bool,
    record_context: bool = True,
    trace_alloc_max_entries: int = 1,
    trace_alloc_record_context: bool = False,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Sequence[str] = (),
) -> None:
    """The history, with the arguments of PyTorch's older signature."""
    _warn_unsupported(compile_context, global_record_annotations)
    level = "alloc" if trace_alloc_record_context else "state" if record_context else None
    _record(enabled, trace_alloc_max_entries, _LEVELS[level], clear_history, skip_actions)


def _warn_unsupported(compile_context: bool, annotations: bool) -> None:
    for name, requested in (("compile_context", compile_context), ("global_record_annotations", annotations)):
        if requested:
            warnings.warn(f"{name} has no effect: only PyTorch's own allocator receives it", stacklevel=5)


def _record(on: bool, max_entries: int, level: int, clear: bool, skip_actions: Sequence[str]) -> None:
    global _history_on
    level = level if on else 0
    _native.record_history(on, max_entries, level, skip_actions, clear)
    _history_on = on
    if level:
        _stacks.install()
    else:
        _stacks.remove()


def is_history_enabled() -> bool:
    """Whether the history is on."""
    return _history_on


def set_memory_metadata(text: str) -> None:
    """Sets the metadata of the history entries that this thread adds from now on."""
    _native.set_user_metadata(text)
    _metadata.text = text


def get_memory_metadata() -> str:
    """The metadata of this thread."""
    return getattr(_metadata, "text", "")


def set_allocator_settings(original: Optional[Callable[[str], None]]) -> Callable[[str], None]:
    """The replacement of PyTorch's setter: settings go to Warpool, and those of pinned memory, which PyTorch still
    allocates, also to PyTorch's `original`, except for those that only Warpool has."""

    def set_settings(conf: str) -> None:
        _native.set_settings(conf)
        named = ((pair.split(":")[0].strip(), pair) for pair in conf.split(","))
        pinned = [pair for name, pair in named if name.startswith("pinned_") and name not in _WARPOOL_PINNED]
        if pinned and original is not None:
            original(",".join(pinned))

    return set_settings


BINDINGS: Dict[str, Callable[..., Any]] = {
    "_cuda_memoryStats": memory_stats,
    "_cuda_resetPeakMemoryStats": _native.reset_peak_stats,
    "_cuda_resetAccumulatedMemoryStats": _native.reset_accumulated_stats,
    "_cuda_memorySnapshot": memory_snapshot,
    "_cuda_getMemoryFraction": _native.memory_fraction,
    # PyTorch's own function calls a hook, which cannot report an error.
    "_cuda_setMemoryFraction": _native.set_memory_fraction,
    "_cuda_emptyCache": _native.empty_cache,
    "_cuda_record_memory_history": record_memory_history,
    "_cuda_record_memory_history_legacy": record_memory_history_legacy,
    "_cuda_isHistoryEnabled": is_history_enabled,
    "_cuda_setMemoryMetadata": set_memory_metadata,
    "_cuda_getMemoryMetadata": get_memory_metadata,
    # PyTorch's own function returns False while its native allocator is unused, and PyTorch would not call the
    # functions below.
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": memory_stats,
    "_accelerator_resetPeakStats": _native.reset_peak_stats,
    "_accelerator_resetAccumulatedStats": _native.reset_accumulated_stats,
    "_accelerator_emptyCache": _native.empty_cache,
}
