"""The C interface of libwarpool_torch.so, by ctypes: one function each, typed, with a failed call as `warpool.Error`.

Not here: any policy, and PyTorch. The shared object is loaded at the first call, never by `import warpool`, so that a missing or
foreign file is an error where it can be read.
"""

import ctypes
import operator
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

# The visitor of statistics: `user[name] = value`. It is no Python function, in which a signal's exception could be
# raised and lost.
_VISIT = ctypes.CFUNCTYPE(None, ctypes.py_object, ctypes.c_char_p, ctypes.c_int64)
_SET_ITEM = _VISIT(operator.setitem)
STACK_HOOK = ctypes.CFUNCTYPE(None)

# Name: result, arguments. What PyTorch calls itself (the hooks) is only looked up, by `address`.
_STATUS: Dict[str, Sequence[Any]] = {
    "warpool_start": (),
    "warpool_device_count": (ctypes.POINTER(ctypes.c_int),),
    "warpool_empty_cache": (),
    "warpool_stats": (ctypes.c_int, _VISIT, ctypes.py_object),
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
_OTHERS: Dict[str, Sequence[Any]] = {
    "warpool_try_malloc": (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p),
    "warpool_free": (None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p),
    "warpool_settings": (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    "warpool_last_error": (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    "warpool_version": (ctypes.c_char_p,),
    "warpool_driver": (ctypes.c_char_p,),
}


class Error(RuntimeError):
    """Warpool refused or failed; the text says what happened and what to do."""


def library_path() -> str:
    """Where libwarpool_torch.so is: what WARPOOL_LIBRARY says, else the one inside the installed package."""
    named = os.environ.get("WARPOOL_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise Error(f"WARPOOL_LIBRARY is {named}, and there is no such file")
        return str(Path(named).resolve())
    beside = Path(__file__).resolve().parent / "warpool_torch" / "libwarpool_torch.so"
    if not beside.is_file():
        raise Error(
            f"libwarpool_torch.so is not in this package ({beside}): install the wheel, or build the shared object with "
            "`cargo build --release -p warpool-torch` and let WARPOOL_LIBRARY name it"
        )
    return str(beside)


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The loaded shared object, its functions typed; the same for the whole process."""
    from . import __version__

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
        raise Error(f"{path} is Warpool {found}, and this Python package is {__version__}: the two belong together")
    return loaded


def _declare(loaded: ctypes.CDLL, name: str, result: Any, arguments: Sequence[Any]) -> None:
    function = getattr(loaded, name)
    function.restype, function.argtypes = result, list(arguments)


@lru_cache(maxsize=None)
def _locked() -> ctypes.PyDLL:
    """The functions that are called with the interpreter's lock kept.

    A frame is pushed in less time than the lock is given away and taken back. And a daemon thread that asks for the lock inside a callback
    while the interpreter ends is thrown out through the shared object, which ends the process: so statistics do not ask for it.
    """
    loaded = ctypes.PyDLL(library()._name)
    _declare(loaded, "warpool_stats", ctypes.c_int, _STATUS["warpool_stats"])
    _declare(loaded, "warpool_push_frame", None, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64))
    return loaded


def address(name: str) -> int:
    """The address of an exported function, for whoever calls it from C."""
    value = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    if value is None:
        raise Error(f"{name} has no address in {library_path()}")
    return value


def _checked(name: str, *arguments: Any, loaded: Optional[ctypes.CDLL] = None) -> None:
    if getattr(loaded or library(), name)(*arguments) != 0:
        raise Error(last_error() or f"{name} failed and did not say why")


def _text(name: str) -> str:
    """A text that the caller brings the room for: asked for its length first, and again should it have grown meanwhile."""
    function, room = getattr(library(), name), 256
    while True:
        buffer = ctypes.create_string_buffer(room)
        needed = function(buffer, room)
        if needed < room:
            return buffer.value.decode("utf-8", "replace")
        room = needed + 1


def last_error() -> str:
    """What the last failed call of this thread said."""
    return _text("warpool_last_error")


def version() -> str:
    """The shared object's version."""
    return library().warpool_version().decode()


def driver() -> str:
    """The driver underneath, `cuda` or `sim`; empty before the start."""
    return (library().warpool_driver() or b"").decode()


def start() -> None:
    """Reads the environment and opens the driver, unless that is done."""
    _checked("warpool_start")


def device_count() -> int:
    """How many devices the driver has."""
    count = ctypes.c_int()
    _checked("warpool_device_count", ctypes.byref(count))
    return count.value


def malloc(size: int, device: int = 0, stream: int = 0) -> int:
    """Memory for a stream; its address. Nothing is thrown into C++ here: a failure is an `Error`."""
    ptr = library().warpool_try_malloc(size, device, stream)
    if not ptr and size > 0:
        raise Error(last_error())
    return ptr or 0


def free(ptr: int, size: int, device: int = 0, stream: int = 0) -> None:
    """Gives memory back, with what it was asked with."""
    library().warpool_free(ptr, size, device, stream)


def empty_cache() -> None:
    """Gives every cached segment back to the driver."""
    _checked("warpool_empty_cache")


def stats(device: int) -> Dict[str, int]:
    """A device's statistics by PyTorch's flattened names."""
    found: Dict[bytes, int] = {}
    _checked("warpool_stats", device, _SET_ITEM, found, loaded=_locked())
    return {name.decode(): value for name, value in found.items()}


def reset_peak_stats(device: int) -> None:
    """Every peak becomes the current value."""
    _checked("warpool_reset_peak_stats", device)


def reset_accumulated_stats(device: int) -> None:
    """Every running total and every counter becomes zero."""
    _checked("warpool_reset_accumulated_stats", device)


def memory_fraction(device: int) -> float:
    """Which part of the device's memory may be taken."""
    fraction = ctypes.c_double()
    _checked("warpool_get_memory_fraction", device, ctypes.byref(fraction))
    return fraction.value


def set_memory_fraction(fraction: float, device: int) -> None:
    """Caps what may be taken of the device's memory."""
    _checked("warpool_set_memory_fraction", fraction, device)


def largest_available(device: int) -> int:
    """The largest piece that could be had now, in bytes."""
    size = ctypes.c_size_t()
    _checked("warpool_largest_available", device, ctypes.byref(size))
    return size.value


def snapshot(path: "os.PathLike[str] | str") -> None:
    """Writes a snapshot of every device to a file, in PyTorch's format."""
    _checked("warpool_snapshot", os.fsencode(path))


def record_history(on: bool, max_entries: int, stack_level: int, skip_actions: Sequence[str] = (), clear: bool = False) -> None:
    """Switches the history. Stack levels: 0 never, 1 for live blocks, 2 for allocations too, 3 for frees too."""
    skip = ",".join(skip_actions).encode() or None
    _checked("warpool_record_history", int(on), max_entries, stack_level, skip, int(clear))


def set_stack_hook(hook: Optional[Any]) -> None:
    """The function (a `STACK_HOOK`, kept alive by the caller) that is asked for a stack; None removes it."""
    _checked("warpool_set_stack_hook", ctypes.cast(hook, ctypes.c_void_p) if hook else None)


def push_frame(name: bytes, file: bytes, line: int) -> None:
    """One frame of the stack that is being gathered, innermost first; inside the hook only."""
    _locked().warpool_push_frame(name, file, line)


def set_user_metadata(text: str) -> None:
    """A text for every entry that this thread adds to the history from now on; empty for none."""
    _checked("warpool_set_user_metadata", text.encode())


def settings() -> str:
    """The settings in force, as the one string that gives them from the defaults."""
    start()
    return _text("warpool_settings")


def set_settings(conf: str) -> None:
    """Changes settings, on top of what is; if anything is wrong nothing changes."""
    _checked("warpool_set_settings", conf.encode())
