"""Tests of `warpool.torch` with a real PyTorch for CUDA on a machine without GPU, on the simulated one.

usage: WARPOOL_LIBRARY=… python python/tests/real_torch.py      run by hand: PyTorch with its libraries has 3 GB

A C++ compiler and CUDA's headers are needed (nvidia-cuda-crt beside PyTorch, or CUDA_HOME): the backend is compiled.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from isolated import isolated

import warpool.torch
from warpool import _backend

PYTHON = str(Path(warpool.torch.__file__).parents[1])


def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program in a process of its own."""
    env = {**os.environ, "PYTHONPATH": PYTHON, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


class RealTorch(unittest.TestCase):
    @isolated
    def test_backend_is_installed_once(self) -> None:
        import torch

        self.assertEqual(torch.cuda.get_allocator_backend(), "native")
        warpool.torch.enable("backend:paged")
        self.assertEqual(torch.cuda.get_allocator_backend(), "warpool")
        with self.assertRaisesRegex(RuntimeError, "called before"):
            warpool.torch.enable()
        self.assertIn("paged", warpool.torch.settings())

    @isolated
    def test_forked_child_is_told(self) -> None:
        warpool.torch.enable()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                warpool.torch.set_settings("max_split_size_mb:200")
            except RuntimeError as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertTrue(warpool.torch.enabled())

    def test_build_that_is_killed_is_repeated(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            code = (
                "import pathlib, sys, torch, warpool.torch\nfrom warpool import _backend\n"
                "_backend._READY = pathlib.Path('/nonexistent')\nwarpool.torch.enable()\n"
                "print(torch.cuda.get_allocator_backend())"
            )
            env = {**os.environ, "PYTHONPATH": PYTHON, "WARPOOL_CACHE": folder}
            env.pop("WARPOOL_BACKEND", None)
            process = subprocess.Popen(
                [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, start_new_session=True
            )
            assert process.stderr is not None
            while b"compiling the backend" not in (line := process.stderr.readline()):
                self.assertTrue(line, "the build did not begin")
            time.sleep(1)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stderr.close()
            self.assertEqual(list(Path(folder).glob("*.so")), [])
            ended = run(code, WARPOOL_CACHE=folder, WARPOOL_BACKEND="")
            self.assertEqual((ended.returncode, ended.stdout.split()[-1:]), (0, ["warpool"]), ended.stderr)
            self.assertEqual(len(list(Path(folder).glob("*.so"))), 1)
            again = run(code, WARPOOL_CACHE=folder, WARPOOL_BACKEND="")
            self.assertNotIn("compiling", again.stderr)


if __name__ == "__main__":
    os.environ["WARPOOL_DRIVER"] = "sim"
    unittest.main()
