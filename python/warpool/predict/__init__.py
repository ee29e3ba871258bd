"""Will it fit? A program's GPU memory, predicted without a GPU.

The program runs with CUDA tensors that have no memory. What it would ask of PyTorch's allocator is logged, and placed
by Warpool's exact reimplementation of it on a simulated GPU. The result is an ordinary memory snapshot, with call
stacks, and a report: peak memory, on which cards and with which settings it fits, and who holds it.

>>> import warpool.predict
>>> with warpool.predict.recording("run.pickle", gpu="a100-80gb") as run:
...     model = Model().cuda()
...     for _ in range(3):
...         step(model)
>>> print(run.report)

`python -m warpool predict --gpu a100-80gb --steps 3 train.py -- --batch 32` does it with a script as it is.
"""

from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from ._assume import PredictionError, assume
    from ._recording import Run, check, recording, sweep
    from ._report import Report
    from ._sweep import Sweep

__all__ = ["PredictionError", "Report", "Run", "Sweep", "assume", "check", "recording", "sweep"]

_MODULES = {
    "_assume": ("PredictionError", "assume"),
    "_recording": ("Run", "check", "recording", "sweep"),
    "_report": ("Report",),
    "_sweep": ("Sweep",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            if module not in ("_report", "_sweep"):
                _expect_torch()
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _expect_torch() -> None:
    from .._native import Error

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise Error(
            "a prediction runs the program with PyTorch, which is not installed here: `pip install torch` (no GPU and "
            "no CUDA are needed)"
        ) from error


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
