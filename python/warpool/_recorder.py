"""Recordings that a program writes about itself, with the call stacks of Python. The public functions are in
`warpool.torch`; what is recorded, and when, is decided by the settings, in the shared object.

The shared object walks the frames of Python itself, by the interpreter's functions, whose addresses it is given here:
a Python function that is called for each allocation would cost more than the allocation.
"""

import atexit
import ctypes
import os
import sys
from typing import Dict, List, Optional, Sequence, Union

from . import _native

# The functions of the interpreter, in the order of `warpool_python_interface`. PyFrame_GetLasti is there since 3.11.
_FUNCTIONS = (
    ("PyGILState_GetThisThreadState",),
    ("PyGILState_Ensure",),
    ("PyGILState_Release",),
    ("PyThreadState_GetFrame",),
    ("PyFrame_GetBack",),
    ("PyFrame_GetCode",),
    ("PyFrame_GetLasti", "PyFrame_GetLineNumber"),
    ("PyFrame_GetLineNumber",),
    ("PyObject_GetAttrString",),
    ("PyUnicode_AsUTF8AndSize",),
    ("PyErr_Fetch",),
    ("PyErr_Restore",),
    ("Py_DecRef",),
)
_Interface = ctypes.c_void_p * len(_FUNCTIONS)
_PATH_MAX = 1 << 13

FolderOrFile = Union[str, "os.PathLike[str]"]

# Argument types of the functions that return a status.
STATUS: Dict[str, Sequence[object]] = {
    "warpool_set_python": (ctypes.c_void_p,),
    "warpool_set_record_dir": (ctypes.c_char_p,),
    "warpool_record_now": (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
    "warpool_record_at_exit": (),
}


def conf_with(conf: Optional[str], record: Optional[str]) -> Optional[str]:
    """The settings string with `record`, on top of that of the environment unless there is one."""
    if record is None:
        return conf
    if not isinstance(record, str):
        raise TypeError(f"record is a text such as 'oom', not {record!r}")
    before = os.environ.get("WARPOOL_CONF", "") if conf is None else conf
    return ",".join(part for part in (before.strip().rstrip(","), f"record:{record}") if part)


def set_folder(folder: FolderOrFile) -> None:
    """Recordings go there from here on."""
    _native.call(STATUS, "warpool_set_record_dir", os.fsencode(folder))


def show_stacks() -> None:
    """Has recordings show the call stacks of this interpreter until it ends. Costs nothing while none are made."""
    interface = _Interface(*(_address(names) for names in _FUNCTIONS))
    _native.call(STATUS, "warpool_set_python", interface)
    atexit.register(_end)


def record_now(path: Optional[FolderOrFile] = None) -> str:
    """Writes a recording, and returns its path."""
    written = ctypes.create_string_buffer(_PATH_MAX)
    to = None if path is None else os.fsencode(path)
    _native.call(STATUS, "warpool_record_now", to, written, _PATH_MAX)
    return os.fsdecode(written.value)


def _address(names: Sequence[str]) -> int:
    """Where the first of the functions is that this interpreter has."""
    missing: List[str] = []
    for name in names:
        try:
            return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
        except AttributeError:
            missing.append(name)
    raise _native.Error(f"this Python has no {missing[0]}, and call stacks need CPython 3.9 or later")


def _end() -> None:
    """Before the interpreter ends. A failure is told, and must not replace the program's own exit status."""
    try:
        _native.call(STATUS, "warpool_record_at_exit")
    except _native.Error as error:
        # In a forked child the recordings are the parent's.
        if "forked" not in str(error):
            print(f"warpool: {error}", file=sys.stderr, flush=True)
    _native.status(STATUS, "warpool_set_python", None)
