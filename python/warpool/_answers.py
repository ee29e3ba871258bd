"""Answers to PyTorch's own questions, from Warpool: each function stands in for the binding of `torch._C` that has its name in `BINDINGS`.

PyTorch's Python code (`torch.cuda.memory`, `torch.accelerator.memory`) stays as it is and calls these, so its checks of arguments and its
summaries stay PyTorch's. Here is no state but the history's switch and the metadata, which the shared object cannot be asked for.
"""

import os
import pickle
import tempfile
import threading
import warnings
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from . import _native, _stacks

_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}

# Settings of pinned memory that PyTorch does not know.
_OWN_PINNED = ("pinned_cap_mb", "pinned_device_cap_mb")

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


def memory_snapshot(asked: Optional[Tuple[Any, ...]] = None) -> Dict[str, Any]:
    """The snapshot as a dictionary; asked for as (pool, pool) or (pool, pool, with traces), where pool 0, 0 means every pool."""
    handle, path = tempfile.mkstemp(prefix="warpool-", suffix=".pickle")
    os.close(handle)
    try:
        _native.snapshot(path)
        with open(path, "rb") as file:
            snapshot: Dict[str, Any] = pickle.load(file)
    finally:
        os.unlink(path)
    if asked is not None:
        pool, with_traces = tuple(asked[:2]), len(asked) < 3 or bool(asked[2])
        if pool != (0, 0):
            snapshot["segments"] = [segment for segment in snapshot["segments"] if tuple(segment["segment_pool_id"]) == pool]
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
    """Switches the history as `torch.cuda.memory._record_memory_history` asks for it."""
    if enabled not in (None, "state", "all"):
        raise RuntimeError(f"enabled is {enabled!r}: it must be None, 'state' or 'all'")
    if context not in _LEVELS:
        raise RuntimeError(f"context is {context!r}: it must be None, 'state', 'alloc' or 'all'")
    if stacks not in ("python", "all"):
        raise RuntimeError(f"stacks is {stacks!r}: it must be 'python' or 'all'")
    _warn_of_missing(compile_context, global_record_annotations)
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
    """The same by PyTorch's older signature."""
    _warn_of_missing(compile_context, global_record_annotations)
    level = "alloc" if trace_alloc_record_context else "state" if record_context else None
    _record(enabled, trace_alloc_max_entries, _LEVELS[level], clear_history, skip_actions)


def _warn_of_missing(compile_context: bool, annotations: bool) -> None:
    for name, asked in (("compile_context", compile_context), ("global_record_annotations", annotations)):
        if asked:
            warnings.warn(f"Warpool's history has no {name}: only PyTorch's own allocator is told them", stacklevel=5)


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
    """A text for this thread's next entries in the history."""
    _native.set_user_metadata(text)
    _metadata.text = text


def get_memory_metadata() -> str:
    """That text."""
    return getattr(_metadata, "text", "")


def set_allocator_settings(torchs: Optional[Callable[[str], None]]) -> Callable[[str], None]:
    """Settings go to Warpool; those of pinned memory to PyTorch as well, whose pinned memory it still is, but not those that only Warpool has."""

    def answer(conf: str) -> None:
        _native.set_settings(conf)
        named = ((pair.split(":")[0].strip(), pair) for pair in conf.split(","))
        pinned = [pair for name, pair in named if name.startswith("pinned_") and name not in _OWN_PINNED]
        if pinned and torchs is not None:
            torchs(",".join(pinned))

    return answer


BINDINGS: Dict[str, Callable[..., Any]] = {
    "_cuda_memoryStats": memory_stats,
    "_cuda_resetPeakMemoryStats": _native.reset_peak_stats,
    "_cuda_resetAccumulatedMemoryStats": _native.reset_accumulated_stats,
    "_cuda_memorySnapshot": memory_snapshot,
    "_cuda_getMemoryFraction": _native.memory_fraction,
    # PyTorch's own goes through a hook, which cannot fail aloud.
    "_cuda_setMemoryFraction": _native.set_memory_fraction,
    "_cuda_emptyCache": _native.empty_cache,
    "_cuda_record_memory_history": record_memory_history,
    "_cuda_record_memory_history_legacy": record_memory_history_legacy,
    "_cuda_isHistoryEnabled": is_history_enabled,
    "_cuda_setMemoryMetadata": set_memory_metadata,
    "_cuda_getMemoryMetadata": get_memory_metadata,
    # PyTorch's own looks at its native allocator, which stays unused; then the others below would not be asked.
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_getDeviceStats": memory_stats,
    "_accelerator_resetPeakStats": _native.reset_peak_stats,
    "_accelerator_resetAccumulatedStats": _native.reset_accumulated_stats,
    "_accelerator_emptyCache": _native.empty_cache,
}
