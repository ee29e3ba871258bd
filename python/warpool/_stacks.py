"""Python stacks for the history: the shared object asks, and the frames of the calling thread are pushed, innermost first.

Not here: C++ frames. They are not gathered, neither with `stacks="python"` nor with `stacks="all"`.
The hook raises nothing, holds no lock of ours, and is removed before the interpreter goes. A Ctrl-C that arrives in it is not lost: it is
sent once more, a moment later.
"""

import _thread
import atexit
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any, Dict, Optional, Tuple

from . import _native

# A runaway recursion must not make every allocation slow.
_DEPTH = 128
_OURS = str(Path(__file__).parent)

# Names as C wants them, by code object. Emptied when it grows past any program's own code: generated code would stay
# alive otherwise.
_names: Dict[CodeType, Optional[Tuple[bytes, bytes]]] = {}
_NAMES = 1 << 16

_registered = False
_unraisable_before: Any = None


def install() -> None:
    """Stacks are gathered from now on, until `remove` or the interpreter's end."""
    global _registered, _unraisable_before
    if not _registered:
        _registered = True
        atexit.register(remove)
        # Stays: others may have put theirs on top of it.
        _unraisable_before, sys.unraisablehook = sys.unraisablehook, _unraisable
    _native.set_stack_hook(_HOOK)


def remove() -> None:
    """No stacks any more."""
    _native.set_stack_hook(None)


def _name(code: CodeType) -> Optional[Tuple[bytes, bytes]]:
    """A function's name and file; None for what is this package's own."""
    try:
        return _names[code]
    except KeyError:
        if len(_names) >= _NAMES:
            _names.clear()
        ours = code.co_filename.startswith(_OURS)
        name = None if ours else (code.co_name.encode("utf-8", "replace"), code.co_filename.encode("utf-8", "replace"))
        _names[code] = name
        return name


def _gather() -> None:
    # An exception here would be printed at every allocation, in a thread that cannot handle it: a lost stack is the
    # lesser evil.
    try:
        frame, left = sys._getframe().f_back, _DEPTH
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


def _unraisable(about: Any) -> None:
    """Hears of exceptions that nobody can handle: also of a Ctrl-C that was noticed at the hook's very beginning, before its `try`."""
    if about.object is _gather and issubclass(about.exc_type, KeyboardInterrupt):
        _interrupt_again()
    else:
        _unraisable_before(about)


def _interrupt_again() -> None:
    """Sends a Ctrl-C from another thread, when this one is likely out of the hook; if not, it is sent again."""

    def send() -> None:
        time.sleep(0.002)
        _thread.interrupt_main()

    # Not by `threading`, which waits for the thread to start: the interrupt might arrive there, and be lost.
    try:
        _thread.start_new_thread(send, ())
    except RuntimeError:
        pass


# Lives as long as the module: the shared object may be in a call of it at any time.
_HOOK = _native.STACK_HOOK(_gather)
