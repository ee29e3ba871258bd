"""Runs one scenario in one process with one allocator: `python child.py SCENARIO ALLOCATOR`. Started by run.py.

The allocators are PyTorch's own (`native`, or `expandable`, for which the parent sets the environment), Warpool's as
the environment or the default has it (`warpool`), or one of its backends by name.

Every line of the output that begins with `@` is JSON for run.py: a check with its result, a note, or data to compare.
An exception is a failed check. WARPOOL_TEST_DUMP_EVERY=SECONDS shows on stderr where a long run is.
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).resolve().parent
# Which module has a scenario; all others are in scenarios.py.
MODULES = {
    **dict.fromkeys(("lengths", "streams", "short_lived"), "trainings"),
    **dict.fromkeys(("reduce_overhead", "max_autotune"), "compiled"),
    "recorder": "recorder",
    **dict.fromkeys(
        ("mempool", "cudnn", "sharing", "loader", "profiler", "cpp_frames", "collected_graphs"), "features"
    ),
}


def emit(kind: str, **values: Any) -> None:
    """Prints a line for run.py."""
    print("@" + json.dumps({"kind": kind, **values}), flush=True)


def check(name: str, holds: Any, detail: Any = "") -> None:
    """Reports a check."""
    emit("check", name=name, ok=bool(holds), detail=str(detail))


def note(name: str, detail: Any) -> None:
    """Reports a value that cannot fail."""
    emit("note", name=name, detail=str(detail))


def data(**values: Any) -> None:
    """Passes data to run.py, which compares it between processes."""
    emit("data", **values)


def enable(allocator: str) -> None:
    """Enables Warpool, if it is the allocator to test."""
    if allocator not in ("native", "expandable"):
        sys.path.insert(0, str(HERE.parent.parent))
        import warpool.torch

        warpool.torch.enable(None if allocator == "warpool" else allocator)


def main() -> None:
    scenario, allocator = sys.argv[1:3]
    sys.path.insert(0, str(HERE))
    if os.environ.get("WARPOOL_TEST_DUMP_EVERY"):
        faulthandler.dump_traceback_later(float(os.environ["WARPOOL_TEST_DUMP_EVERY"]), repeat=True)
    try:
        module = importlib.import_module(MODULES.get(scenario, "scenarios"))
        run: Callable[[str], None] = getattr(module, scenario)
        run(allocator)
    except BaseException as error:
        traceback.print_exc()
        check("no exception", False, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # The scenarios import `child`, which must be this module.
    sys.modules["child"] = sys.modules["__main__"]
    main()
