"""Compares the trainings of trainings.py between allocators: PyTorch's own, the same with expandable segments, and
Warpool's with PyTorch's placement (`backend:native`) and with pages (`backend:paged`).

Each run is a process. Every round runs each allocator once, and begins with another one.
"""

import hashlib
import json
from typing import Any, Dict, List, Optional, Sequence

from processes import Report, child

TRAININGS = ("lengths", "streams", "short_lived")
PAGED = "backend:paged"
ALLOCATORS = ("native", "expandable", "backend:native", PAGED)
# PyTorch's expandable segments reserve more addresses than the device has memory for every stream, and never give them
# back: with some hundred short-lived streams the driver has none left.
FAILS = {"short_lived": ("expandable",)}
# Limits for the paged allocator: reserved over allocated memory at the peaks, and step time over that of PyTorch's.
RESERVED_RATIO_MAX = 1.02
STEP_RATIO_MAX = 1.01

Run = Dict[str, Any]
Runs = Dict[str, List[Run]]
# The same with a recorder that is always on: a million events, with call stacks.
RECORDED = f"{PAGED},record:oom,record_events:1000000"


def compare_trainings(
    report: Report, trainings: Sequence[str], rounds: int, steps: Optional[int], path: Optional[str]
) -> None:
    """Runs the trainings in turns, prints a line of JSON per run, and checks what the paged allocator is to keep."""
    for training in trainings:
        allocators = [allocator for allocator in ALLOCATORS if allocator not in FAILS.get(training, ())]
        runs: Runs = {allocator: [] for allocator in allocators}
        for number in range(rounds):
            for allocator in _turned(allocators, number):
                for run in child(report, training, allocator, **_environment(allocator, steps)):
                    runs[allocator].append(run)
                    _print(training, allocator, number, run, path)
        compare(report, training, runs, rounds)


def compare_recorded(report: Report, rounds: int, steps: Optional[int], path: Optional[str]) -> None:
    """Runs two trainings in turns with PyTorch's allocator, with pages, and with pages and recordings. Checks that the
    losses are the same, and the time of a step."""
    allocators = ("native", PAGED, RECORDED)
    for training in ("lengths", "streams"):
        runs: Runs = {allocator: [] for allocator in allocators}
        for number in range(rounds):
            for allocator in _turned(allocators, number):
                for run in child(report, training, allocator, **_environment(allocator, steps)):
                    runs[allocator].append(run)
                    _print(training, allocator, number, run, path)
        if any(len(runs[allocator]) < rounds for allocator in allocators):
            report.check(RECORDED, training, "all runs complete", False)
            continue
        _compare_losses(report, training, runs)
        ratios = {allocator: _best_groups(runs[allocator]) / _best_groups(runs["native"]) for allocator in allocators}
        detail = ", ".join(f"{allocator} {ratio:.4f}" for allocator, ratio in ratios.items())
        report.check(RECORDED, training, "a step's time over native's", ratios[RECORDED] <= STEP_RATIO_MAX, detail)


def _turned(allocators: Sequence[str], number: int) -> List[str]:
    first = number % len(allocators)
    return [*allocators[first:], *allocators[:first]]


def _environment(allocator: str, steps: Optional[int]) -> Dict[str, Optional[str]]:
    """The settings of the allocator, and no others."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if allocator == "expandable" else None,
        "PYTORCH_ALLOC_CONF": None,
        "WARPOOL_CONF": None,
        "WARPOOL_TEST_STEPS": str(steps) if steps else None,
    }


def _print(training: str, allocator: str, number: int, run: Run, path: Optional[str]) -> None:
    """One line: every loss and the time of every group of steps only in the file."""
    line = {"training": training, "allocator": allocator, "round": number, **run}
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    losses = run["losses"]
    digest = hashlib.sha256(" ".join(losses).encode()).hexdigest()[:16]
    short = {name: value for name, value in line.items() if name not in ("losses", "step_ms")}
    print(json.dumps({**short, "losses": f"{losses[0]} to {losses[-1]}, sha256 {digest}"}), flush=True)


def compare(report: Report, training: str, runs: Runs, rounds: int) -> None:
    """Reports what holds between the runs of one training."""
    missing = [allocator for allocator in runs if len(runs[allocator]) < rounds]
    if missing:
        report.check(PAGED, training, "all runs complete", False, ", ".join(missing))
        return
    _compare_losses(report, training, runs)
    _compare_memory(report, training, runs)
    _compare_time(report, training, runs)


def _compare_losses(report: Report, training: str, runs: Runs) -> None:
    expected = runs["native"][0]["losses"]
    for allocator in runs:
        differences = [_first_difference(expected, run["losses"]) for run in runs[allocator]]
        first = next((difference for difference in differences if difference), "")
        detail = first or f"{expected[0]} to {expected[-1]}, {len(differences)} runs"
        report.check(allocator, training, f"{len(expected)} losses are native's, bit for bit", not first, detail)


def _first_difference(expected: List[str], found: List[str]) -> str:
    """Where two runs differ first; empty if nowhere."""
    for step, (one, other) in enumerate(zip(expected, found)):
        if one != other:
            return f"step {step}: {other} instead of {one}"
    return "" if len(expected) == len(found) else f"{len(found)} losses instead of {len(expected)}"


def _compare_memory(report: Report, training: str, runs: Runs) -> None:
    for allocator in runs:
        peaks = max(runs[allocator], key=lambda run: run["reserved"])
        detail = ", ".join(f"{name} {peaks[name] / 2**20:.0f} MiB" for name in ("allocated", "active", "reserved"))
        detail += f"; device {_device(runs, allocator, max) / 2**20:.0f} MiB"
        report.note(allocator, training, "peaks, of the round that reserved most", detail)
    ratio = max(run["reserved"] / run["allocated"] for run in runs[PAGED])
    others = {allocator: max(run["reserved"] / run["allocated"] for run in runs[allocator]) for allocator in runs}
    detail = ", ".join(f"{allocator} {value:.4f}" for allocator, value in others.items())
    report.check(PAGED, training, "peak reserved / peak allocated", ratio <= RESERVED_RATIO_MAX, detail)
    if "expandable" not in runs:
        return
    most, least = _device(runs, PAGED, max), _device(runs, "expandable", min)
    detail = f"{most / 2**20:.0f} MiB at most, expandable {least / 2**20:.0f} MiB at least"
    report.check(PAGED, training, "peak device memory is below expandable segments'", most < least, detail)


def _device(runs: Runs, allocator: str, which: Any) -> int:
    return which(run["device"] for run in runs[allocator])


def _compare_time(report: Report, training: str, runs: Runs) -> None:
    for allocator in runs:
        medians = ", ".join(f"{run['step_ms_median']:.3f}" for run in runs[allocator])
        means = ", ".join(f"{run['step_ms_mean']:.3f}" for run in runs[allocator])
        report.note(allocator, training, "a step, second half", f"median {medians} ms, mean {means} ms of each round")
    for allocator in list(runs)[1:]:
        ratio = _best_groups(runs[allocator]) / _best_groups(runs["native"])
        rounds = [one["step_ms_mean"] / other["step_ms_mean"] for one, other in zip(runs[allocator], runs["native"])]
        detail = f"{ratio:.4f} times native's, each group of steps at its best of {len(rounds)} rounds; mean by round "
        detail += ", ".join(f"{value:.4f}" for value in rounds)
        if allocator == PAGED:
            report.check(allocator, training, "a step's time", ratio <= STEP_RATIO_MAX, detail)
        else:
            report.note(allocator, training, "a step's time", detail)


def _best_groups(runs: List[Run]) -> float:
    """The time of all groups of steps in the second half, each at its fastest round: delays on a shared machine rarely
    hit a group in every round."""
    groups = [run["step_ms"] for run in runs]
    return sum(min(times) for times in zip(*(times[len(times) // 2 :] for times in groups)))
