"""Tests of how the backend is found, built and cached, with a fake PyTorch and a fake compiler: no PyTorch, no GPU."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import warpool.torch
from warpool import _backend, _command


# Writes the file that is to be compiled.
_MAKE = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'


class Folder(unittest.TestCase):
    """A fake PyTorch, a compiler that writes its arguments to a log and a file as its output, and a cache folder."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        root = self.folder / "site" / "torch"
        for path in ("include/c10/core.h", "lib/libc10_cuda.so", "__init__.py"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        self.headers = self.folder / "site" / "nvidia" / "cu13" / "include"
        (self.headers / "crt").mkdir(parents=True)
        (self.headers / "cuda_runtime_api.h").touch()
        (self.headers / "crt" / "host_defines.h").touch()
        self.torch: Any = types.SimpleNamespace(__version__="2.12.1+cu130", __file__=str(root / "__init__.py"))
        self.cache, self.log, self.compiler = self.folder / "cache", self.folder / "log", self.folder / "c++"
        self.write_compiler(f'echo "$@" >> {self.log}; sleep 0.2; {_MAKE}')
        environment = {"WARPOOL_CACHE": str(self.cache), "CXX": str(self.compiler)}
        self.enterContext(mock.patch.dict(os.environ, environment))
        self.ready = self.folder / "backends"
        self.enterContext(mock.patch.object(_backend, "_READY", self.ready))
        for name in ("WARPOOL_BACKEND", "CUDA_HOME", "CUDA_PATH"):
            os.environ.pop(name, None)
        self.enterContext(contextlib.redirect_stderr(io.StringIO()))

    def write_compiler(self, script: str) -> None:
        self.compiler.write_text(f"#!/bin/sh\n{script}\n")
        self.compiler.chmod(0o755)

    def enterContext(self, context: Any) -> Any:  # of Python 3.11
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def build(self) -> Path:
        return _backend.get(self.torch).path

    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


class Build(Folder):
    def test_backend_is_built_once(self) -> None:
        path = self.build()
        self.assertEqual(path.read_text(), "made\n")
        self.assertTrue(path.name.startswith("libwarpool_backend-2.12-"))
        self.assertEqual(self.build(), path)
        self.assertEqual(self.compilations(), 1)
        self.assertIn("compiling the backend for PyTorch 2.12.1", sys.stderr.getvalue())
        command = self.log.read_text()
        for part in ("-std=c++17", "install.cpp", "-lc10_cuda", str(self.headers)):
            self.assertIn(part, command)

    def test_newer_versions_need_a_newer_standard(self) -> None:
        self.torch.__version__ = "2.14.0"
        self.build()
        self.assertIn("-std=c++20", self.log.read_text())

    def test_backend_of_the_package_is_used_without_a_compiler(self) -> None:
        self.ready.mkdir()
        packaged = self.ready / "libwarpool_backend-2.12.so"
        packaged.touch()
        os.environ["CXX"] = "no-such-compiler"
        self.assertEqual(self.build(), packaged)
        self.torch.__version__ = "2.13.0"
        with self.assertRaisesRegex(_backend.Unavailable, "no C\\+\\+ compiler"):
            self.build()

    def test_other_build_of_pytorch_has_its_own(self) -> None:
        first = self.build()
        self.torch.__version__ = "2.12.1+cu126"
        self.assertNotEqual(self.build(), first)
        self.assertEqual(self.compilations(), 2)

    def test_processes_that_start_at_once_build_once(self) -> None:
        threads = [threading.Thread(target=self.build) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.compilations(), 1)
        self.assertEqual([path.suffix for path in sorted(self.cache.iterdir())], [".lock", ".so"])

    def test_killed_build_leaves_nothing_that_is_used(self) -> None:
        self.write_compiler(f"echo started >> {self.log}; sleep 60")
        code = (
            "import pathlib, types, sys; sys.path.insert(0, {!r}); from warpool import _backend\n"
            "torch = types.SimpleNamespace(__version__={!r}, __file__={!r})\n"
            "_backend._build(torch, pathlib.Path({!r}))"
        )
        path = str(_backend.get(self.torch, may_build=False).path)
        package = str(Path(warpool.torch.__file__).parents[1])
        code = code.format(package, self.torch.__version__, self.torch.__file__, path)
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
        while not self.log.exists():
            self.assertIsNone(process.poll(), "the build ended early")
            time.sleep(0.01)
        os.killpg(process.pid, 9)
        process.wait()
        self.assertFalse(_backend.get(self.torch, may_build=False).ready)
        self.write_compiler(_MAKE)
        self.assertEqual(self.build().read_text(), "made\n")

    def test_failed_compilation_says_why(self) -> None:
        self.write_compiler('echo "memory.cpp:7: error: no such thing"; exit 1')
        with self.assertRaisesRegex(_backend.Unavailable, "no such thing"):
            self.build()
        self.assertFalse(_backend.get(self.torch, may_build=False).ready)

    def test_what_is_missing_is_named(self) -> None:
        (self.headers / "crt" / "host_defines.h").unlink()
        with mock.patch.object(Path, "is_file", lambda path: os.path.isfile(path) and "/usr/local" not in str(path)):
            with self.assertRaisesRegex(_backend.Unavailable, "crt/host_defines.h.*nvidia-cuda-crt"):
                self.build()
        os.environ["CXX"] = "no-such-compiler"
        with self.assertRaisesRegex(_backend.Unavailable, "no C\\+\\+ compiler.*set CXX"):
            self.build()
        self.torch.__version__ = "2.8.0"
        with self.assertRaisesRegex(_backend.Unavailable, "no backend for PyTorch 2.8.0.*2.9 to 2.15: install"):
            self.build()
        os.environ["WARPOOL_BACKEND"] = str(self.folder / "nothing.so")
        with self.assertRaisesRegex(warpool.Error, "not a file"):
            self.build()

    def test_incomplete_sources_are_told(self) -> None:
        sources = self.folder / "cpp"
        sources.mkdir()
        with mock.patch.object(_backend, "_SOURCES", sources):
            with self.assertRaisesRegex(_backend.Unavailable, "there are none"):
                self.build()
            (sources / "install.cpp").touch()
            # As in a copy of the repository's folder alone.
            (sources / "warpool_torch.h").symlink_to("../../nowhere/warpool_torch.h")
            with self.assertRaisesRegex(_backend.Unavailable, "warpool_torch.h is missing.*cp -rL"):
                self.build()

    def test_cache_folder_that_cannot_be_written_is_an_error(self) -> None:
        self.cache.write_text("not a folder")
        with self.assertRaisesRegex(warpool.Error, "WARPOOL_CACHE.*warpool.torch build"):
            self.build()

    def test_foreign_file_is_refused(self) -> None:
        path = self.build()
        with self.assertRaisesRegex(warpool.Error, "not a backend"):
            _backend.install(path, self.torch)


class Commands(Folder):
    def run_command(self, *arguments: str) -> "tuple[int, str]":
        self.torch.version = types.SimpleNamespace(cuda="13.0")
        with mock.patch.dict(sys.modules, {"torch": self.torch}), contextlib.redirect_stdout(io.StringIO()) as out:
            status = _command.main(list(arguments))
        return status, out.getvalue() + sys.stderr.getvalue()

    def test_status_tells_what_would_be_used(self) -> None:
        status, text = self.run_command("status")
        self.assertEqual(status, 0, text)
        self.assertRegex(text, "not built yet.*\n.*would build it first")
        self.assertEqual(self.compilations(), 0)
        os.environ["CXX"] = "no-such-compiler"
        status, text = self.run_command("status")
        self.assertEqual(status, 1)
        self.assertRegex(text, "no C\\+\\+ compiler.*This package has no ready backends")

    def test_status_as_json(self) -> None:
        status, text = self.run_command("status", "--json")
        told = json.loads(text)
        self.assertEqual((status, told["ready"], told["torch"]), (0, False, "2.12.1+cu130"))
        self.torch.__version__ = "2.7.0"
        status, text = self.run_command("status", "--json")
        self.assertEqual(status, 1)
        self.assertIn("no backend", json.loads(text)["error"])

    def test_build_builds(self) -> None:
        # The fake compiler's output is not a shared object, which the check after the build finds.
        status, text = self.run_command("build")
        self.assertEqual((status, self.compilations()), (1, 1))
        self.assertIn("not a backend", text)

    def test_missing_backend_is_told(self) -> None:
        self.torch.__version__ = "2.7.0"
        status, text = self.run_command("status")
        self.assertEqual(status, 1)
        self.assertRegex(text, "error: there is no backend for PyTorch 2.7.0.*2.9 to 2.15")


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
