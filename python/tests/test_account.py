"""Tests of `warpool.torch.account()` and of `warpool record`, with a CUDA driver in C and its management library
(`crates/inject/tests/c`), and a PyTorch that asks them. What is counted is tested in Rust (`crates/inject`)."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Dict, List

from fake_torch import backend

import warpool

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "crates" / "inject" / "tests" / "c"
MIB = 1 << 20

# A program that uses the driver through two libraries, and whose allocator has reserved 40 MiB of PyTorch's 44.
PROGRAM = """
import ctypes, json, os, sys, types
cuda, cublas, c10 = (ctypes.CDLL(name) for name in ("libcuda.so.1", "libcublas.so.13", "libc10_cuda.so"))
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
cuda.cuCtxSetCurrent(context)
cublas.cublas_take.restype = c10.c10_take.restype = ctypes.c_uint64
assert cublas.cublas_take(ctypes.c_size_t(64 << 20)) and c10.c10_take(ctypes.c_size_t(44 << 20))
assert cublas.cublas_launch(3) == 0

def mem_get_info(device):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value, total.value

properties = types.SimpleNamespace(uuid="01020304-0506-0708-090a-0b0c0d0e0f10")
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(
    current_device=lambda: 0, mem_get_info=mem_get_info, memory_reserved=lambda device: 40 << 20,
    get_device_properties=lambda device: properties))
import warpool.torch
found = warpool.torch.account()
print(json.dumps({**found._asdict(), "rows": [row._asdict() for row in found.rows], "text": str(found)}))
"""

# A program whose allocator is Warpool's on the simulated GPU, of which the double is said to be the driver.
RECORDED = """
import ctypes, json, sys
cuda, cublas = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcublas.so.13")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
cuda.cuCtxSetCurrent(context)
cublas.cublas_take.restype = ctypes.c_uint64
assert cublas.cublas_take(ctypes.c_size_t(64 << 20))
from fake_torch import fake_torch
from memory import malloc
fake_torch()
import warpool, warpool.torch
warpool.torch.enable()
kept = malloc(100 << 20)
print(warpool.torch.record_now())
"""
# The first simulated GPU's.
SIMULATED_UUID = "73696d756c6174656420202000000000"


def library(folder: Path, name: str, source: str, *options: str) -> None:
    command = ["cc", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}", str(SOURCES / source), "-o", str(folder / name)]
    subprocess.run([*command, "-L", str(folder), *options], check=True)


class Account(unittest.TestCase):
    folder: Path
    environment: Dict[str, str]

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        library(cls.folder, "libcuda.so.1", "fake_cuda.c")
        library(cls.folder, "libnvidia-ml.so.1", "fake_cuda.c", "-DNVML", "-ldl")
        library(cls.folder, "libcublas.so.13", "library.c", "-DLIBRARY=cublas", "-DROUTE=1", "-l:libcuda.so.1")
        library(cls.folder, "libc10_cuda.so", "library.c", "-DLIBRARY=c10", "-DROUTE=3", "-ldl")
        built = Path(os.environ["WARPOOL_LIBRARY"]).parent
        cls.environment = {
            **{name: value for name, value in os.environ.items() if name != "WARPOOL_CONF"},
            "LD_LIBRARY_PATH": str(cls.folder),
            "WARPOOL_RECORD_DIR": str(cls.folder / "records"),
            "WARPOOL_INJECT_LIBRARY": str(built / "libwarpool_inject.so"),
        }

    def run_program(
        self, *before: str, program: str = PROGRAM, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        command = [*before, sys.executable, "-c", program]
        environment = {**self.environment, **more}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        return ended

    def rows(self, found: Dict[str, Any]) -> Dict[str, float]:
        return {f"{row['owner']}, {row['what']}": row["bytes"] / MIB for row in found["rows"]}

    def recorded(self, **more: str) -> Dict[str, Any]:
        """The account that the program prints, started with `record`."""
        ended = self.run_program(os.environ["WARPOOL_COMMAND"], "record", "--", **more)
        return json.loads(ended.stdout)

    OWN = {
        "the allocator, reserved": 40.0,
        "CUDA, context": 500.0,
        "cuBLAS, allocations": 64.0,
        "cuBLAS, modules and kernels": 4.0,
        "the allocator, beyond what it has reserved": 4.0,
    }

    def test_each_owner_has_its_row_and_nothing_is_left(self) -> None:
        found = self.recorded(FAKE_OTHERS_MIB="300")
        self.assertEqual(self.rows(found), {**self.OWN, "other processes, 1 process": 300.0})
        self.assertEqual((found["used_bytes"], found["unexplained_bytes"], found["remarks"]), (912 * MIB, 0, []))
        self.assertEqual(found["rows"][0]["owner"], "the allocator")
        lines: List[str] = found["text"].splitlines()
        self.assertEqual(lines[0], "GPU 0: 912.0 MiB of 8,192.0 MiB in use")
        self.assertRegex(lines[1], r"^ +40\.0 MiB +4\.4%  the allocator: reserved \(the allocator counts it\)$")
        self.assertRegex(lines[-1], r"^ +0\.0 MiB +0\.0%  unexplained: ")

    def test_without_the_shared_object_there_is_one_row_for_the_process(self) -> None:
        found = json.loads(self.run_program(FAKE_OTHERS_MIB="300").stdout)
        expected = {
            "the allocator, reserved": 40.0,
            "this process, context, modules, libraries": 572.0,
            "other processes, 1 process": 300.0,
        }
        self.assertEqual((self.rows(found), found["unexplained_bytes"]), (expected, 0))
        self.assertIn("start the program with `warpool record -- COMMAND`", found["remarks"][0])

    def test_a_container_that_hides_processes_is_told(self) -> None:
        found = self.recorded(FAKE_OTHERS_MIB="300", FAKE_HIDDEN="1")
        self.assertEqual(self.rows(found), {**self.OWN, "other processes, before this one began": 300.0})
        self.assertIn("as in a container", found["remarks"][0])
        found = json.loads(self.run_program(FAKE_OTHERS_MIB="300", FAKE_HIDDEN="1").stdout)
        self.assertEqual(self.rows(found), {"the allocator, reserved": 40.0})
        self.assertEqual(found["unexplained_bytes"], 872 * MIB)

    def test_without_the_management_library_it_says_so(self) -> None:
        found = self.recorded(FAKE_OTHERS_MIB="300", FAKE_NO_NVML="1")
        rows = {name: bytes for name, bytes in self.OWN.items() if name != "CUDA, context"}
        self.assertEqual(self.rows(found), {**rows, "CUDA, context, and what others had then": 800.0})
        self.assertIn("NVIDIA's management library is missing", found["remarks"][0])

    def test_record_shows_the_account_when_the_program_has_ended(self) -> None:
        ended = self.run_program(os.environ["WARPOOL_COMMAND"], "record", "--json", "--", FAKE_OTHERS_MIB="300")
        found = json.loads(ended.stdout)
        self.assertEqual((found["exit_status"], found["recordings"]), (0, []))
        ((device,),) = [process["devices"] for process in found["processes"]]
        rows = {
            "the allocator, allocations": 44.0,
            "CUDA, context": 500.0,
            "cuBLAS, allocations": 64.0,
            "cuBLAS, modules and kernels": 4.0,
            "other processes, before this one began": 300.0,
        }
        self.assertEqual((self.rows(device), device["unexplained_bytes"]), (rows, 0))
        # What the program prints goes to stderr.
        self.assertIn('"used_bytes"', ended.stderr)

    def test_a_recording_has_the_account_and_explain_shows_it(self) -> None:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        variables = {"WARPOOL_DRIVER": "sim", "WARPOOL_BACKEND": backend(self.folder), "PYTHONPATH": path}
        for uuid, owners in ((SIMULATED_UUID, ["the allocator", "CUDA", "cuBLAS"]), ("00" * 16, None)):
            ended = self.run_program(
                os.environ["WARPOOL_COMMAND"], "record", "--json", "--", program=RECORDED, FAKE_UUID=uuid, **variables
            )
            (recording,) = json.loads(ended.stdout)["recordings"]
            self.assertIn(recording, ended.stderr)
            explained = warpool.explain(recording)
            if owners is None:
                # Of another device.
                self.assertIsNone(explained["account"])
                continue
            rows = explained["account"]["rows"]
            self.assertEqual([row["owner"] for row in rows], owners)
            self.assertGreaterEqual(rows[0]["bytes"], 100 * MIB)
            self.assertEqual(rows[2].bytes, 64 * MIB)
            self.assertIn("Whose it was", explained._repr_html_())
            text = Path(recording).with_suffix(".txt").read_text()
            self.assertIn("cuBLAS, allocations: 64 MiB", text)


if __name__ == "__main__":
    unittest.main()
