"""`recording`: the context in which a program is predicted, and what it gives."""

import contextlib
import gc
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence, Union

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _python_dispatch
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import _library
from .._library import Input
from .._inputs import size_option
from . import _assume, _cards, _distributed, _outside, _patches, _recorder
from ._log import Log
from ._report import Report
from ._sweep import Sweep

# What is answered beside the settings that were asked for.
SETTINGS = ("", "expandable_segments:True", "backend:paged")

# A program that allocates more on one device looks for where memory runs out, or is wrong.
_ENDLESS = 4 << 40

# What PyTorch wraps around the step of every optimizer, and calls hooks from.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__

_active: List["Run"] = []


class StopRecording(BaseException):
    """Ends the program under a prediction: enough steps were made."""


class Run:
    """A prediction under way, and its result: `report` once the context has ended."""

    def __init__(
        self,
        path: Optional[str],
        card: _cards.Card,
        settings: Sequence[str],
        devices: int,
        steps: Optional[int],
        progress: Optional[Callable[[int, int], None]],
        out_of_memory: str = "continue",
    ) -> None:
        self.path = path
        self.out_of_memory = out_of_memory
        self.card = card
        self.settings = list(settings)
        self.steps = steps
        self.steps_made = 0
        self._progress = progress
        self._shown = 0.0
        self._start = time.perf_counter()
        hidden = _patches.hidden_files()
        own = hidden[1]
        self.log = Log((own, hidden[2], hidden[0] + "utils/_python_dispatch.py", hidden[0] + "_subclasses"), set())
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        fake.allow_meta = True
        # Its cache gives some results a storage of their own that are views.
        fake.cache_enabled = False
        self.recorder = _recorder.Recorder(fake, self.log, _table(card), _assume.Assumptions())
        self.recorder.devices = devices
        self.recorder.remarks = set()
        self.recorder.assumptions_error = _assume.PredictionError
        self.recorder.on_operator = self._look if progress is not None else None
        self._devices = devices
        self.error: Optional[_assume.PredictionError] = None
        if out_of_memory == "raise":
            self.log.most, self.log.full = card.bytes - _outside.CONTEXT_BYTES - _outside.KERNELS, self._full
        else:
            self.log.most, self.log.full = _ENDLESS, self._endless
        self._report: Optional[Report] = None

    @property
    def report(self) -> Report:
        """What the program needs. The context must have ended."""
        if self._report is None:
            raise _assume.PredictionError("the report is there when the context of `recording` has ended")
        return self._report

    def _full(self, size: int, device: int) -> BaseException:
        allocated = self.log.allocated.get(device, 0)
        error = torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_text(size)}. GPU {device} has a total capacity of "
            f"{_text(self.card.bytes)} of which {_text((self.log.most or 0) - allocated)} is free "
            "(predicted: without fragmentation)."
        )
        # The error itself is not kept: its traceback would hold tensors.
        error.of_prediction = True
        return error

    def _endless(self, size: int, device: int) -> BaseException:
        line = self.recorder.assumptions.given()[1]
        return _assume.PredictionError(
            f"{line}: {_text(size)} were requested when {_text(self.log.allocated.get(device, 0))} were allocated, "
            "more than any GPU has. If the program goes on until memory runs out, such as to find its largest batch, "
            'give --oom raise (out_of_memory="raise" in Python)'
        )

    def _failed(self, error: "_assume.PredictionError") -> None:
        if self.error is None:
            self.error = self.recorder.ending = error

    def optimizer_step(self) -> None:
        """An optimizer has made a step: an iteration, unless another one called it, such as one that wraps it."""
        frame: Any = sys._getframe(1)
        calls = 0
        while frame is not None:
            calls += frame.f_code is _STEP_CODE
            frame = frame.f_back
        if calls <= 1:
            self.step()

    def step(self) -> None:
        """An iteration has ended: called by optimizers, or by the program itself."""
        self.steps_made += 1
        if self.steps is not None and self.steps_made >= self.steps:
            self.recorder.ending = StopRecording()
            raise self.recorder.ending

    def _look(self) -> None:
        if self.log.operators % 256 == 0 and time.perf_counter() - self._shown > 0.5:
            self._shown = time.perf_counter()
            self._progress(self.log.operators, self.steps_made)

    def finish(self) -> None:
        """Places the log, writes the snapshot and makes the report."""
        recorded = time.perf_counter() - self._start
        if torch.backends.cudnn.benchmark and "convolution" in self.recorder.operators:
            self.recorder.remarks.add(
                "torch.backends.cudnn.benchmark is on: in the first step cuDNN tries all algorithms of a convolution, "
                "and keeps the fastest, with workspaces that may be larger than those counted here"
            )
        with contextlib.ExitStack() as stack:
            path = self.path
            if path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warpool-"))
                path = str(Path(folder) / "prediction.pickle")
            self._report = Report.of(self, path, recorded)


def _table(card: _cards.Card) -> Any:
    """What operators allocate inside; `None` where no table was measured."""
    try:
        from .operators import Table
    except ImportError:
        return None
    return Table.load(card.key)


@contextlib.contextmanager
def recording(
    path: Union[str, "os.PathLike[str]", None] = None,
    *,
    gpu: Optional[str] = None,
    capacity: Union[str, int, None] = None,
    settings: Union[str, Sequence[str], None] = None,
    gpus: Optional[int] = None,
    rank: Optional[int] = None,
    world_size: Optional[int] = None,
    steps: Optional[int] = None,
    progress: Optional[Callable[[int, int], None]] = None,
    out_of_memory: str = "continue",
) -> Iterator[Run]:
    """Predicts the GPU memory of the code in this context, which needs no GPU.

    >>> with warpool.predict.recording("run.pickle", gpu="a100-80gb") as run:
    ...     train()
    >>> print(run.report)

    Args:
        path: Where the snapshot is written, for `warpool explain`, `view`, `tune` and `replay`. None writes none.
        gpu: The card, such as "a100-80gb": it has this one's memory and compute capability.
        capacity: Its memory in its place, where the card has no name. Without both it is an H200.
        settings: The allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF, which is read if this is None; a list has
            further settings to compare. Native, expandable segments and pages are always compared.
        gpus: How many such cards the program sees; as many as its node has ranks if this is None, or one.
        rank, world_size: The rank of a distributed program that is predicted, and how many there are; those of
            torchrun's variables in the environment if this is None, or rank 0 of `gpus`.
        steps: Leave the context after this many steps of optimizers.
        progress: Called now and then with the number of operators and of steps.
        out_of_memory: "continue": the program goes on where the card is full, so that its whole need is known. "raise":
            `torch.OutOfMemoryError` is raised there, for programs that catch it: when the bytes allocated exceed the
            card's memory without the context; fragmentation is not counted. If it is not caught, the context ends.

    Raises:
        PredictionError: The program needs a value that a prediction does not have; the text says how to give it.
        OptionError: An option has a value that it cannot have.
    """
    if _active:
        raise _assume.PredictionError("a prediction is under way already: contexts of `recording` cannot be nested")
    if gpu is not None and capacity is not None:
        raise _library.OptionError("give capacity or gpu, not both")
    if out_of_memory not in ("continue", "raise"):
        raise _library.OptionError(f"out_of_memory: '{out_of_memory}' is neither 'continue' nor 'raise'")
    place = _distributed.Place(rank, world_size, gpus)
    if not 0 <= place.rank < place.world_size:
        raise _library.OptionError(
            f"rank: {place.rank} is not one of a world size of {place.world_size}: they are 0 to {place.world_size - 1}"
        )
    gpus = place.gpus
    size = size_option("capacity", capacity)
    size = _bytes(size) if size is not None else None
    card = _cards.find(gpu or "h200") if size is None else _cards.of_capacity(size)
    if settings is None:
        settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    asked = [settings] if isinstance(settings, str) else list(settings)
    every = asked + [each for each in SETTINGS if each not in asked]
    # Wrong settings are said before the program runs.
    empty = [Input(b"", False), Input(b'{"frames": [], "stacks": []}', False)]
    _library.answer("predict", {"capacity": card.bytes, "settings": every}, empty)
    run = Run(None if path is None else os.fspath(path), card, every, gpus, steps, progress, out_of_memory)
    patches = _patches.Patches()
    _patches.answer_for_hooks()
    lifts = torch._C._only_lift_cpu_tensors()
    hook = register_optimizer_step_post_hook(lambda *_: run.optimizer_step())
    _active.append(run)
    _assume.on_error = run._failed
    ended = False
    # It prints what fails in an operator's shape function, and then the operator fails as on a GPU.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        torch._C._set_only_lift_cpu_tensors(True)
        _patches.patch(patches, run.recorder, card, gpus, lambda: _leave_in_worker(patches))
        _distributed.patch(patches, run.recorder, place)
        try:
            with run.recorder:
                yield run
            ended = True
        except (StopRecording, _recorder.Ended):
            ended = True
        except torch.OutOfMemoryError as error:
            if not getattr(error, "of_prediction", False):
                raise
            run.log.end_refused()
            ended = True
        if run.error is not None:
            raise run.error
    finally:
        _assume.on_error = None
        ended = ended and run.error is None
        for end in run.recorder.on_end:
            end()
        hook.remove()
        logger.setLevel(level)
        patches.undo()
        torch._C._set_only_lift_cpu_tensors(lifts)
        _active.clear()
        if ended:
            run.finish()


def check(
    function: Callable[..., Any],
    *args: Any,
    budget: Union[str, int],
    gpu: str = "h200",
    settings: Optional[str] = None,
    **kwargs: Any,
) -> Report:
    """Runs a function under a prediction and fails if it needs more memory than a budget: for test suites.

    >>> def test_memory():
    ...     warpool.predict.check(train_three_steps, budget="20GiB")

    Args:
        function: Called with the other arguments.
        budget: The most reserved memory, such as "20GiB" or bytes.
        gpu, settings: As for `recording`.

    Raises:
        AssertionError: It needs more; the text says how much, and who holds it.
    """
    most = _bytes(size_option("budget", budget))
    with recording(gpu=gpu, settings=settings) as run:
        function(*args, **kwargs)
    report = run.report
    if report.peak_reserved_bytes > most:
        over = report.peak_reserved_bytes - most
        raise AssertionError(
            f"{getattr(function, '__name__', 'the program')} needs {_text(report.peak_reserved_bytes)} of GPU memory, "
            f"{_text(over)} more than the budget of {_text(most)}\n\n{report}"
        )
    return report


def sweep(
    function: Callable[..., Any],
    *args: Any,
    gpu: Optional[str] = None,
    settings: Union[str, Sequence[str], None] = None,
    steps: Optional[int] = None,
    **values: Any,
) -> Sweep:
    """Runs a function under a prediction for several values of one of its arguments.

    >>> found = warpool.predict.sweep(train, batch=[8, 16, 32, 64], steps=2)
    >>> print(found)
    >>> found.largest("rtx4090")
    32

    Args:
        function: Called with `args`, and one keyword argument, of which each value is tried.
        gpu, settings, steps: As for `recording`.
        values: The keyword argument with its values, from the smallest to the largest.

    Raises:
        TypeError: There is not one keyword argument.
    """
    if len(values) != 1:
        raise TypeError("sweep needs one keyword argument with its values, such as batch=[8, 16, 32]")
    ((name, every),) = values.items()
    reports = {}
    for value in every:
        with recording(gpu=gpu, settings=settings, steps=steps) as run:
            function(*args, **{name: value})
        reports[value] = run.report
        # What is left in cycles is not the next one's.
        gc.collect()
    return Sweep(name, reports)


def _text(size: int) -> str:
    from ._report import size_text

    return size_text(size)


def _bytes(size: Any) -> int:
    """A size in bytes, from a number or a text with its unit."""
    if isinstance(size, int):
        return size
    if re.fullmatch(r"\s*[0-9]+\s*", size):
        raise _library.OptionError(f"'{size}' has no unit: write {size.strip()}GiB or {size.strip()}B")
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B\s*", size)
    if found is None:
        raise _library.OptionError(f"'{size}' is not a size: write one such as 20GiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(prefix) if prefix else 0))


def leave() -> None:
    """Leaves the modes in which operators are logged, for a process that ends."""
    while torch._C._len_torch_dispatch_stack():
        _python_dispatch._pop_mode()
    torch._C._set_only_lift_cpu_tensors(False)


def _leave_in_worker(patches: _patches.Patches) -> None:
    """In the process of a loader's worker: tensors have memory there."""
    leave()
    patches.undo()
