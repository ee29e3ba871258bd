"""The C interface of libwarpool_torch.so through ctypes: one typed function each; a failed call raises `warpool.Error`.

The shared object is loaded by the first call, not by `import warpool`, so that `import` cannot fail. Nothing here needs
PyTorch.
"""

import ctypes
import operator
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from ._version import __version__

# The visitor of statistics: `user[name] = value`. Not a Python function: an exception of a signal handler could be
# raised in it and lost.
_VISIT = ctypes.CFUNCTYPE(None, ctypes.py_object, ctypes.c_char_p, ctypes.c_int64)
_SET_ITEM = _VISIT(operator.setitem)
STACK_HOOK = ctypes.CFUNCTYPE(None)

# Argument types of the functions that return a status. The hooks, which PyTorch calls, are only looked up by `address`.
_STATUS: Dict[str, Sequence[Any]] = {
    "warpool_start": (),
    "warpool_start_with": (ctypes.c_char_p,),
    "warpool_device_count": (ctypes.POINTER(ctypes.c_int),),
    "warpool_empty_cache": (),
    "warpool_stats": (ctypes.c_int, _VISIT, ctypes.py_object),
    "warpool_page_stats": (ctypes.c_int, _VISIT, ctypes.py_object),
    "warpool_reset_peak_stats": (ctypes.c_int,),
    "warpool_reset_accumulated_stats": (ctypes.c_int,),
    "warpool_get_memory_fraction": (ctypes.c_int, ctypes.POINTER(ctypes.c_double)),
    "warpool_set_memory_fraction": (ctypes.c_double, ctypes.c_int),
    "warpool_largest_available": (ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)),
    "warpool_snapshot": (ctypes.c_char_p,),
    "warpool_record_history": (ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
    "warpool_set_stack_hook": (ctypes.c_void_p,),
    "warpool_set_user_metadata": (ctypes.c_char_p,),
    "warpool_set_settings": (ctypes.c_char_p,),
}
# Result and argument types of the other functions.
_OTHERS: Dict[str, Sequence[Any]] = {
    "warpool_try_malloc": (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p),
    "warpool_free": (None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p),
    "warpool_settings": (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    "warpool_last_error": (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    "warpool_version": (ctypes.c_char_p,),
    "warpool_driver": (ctypes.c_char_p,),
}


class Error(RuntimeError):
    """A call to Warpool failed; the text says why and what to do."""


def library_path() -> str:
    """The path of libwarpool_torch.so: WARPOOL_LIBRARY, else the one in the installed package."""
    named = os.environ.get("WARPOOL_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise Error(f"WARPOOL_LIBRARY is {named}, which is not a file")
        return str(Path(named).resolve())
    packaged = Path(__file__).resolve().parent / "libwarpool_torch.so"
    if not packaged.is_file():
        raise Error(
            f"libwarpool_torch.so is not in this package ({packaged}): install the wheel, or build the shared object "
            "with `cargo build --release -p warpool-torch` and set WARPOOL_LIBRARY to its path"
        )
    return str(packaged)


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The shared object, loaded once per process, with typed functions."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(path)
        for name, arguments in _STATUS.items():
            _declare(loaded, name, ctypes.c_int, arguments)
        for name, (result, *arguments) in _OTHERS.items():
            _declare(loaded, name, result, arguments)
    except (OSError, AttributeError) as error:
        raise Error(f"{path} is not Warpool's shared object, or was built for another system: {error}") from error
    found = loaded.warpool_version().decode()
    if found != __version__:
        raise Error(f"{path} has version {found}, this Python package {__version__}: install both from one version")
    return loaded


def _declare(loaded: ctypes.CDLL, name: str, result: Any, arguments: Sequence[Any]) -> None:
    function = getattr(loaded, name)
    function.restype, function.argtypes = result, list(arguments)


@lru_cache(maxsize=None)
def _with_gil() -> ctypes.PyDLL:
    """The functions that are called without releasing the GIL.

    Pushing a frame takes less time than releasing and acquiring the GIL. And a daemon thread that acquires the GIL in a
    callback while the interpreter shuts down is unwound through the shared object, which ends the process; with the GIL
    kept, the callback of statistics need not acquire it.
    """
    loaded = ctypes.PyDLL(library()._name)
    for name in ("warpool_stats", "warpool_page_stats"):
        _declare(loaded, name, ctypes.c_int, _STATUS[name])
    _declare(loaded, "warpool_push_frame", None, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64))
    return loaded


def address(name: str) -> int:
    """The address of an exported function, to be called from C."""
    value = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    if value is None:
        raise Error(f"{name} has no address in {library_path()}")
    return value


def _checked(name: str, *arguments: Any, loaded: Optional[ctypes.CDLL] = None) -> None:
    if getattr(loaded or library(), name)(*arguments) != 0:
        raise Error(last_error() or f"{name} failed without a reason")


def call(types: Dict[str, Sequence[Any]], name: str, *arguments: Any) -> None:
    """Calls a function of another module's table, which returns a status."""
    _declare(library(), name, ctypes.c_int, types[name])
    _checked(name, *arguments)


def _text(name: str) -> str:
    """A string that the function copies to a buffer; repeated with a larger buffer if it does not fit."""
    function, size = getattr(library(), name), 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(buffer, size)
        if length < size:
            return buffer.value.decode("utf-8", "replace")
        size = length + 1


def last_error() -> str:
    """The last error of this thread."""
    return _text("warpool_last_error")


def version() -> str:
    """The shared object's version."""
    return library().warpool_version().decode()


def driver() -> str:
    """The driver in use, `cuda` or `sim`; empty before the start."""
    return (library().warpool_driver() or b"").decode()


def start(backend: Optional[str] = None) -> None:
    """Reads the environment and opens the driver, unless that is done; with this backend if the settings name none."""
    if backend is None:
        _checked("warpool_start")
    else:
        _checked("warpool_start_with", backend.encode())


def device_count() -> int:
    """The number of devices."""
    count = ctypes.c_int()
    _checked("warpool_device_count", ctypes.byref(count))
    return count.value


def malloc(size: int, device: int = 0, stream: int = 0) -> int:
    """Allocates memory for a stream and returns its address. Throws no C++ exception: a failure is an `Error`."""
    ptr = library().warpool_try_malloc(size, device, stream)
    if not ptr and size > 0:
        raise Error(last_error())
    return ptr or 0


def free(ptr: int, size: int, device: int = 0, stream: int = 0) -> None:
    """Frees memory, with the arguments of its allocation."""
    library().warpool_free(ptr, size, device, stream)


def empty_cache() -> None:
    """Returns all cached memory to the driver."""
    _checked("warpool_empty_cache")


def stats(device: int) -> Dict[str, int]:
    """The statistics of a device, by PyTorch's flattened names."""
    return _visited("warpool_stats", device)


def page_stats(device: int) -> Dict[str, int]:
    """The statistics of a device's pages; an error unless the backend is `paged`."""
    return _visited("warpool_page_stats", device)


def _visited(name: str, device: int) -> Dict[str, int]:
    found: Dict[bytes, int] = {}
    _checked(name, device, _SET_ITEM, found, loaded=_with_gil())
    return {name.decode(): value for name, value in found.items()}


def reset_peak_stats(device: int) -> None:
    """Sets every peak to the current value."""
    _checked("warpool_reset_peak_stats", device)


def reset_accumulated_stats(device: int) -> None:
    """Sets every accumulated count to zero."""
    _checked("warpool_reset_accumulated_stats", device)


def memory_fraction(device: int) -> float:
    """The fraction of the device's memory that may be reserved."""
    fraction = ctypes.c_double()
    _checked("warpool_get_memory_fraction", device, ctypes.byref(fraction))
    return fraction.value


def set_memory_fraction(fraction: float, device: int) -> None:
    """Limits the reserved memory to a fraction of the device's memory."""
    _checked("warpool_set_memory_fraction", fraction, device)


def largest_available(device: int) -> int:
    """The size of the largest request that would succeed now, in bytes."""
    size = ctypes.c_size_t()
    _checked("warpool_largest_available", device, ctypes.byref(size))
    return size.value


def snapshot(path: "os.PathLike[str] | str") -> None:
    """Writes a snapshot of every device to a file, in PyTorch's format."""
    _checked("warpool_snapshot", os.fsencode(path))


def record_history(
    on: bool, max_entries: int, stack_level: int, skip_actions: Sequence[str] = (), clear: bool = False
) -> None:
    """Switches the history on or off. Stack levels: 0 never, 1 for allocated blocks, 2 also for entries of allocations,
    3 also for entries of frees."""
    skip = ",".join(skip_actions).encode() or None
    _checked("warpool_record_history", int(on), max_entries, stack_level, skip, int(clear))


def set_stack_hook(hook: Optional[Any]) -> None:
    """Sets the function (a `STACK_HOOK`, kept alive by the caller) that collects call stacks; None removes it."""
    _checked("warpool_set_stack_hook", ctypes.cast(hook, ctypes.c_void_p) if hook else None)


def push_frame(name: bytes, file: bytes, line: int) -> None:
    """Adds a frame to the stack that is being collected, innermost first; only inside the hook."""
    _with_gil().warpool_push_frame(name, file, line)


def set_user_metadata(text: str) -> None:
    """Sets the user metadata of the history entries that this thread adds from now on; empty for none."""
    _checked("warpool_set_user_metadata", text.encode())


def settings() -> str:
    """The settings in effect, as the string that produces them from the defaults."""
    start()
    return _text("warpool_settings")


def set_settings(conf: str) -> None:
    """Applies settings on top of those in effect. If anything is wrong nothing changes."""
    _checked("warpool_set_settings", conf.encode())
