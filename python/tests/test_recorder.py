"""Tests of recordings that a program writes about itself, on the simulated GPU with the call stacks of this Python.

What is in a recording, and what happens where none can be written, is tested in Rust (`crates/torch/tests/recorder`).
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

from fake_torch import backend, fake_torch
from isolated import isolated
from memory import free, malloc

import warpool
import warpool.torch
from warpool import _native, _recorder

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
HUGE = 1600 * MIB
# A context takes a quarter of it.
DEVICE = "memory_mb:2048"


def run(program: str, folder: Path, conf: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program that has enabled Warpool, in a process of its own."""
    begin = (
        "import os, signal, sys, threading, time\nfrom memory import malloc\nfrom fake_torch import fake_torch\n"
        "fake_torch()\nimport warpool.torch\nfrom warpool import _native\nwarpool.torch.enable()\n"
    )
    environment = {**os.environ, "WARPOOL_CONF": conf, "WARPOOL_RECORD_DIR": str(folder), **more}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", begin + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


class Recorder(unittest.TestCase):
    """A folder for recordings, and a backend that `enable` uses."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "records"
        variables = {"WARPOOL_BACKEND": backend(Path(folder.name)), "WARPOOL_SIM": DEVICE}
        environment = mock.patch.dict(os.environ, variables)
        environment.start()
        self.addCleanup(environment.stop)

    def enable(self, conf: str = "backend:paged", **options: Any) -> None:
        fake_torch()
        warpool.torch.enable(conf, record_dir=self.folder, **{"record": "oom", **options})

    def recordings(self) -> List[Path]:
        return sorted(self.folder.glob("warpool-rank*.pickle"))

    def wait_for(self, count: int) -> None:
        """Until there are so many recordings with their texts."""
        while not len([path for path in self.recordings() if path.with_suffix(".txt").stat().st_size]) >= count:
            time.sleep(0.01)


def weights() -> int:
    """Allocates what is found in the recording."""
    return malloc(512 * MIB)


def out_of_memory() -> str:
    """The text of the error."""
    try:
        malloc(HUGE)
    except warpool.Error as error:
        return str(error)
    raise AssertionError("there is no such memory")


class OutOfMemory(Recorder):
    @isolated
    def test_text_ends_with_the_lines_that_matter(self) -> None:
        self.enable()
        weights()
        text = out_of_memory()
        self.assertRegex(text, r"^CUDA out of memory\. Tried to allocate 1\.56 GiB")
        lines = text.splitlines()[1:]
        begins = ["Why: out of memory", "Asked for: ", "Then: ", "Most is held by: ", "What to do: ", "Recording: "]
        self.assertEqual([line[: len(begin)] for line, begin in zip(lines, begins)], begins, text)
        self.assertEqual(len(lines), 6, text)
        # The innermost line that is no framework's.
        holder = r"malloc \(.*tests/memory\.py:\d+\)"
        self.assertRegex(lines[3], holder + ": 512 MiB in 1 block$")
        (path,) = self.recordings()
        self.assertIn(str(path), lines[5])
        self.assertIn(f"pid{os.getpid()}-", path.name)

        found = warpool.explain(str(path))
        self.assertEqual(found.holders[0].bytes, 512 * MIB)
        self.assertRegex(found.holders[0].line or found.holders[0].name, holder)
        self.assertRegex(path.with_suffix(".txt").read_text(), holder)

    @isolated
    def test_recording_is_a_snapshot_of_pytorch(self) -> None:
        self.enable()
        block = weights()
        freed = malloc(MIB)
        free(freed)
        out_of_memory()
        with open(self.recordings()[0], "rb") as file:
            snapshot: Dict[str, Any] = pickle.load(file)
        self.assertLessEqual({"segments", "device_traces", "allocator_settings"}, set(snapshot))
        trace = snapshot["device_traces"][0]
        allocated = next(entry for entry in trace if entry["action"] == "alloc" and entry["addr"] == block)
        names = [frame["name"] for frame in allocated["frames"]]
        self.assertEqual(names[:2], ["malloc", "weights"])
        self.assertIn("test_recording_is_a_snapshot_of_pytorch", names)
        of_freed = [entry["action"] for entry in trace if entry.get("addr") == freed]
        calls = [action for action in of_freed if not action.startswith("segment_")]
        self.assertEqual(calls, ["alloc", "free_requested", "free_completed"])
        self.assertEqual(trace[-1]["action"], "oom")
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        live = [found for found in blocks if found["state"] == "active_allocated"]
        self.assertEqual([frame["name"] for frame in live[0]["frames"]][1], "weights")

    @isolated
    def test_second_one_in_a_loop_is_not_recorded(self) -> None:
        self.enable()
        out_of_memory()
        again = [out_of_memory() for _ in range(20)]
        self.assertTrue(all("Not recorded: Warpool's last recording, of " in text for text in again), again)
        self.assertEqual(len(self.recordings()), 1)

    @isolated
    def test_failures_are_a_sentence(self) -> None:
        self.folder.write_text("a file")
        self.enable()
        text = out_of_memory()
        self.assertRegex(text.splitlines()[-1], "^No recording can be written to .*records: .*directory|exists")
        self.assertIn("\nWhy: ", text)

    @isolated
    def test_without_it_the_text_is_as_before(self) -> None:
        fake_torch()
        warpool.torch.enable("backend:paged", record_dir=self.folder)
        self.assertEqual(len(out_of_memory().splitlines()), 1)
        self.assertFalse(self.folder.exists())
        with self.assertRaisesRegex(warpool.Error, 'recordings are off.*record="oom"'):
            warpool.torch.record_now()


class Settings(Recorder):
    @isolated
    def test_argument_is_added_to_the_environments(self) -> None:
        os.environ["WARPOOL_CONF"] = "backend:native,max_split_size_mb:200,"
        fake_torch()
        warpool.torch.enable(record="oom")
        self.assertEqual(warpool.torch.settings(), "max_split_size_mb:200,record:oom")

    @isolated
    def test_wrong_values_are_errors(self) -> None:
        fake_torch()
        for record, why in (("ooom", "did you mean `oom`"), ("oom,record_abov:0.9", "record_abov.*did you mean")):
            with self.assertRaisesRegex(warpool.Error, why):
                warpool.torch.enable(record=record)
        with self.assertRaisesRegex(TypeError, "a text such as 'oom'"):
            warpool.torch.enable(record=True)  # type: ignore[arg-type]
        self.assertFalse(warpool.torch.enabled())

    def test_strings(self) -> None:
        with mock.patch.dict(os.environ, {"WARPOOL_CONF": "backend:native"}):
            self.assertIsNone(_recorder.conf_with(None, None))
            self.assertEqual(_recorder.conf_with("a:1", None), "a:1")
            self.assertEqual(_recorder.conf_with("", "oom"), "record:oom")
            self.assertEqual(_recorder.conf_with(None, "oom"), "backend:native,record:oom")

    @isolated
    def test_it_can_be_switched_at_run_time(self) -> None:
        self.enable(record=None)
        warpool.torch.set_settings("record:oom")
        block = weights()
        path = warpool.torch.record_now(self.folder.parent / "now.pickle")
        self.assertIn(b"weights", Path(path).read_bytes())
        free(block)
        warpool.torch.set_settings("record:off")
        with self.assertRaisesRegex(warpool.Error, "recordings are off"):
            warpool.torch.record_now()


class Triggers(Recorder):
    @isolated
    def test_call(self) -> None:
        self.enable()
        weights()
        path = warpool.torch.record_now()
        self.assertEqual([str(found) for found in self.recordings()], [path])
        self.assertEqual(warpool.explain(path, fits=False).holders[0].bytes, 512 * MIB)

    @isolated
    def test_signal(self) -> None:
        self.enable("backend:paged,record_signal:SIGUSR2")
        weights()
        os.kill(os.getpid(), signal.SIGUSR2)
        self.wait_for(1)
        os.kill(os.getpid(), signal.SIGUSR2)
        self.wait_for(2)
        self.assertTrue(all("-signal.pickle" in path.name for path in self.recordings()))

    @isolated
    def test_share_of_the_device(self) -> None:
        self.enable("backend:paged,record_above:0.7")
        weights()
        weights()
        self.wait_for(1)
        self.assertIn("-above.pickle", self.recordings()[0].name)

    def test_end_of_the_program(self) -> None:
        ended = run("malloc(1 << 20)\n", self.folder, "backend:paged,record:oom,record_at_exit:True")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        (path,) = self.recordings()
        self.assertRegex(path.name, r"^warpool-rank0-pid\d+-1-exit\.pickle$")
        ended = run("malloc(1 << 20)\n", self.folder, "backend:paged,record:oom", RANK="5")
        self.assertEqual((ended.returncode, ended.stderr, len(self.recordings())), (0, "", 1))

    def test_rank_is_in_the_name(self) -> None:
        ended = run("warpool.torch.record_now()\n", self.folder, "backend:paged,record:oom", RANK="5")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        self.assertTrue(self.recordings()[0].name.startswith("warpool-rank5-pid"))


class Threads(Recorder):
    @isolated
    def test_recording_while_other_threads_allocate(self) -> None:
        self.enable("backend:paged,record_interval_s:0,record_files:2,record_events:1000")
        running, failures = [True], []

        def work(number: int) -> None:
            try:
                while running[0]:
                    free(malloc((1 + number) * MIB))
                    if number == 0:
                        out_of_memory()
            except BaseException:
                failures.append(traceback.format_exc())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            warpool.torch.record_now(self.folder.parent / "now.pickle")
        running[0] = False
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertLessEqual(len(self.recordings()), 2)

    def test_interpreter_ends_while_threads_allocate(self) -> None:
        program = (
            "from memory import free\n"
            "def work():\n while True: free(malloc(1 << 20))\n"
            "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
            "time.sleep(0.05)\n"
        )
        for _ in range(5):
            ended = run(program, self.folder, "backend:paged,record:oom,record_events:1000,record_at_exit:True")
            self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    @isolated
    def test_exception_that_is_being_handled_stays(self) -> None:
        self.enable()
        try:
            raise KeyError("mine")
        except KeyError:
            weights()
            self.assertEqual(sys.exc_info()[0], KeyError)
        for depth in (1, 50, 500):

            def deeper(left: int) -> int:
                return deeper(left - 1) if left else malloc(MIB)

            deeper(depth)
        warpool.torch.record_now()

    @isolated
    def test_forked_child_writes_nothing(self) -> None:
        self.enable("backend:paged,record_signal:SIGUSR2,record_at_exit:True")
        weights()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            status = 1
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
                for call in (warpool.torch.record_now, lambda: malloc(HUGE)):
                    with self.assertRaisesRegex(warpool.Error, "forked"):
                        call()
                _recorder._end()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(self.recordings(), [])
        out_of_memory()
        self.assertEqual(len(self.recordings()), 1)


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    _native.library()
    unittest.main()
