"""Tests of the parts of `warpool.predict` that need no PyTorch: the log, the report, the command's arguments.
WARPOOL_ANSWERS_LIBRARY is the path of the shared object."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Dict, List

import warpool
from warpool import _library
from warpool._library import Input
from warpool.predict import _cards, _command, _log, _plot, _sweep

GIB = 1 << 30


def placed(log: _log.Log, **options: Any) -> Dict[str, Any]:
    """What the library says about a log."""
    table = json.dumps({"frames": log.stacks.frames, "stacks": log.stacks.stacks}).encode()
    options = {"settings": [""], "capacity": 80 * GIB, **options}
    return _library.answer("predict", options, [Input(log.steps(), False), Input(table, False)]).json


def log_of(*sizes: int) -> _log.Log:
    log = _log.Log((), set())
    for size in sizes:
        log.operator()
        log.alloc(size, 0, 0, log.stacks.number(sys._getframe(), ("at::_ops::empty::call",)))
    return log


class Logs(unittest.TestCase):
    def test_frees_at_one_time_are_in_order(self) -> None:
        log = _log.Log((), set())
        stack = log.stacks.number(None, ("f",))
        blocks = [log.alloc(512, 0, 0, stack) for _ in range(4)]
        for number in (2, 0, 3):
            log.free(blocks[number])
        log.operator()
        log.free(blocks[1])
        frees = [log.events[at + 1] for at in range(0, len(log.events), 5) if log.events[at] == _log.FREE]
        self.assertEqual(frees, [0, 2, 3, 1])
        self.assertEqual((log.allocated[0], log.peak[0]), (0, 2048))

    def test_blocks_of_other_streams_wait(self) -> None:
        log = _log.Log((), set())
        stack = log.stacks.number(None, ("f",))
        block = log.alloc(512, 0, 1, stack)
        log.use(block, 1)
        self.assertIsNone(block.streams_used)
        log.use(block, 0)
        log.free(block)
        for _ in range(_log.LAUNCHES_AHEAD):
            log.operator()
        kinds = [log.events[at] & 0xFF for at in range(0, len(log.events), 5)]
        self.assertEqual(kinds, [_log.ALLOC, _log.FREE_IN_USE, _log.COMPLETE])

    def test_pending_block_is_not_reused(self) -> None:
        def segments(wait: bool) -> int:
            log = _log.Log((), set())
            stack = log.stacks.number(None, ("f",))
            for _ in range(3):
                block = log.alloc(30 << 20, 0, 1, stack)
                log.use(block, 0)
                log.free(block)
                if wait:
                    log.synchronize()
            return placed(log)["settings"][0]["peak_reserved_bytes"] >> 20

        self.assertEqual((segments(True), segments(False)), (30, 90))

    def test_stacks_are_shared(self) -> None:
        log = log_of(1024, 1024, 1024)
        self.assertEqual((len(log.stacks.stacks), log.allocations), (1, 3))
        names = [log.stacks.frames[number][0] for number in log.stacks.stacks[0]]
        self.assertEqual(names[:2], ["at::_ops::empty::call", "log_of"])


class Placed(unittest.TestCase):
    def test_settings_and_cards(self) -> None:
        log = log_of(*([3 * GIB] * 5))
        found = placed(log, settings=["", "expandable_segments:True", "backend:paged"], capacity=None, gpu="rtx4090")
        self.assertTrue(found["device"]["fits"])
        self.assertEqual([row["peak_reserved_bytes"] for row in found["settings"]], [15 * GIB] * 3)
        self.assertEqual([row["allocator"] for row in found["settings"]], ["caching", "caching", "paged"])
        fits = {card["key"]: card["fits"] for card in found["cards"]}
        # An RTX 4080 has 15.6 GiB, an RTX 4070 11.7.
        self.assertEqual((fits["rtx4080"], fits["rtx4070"]), ([True] * 3, [False] * 3))

    def test_out_of_memory_names_the_request(self) -> None:
        found = placed(log_of(GIB, 2 * GIB, 3 * GIB), capacity=4 * GIB)["device"]
        self.assertFalse(found["fits"])
        self.assertEqual((found["out_of_memory"]["step"], found["out_of_memory"]["requested_bytes"]), (2, 3 * GIB))

    def test_limit_of_the_program_counts(self) -> None:
        log = _log.Log((), set())
        log.limit(0, 0.01)
        log.alloc(GIB, 0, 0, log.stacks.number(None, ("f",)))
        self.assertFalse(placed(log)["device"]["fits"])

    def test_snapshot_is_an_ordinary_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.pickle"
            found = placed(log_of(GIB, 5 << 20, 1000), out=str(path))
            self.assertEqual(found["snapshot_bytes"], path.stat().st_size)
            replayed = warpool.replay(path)
            self.assertTrue(replayed.fidelity.exact)
            self.assertEqual(replayed.peak_reserved_bytes, found["settings"][0]["peak_reserved_bytes"])
            self.assertIn("log_of", warpool.explain(path, at="allocated", fits=False).holders[0].line)

    def test_wrong_steps_are_refused(self) -> None:
        log = log_of(1024)
        for events in ([1, 7, 0, 0, 0], [0, 5, 1, 0, 0], [0, 1, 1, 9, 0], [3, 0, 0, 0, 0], [77, 0, 0, 0, 0]):
            wrong = log_of(1024)
            wrong.events.extend(events)
            with self.subTest(events=events), self.assertRaisesRegex(warpool.Error, "step 1 of the program is wrong"):
                placed(wrong)
        del log


class Cards(unittest.TestCase):
    def test_every_card_of_the_table_has_figures(self) -> None:
        keys = {card["key"] for card in _library.answer("cards", {}, []).json["cards"]}
        self.assertEqual(keys, set(_cards._FIGURES))

    def test_card_is_found_by_the_beginning_of_its_name(self) -> None:
        self.assertEqual(_cards.find("RTX 4090").capability, (8, 9))
        self.assertEqual(_cards.find("rtx3060").key, "rtx3060-12gb")
        with self.assertRaisesRegex(warpool.OptionError, "a100-40gb, a100-80gb"):
            _cards.find("a100")


class Command(unittest.TestCase):
    def test_argument_of_a_sweep_is_replaced(self) -> None:
        def replaced(arguments: str) -> List[str]:
            return _command.replaced(arguments.split(), "batch_size", "8")

        self.assertEqual(replaced("--lr 1 --batch-size 4 --x"), ["--lr", "1", "--batch-size", "8", "--x"])
        self.assertEqual(replaced("--batch_size=4 y"), ["--batch_size=8", "y"])
        self.assertEqual(replaced("batch_size=4"), ["batch_size=8"])
        self.assertEqual(replaced("--lr 1"), ["--lr", "1", "--batch_size", "8"])

    def test_plot_has_every_value(self) -> None:
        rows = [placed(log_of(size * GIB), settings=["", "backend:paged"]) for size in (1, 5)]
        reports = [(str(at), {**row, "gpu_name": "x"}) for at, row in enumerate(rows)]
        picture = _plot.svg("batch", reports)
        self.assertEqual((picture.count("<circle"), picture.count("<polyline")), (4, 2))
        lines = "\n".join(_sweep.sweep_lines("batch", [(name, {**row, "fits": True}) for name, row in reports]))
        self.assertIn("The last batch of the sweep that fits", lines)

    @unittest.skipIf(importlib.util.find_spec("torch"), "PyTorch is installed")
    def test_without_pytorch_there_is_a_sentence(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "warpool", "predict", __file__], capture_output=True, text=True, check=False
        )
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1))
        self.assertIn("pip install torch", done.stderr)
        with self.assertRaisesRegex(warpool.Error, "pip install torch"):
            warpool.predict.recording  # noqa: B018


if __name__ == "__main__":
    unittest.main()
