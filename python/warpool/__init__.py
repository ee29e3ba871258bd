"""Warpool for Python: answers about recordings of GPU memory, and PyTorch's allocator.

`warpool.explain`, `replay`, `tune`, `diff` and `view` are the commands of these names as functions: they take a
recording's path, its bytes, or what `torch.cuda.memory._snapshot()` returns. `explain_ranks`, `summarize` and `merge`
are about the many recordings of one job. `warpool.torch` makes Warpool PyTorch's
allocator, `python -m warpool` is the command `warpool`. This module needs neither PyTorch nor a GPU, and loads a shared
object only when one of its functions is called.
"""

from typing import TYPE_CHECKING, Any, List

from ._native import Error, library_path
from ._version import __version__

if TYPE_CHECKING:
    from ._answers import Difference, Explanation, Page, Replay, Tuning
    from ._ask import diff, explain, replay, tune, view
    from ._library import InputError, OptionError
    from ._ranks import Part, Ranks, explain_ranks, merge, summarize
    from ._records import Record, Records

__all__ = [
    "Difference",
    "Error",
    "Explanation",
    "InputError",
    "OptionError",
    "Page",
    "Part",
    "Ranks",
    "Record",
    "Records",
    "Replay",
    "Tuning",
    "__version__",
    "diff",
    "explain",
    "explain_ranks",
    "library_path",
    "merge",
    "replay",
    "summarize",
    "tune",
    "view",
]

# Imported at first use: a training that only enables the allocator does not wait for them.
_MODULES = {
    "_answers": ("Difference", "Explanation", "Page", "Replay", "Tuning"),
    "_ask": ("diff", "explain", "replay", "tune", "view"),
    "_library": ("InputError", "OptionError"),
    "_ranks": ("Part", "Ranks", "explain_ranks", "merge", "summarize"),
    "_records": ("Record", "Records"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(f".{module}", __name__), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
