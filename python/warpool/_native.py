"""The C interface of libwarpool_torch.so through ctypes: one typed function each; a failed call raises `warpool.Error`.

The shared object is loaded by the first call, not by `import warpool`, so that `import` cannot fail. Nothing here needs
PyTorch.
"""

import ctypes
import operator
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from ._version import __version__

# The visitor of statistics: `user[name] = value`. Not a Python function: an exception of a signal handler could be
# raised in it and lost.
_VISIT = ctypes.CFUNCTYPE(None, ctypes.py_object, ctypes.c_char_p, ctypes.c_int64)
_SET_ITEM = _VISIT(operator.setitem)

# Argument types of the functions that return a status.
_STATUS: Dict[str, Sequence[Any]] = {
    "warpool_start": (),
    "warpool_start_with": (ctypes.c_char_p,),
    "warpool_set_settings": (ctypes.c_char_p,),
}
# Result and argument types of the other functions.
_OTHERS: Dict[str, Sequence[Any]] = {
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
        if not sys.platform.startswith("linux"):
            raise Error(
                f"Warpool's allocator needs Linux, and this is {sys.platform}: here the package has the command "
                "`warpool` and the functions that answer about recordings"
            )
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


def _checked(name: str, *arguments: Any) -> None:
    raise_if(getattr(library(), name)(*arguments), name)


def raise_if(status: int, name: str) -> None:
    """Raises the last error, unless the status of a function is success."""
    if status != 0:
        raise Error(last_error() or f"{name} failed without a reason")


def call(types: Dict[str, Sequence[Any]], name: str, *arguments: Any) -> None:
    """Calls a function of another module's table, which returns a status."""
    raise_if(status(types, name, *arguments), name)


def status(types: Dict[str, Sequence[Any]], name: str, *arguments: Any) -> int:
    """The same, for a caller to whom the status says more."""
    _declare(library(), name, ctypes.c_int, types[name])
    return getattr(library(), name)(*arguments)


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


@lru_cache(maxsize=None)
def _visiting(name: str) -> Any:
    """A function that calls `_VISIT`, called without releasing the GIL: a daemon thread that acquires the GIL in a
    callback while the interpreter shuts down is unwound through the shared object, which ends the process."""
    loaded = ctypes.PyDLL(library()._name)
    _declare(loaded, name, ctypes.c_int, (ctypes.c_int, _VISIT, ctypes.py_object))
    return getattr(loaded, name)


def visited(name: str, device: int) -> Dict[str, int]:
    """What the function visits of a device."""
    found: Dict[bytes, int] = {}
    raise_if(_visiting(name)(device, _SET_ITEM, found), name)
    return {name.decode(): value for name, value in found.items()}


def page_stats(device: int) -> Dict[str, int]:
    """The statistics of a device's pages; an error unless the backend is `paged`."""
    return visited("warpool_page_stats", device)


def settings() -> str:
    """The settings in effect, as the string that produces them from the defaults."""
    start()
    return _text("warpool_settings")


def set_settings(conf: str) -> None:
    """Applies settings on top of those in effect. If anything is wrong nothing changes."""
    _checked("warpool_set_settings", conf.encode())
