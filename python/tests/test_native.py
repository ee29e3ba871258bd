"""Tests of the ctypes layer on the simulated GPU, without PyTorch. WARPOOL_LIBRARY is the path of the shared object."""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import unittest
from pathlib import Path
from typing import Any, Dict

from isolated import isolated

import warpool
from warpool import _native, _stacks

MIB = 1 << 20


def snapshot() -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        _native.snapshot(path)
        return pickle.loads(path.read_bytes())


def actions(device: int = 0) -> list:
    return [entry["action"] for entry in snapshot()["device_traces"][device]]


class Loading(unittest.TestCase):
    @isolated
    def test_library_has_the_version_of_the_package(self) -> None:
        self.assertEqual(_native.version(), warpool.__version__)
        self.assertTrue(Path(warpool.library_path()).is_file())

    @isolated
    def test_missing_library_is_an_error_that_names_it(self) -> None:
        os.environ["WARPOOL_LIBRARY"] = "/nowhere/libwarpool_torch.so"
        with self.assertRaisesRegex(warpool.Error, "/nowhere/libwarpool_torch.so"):
            _native.start()

    @isolated
    def test_file_that_is_not_the_library_is_an_error(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(b"not a library")
            file.flush()
            os.environ["WARPOOL_LIBRARY"] = file.name
            with self.assertRaisesRegex(warpool.Error, "not Warpool's shared object"):
                _native.start()

    @isolated
    def test_library_of_another_version_is_an_error(self) -> None:
        _native.__version__ = "0.0.0"
        with self.assertRaisesRegex(warpool.Error, "install both from one version"):
            _native.start()

    @isolated
    def test_start_can_be_repeated(self) -> None:
        self.assertEqual(_native.driver(), "")
        _native.start()
        _native.start()
        self.assertEqual(_native.driver(), "sim")
        self.assertGreaterEqual(_native.device_count(), 1)

    @isolated
    def test_unknown_driver_is_an_error_that_names_it(self) -> None:
        os.environ["WARPOOL_DRIVER"] = "abacus"
        with self.assertRaisesRegex(warpool.Error, "abacus"):
            _native.start()

    @isolated
    def test_invalid_settings_in_the_environment_are_an_error(self) -> None:
        os.environ["WARPOOL_CONF"] = "no_such_key:1"
        with self.assertRaisesRegex(warpool.Error, "no_such_key"):
            _native.start()


class Memory(unittest.TestCase):
    @isolated
    def test_freed_block_is_cached(self) -> None:
        first = _native.malloc(4 * MIB)
        stats = _native.stats(0)
        self.assertEqual(stats["allocated_bytes.all.current"], 4 * MIB)
        self.assertEqual(stats["reserved_bytes.all.current"], 20 * MIB)
        self.assertEqual(stats["allocation.large_pool.current"], 1)
        self.assertEqual(stats["num_ooms"], 0)
        _native.free(first, 4 * MIB)
        self.assertEqual(_native.stats(0)["allocated_bytes.all.current"], 0)
        self.assertEqual(_native.malloc(4 * MIB), first)

    @isolated
    def test_empty_cache_returns_free_segments(self) -> None:
        kept, freed = _native.malloc(4 * MIB), _native.malloc(100 * MIB)
        _native.free(freed, 100 * MIB)
        _native.empty_cache()
        self.assertEqual(_native.stats(0)["reserved_bytes.all.current"], 20 * MIB)
        _native.free(kept, 4 * MIB)
        _native.empty_cache()
        self.assertEqual(_native.stats(0)["reserved_bytes.all.current"], 0)

    @isolated
    def test_peaks_and_accumulated_counts_are_reset_separately(self) -> None:
        _native.free(_native.malloc(2 * MIB), 2 * MIB)
        _native.reset_peak_stats(0)
        stats = _native.stats(0)
        self.assertEqual(stats["allocated_bytes.all.peak"], 0)
        self.assertEqual(stats["allocated_bytes.all.allocated"], 2 * MIB)
        _native.reset_accumulated_stats(0)
        self.assertEqual(_native.stats(0)["allocated_bytes.all.allocated"], 0)

    @isolated
    def test_allocation_works_after_out_of_memory(self) -> None:
        with self.assertRaisesRegex(warpool.Error, "^CUDA out of memory. Tried to allocate"):
            _native.malloc(1 << 50)
        self.assertEqual(_native.stats(0)["num_ooms"], 1)
        self.assertNotEqual(_native.malloc(MIB), 0)

    @isolated
    def test_memory_fraction_limits_allocation(self) -> None:
        self.assertEqual(_native.memory_fraction(0), 1.0)
        _native.set_memory_fraction(0.0, 0)
        self.assertEqual(_native.memory_fraction(0), 0.0)
        with self.assertRaisesRegex(warpool.Error, "out of memory"):
            _native.malloc(10 * MIB)
        _native.set_memory_fraction(1.0, 0)
        self.assertNotEqual(_native.malloc(10 * MIB), 0)
        for wrong in (-0.5, 1.5, float("nan")):
            with self.assertRaises(warpool.Error):
                _native.set_memory_fraction(wrong, 0)

    @isolated
    def test_largest_available(self) -> None:
        self.assertGreater(_native.largest_available(0), MIB)

    @isolated
    def test_missing_device_is_an_error(self) -> None:
        for device in (99, -1):
            with self.assertRaises(warpool.Error):
                _native.stats(device)
            with self.assertRaises(warpool.Error):
                _native.malloc(MIB, device)
        self.assertNotEqual(_native.malloc(MIB), 0)

    @isolated
    def test_threads_share_one_allocator(self) -> None:
        def work() -> None:
            for size in range(1, 200):
                _native.free(_native.malloc(size * 1024), size * 1024)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = _native.stats(0)
        self.assertEqual(stats["allocation.all.allocated"], 4 * 199)
        self.assertEqual(stats["allocated_bytes.all.current"], 0)


class Pages(unittest.TestCase):
    @isolated
    def test_backend_is_chosen_if_the_settings_name_none(self) -> None:
        with self.assertRaisesRegex(warpool.Error, "unknown backend .pages."):
            _native.start("pages")
        self.assertEqual(_native.driver(), "")
        _native.start("paged")
        self.assertEqual(_native.settings(), "backend:paged")

    @isolated
    def test_settings_take_precedence(self) -> None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:expandable"
        _native.start("paged")
        self.assertEqual(_native.settings(), "expandable_segments:True")

    @isolated
    def test_settings_without_a_backend_get_it(self) -> None:
        os.environ["WARPOOL_CONF"] = "memory_cap_mb:100"
        _native.start("paged")
        self.assertEqual(_native.settings(), "backend:paged,memory_cap_mb:100")

    @isolated
    def test_statistics_of_pages(self) -> None:
        os.environ["WARPOOL_CONF"] = "backend:paged"
        first, second = _native.malloc(64 * MIB), _native.malloc(6 * MIB)
        _native.free(first, 64 * MIB)
        stats = _native.page_stats(0)
        self.assertEqual((stats["reserved_bytes"], stats["pages"]), (70 * MIB, 35))
        self.assertEqual((stats["active_bytes"], stats["free_mapped_bytes"]), (6 * MIB, 64 * MIB))
        self.assertEqual((stats["spare_bytes"], stats["bytes_mapped_twice"]), (0, 0))
        self.assertEqual((stats["pages_created"], stats["pages_mapped"], stats["pages_taken"]), (35, 35, 0))
        self.assertEqual(_native.stats(0)["reserved_bytes.all.current"], 70 * MIB)
        _native.free(second, 6 * MIB)
        _native.empty_cache()
        self.assertEqual(_native.page_stats(0)["reserved_bytes"], 0)
        _native.reset_accumulated_stats(0)
        self.assertEqual(_native.page_stats(0)["pages_created"], 0)

    @isolated
    def test_other_backends_have_no_statistics_of_pages(self) -> None:
        with self.assertRaisesRegex(warpool.Error, "choose backend:paged"):
            _native.page_stats(0)


class Settings(unittest.TestCase):
    @isolated
    def test_settings_can_be_changed(self) -> None:
        _native.set_settings("max_split_size_mb:200")
        self.assertIn("max_split_size_mb:200", _native.settings())

    @isolated
    def test_invalid_settings_change_nothing(self) -> None:
        before = _native.settings()
        with self.assertRaisesRegex(warpool.Error, "no_such_key"):
            _native.set_settings("max_split_size_mb:200,no_such_key:1")
        self.assertEqual(_native.settings(), before)

    @isolated
    def test_settings_without_a_driver_are_an_error(self) -> None:
        os.environ["WARPOOL_DRIVER"] = "abacus"
        with self.assertRaisesRegex(warpool.Error, "abacus"):
            _native.settings()

    @isolated
    def test_settings_are_read_from_the_environment(self) -> None:
        os.environ["WARPOOL_CONF"] = "max_split_size_mb:64"
        self.assertIn("max_split_size_mb:64", _native.settings())


class Snapshots(unittest.TestCase):
    @isolated
    def test_snapshot_has_segments(self) -> None:
        ptr = _native.malloc(4 * MIB)
        (segment,) = snapshot()["segments"]
        self.assertEqual((segment["total_size"], segment["allocated_size"]), (20 * MIB, 4 * MIB))
        self.assertEqual(segment["blocks"][0]["address"], ptr)
        self.assertEqual(segment["blocks"][0]["state"], "active_allocated")

    @isolated
    def test_unwritable_path_is_an_error_that_names_it(self) -> None:
        with self.assertRaisesRegex(warpool.Error, "/nowhere/at/all.pickle"):
            _native.snapshot("/nowhere/at/all.pickle")
        self.assertNotEqual(_native.malloc(MIB), 0)

    @isolated
    def test_history_is_switched_on_and_off(self) -> None:
        _native.record_history(True, 1000, 0)
        _native.free(_native.malloc(MIB), MIB)
        self.assertEqual(actions(), ["segment_alloc", "alloc", "free_requested", "free_completed"])
        _native.record_history(False, 1, 0)
        self.assertEqual(actions(), [])

    @isolated
    def test_history_keeps_the_newest_entries_and_skips_actions(self) -> None:
        _native.record_history(True, 3, 0, ["free_requested"])
        for _ in range(5):
            _native.free(_native.malloc(MIB), MIB)
        self.assertEqual(actions(), ["free_completed", "alloc", "free_completed"])
        with self.assertRaisesRegex(warpool.Error, "no_such_action"):
            _native.record_history(True, 3, 0, ["no_such_action"])

    @isolated
    def test_entries_have_metadata(self) -> None:
        _native.record_history(True, 100, 0)
        _native.set_user_metadata("layer 3")
        _native.malloc(MIB)
        _native.set_user_metadata("")
        _native.malloc(MIB)
        allocs = [entry for entry in snapshot()["device_traces"][0] if entry["action"] == "alloc"]
        self.assertEqual([entry["user_metadata"] for entry in allocs], ["layer 3", ""])


class Stacks(unittest.TestCase):
    @isolated
    def test_stack_is_innermost_first(self) -> None:
        _native.record_history(True, 100, 3)
        _stacks.install()

        def inner() -> int:
            return _native.malloc(MIB)

        def outer() -> int:
            return inner()

        ptr = outer()
        _native.free(ptr, MIB)
        alloc = next(entry for entry in snapshot()["device_traces"][0] if entry["action"] == "alloc")
        names = [frame["name"] for frame in alloc["frames"][:3]]
        self.assertEqual(names, ["inner", "outer", "test_stack_is_innermost_first"])
        self.assertEqual(alloc["frames"][0]["filename"], __file__)
        self.assertEqual(alloc["frames"][0]["line"], inner.__code__.co_firstlineno + 1)
        freed = next(entry for entry in snapshot()["device_traces"][0] if entry["action"] == "free_requested")
        self.assertEqual(freed["frames"][0]["name"], "test_stack_is_innermost_first")

    @isolated
    def test_allocated_block_has_a_stack(self) -> None:
        _native.record_history(True, 1, 1)
        _stacks.install()
        _native.malloc(MIB)
        (segment,) = snapshot()["segments"]
        self.assertEqual(segment["blocks"][0]["frames"][0]["name"], "test_allocated_block_has_a_stack")

    @isolated
    def test_removed_hook_collects_no_frames(self) -> None:
        _native.record_history(True, 100, 3)
        _stacks.install()
        _stacks.remove()
        _native.malloc(MIB)
        self.assertFalse(any(entry.get("frames") for entry in snapshot()["device_traces"][0]))

    @isolated
    def test_deep_stack_is_truncated(self) -> None:
        _native.record_history(True, 100, 3)
        _stacks.install()

        def down(left: int) -> int:
            return down(left - 1) if left else _native.malloc(MIB)

        down(500)
        alloc = next(entry for entry in snapshot()["device_traces"][0] if entry["action"] == "alloc")
        self.assertEqual({frame["name"] for frame in alloc["frames"]}, {"down"})
        self.assertEqual(len(alloc["frames"]), 128)

    @isolated
    def test_interrupt_in_the_hook_is_sent_again(self) -> None:
        # A shell makes its background processes ignore SIGINT; then Python installs no handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _native.record_history(True, 100, 3)
        _stacks.install()
        interrupts, name = [], _stacks._name

        def interrupted(code: Any) -> Any:
            if not interrupts:
                interrupts.append(code)
                raise KeyboardInterrupt
            return name(code)

        _stacks._name = interrupted
        with self.assertRaises(KeyboardInterrupt):
            _native.malloc(MIB)
            threading.Event().wait(60)

    def test_no_interrupt_is_lost_in_hook_or_statistics(self) -> None:
        # A lost interrupt would leave the loop running, and the subprocess would time out.
        program = (
            "import os, random, signal, sys, threading, time; from warpool import _native, _stacks\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "random.seed(int(sys.argv[1])); _native.record_history(True, 100, 3); _stacks.install()\n"
            "def send(): time.sleep(random.random() / 50); os.kill(os.getpid(), signal.SIGINT)\n"
            "for _ in range(20):\n"
            " try:\n"
            "  threading.Thread(target=send).start()\n"
            "  while True: _native.free(_native.malloc(1024), 1024); assert 'num_ooms' in _native.stats(0)\n"
            " except KeyboardInterrupt: pass\n"
            "print('interrupted')\n"
        )
        for seed in range(2):
            command = [sys.executable, "-c", program, str(seed)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertEqual((ended.returncode, ended.stdout, ended.stderr), (0, "interrupted\n", ""), f"seed {seed}")

    def test_interpreter_ends_while_daemon_threads_allocate(self) -> None:
        program = (
            "import threading; from warpool import _native, _stacks\n"
            "_native.record_history(True, 100, 3); _stacks.install()\n"
            "def work():\n while True: _native.free(_native.malloc(1024), 1024); _native.stats(0)\n"
            "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        )
        for _ in range(20):
            ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
            self.assertEqual((ended.returncode, ended.stderr), (0, ""))


class Fork(unittest.TestCase):
    def in_child(self, act: Any) -> int:
        """The exit code of a forked child that runs `act` and its exit handlers; a hanging one is killed."""
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            status = 1
            try:
                act()
                atexit._run_exitfuncs()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @isolated
    def test_children_get_errors_and_never_hang(self) -> None:
        _native.record_history(True, 100, 3)
        _stacks.install()
        inherited = _native.malloc(MIB)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                _native.free(_native.malloc(3 * MIB), 3 * MIB)

        def child() -> None:
            calls = [
                lambda: _native.malloc(MIB),
                lambda: _native.stats(0),
                _native.empty_cache,
                _native.settings,
                lambda: _native.set_settings("max_split_size_mb:200"),
                lambda: _native.record_history(False, 1, 0),
                _stacks.install,
                _native.device_count,
            ]
            for call in calls:
                with self.assertRaisesRegex(warpool.Error, "forked"):
                    call()
            _native.free(inherited, MIB)
            self.assertEqual(_native.driver(), "sim")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number in range(40):
                self.assertEqual(self.in_child(child), 0, f"child {number}")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        _native.free(inherited, MIB)
        self.assertEqual(_native.stats(0)["allocated_bytes.all.current"], 0)


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
