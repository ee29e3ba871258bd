"""Tests of the comparison of trainings (tests/gpu/compare.py) with made-up runs: no PyTorch, no GPU, no processes."""

import contextlib
import copy
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import compare  # noqa: E402

MIB = 1 << 20
RUN = {
    "steps": 40,
    "losses": ["41100000", "410fffff", "410ffffe"],
    "allocated": 1000 * MIB,
    "active": 1000 * MIB,
    "reserved": 1010 * MIB,
    "device": 1200 * MIB,
    "step_ms": [30.0, 10.0, 10.0, 10.0],
    "step_ms_median": 10.0,
    "step_ms_mean": 10.0,
    "seconds": 0.6,
}


class FakeReport:
    """Keeps the checks."""

    def __init__(self) -> None:
        self.checks: Dict[str, bool] = {}
        self.details: List[str] = []

    def check(self, allocator: str, _scenario: str, name: str, ok: bool, detail: str = "") -> None:
        self.checks[f"{allocator} {name}"] = ok
        self.details.append(detail)

    def note(self, _allocator: str, _scenario: str, _name: str, detail: str) -> None:
        self.details.append(detail)


def made_up() -> Dict[str, List[Dict[str, Any]]]:
    """Three rounds in which everything holds."""
    runs = {allocator: [copy.deepcopy(RUN) for _ in range(3)] for allocator in compare.ALLOCATORS}
    for run in runs["expandable"]:
        run["device"] = 1300 * MIB
    return runs


def failed(runs: Dict[str, List[Dict[str, Any]]]) -> List[str]:
    """The names of the checks that fail."""
    report = FakeReport()
    compare.compare(report, "lengths", runs, 3)
    return [name for name, ok in report.checks.items() if not ok]


class Compare(unittest.TestCase):
    def test_all_holds(self) -> None:
        self.assertEqual(failed(made_up()), [])

    def test_one_bit_of_one_loss(self) -> None:
        runs = made_up()
        runs["backend:paged"][2]["losses"][1] = "410ffffd"
        self.assertEqual(failed(runs), ["backend:paged 3 losses are native's, bit for bit"])
        report = FakeReport()
        compare.compare(report, "lengths", runs, 3)
        self.assertIn("step 1: 410ffffd instead of 410fffff", report.details)

    def test_reserved_memory_of_one_round(self) -> None:
        runs = made_up()
        runs["backend:paged"][1]["reserved"] = 1021 * MIB
        self.assertEqual(failed(runs), ["backend:paged peak reserved / peak allocated"])

    def test_device_memory_of_one_round(self) -> None:
        runs = made_up()
        runs["expandable"][0]["device"] = 1200 * MIB
        self.assertEqual(failed(runs), ["backend:paged peak device memory is below expandable segments'"])

    def test_slow_steps_in_every_round(self) -> None:
        runs = made_up()
        for run in runs["backend:paged"]:
            run["step_ms"][3] = 10.3
        self.assertEqual(failed(runs), ["backend:paged a step's time"])
        runs["backend:paged"][1]["step_ms"][3] = 10.0
        self.assertEqual(failed(runs), [])
        for run in runs["backend:paged"]:
            run["step_ms"][0] = 90.0
        self.assertEqual(failed(runs), [], "the first half is a warm-up")

    def test_missing_run(self) -> None:
        runs = made_up()
        runs["native"].pop()
        self.assertEqual(failed(runs), ["backend:paged all runs complete"])

    def test_runs_are_made_in_turns_and_printed(self) -> None:
        order, environments = [], []

        def child(_report: Any, training: str, allocator: str, **environment: Any) -> List[Dict[str, Any]]:
            order.append(allocator)
            environments.append(environment)
            return [copy.deepcopy(RUN)]

        with tempfile.TemporaryDirectory() as folder:
            path, printed = Path(folder) / "runs.jsonl", io.StringIO()
            with mock.patch.object(compare, "child", child), contextlib.redirect_stdout(printed):
                compare.compare_trainings(FakeReport(), ("lengths",), 2, 40, str(path))
            written = [json.loads(line) for line in path.read_text().splitlines()]
        native, expandable, plain, paged = compare.ALLOCATORS
        self.assertEqual(order, [native, expandable, plain, paged, expandable, plain, paged, native])
        confs = {allocator: env["PYTORCH_CUDA_ALLOC_CONF"] for allocator, env in zip(order, environments)}
        self.assertEqual(confs, {native: None, expandable: "expandable_segments:True", plain: None, paged: None})
        self.assertTrue(all(env["WARPOOL_TEST_STEPS"] == "40" for env in environments))
        self.assertEqual([run["losses"] for run in written], [RUN["losses"]] * 8)
        lines = [json.loads(line) for line in printed.getvalue().splitlines()]
        self.assertEqual([(line["allocator"], line["round"]) for line in lines], list(zip(order, [0] * 4 + [1] * 4)))
        self.assertTrue(lines[0]["losses"].startswith("41100000 to 410ffffe, sha256 "))


if __name__ == "__main__":
    unittest.main()
