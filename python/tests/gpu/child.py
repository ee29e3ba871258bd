"""One scenario in one process, with one allocator: `python child.py SCENARIO native|warpool`. Started by run.py.

Every line of the output that begins with `@` is JSON for run.py: a check with its verdict, a note, or data to compare. What else is
printed is for people. A check that raises is a failed check.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).resolve().parent


def emit(kind: str, **values: Any) -> None:
    """A line for run.py."""
    print("@" + json.dumps({"kind": kind, **values}), flush=True)


def check(name: str, holds: Any, detail: Any = "") -> None:
    """A verdict."""
    emit("check", name=name, ok=bool(holds), detail=str(detail))


def note(name: str, detail: Any) -> None:
    """Something worth knowing that cannot fail."""
    emit("note", name=name, detail=str(detail))


def data(**values: Any) -> None:
    """What run.py compares between processes."""
    emit("data", **values)


def enable(allocator: str) -> None:
    """Puts Warpool under PyTorch, if that is what is asked for."""
    if allocator == "warpool":
        sys.path.insert(0, str(HERE.parent.parent))
        import warpool.torch

        warpool.torch.enable()


def main() -> None:
    scenario, allocator = sys.argv[1:3]
    sys.path.insert(0, str(HERE))
    try:
        module = importlib.import_module("scenarios")
        run: Callable[[str], None] = getattr(module, scenario)
        run(allocator)
    except BaseException as error:
        traceback.print_exc()
        check("no exception", False, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # The scenarios import `child`: let it be this very module.
    sys.modules["child"] = sys.modules["__main__"]
    main()
