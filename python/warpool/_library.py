"""The C interface of libwarpool_answers through ctypes: `answer` runs one request and returns its answer.

The shared object is loaded by the first request, not by `import warpool`. It has neither CUDA nor Python in it.

A request runs on a thread of its own while the calling thread waits, so Ctrl-C interrupts at once; the request is then
told to stop, and ends soon after. Nothing calls back from Rust: a callback would need the GIL, and could neither raise
an exception nor run while the interpreter shuts down.
"""

import ctypes
import json
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

from ._native import Error
from ._version import __version__

Progress = Callable[[str, int, int], None]
"""Called now and then, on the thread that asked, with what is being done ("reading", "replaying" or "writing"), how
much of it is done, and how much there is (0 if that is not known)."""

_STAGES = ("starting", "reading", "replaying", "writing")
_SECONDS_BETWEEN_LOOKS = 0.1


class InputError(Error, ValueError):
    """A recording cannot be read, or nothing can be told about it; the text says why."""


class OptionError(Error, ValueError):
    """An option has a value that it cannot have; the text says which it may have."""


class Input(NamedTuple):
    """A recording: the path of a file, or its content."""

    data: bytes
    is_path: bool


class Answered(NamedTuple):
    """An answer: its JSON, and its page, which is empty if there is none."""

    json: Dict[str, Any]
    page: str


class _Input(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("is_path", ctypes.c_int)]


_SIZE = ctypes.POINTER(ctypes.c_size_t)
# Result and argument types of the functions.
_FUNCTIONS: Dict[str, Sequence[Any]] = {
    "warpool_answers_version": (ctypes.c_char_p,),
    "warpool_call_new": (ctypes.c_void_p,),
    "warpool_call_free": (None, ctypes.c_void_p),
    "warpool_call_run": (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(_Input),
        ctypes.c_size_t,
    ),
    "warpool_call_stop": (None, ctypes.c_void_p),
    "warpool_call_progress": (None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)),
    "warpool_call_json": (ctypes.c_void_p, ctypes.c_void_p, _SIZE),
    "warpool_call_page": (ctypes.c_void_p, ctypes.c_void_p, _SIZE),
}


def library_name() -> str:
    """The name of the shared object on this system."""
    prefix = "" if sys.platform == "win32" else "lib"
    ending = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    return f"{prefix}warpool_answers.{ending}"


def library_path() -> str:
    """The path of the shared object: WARPOOL_ANSWERS_LIBRARY, else the one in the installed package."""
    named = os.environ.get("WARPOOL_ANSWERS_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise Error(f"WARPOOL_ANSWERS_LIBRARY is {named}, which is not a file")
        return str(Path(named).resolve())
    packaged = Path(__file__).resolve().parent / library_name()
    if not packaged.is_file():
        raise Error(
            f"{packaged.name} is not in this package ({packaged}): install the wheel, or build it with `cargo build "
            "--release -p warpool-python` and set WARPOOL_ANSWERS_LIBRARY to its path"
        )
    return str(packaged)


@lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The shared object, loaded once per process, with typed functions."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(path)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Error(f"{path} is not Warpool's shared object, or was built for another system: {error}") from error
    found = loaded.warpool_answers_version().decode()
    if found != __version__:
        raise Error(f"{path} has version {found}, this Python package {__version__}: install both from one version")
    return loaded


def answer(
    command: str, options: Dict[str, Any], inputs: Sequence[Input], progress: Optional[Progress] = None
) -> Answered:
    """The answer to a request. Options that are None are left out."""
    call = _Call({"command": command, "options": options}, inputs)
    # A daemon: after Ctrl-C, nobody waits for it to stop.
    thread = threading.Thread(target=call.run, name=f"warpool {command}", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # No thread can be started, as while the interpreter shuts down.
            call.run()
        while not call.ended.wait(_SECONDS_BETWEEN_LOOKS):
            if progress is not None:
                progress(*call.progress())
    except BaseException:  # KeyboardInterrupt, or what `progress` raises.
        call.stop()
        raise
    return call.result()


class _Call:
    """A request with its answer. The thread that runs it holds a reference, so what it reads stays until it ends."""

    def __init__(self, request: Dict[str, Any], inputs: Sequence[Input]) -> None:
        self._library = library()
        self._request = json.dumps(request).encode()
        self._kept = inputs  # `_Input` has pointers into these.
        self._inputs = (_Input * len(inputs))(*(_Input(given.data, len(given.data), given.is_path) for given in inputs))
        self._handle = self._library.warpool_call_new()
        self._failure: Optional[BaseException] = None
        self.ended = threading.Event()

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._library.warpool_call_free(handle)

    def run(self) -> None:
        try:
            request, inputs = self._request, self._inputs
            self._library.warpool_call_run(self._handle, request, len(request), inputs, len(inputs))
        except BaseException as error:  # It is raised where the answer is taken.
            self._failure = error
        finally:
            self.ended.set()

    def stop(self) -> None:
        self._library.warpool_call_stop(self._handle)

    def progress(self) -> "tuple[str, int, int]":
        numbers = (ctypes.c_uint64 * 3)()
        self._library.warpool_call_progress(self._handle, numbers)
        stage, done, total = numbers
        return _STAGES[stage], done, total

    def result(self) -> Answered:
        if self._failure is not None:
            raise self._failure
        found: Dict[str, Any] = json.loads(self._text("warpool_call_json"))
        if "error" in found:
            raise _exception(found["error"])
        return Answered(found, self._text("warpool_call_page"))

    def _text(self, name: str) -> str:
        size = ctypes.c_size_t()
        start = getattr(self._library, name)(self._handle, ctypes.byref(size))
        return ctypes.string_at(start, size.value).decode() if start else ""


def _exception(error: Dict[str, Any]) -> Exception:
    """The exception for an error of the shared object."""
    kind, message = error["kind"], error["message"]
    if kind == "file":
        return _os_error(error["code"], message, error["path"])
    return {"input": InputError, "option": OptionError}.get(kind, Error)(message)


def _os_error(code: Optional[int], message: str, path: str) -> OSError:
    """FileNotFoundError and the like, as `open` would raise them."""
    if code is None:
        return OSError(f"{path}: {message}")
    if sys.platform == "win32":
        return OSError(None, message, path, code)
    return OSError(code, os.strerror(code), path)
