"""`python -m warpool predict`: predicts the memory of a script."""

import argparse
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .._native import Error

_HELP = """\
Runs a PyTorch script with CUDA tensors that have no memory, and says how much GPU memory it would need, whether it fits
on a card and with which allocator settings, and who holds the memory. Needs PyTorch, but no GPU.

  python -m warpool predict --gpu a100-80gb --steps 3 train.py -- --batch 32
  python -m warpool predict --gpu rtx4090 --sweep batch=8,16,32,64 train.py -- --epochs 1
  python -m warpool predict --steps 3 -m package.train -- --batch 32
  python -m warpool predict --budget 20GiB --steps 3 train.py      # for CI: exit status 1 if it needs more
"""
_AFTER = """\
The script ends after N steps of any optimizer (--steps), or when it ends itself. Its own output goes to stderr with
--json. --sweep NAME=V1,V2,… runs it once for each value: an argument --NAME of the script is replaced, or added.

Values: a prediction knows the values of inputs, masks and lengths, but not of what a model computes. A float that is
read is 1.0. Where the program needs another value, an error names the line; say what it is with --assume.

Options come before SCRIPT: what follows it is the script's.

Exit status: 0 if it fits (and is within the budget), 1 if it does not, 2 if there is no prediction: the script failed,
never used CUDA, or needs a value. With --sweep: 0 if any value fits, 1 if none does, 2 if one has no prediction.
"""


# The exit status of a command that was interrupted, as shells have it.
_INTERRUPTED = 130


class _NoPrediction(Error):
    """There is no prediction; `detail` is printed before the text."""

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.detail = detail


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m warpool predict",
        description=_HELP,
        epilog=_AFTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", metavar="CARD", help="the card, such as a100-80gb or rtx4090 (h200)")
    parser.add_argument("--capacity", metavar="SIZE", help="its memory in its place, such as 79.1GiB")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many such cards the script sees (1)")
    parser.add_argument("--rank", type=int, metavar="R", help="the rank that the script is (RANK, or 0)")
    parser.add_argument("--world-size", type=int, metavar="N", help="of so many ranks (WORLD_SIZE, or --gpus)")
    parser.add_argument("--steps", type=int, metavar="N", help="end the script after N steps of optimizers")
    parser.add_argument(
        "--oom",
        choices=("continue", "raise"),
        default="continue",
        help="where the card is full, go on, or raise torch.OutOfMemoryError for scripts that catch it (continue)",
    )
    parser.add_argument(
        "--settings",
        action="append",
        metavar="CONF",
        help="settings of the allocator, as in PYTORCH_CUDA_ALLOC_CONF; the first are the script's, more are compared",
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="LINE=VALUE",
        help="a value that a prediction does not have, such as model.py:120=37",
    )
    parser.add_argument(
        "--sweep", metavar="NAME=V1,V2,…", help="run it for several values of an argument of the script"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the sweep")
    parser.add_argument("--budget", metavar="SIZE", help="the most reserved memory, such as 20GiB")
    parser.add_argument("-o", "--out", metavar="FILE", help="write the snapshot, for explain, view, tune and replay")
    parser.add_argument("--json", action="store_true", help="a JSON object for each prediction on stdout")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or -m MODULE as for python")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="-- ARGS", help="its arguments")
    rest.required = False
    every, as_module = _without_m(parser, list(sys.argv[1:] if arguments is None else arguments))
    chosen = parser.parse_args(every)
    chosen.as_module = as_module
    script_arguments = chosen.args[1:] if chosen.args[:1] == ["--"] else chosen.args
    # argparse may have taken the -- out.
    separated = every[len(every) - len(script_arguments) - 1] == "--"
    try:
        _check(chosen)
        if not separated:
            own = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
            _remark_options(own, script_arguments)
        # The program must not use a GPU that is there.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if chosen.sweep:
            return _sweep(chosen, script_arguments)
        report = _predicted(chosen, script_arguments, chosen.out)
        return _shown(chosen, report)
    except (Error, OSError) as error:
        return _failed(error, chosen.json)
    except KeyboardInterrupt:
        _failed(Error("interrupted: no prediction"), chosen.json)
        return _INTERRUPTED


def _without_m(parser: argparse.ArgumentParser, arguments: List[str]) -> Tuple[List[str], bool]:
    """The arguments without -m, and whether it is among the options, so that SCRIPT is a module."""
    followed = [name for action in parser._actions if action.nargs is None for name in action.option_strings]
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        option = arguments[at]
        if option == "-m":
            return arguments[:at] + arguments[at + 1 :], True
        takes_value = any(name == option or option[:2] == "--" and name.startswith(option) for name in followed)
        at += 2 if takes_value else 1
    return arguments, False


def _failed(error: Exception, as_json: bool) -> int:
    print(f"{getattr(error, 'detail', '')}error: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"schema_version": 1, "error": str(error)}), flush=True)
    return 2


def _check(chosen: Any) -> None:
    """What can be wrong is said before the script runs, which may take long."""
    if chosen.as_module:
        if importlib.util.find_spec(chosen.script.partition(".")[0]) is None:
            raise Error(f"{chosen.script}: there is no such module")
    elif Path(chosen.script).is_dir():
        raise Error(f"{chosen.script} is a folder: name a script, or -m MODULE")
    elif not Path(chosen.script).is_file():
        raise Error(f"{chosen.script}: there is no such file")
    for name in ("steps", "gpus", "world_size"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            raise Error(f"--{name.replace('_', '-')} is at least 1")
    if chosen.plot and not chosen.sweep:
        raise Error("--plot draws a sweep: give --sweep too")
    for option, path in (("-o", chosen.out), ("--plot", chosen.plot)):
        if path is not None:
            folder = Path(path).resolve().parent
            if Path(path).is_dir() or not os.access(folder, os.W_OK):
                raise Error(f"{option} {path}: a file cannot be written there")
    from . import _expect_torch

    _expect_torch()
    from ._recording import _bytes

    if chosen.budget is not None:
        chosen.budget_bytes = _bytes(chosen.budget)


def _remark_options(own: "set[str]", arguments: List[str]) -> None:
    given = [each for each in arguments if each.partition("=")[0] in own]
    if given:
        print(
            f"remark: {', '.join(given)} follows SCRIPT, so the script gets it; options of warpool predict come before "
            "SCRIPT (write -- before the script's arguments to say that it is meant)",
            file=sys.stderr,
        )


def _shown(chosen: Any, report: Any) -> int:
    from ._report import size_text

    within = chosen.budget is None or report.peak_reserved_bytes <= chosen.budget_bytes
    if chosen.json:
        print(report.to_json())
    else:
        if chosen.budget is not None:
            size = size_text(report.peak_reserved_bytes)
            print(f"It reserves {size}, {'within' if within else 'more than'} the budget of {chosen.budget}.")
        print(report)
    return 0 if report.fits and within else 1


def _predicted(chosen: Any, arguments: List[str], out: Optional[str]) -> Any:
    """Runs the script in this process."""
    import torch

    from ._assume import PredictionError, assume
    from ._recorder import Ended
    from ._recording import StopRecording, recording

    for text in chosen.assume:
        where, separator, value = text.rpartition("=")
        if not separator:
            raise Error(f"--assume {text}: write LINE=VALUE, such as model.py:120=37")
        try:
            assume(where, json.loads(value.lower() if value in ("True", "False") else value))
        except ValueError:
            raise Error(f"--assume {text}: the value is a number, true or false") from None
    progress = None if chosen.quiet else _Progress()
    settings = chosen.settings if chosen.settings else None
    before = sys.argv, sys.path[0], sys.stdout
    sys.argv = [chosen.script, *arguments]
    sys.path[0] = os.getcwd() if chosen.as_module else str(Path(chosen.script).resolve().parent)
    if chosen.json:
        sys.stdout = sys.stderr
    try:
        with recording(
            out,
            gpu=chosen.gpu,
            capacity=chosen.capacity,
            settings=settings,
            gpus=chosen.gpus,
            rank=chosen.rank,
            world_size=chosen.world_size,
            steps=chosen.steps,
            progress=progress,
            out_of_memory=chosen.oom,
        ) as run:
            run.recorder.on_swallowed = lambda: _leave(chosen, run, before[2])
            try:
                if chosen.as_module:
                    runpy.run_module(chosen.script, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(chosen.script, run_name="__main__")
            except (PredictionError, StopRecording, Ended, KeyboardInterrupt):
                raise
            except torch.OutOfMemoryError as error:
                if chosen.oom == "raise":
                    raise
                raise _NoPrediction(f"{chosen.script} failed: no prediction", _traceback(error)) from None
            except SystemExit as ended:
                if isinstance(ended.code, int) or ended.code is None:
                    if ended.code:
                        raise _NoPrediction(f"{chosen.script} ended with status {ended.code}") from None
                else:
                    raise _NoPrediction(f"{chosen.script} ended with: {ended.code}") from None
            except BaseException as error:
                raise _NoPrediction(f"{chosen.script} failed: no prediction", _traceback(error)) from None
    finally:
        sys.argv, sys.path[0], sys.stdout = before
        if progress is not None:
            progress.end()
    if not run.report.allocations:
        raise _NoPrediction(f"{chosen.script} never used CUDA: no prediction")
    return run.report


def _leave(chosen: Any, run: Any, stdout: Any) -> None:
    """The script catches everything, and would not end: the process ends here, with the answer."""
    status = 2
    try:
        from . import _recording

        _recording.leave()
        sys.stdout = stdout
        if run.error is not None:
            status = _failed(run.error, chosen.json)
        else:
            run.finish()
            status = _shown(chosen, run.report)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _traceback(error: BaseException) -> str:
    """The script's own traceback: without the frames of this package and of what runs the script."""
    hidden = (str(Path(__file__).resolve().parents[1]) + os.sep, "<frozen runpy>", runpy.__file__)
    found = traceback.TracebackException.from_exception(error)
    every: List[Any] = [found]
    for each in every:
        kept = [frame for frame in each.stack if not str(Path(frame.filename).resolve()).startswith(hidden[0])]
        kept = [frame for frame in kept if frame.filename not in hidden]
        each.stack = traceback.StackSummary.from_list(kept)
        every += [more for more in (each.__cause__, each.__context__) if more is not None and more not in every]
    return "".join(found.format())


class _Progress:
    """A line on stderr that is written over."""

    def __init__(self) -> None:
        self._length = 0
        self._start = time.monotonic()

    def __call__(self, operators: int, steps: int) -> None:
        if sys.stderr.isatty():
            text = f"{operators} operators, {steps} steps, {time.monotonic() - self._start:.0f} s"
            print("\r" + text.ljust(self._length), end="", file=sys.stderr, flush=True)
            self._length = len(text)

    def end(self) -> None:
        if self._length:
            print("\r" + " " * self._length + "\r", end="", file=sys.stderr, flush=True)


# A sweep.


def _sweep(chosen: Any, arguments: List[str]) -> int:
    """One process for each value: a script may be run once in a process."""
    import subprocess

    from ._sweep import sweep_lines

    name, separator, values = chosen.sweep.partition("=")
    if not separator or not values:
        raise Error(f"--sweep {chosen.sweep}: write NAME=V1,V2,…, such as batch=8,16,32")
    reports: List[Tuple[str, Dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="warpool-") as folder:
        for value in values.split(","):
            command = [sys.executable, "-m", "warpool", "predict", "--json", "--quiet"]
            for option in ("gpu", "capacity", "gpus", "rank", "world_size", "steps", "oom"):
                given = getattr(chosen, option)
                command += [] if given is None else [f"--{option.replace('_', '-')}", str(given)]
            for text in chosen.settings or []:
                command += ["--settings", text]
            for text in chosen.assume:
                command += ["--assume", text]
            command += ["-m"] if chosen.as_module else []
            command += [chosen.script, "--", *replaced(arguments, name, value)]
            if not chosen.quiet:
                print(f"{name}={value} …", file=sys.stderr, flush=True)
            log = Path(folder) / "log"
            with log.open("w") as errors:
                ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            if ended.returncode not in (0, 1):
                printed = log.read_text().strip()
                head, _, tail = (printed or "nothing was printed").rpartition("\n")
                raise _NoPrediction(f"{name}={value}: {tail.removeprefix('error: ')}", head + "\n" if head else "")
            report = json.loads(ended.stdout.strip().splitlines()[-1])
            reports.append((value, {**report, "sweep": {"name": name, "value": value}}))
    if chosen.json:
        for _, report in reports:
            print(json.dumps(report))
    else:
        print("\n".join(sweep_lines(name, reports)))
    if chosen.plot:
        from ._plot import svg

        Path(chosen.plot).write_text(svg(name, reports), encoding="utf-8")
        print(f"{chosen.plot} is written.", file=sys.stderr)
    most = None if chosen.budget is None else chosen.budget_bytes
    fits = any(report["fits"] and (most is None or report["peak_reserved_bytes"] <= most) for _, report in reports)
    return 0 if fits else 1


def replaced(arguments: List[str], name: str, value: str) -> List[str]:
    """A script's arguments with another value of one; it is added if it is not there."""
    found, result, skip = False, [], False
    for position, argument in enumerate(arguments):
        if skip:
            skip = False
            continue
        key, separator, _ = argument.partition("=")
        if key.lstrip("-").replace("-", "_") == name.replace("-", "_") and argument.startswith("-"):
            found = True
            if separator:
                result.append(f"{key}={value}")
            else:
                result += [argument, value]
                skip = position + 1 < len(arguments)
        elif separator and key == name:  # As Hydra has it.
            found = True
            result.append(f"{name}={value}")
        else:
            result.append(argument)
    return result if found else [*result, f"--{name}", value]
