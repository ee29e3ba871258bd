"""Scenarios of what programs use of PyTorch's allocator beside tensors: pools with a user's allocator, cuDNN's
benchmark mode, other processes, DataLoader, profiler, history with C++ frames, graphs that are collected.

As in scenarios.py: one function each, run in its own process, also with PyTorch's own allocator as the control.
"""

import contextlib
import gc
import io
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, List

import child
import sharing_child
import torch
from child import check, note

MIB = 1 << 20
HERE = Path(__file__).resolve().parent


def mempool(allocator: str) -> None:
    """A MemPool whose memory comes from a user's allocator, in C."""
    child.enable(allocator)
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "libupstream.so")
        compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(HERE / "upstream.c"), "-ldl"], check=True)
        upstream = torch.cuda.memory.CUDAPluggableAllocator(library, "upstream_alloc", "upstream_free")
        import ctypes

        counts = ctypes.CDLL(library)
        pool = torch.cuda.MemPool(upstream.allocator())
        with torch.cuda.use_mem_pool(pool):
            x = torch.full((3 * MIB,), 2.0, device="cuda")
        outside = torch.full((3 * MIB,), 5.0, device="cuda")
        check("its segments come from the user's allocator", counts.upstream_allocated() == 1)
        check("the memory works", float(x.sum()) == 6 * MIB and float(outside.sum()) == 15 * MIB)
        check("snapshot", len(pool.snapshot()) == 1 and pool.use_count() >= 1, f"{len(pool.snapshot())} segments")
        del x
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        check("and go back to it", counts.upstream_freed() == 1, counts.upstream_freed())


def cudnn(allocator: str) -> None:
    """cuDNN's benchmark mode asks the allocator how large a workspace may be."""
    child.enable(allocator)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)).cuda()
    x = torch.randn(8, 3, 96, 96, generator=torch.Generator().manual_seed(1)).cuda()
    benchmarked = net(x)
    benchmarked.sum().backward()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    worst = float((net(x) - benchmarked).abs().max())
    check("results equal those without it", worst < 1e-3, f"largest difference {worst:.1e}")


def sharing(allocator: str) -> None:
    """A tensor goes to another process, which changes it, and one of that process comes back."""
    child.enable(allocator)
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    to_child, to_parent = context.Queue(), context.Queue()
    other = context.Process(target=sharing_child.main, args=(allocator, to_child, to_parent))
    other.start()
    # The second lies in the middle of a segment, and both in the same one with PyTorch's placement.
    tensors = [torch.full((size,), float(size), device="cuda") for size in (100_000, 200_000, 8 * MIB)]
    kept = torch.full((100_000,), 9.0, device="cuda")
    try:
        to_child.put(tensors)
        told = to_parent.get(timeout=60)
        check("the other process reads it", told == [float(t.numel()) ** 2 for t in tensors], told)
        torch.cuda.synchronize()
        changed = [bool((t == -1.0).all()) for t in tensors]
        check("and what it writes is seen here", all(changed), changed)
        check("nothing else is changed", bool((kept == 9.0).all()))
        back = to_parent.get(timeout=60)
        check("a tensor of the other process", bool((back == 3.0).all()) and back.is_cuda)
        del back
        gc.collect()
        to_child.put(None)
    finally:
        other.join(timeout=60)
        alive = other.is_alive()
        if alive:
            other.kill()
    check("the other process ends well", not alive and other.exitcode == 0, other.exitcode)
    torch.cuda.ipc_collect()


def loader(allocator: str) -> None:
    """A DataLoader's pinned memory is the allocator's."""
    child.enable(allocator)
    from torch.utils.data import DataLoader, TensorDataset

    torch.cuda.init()
    before = torch.cuda.host_memory_stats()["active_requests.allocated"]
    numbers = torch.arange(4096.0).reshape(256, 16)
    pinned, total = 0, 0.0
    for (batch,) in DataLoader(TensorDataset(numbers), batch_size=32, pin_memory=True, num_workers=2):
        pinned += batch.is_pinned()
        total += float(batch.to("cuda", non_blocking=True).sum())
    stats = torch.cuda.host_memory_stats()
    check("every batch is pinned", pinned == 8, pinned)
    check("and arrives", total == float(numbers.sum()), total)
    taken = stats["active_requests.allocated"] - before
    check("host_memory_stats counts them", taken >= 8, f"{taken} requests, {stats['allocated_bytes.current']} bytes")


def profiler(allocator: str) -> None:
    """The profiler sees the memory of operators."""
    child.enable(allocator)
    torch.ones(1, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        x = torch.ones(4 * MIB, device="cuda")
        y = x + 1
        del x, y
    memory = {event.key: event.self_device_memory_usage for event in profile.key_averages()}
    allocated = sum(bytes for bytes in memory.values() if bytes > 0)
    freed = sum(bytes for bytes in memory.values() if bytes < 0)
    check("it sees allocations", allocated >= 32 * MIB, f"{allocated} bytes")
    note("and frees", f"{freed} bytes")


def cpp_frames(allocator: str) -> None:
    """The history has C++ frames, and memory_viz reads the dump."""
    child.enable(allocator)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="all", context="all", max_entries=10_000)
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    entries = [entry for trace in snapshot["device_traces"] for entry in trace if entry["action"] == "alloc"]
    names = {frame["name"] for entry in entries for frame in entry.get("frames", ())}
    cpp = sum("::" in name for name in names)
    check("C++ frames", cpp > 10, f"{cpp} of {len(names)} functions")
    python = any(frame["filename"].endswith("features.py") for entry in entries for frame in entry.get("frames", ()))
    check("Python frames", python)
    from torch.cuda import _memory_viz

    with contextlib.redirect_stdout(io.StringIO()):
        text = _memory_viz.segsum(snapshot)
        page = _memory_viz.trace_plot(snapshot)
        listed = _memory_viz.trace(snapshot)
    sizes = f"{len(text)}, {len(page)} and {len(listed)} characters"
    check("memory_viz reads it", "segments" in text and "<" in page and "TOTAL MEM" in listed, sizes)
    torch.cuda.memory._record_memory_history(None)


def collected_graphs(allocator: str) -> None:
    """The garbage collector destroys graphs while another one is captured, which stays valid."""
    child.enable(allocator)
    static = torch.ones(1000, device="cuda")
    cycles: List[Any] = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static * 2
        cycle: List[Any] = [graph, result]
        cycle.append(cycle)
        cycles.append(cycle)
    del graph, result, cycle
    gc.disable()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        first = static + 1
        cycles.clear()
        gc.collect()
        second = first * 3
    gc.enable()
    static.fill_(4.0)
    captured.replay()
    check("the capture is valid", bool((second == 15.0).all()), float(second[0]))
    torch.cuda.synchronize()
    check("allocations go on", float(torch.ones(MIB, device="cuda").sum()) == MIB)
