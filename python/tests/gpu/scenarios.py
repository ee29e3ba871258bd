"""The scenarios, one function each: takes the allocator's name, and reports by `child.check`, `note` and `data`.

Each runs in its own process, also with PyTorch's own allocator as the control.
"""

import gc
import os
import pickle
import queue
import threading
import time
from typing import Any, List

import child
import torch
from child import check, data, note

import model as models

MIB, GIB = 1 << 20, 1 << 30


def train(allocator: str) -> None:
    """Fifty training steps: losses, time of every step, memory peaks."""
    child.enable(allocator)
    models.reproducible()
    model = models.Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, seconds = [], []
    for tokens, targets in models.batches(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = models.step(model, optimizer, tokens, targets)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item().hex())
    data(
        losses=losses,
        seconds=seconds,
        pair_us=_pair_us(),
        reserved=torch.cuda.max_memory_reserved(),
        allocated=torch.cuda.max_memory_allocated(),
    )


def _pair_us() -> float:
    """The time to create and drop a cached tensor from Python, in microseconds; the fastest of 20 rounds."""
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            torch.empty(4096, device="cuda")
        best = min(best, (time.perf_counter() - start) / 1000)
    return best * 1e6


def side_stream(allocator: str) -> None:
    """A recorded block is not reused while a side stream still reads it."""
    child.enable(allocator)
    count = 16 * MIB
    for recorded in (True, False):
        side, out = torch.cuda.Stream(), torch.zeros(count, device="cuda")
        x = torch.full((count,), 7.0, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
            out.copy_(x)
        if recorded:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        y = torch.full((count,), 1.0, device="cuda")
        reused = y.data_ptr() == address
        finished = side.query()
        torch.cuda.synchronize()
        intact = bool((out == 7.0).all())
        if recorded:
            check("the side stream is still busy", not finished)
            check("a recorded block is not reused", not reused)
            check("a recorded block keeps its contents", intact)
            z = torch.empty(count, device="cuda")
            check("it is reused once the stream is done", z.data_ptr() == address)
            del z
        else:
            note("without record_stream", f"reused at once: {reused}, contents intact: {intact}")
        del y, out
        torch.cuda.empty_cache()


def graph(allocator: str) -> None:
    """Captured graphs: a thousand replays, a shared pool, random numbers, training, and release of the memory."""
    child.enable(allocator)
    models.reproducible()
    layers = (torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4))
    net = torch.nn.Sequential(*layers).cuda().requires_grad_(False)
    static = torch.zeros(64, 512, device="cuda")
    _warm_up(lambda: net(static))
    before = _reserved_at_rest()

    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        middle = net(static)
    with torch.cuda.graph(second, pool=first.pool()):
        result = net(middle) + 1
    during = torch.cuda.memory_reserved()

    equal, worst, kept = 0, 0.0, []
    for turn in range(1000):
        numbers = torch.randn(64, 512, generator=torch.Generator().manual_seed(turn))
        static.copy_(numbers)
        first.replay()
        second.replay()
        # Allocations outside the graphs must not overlap memory that a graph writes.
        kept.append(torch.full((1 + turn * 977 % 300_000,), float(turn), device="cuda"))
        if len(kept) > 20:
            old, value = kept.pop(0), float(turn - 20)
            if not bool((old == value).all()):
                check("replays do not change other tensors", False, f"turn {turn}")
                break
        expected_middle = net(numbers.cuda())
        expected = net(expected_middle) + 1
        equal += bool(torch.equal(middle, expected_middle) and torch.equal(result, expected))
        worst = max(worst, float((result - expected).abs().max()))
    detail = f"{equal} bit for bit, largest difference {worst:.1e}"
    check("1000 replays of two graphs with a shared pool", worst < 1e-4, detail)

    del middle, result, kept, old, expected, expected_middle
    first.reset()
    second.reset()
    del first, second
    after = _reserved_at_rest()
    detail = f"before {before}, during {during}, after {after}"
    check("memory is released by reset and empty_cache", after <= before < during, detail)

    _fresh_streams()
    _random_numbers()
    _graphed_training()


def _reserved_at_rest() -> int:
    """Reserved bytes after releasing all unused memory, including cuBLAS's workspaces, of which PyTorch keeps one in
    the graphs' pool."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _warm_up(work: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def _fresh_streams() -> None:
    """Captures on streams that the allocator has not seen before."""
    source = torch.arange(1000.0, device="cuda")
    torch.cuda.synchronize()

    alone = torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone, stream=torch.cuda.Stream()):
        doubled = source * 2
    alone.replay()
    check("a capture on a stream that never allocated", torch.equal(doubled.cpu(), torch.arange(1000.0) * 2))

    forked, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(forked, stream=torch.cuda.Stream()):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            tripled = source * 3
        main.wait_stream(side)
        result = tripled + 1
    forked.replay()
    equal = torch.equal(result.cpu(), torch.arange(1000.0) * 3 + 1)
    check("a capture that forks to a stream that never allocated", equal)


def _random_numbers() -> None:
    torch.cuda.manual_seed(3)
    drawn = torch.cuda.CUDAGraph()
    with torch.cuda.graph(drawn):
        numbers = torch.rand(1000, device="cuda")
    drawn.replay()
    once = numbers.clone()
    drawn.replay()
    differ = not torch.equal(once, numbers) and 0.4 < float(numbers.mean()) < 0.6
    check("a replay draws new random numbers", differ)


def _graphed_training() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    copy = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    copy.load_state_dict(eager.state_dict())
    graphed = torch.cuda.make_graphed_callables(copy, (torch.randn(32, 256, device="cuda"),))
    worst = 0.0
    for _ in range(20):
        x = torch.randn(32, 256, device="cuda")
        for net in (eager, graphed):
            net.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
        for a, b in zip(eager.parameters(), graphed.parameters()):
            worst = max(worst, float((a.grad - b.grad).abs().max()))
    check("a graphed model trains", worst < 1e-5, f"largest difference of a gradient {worst:.1e}")


def dropped_graph(allocator: str) -> None:
    """A graph is dropped right after a long replay was started, and its memory released. run.py switches expandable
    segments on, with which releasing memory does not wait for the device."""
    child.enable(allocator)
    count, turns = 16 * MIB, 20
    out = torch.zeros(count, device="cuda")
    # Twice on the current stream, once on one that never allocated.
    for stream in (torch.cuda.current_stream(), torch.cuda.current_stream(), torch.cuda.Stream()):
        static = torch.zeros(count, device="cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            torch.cuda._sleep(100_000_000)
            x = static + 1
            for _ in range(turns):
                x = x * 1.0 + 1.0
            out.copy_(x)
        del x
        before = torch.cuda.memory_reserved()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            captured.replay()
        finished = stream.query()
        del captured
        gc.collect()
        torch.cuda.empty_cache()
        released = torch.cuda.memory_reserved() < before
        others = [torch.full((count,), 5.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        check("the replay is still running", not finished)
        check("the graph's memory is released", released, f"{before} -> {torch.cuda.memory_reserved()}")
        check("the replay completes", bool((out == turns + 1).all()), float(out[0]))
        check("the replay does not change new tensors", all(bool((other == 5.0).all()) for other in others))
        out.zero_()
        del others, static


def oom(allocator: str) -> None:
    """Out of memory is an exception with a report, and the process continues."""
    child.enable(allocator)
    torch.ones(1, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    ooms = torch.cuda.memory_stats()["num_ooms"]

    def fails(name: str, work: Any) -> None:
        try:
            work()
            check(f"{name}: raises", False, "nothing was raised")
            return
        except RuntimeError as error:
            text, kind = str(error), type(error)
        check(f"{name}: the text", text.startswith("CUDA out of memory. Tried to allocate"), text.splitlines()[0][:160])
        check(f"{name}: the type", issubclass(kind, torch.cuda.OutOfMemoryError), kind.__name__)
        works = float(torch.ones(MIB, device="cuda").sum()) == MIB
        check(f"{name}: later allocations work", works)

    fails("more than the device has", lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"))
    count = 1 + total // (4 * GIB)
    fails("many blocks", lambda: [torch.empty(4 * GIB, dtype=torch.uint8, device="cuda") for _ in range(count)])
    fails("in a backward pass", _backward_that_allocates(2 * total))

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    small = [torch.empty(free // 20, dtype=torch.uint8, device="cuda") for _ in range(14)]
    del small
    large = torch.empty(free // 10 * 7, dtype=torch.uint8, device="cuda")
    check("cached blocks are released for a larger one", large.numel() == free // 10 * 7)
    del large
    torch.cuda.empty_cache()

    torch.cuda.set_per_process_memory_fraction(0.05)
    check("get_per_process_memory_fraction", torch.cuda.get_per_process_memory_fraction() == 0.05)
    fails("more than the fraction", lambda: torch.empty(int(total * 0.06), dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    fits = torch.empty(int(total * 0.06), dtype=torch.uint8, device="cuda").numel() > 0
    check("it fits without the fraction", fits)
    counted = torch.cuda.memory_stats()["num_ooms"]
    check("num_ooms counts them", counted >= ooms + 4, counted)


def _backward_that_allocates(size: int) -> Any:
    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.empty(size, dtype=torch.uint8, device="cuda")[0]

    return lambda: Allocates.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()


def snapshot(allocator: str) -> None:
    """A recorded training step, dumped to a file, which run.py passes to `warpool replay`."""
    child.enable(allocator)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    models.reproducible()
    model = models.Transformer(layers=2, width=256, heads=4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for tokens, targets in models.batches(5):
        models.step(model, optimizer, tokens, targets)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ones(3 * MIB, device="cuda")
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    path = os.environ["WARPOOL_TEST_SNAPSHOT"]
    torch.cuda.memory._dump_snapshot(path)

    with open(path, "rb") as file:
        read = pickle.load(file)
    check("segments add up to memory_reserved", sum(s["total_size"] for s in read["segments"]) == reserved, reserved)
    trace: List[Any] = read["device_traces"][0]
    allocs = [entry for entry in trace if entry["action"] == "alloc"]
    frees = [entry for entry in trace if entry["action"] == "free_completed"]
    check("the trace has allocations and frees", allocs and frees, f"{len(trace)} entries")
    in_model = sum(any(frame["filename"].endswith("model.py") for frame in entry.get("frames", ())) for entry in allocs)
    check("stacks contain the model's code", in_model > 50, f"{in_model} of {len(allocs)} allocations")
    blocks = [block for segment in read["segments"] for block in segment["blocks"]]
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    check("allocated blocks have stacks", any(block["frames"] for block in allocated))
    torch.cuda.memory._record_memory_history(None)
    check("the history is empty once it is off", not torch.cuda.memory._snapshot()["device_traces"][0])
    try:
        torch.cuda.memory._dump_snapshot("/nowhere/at/all.pickle")
        check("an unwritable path is an error", False)
    except OSError as error:
        check("an unwritable path is an error", True, error)


def calls(allocator: str) -> None:
    """PyTorch's memory functions work, and their results are consistent."""
    child.enable(allocator)
    cuda = torch.cuda
    check("no statistics before CUDA is used", cuda.memory_stats() == {} and cuda.memory_allocated() == 0)
    x = torch.ones(10 * MIB, device="cuda")
    big = 40 * MIB
    check("memory_allocated", cuda.memory_allocated() == big, cuda.memory_allocated())
    check("memory_reserved", cuda.memory_reserved() >= big, cuda.memory_reserved())
    y = torch.ones(10 * MIB, device="cuda")
    del y
    check("max_memory_allocated", cuda.max_memory_allocated() == 2 * big, cuda.max_memory_allocated())
    check("max_memory_reserved", cuda.max_memory_reserved() >= 2 * big)
    before = cuda.memory_reserved()
    cuda.empty_cache()
    check("empty_cache", cuda.memory_reserved() == before - big, f"{before} -> {cuda.memory_reserved()}")
    check("the peak is kept", cuda.max_memory_reserved() == before)
    cuda.reset_peak_memory_stats()
    check("reset_peak_memory_stats", cuda.max_memory_allocated() == cuda.memory_allocated() == big)
    stats = cuda.memory_stats()
    check("memory_stats", stats["allocation.all.allocated"] >= 2 and stats["num_ooms"] == 0, f"{len(stats)} values")
    check("every value is a number", all(isinstance(value, int) for value in stats.values()))
    data(names=sorted(name for name in stats if "private_pools" not in name))
    cuda.reset_accumulated_memory_stats()
    check("reset_accumulated_memory_stats", cuda.memory_stats()["allocation.all.allocated"] == 0)
    check("memory_summary", "Allocated memory" in cuda.memory_summary() and "40960 KiB" in cuda.memory_summary())
    segments = cuda.memory_snapshot()
    reserved = sum(segment["total_size"] for segment in segments)
    check("memory_snapshot", reserved == cuda.memory_reserved(), f"{len(segments)} segments")
    free, total = cuda.mem_get_info()
    check("mem_get_info", 0 < free < total)
    accelerator = (torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved())
    check("torch.accelerator", accelerator == (big, cuda.memory_reserved()))
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.empty_cache()
    raw = cuda.caching_allocator_alloc(5 * MIB)
    check("caching_allocator_alloc", cuda.memory_allocated() == big + 5 * MIB)
    cuda.caching_allocator_delete(raw)
    check("caching_allocator_delete", cuda.memory_allocated() == big)
    check("an empty tensor", torch.empty(0, device="cuda").numel() == 0 and cuda.memory_allocated() == big)
    del x
    check("no memory is left allocated", cuda.memory_allocated() == 0)


def threads(allocator: str) -> None:
    """Allocations in threads that never set a context, frees in another thread, and a backward pass."""
    child.enable(allocator)
    tensors: "queue.Queue[Any]" = queue.Queue()
    errors: List[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(200):
                    x = torch.full((1 + (number * 7919 + turn * 104729) % 500_000,), float(number), device="cuda")
                    if turn % 20 == 0 and not bool((x == number).all()):
                        errors.append(f"thread {number}, turn {turn}")
                    torch.cuda.current_stream().synchronize()
                    tensors.put(x)
        except BaseException as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not tensors.empty():
        try:
            tensors.get(timeout=0.1)
        except queue.Empty:
            pass
    check("eight threads allocate, a ninth frees", not errors, "; ".join(errors[:3]))
    check("no memory is left allocated", torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated())
    x = torch.arange(1000.0, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    check("a backward pass", torch.equal(x.grad, 2 * x.detach()))


def refusals(allocator: str) -> None:
    """A second enable, and what is wrong, raise an error that says so."""
    if allocator == "native":
        return
    child.enable(allocator)
    import warpool.torch

    def raises(name: str, work: Any, *words: str) -> None:
        try:
            work()
            check(name, False, "nothing was raised")
        except (RuntimeError, ValueError) as error:
            check(name, all(word in str(error) for word in words), str(error)[:100])

    raises("enable twice", warpool.torch.enable, "called before")
    torch.ones(1, device="cuda")
    raises("a checkpoint of an unknown pool", lambda: torch._C._cuda_getCheckpointState(0, (0, 1)), "unknown")
    raises("invalid settings", lambda: warpool.torch.set_settings("no_such_key:1"), "no_such_key")
    raises("invalid settings by PyTorch", lambda: torch._C._accelerator_setAllocatorSettings("no_such_key:1"), "key")
    check("the process continues", float(torch.ones(MIB, device="cuda").sum()) == MIB)


def features(allocator: str) -> None:
    """Pools, observers, pinned memory, cuDNN's benchmark mode."""
    child.enable(allocator)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(MIB, device="cuda")
    check("a MemPool", len(pool.snapshot()) == 1 and pool.use_count() == 1 and float(x.sum()) == MIB)
    seen: List[Any] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *values: seen.append(values))
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    check("an out-of-memory observer is called", len(seen) == 1 and seen[0][0] == 0, seen)
    before = torch.cuda.host_memory_stats()["active_requests.allocated"]
    pinned = torch.arange(1000.0, pin_memory=True)
    on_device = pinned.to("cuda", non_blocking=True)
    check("pinned memory", pinned.is_pinned() and torch.equal(on_device.cpu(), pinned))
    check("host_memory_stats", torch.cuda.host_memory_stats()["active_requests.allocated"] > before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.ones(MIB, device="cuda")
    check("the profiler sees allocations", any(event.device_memory_usage for event in profile.events()))
    torch.backends.cudnn.benchmark = True
    convolved = torch.nn.Conv2d(8, 8, 3).cuda()(torch.ones(2, 8, 32, 32, device="cuda"))
    check("cuDNN's benchmark mode", bool(convolved.isfinite().all()))


def late(allocator: str) -> None:
    """Enabling after CUDA was used raises an error, and PyTorch continues with its own allocator."""
    if allocator == "native":
        return
    kept = torch.ones(1, device="cuda")
    try:
        child.enable(allocator)
        check("too late is an error", False, "nothing was raised")
    except RuntimeError as error:
        check("too late is an error", "too late" in str(error), str(error)[:100])
    unchanged = torch.cuda.memory_allocated() == 512 * kept.numel()
    works = float(torch.ones(MIB, device="cuda").sum()) == MIB
    check("PyTorch continues with its own allocator", unchanged and works)
