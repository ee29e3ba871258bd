"""Compares a table with the operators of whole programs, as `tests/gpu/predict_truth.py --modes operators` writes them.

The rules are not fitted to these programs. What each call asked for is known, so two peaks are computed with the same
memory before each call: with the events that were measured within, and with those of the table.
"""

import collections
import json
import lzma
from collections.abc import Iterator
from typing import Any, Dict, List, Tuple

from . import fit, operators

Program = Tuple[str, List[Any], List[fit.Sample]]


def programs(path: str) -> Iterator[Program]:
    """Name, sequence (numbers of calls; negative bytes are frees, lists allocations between calls), calls."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        about: Dict[str, Any] = {}
        found: List[fit.Sample] = []
        for line in file:
            value = json.loads(line)
            if isinstance(value, dict):
                about, found = value, []
            elif value == 0:
                yield about["program"], about["sequence"], found
            else:
                found.append(fit.sample(*value[:4]))


def inside(sample: fit.Sample, events: Any) -> Tuple[int, int]:
    """The most bytes within, and the bytes after."""
    return fit.peak(events, sample.call.outputs), sum(it.nbytes for it in sample.call.outputs)


class Row:
    """An operator in a program."""

    def __init__(self) -> None:
        self.calls = 0
        # Bytes within that are too many, too few; and where the program has nearly its peak.
        self.most = self.near_peak = 0
        self.example: Any = None


def check(table: operators.Table, program: Program) -> Tuple[int, int, Dict[str, Row]]:
    """Peak with the measured events, peak with the table's, and errors by operator."""
    _, sequence, samples = program
    within = []
    for it in samples:
        found = table.of(it.call)
        order = found.order if found is not None else [("output", n) for n in range(len(it.call.outputs))]
        if found is None and it.call.name.startswith("aten.") and not it.sizes and not it.events:
            found = operators.Steps([])
        within.append((*inside(it, it.events), inside(it, order)[0], found is None and bool(fit.sizes_of(it.events))))
    now, peaks, at = 0, [0, 0], []
    for event in sequence:
        if isinstance(event, list):
            now += event[0]
        elif event < 0:
            now += event
        else:
            real, after, told, _ = within[event]
            at.append((now, event))
            peaks = [max(peaks[0], now + real), max(peaks[1], now + told)]
            now += after + sum(samples[event].kept)
    rows: Dict[str, Row] = collections.defaultdict(Row)
    for before, event in at:
        real, _, told, unknown = within[event]
        row = rows[samples[event].call.name + (" (no rule)" if unknown else "")]
        row.calls += 1
        off = told - real
        if abs(off) > abs(row.most):
            row.most, row.example = off, samples[event]
        # Only what reaches close to the peak can move it.
        if off and before + max(real, told) > 0.9 * peaks[0] and abs(off) > abs(row.near_peak):
            row.near_peak = off
    return peaks[0], peaks[1], rows


def main(table_path: str, path: str, most: int) -> int:
    """Prints the comparison; returns the number of programs that are off by 2 % or more."""
    table = operators.Table(json.loads(open(table_path).read()))
    bad = 0
    everything: Dict[str, Row] = collections.defaultdict(Row)
    for program in programs(path):
        real, told, rows = check(table, program)
        bad += abs(told - real) >= 0.02 * real
        print(f"{program[0]:30} {real / 2**20:9.1f} MiB, by the table {told / 2**20:9.1f} MiB, {told / real - 1:+.2%}")
        for name, row in rows.items():
            total = everything[name]
            total.calls += row.calls
            if abs(row.most) > abs(total.most):
                total.most, total.example = row.most, row.example
            if abs(row.near_peak) > abs(total.near_peak):
                total.near_peak = row.near_peak
    print(f"\n{'operator':55} {'calls':>7} {'largest error':>15} {'near the peak':>15}   (MiB)")
    for name, row in sorted(everything.items(), key=lambda it: -abs(it[1].most))[:most]:
        if row.most:
            print(f"{name:55} {row.calls:7} {row.most / 2**20:15.2f} {row.near_peak / 2**20:15.2f}")
    return bad
