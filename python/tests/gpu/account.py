"""Whose the memory of a GPU is: `python account.py [--json] [--inject FILE] [--only ALLOCATOR]`. Needs a GPU, PyTorch,
and Warpool (the repository with WARPOOL_LIBRARY, or installed).

For PyTorch's own allocator, and Warpool's `backend:native` and `backend:paged`, a program with cuBLAS, captured graphs,
a convolution of cuDNN, NCCL with one rank, `cudaMalloc` of another library and a second process that holds memory is
started with the shared object that counts. Each step shows who took what; at the end at most 2 % of what is in use may
be unexplained. Exit status 0 if that holds, 1 if not, 2 if it could not be run.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

MIB = 1 << 20
UNEXPLAINED_MAX = 0.02
OTHER_BYTES = 1 << 30
OTHER = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
"""


def other_process() -> "subprocess.Popen[str]":
    """A process that holds memory until its input ends."""
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "WARPOOL_CONF")}
    command = [sys.executable, "-c", OTHER, str(OTHER_BYTES)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("the second process does not start")
    return process


def child(allocator: str) -> int:
    """The program, in a process that was started with the shared object."""
    import torch

    import warpool.torch

    if allocator != "pytorch":
        warpool.torch.enable(allocator)

    def report(step: str) -> Any:
        torch.cuda.synchronize()
        found = warpool.torch.account()
        values = {**found._asdict(), "rows": [row._asdict() for row in found.rows]}
        print(json.dumps({"step": step, "allocator": allocator, **values}), flush=True)
        return found

    torch.manual_seed(0)
    x = torch.randn(2048, 2048, device="cuda")
    (x + 1).sum().item()
    report("first kernels")
    for dtype in (torch.float32, torch.bfloat16):
        a = x.to(dtype)
        torch.nn.functional.linear(a, a, a[0])
        a @ a
    torch.linalg.solve(x[:64, :64], x[:64, :1])
    report("cuBLAS, cuSOLVER")
    conv = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)).cuda()
    images = torch.randn(16, 32, 64, 64, device="cuda", requires_grad=True)
    conv(images).sum().backward()
    report("cuDNN")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.relu(x @ x)
    torch.cuda.current_stream().wait_stream(side)
    graphs: List[Any] = []
    for size in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100 + size):
                y = torch.relu(x @ x)
        graph.replay()
        graphs.append(graph)
    report("graphs")
    folder = Path(os.environ["WARPOOL_TEST_FOLDER"])
    store = torch.distributed.FileStore(str(folder / f"store-{allocator.replace(':', '-')}"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.distributed.all_reduce(x)
    report("NCCL of one rank")
    cudart = torch.cuda.cudart()
    runtime = ctypes.CDLL(None)
    if hasattr(runtime, "cudaMalloc") and cudart is not None:
        pointer = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(300 * MIB)) == 0
        assert runtime.cudaMallocAsync(ctypes.byref(pointer), ctypes.c_size_t(100 * MIB), None) == 0
    report("cudaMalloc by ctypes, cudaMallocAsync")
    other = other_process()
    report("a second process with 1 GiB")
    other.communicate("")
    report("after it ended")
    begun = time.perf_counter()
    for _ in range(1000):
        torch.relu(y)
    torch.cuda.synchronize()
    microseconds = (time.perf_counter() - begun) * 1e3
    print(json.dumps({"step": "time", "allocator": allocator, "relu_us": round(microseconds, 2)}), flush=True)
    torch.distributed.destroy_process_group()
    return 0


def diagnostics() -> Dict[str, Any]:
    """What the driver's management library says here, for whoever reads a failure."""
    found: Dict[str, Any] = {"pid": os.getpid()}
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        found["NSpid"] = next((line.split()[1:] for line in lines if line.startswith("NSpid")), None)
        for query in ("--query-compute-apps=pid,used_memory", "--query-gpu=driver_version,memory.used,memory.total"):
            ended = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
            found[query.split("=")[0]] = (ended.stdout + ended.stderr).strip().splitlines()
    except OSError as error:
        found["error"] = str(error)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inject", help="libwarpool_inject.so; by default beside WARPOOL_LIBRARY, or in the package")
    parser.add_argument("--only", help="one of pytorch, backend:native, backend:paged")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    from warpool import _native

    inject = Path(arguments.inject or Path(_native.library_path()).parent / "libwarpool_inject.so").resolve()
    if not inject.is_file():
        print(f"cannot run: {inject} is missing", file=sys.stderr)
        return 2
    failed = 0

    def check(name: str, ok: bool, **values: Any) -> None:
        nonlocal failed
        failed += not ok
        line: Dict[str, Any] = {"verdict": "ok" if ok else "FAILED", "name": name, **values}
        print(json.dumps(line) if arguments.json else f"{line.pop('verdict'):<8}{line}", flush=True)

    print(json.dumps({"diagnostics": diagnostics()}), flush=True)
    import tempfile

    for allocator in [arguments.only] if arguments.only else ["pytorch", "backend:native", "backend:paged"]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                **os.environ,
                "LD_PRELOAD": str(inject),
                "WARPOOL_ACCOUNT_DIR": folder,
                "WARPOOL_TEST_FOLDER": folder,
            }
            begun = time.perf_counter()
            command = [sys.executable, str(Path(__file__).resolve()), "--child", allocator]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
            seconds = time.perf_counter() - begun
            files = [json.loads(path.read_text()) for path in Path(folder).glob("account-*.json")]
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        status = ended.returncode
        check(f"{allocator}: the program ends", status == 0, status=status, seconds=round(seconds, 1))
        if ended.returncode != 0:
            print(ended.stderr[-3000:], file=sys.stderr, flush=True)
        owners: Dict[str, int] = {}
        for line in lines:
            if "rows" not in line:
                print(f"        {line}", flush=True)
                continue
            owners = {}
            for row in line["rows"]:
                owners[row["owner"]] = owners.get(row["owner"], 0) + row["bytes"]
            share = abs(line["unexplained_bytes"]) / line["used_bytes"]
            rows = {f"{row['owner']}, {row['what']}": round(row["bytes"] / MIB, 1) for row in line["rows"]}
            used = round(line["used_bytes"] / MIB, 1)
            check(f"{allocator}: {line['step']}", share <= UNEXPLAINED_MAX, unexplained=round(share, 4), used_mib=used)
            print(f"        {json.dumps(rows)} {line['remarks'] or ''}", flush=True)
            if line["step"].startswith("a second process"):
                others = owners.get("other processes", 0)
                check(f"{allocator}: the second process", others >= OTHER_BYTES, mib=round(others / MIB, 1))
        for owner in ("the allocator", "CUDA", "PyTorch", "cuBLAS", "NCCL"):
            check(f"{allocator}: has {owner}", owners.get(owner, 0) > 0, mib=round(owners.get(owner, 0) / MIB, 1))
        check(f"{allocator}: a file of its account", len(files) == 1 and len(files[0]["devices"]) == 1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
