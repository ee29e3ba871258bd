"""Tests of the ctypes layer on the simulated GPU, without PyTorch. WARPOOL_LIBRARY is the path of the shared object."""

import os
import signal
import subprocess
import sys
import tempfile
import traceback
import unittest
from pathlib import Path

from isolated import isolated
from memory import free, malloc, stats

import warpool
from warpool import _native

MIB = 1 << 20


def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program in a process of its own, with the paged allocator."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "WARPOOL_CONF": "backend:paged"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


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


class Statistics(unittest.TestCase):
    @isolated
    def test_names_and_values(self) -> None:
        os.environ["WARPOOL_CONF"] = "backend:paged"
        free(malloc(64 * MIB))
        stats = _native.page_stats(0)
        self.assertEqual((stats["reserved_bytes"], stats["active_bytes"]), (64 * MIB, 0))
        with self.assertRaisesRegex(warpool.Error, "device index 7 is out of range"):
            _native.page_stats(7)

    def test_no_interrupt_is_lost(self) -> None:
        # A lost interrupt would leave the loop running, and the subprocess would time out.
        program = (
            "import os, random, signal, sys, threading, time; from warpool import _native\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "random.seed(int(sys.argv[1]))\n"
            "def send(): time.sleep(random.random() / 50); os.kill(os.getpid(), signal.SIGINT)\n"
            "for _ in range(20):\n"
            " try:\n"
            "  threading.Thread(target=send).start()\n"
            "  while True: assert 'pages' in _native.page_stats(0)\n"
            " except KeyboardInterrupt: pass\n"
            "print('interrupted')\n"
        )
        for seed in range(2):
            ended = run(program, str(seed))
            self.assertEqual((ended.returncode, ended.stdout, ended.stderr), (0, "interrupted\n", ""), f"seed {seed}")

    def test_interpreter_ends_while_daemon_threads_are_in_it(self) -> None:
        program = (
            "import threading; from warpool import _native\n"
            "def work():\n while True: _native.page_stats(0)\n"
            "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        )
        for _ in range(20):
            ended = run(program)
            self.assertEqual((ended.returncode, ended.stderr), (0, ""))


class Fork(unittest.TestCase):
    @isolated
    def test_child_gets_errors(self) -> None:
        inherited = malloc(MIB)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            status = 1
            try:
                for call in (
                    lambda: malloc(MIB),
                    lambda: _native.page_stats(0),
                    _native.settings,
                    lambda: _native.set_settings("max_split_size_mb:200"),
                ):
                    with self.assertRaisesRegex(warpool.Error, "forked"):
                        call()
                free(inherited)
                self.assertEqual(_native.driver(), "sim")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        free(inherited)
        self.assertEqual(stats()["allocated_bytes.all.current"], 0)


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
