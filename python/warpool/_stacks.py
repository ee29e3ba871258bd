"""Python call stacks for the history: a hook that pushes the frames of the calling thread, innermost first.

C++ frames are not collected, neither with `stacks="python"` nor with `stacks="all"`. The hook raises nothing, holds no
lock, and is removed before the interpreter shuts down. A Ctrl-C that arrives in the hook is sent again shortly after.
"""

import _thread
import atexit
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any, Dict, Optional, Tuple

from . import _native

# At most this many frames, so that deep recursion does not make every allocation slow.
_DEPTH_MAX = 128
_PACKAGE = str(Path(__file__).parent)

# Encoded names by code object. Cleared when it is larger than any program's own code, since it keeps generated code
# alive.
_names: Dict[CodeType, Optional[Tuple[bytes, bytes]]] = {}
_NAMES_MAX = 1 << 16

_registered = False
_unraisable_before: Any = None


def install() -> None:
    """Collects stacks from now on, until `remove` or the end of the interpreter."""
    global _registered, _unraisable_before
    if not _registered:
        _registered = True
        atexit.register(remove)
        # Never removed: another hook may have replaced it and call it.
        _unraisable_before, sys.unraisablehook = sys.unraisablehook, _unraisable
    _native.set_stack_hook(_HOOK)


def remove() -> None:
    """Stops collecting stacks."""
    _native.set_stack_hook(None)


def _name(code: CodeType) -> Optional[Tuple[bytes, bytes]]:
    """A function's name and file; None for functions of this package."""
    try:
        return _names[code]
    except KeyError:
        if len(_names) >= _NAMES_MAX:
            _names.clear()
        own = code.co_filename.startswith(_PACKAGE)
        name = None if own else (code.co_name.encode("utf-8", "replace"), code.co_filename.encode("utf-8", "replace"))
        _names[code] = name
        return name


def _push_frames() -> None:
    # An exception here would be printed at every allocation; an incomplete stack is better.
    try:
        frame, left = sys._getframe().f_back, _DEPTH_MAX
        while frame is not None and left > 0:
            name = _name(frame.f_code)
            if name is not None:
                _native.push_frame(name[0], name[1], frame.f_lineno or 0)
                left -= 1
            frame = frame.f_back
    except KeyboardInterrupt:
        _interrupt_again()
    except BaseException:
        pass


def _unraisable(unraisable: Any) -> None:
    """The unraisable hook: receives a Ctrl-C that arrived at the start of the stack hook, before its `try`."""
    if unraisable.object is _push_frames and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_again()
    else:
        _unraisable_before(unraisable)


def _interrupt_again() -> None:
    """Sends a Ctrl-C from another thread, when this one has probably left the hook; if not, it is sent once more."""

    def send() -> None:
        time.sleep(0.002)
        _thread.interrupt_main()

    # Not `threading`, which waits for the thread to start: the interrupt could arrive there and be lost.
    try:
        _thread.start_new_thread(send, ())
    except RuntimeError:
        pass


# Kept as long as the module: the shared object may call it at any time.
_HOOK = _native.STACK_HOOK(_push_frames)
