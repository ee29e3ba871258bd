"""The scenarios, by name: each takes the allocator's name, runs in a fresh process, and reports by `child.check`, `note` and `data`.

The same code runs with PyTorch's own allocator, as the control: what PyTorch itself does not do is no fault of Warpool's.
"""

import gc
import os
import pickle
import queue
import threading
import time
import warnings
from typing import Any, List

import child
import torch
from child import check, data, note

import model as models

MIB, GIB = 1 << 20, 1 << 30


def train(allocator: str) -> None:
    """Fifty steps: losses bit for bit, the time of every step, the peaks."""
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
    """What it costs to make and drop a tensor that is cached, from Python; the best of some rounds."""
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            torch.empty(4096, device="cuda")
        best = min(best, (time.perf_counter() - start) / 1000)
    return best * 1e6


def side_stream(allocator: str) -> None:
    """A block that a side stream still reads is not given out again, if it was recorded."""
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
        at_once = y.data_ptr() == address
        late = side.query()
        torch.cuda.synchronize()
        intact = bool((out == 7.0).all())
        if recorded:
            check("the side stream was still at work", not late)
            check("a recorded block is not given out again", not at_once)
            check("a recorded block keeps its contents", intact)
            z = torch.empty(count, device="cuda")
            check("it comes back once the stream has passed", z.data_ptr() == address)
            del z
        else:
            note("without record_stream", f"given out at once: {at_once}, contents intact: {intact}")
        del y, out
        torch.cuda.empty_cache()


def graph(allocator: str) -> None:
    """Captured graphs: a thousand replays, a shared pool, random numbers, training, and memory given back."""
    child.enable(allocator)
    models.reproducible()
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4))).cuda().requires_grad_(False)
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
        # Other allocations come and go: none of them may lie where a graph writes.
        kept.append(torch.full((1 + turn * 977 % 300_000,), float(turn), device="cuda"))
        if len(kept) > 20:
            old, value = kept.pop(0), float(turn - 20)
            if not bool((old == value).all()):
                check("other tensors are left alone by replays", False, f"turn {turn}")
                break
        expected_middle = net(numbers.cuda())
        expected = net(expected_middle) + 1
        equal += bool(torch.equal(middle, expected_middle) and torch.equal(result, expected))
        worst = max(worst, float((result - expected).abs().max()))
    check("1000 replays of two graphs with a shared pool", worst < 1e-4, f"{equal} bit for bit, largest difference {worst:.1e}")

    del middle, result, kept, old, expected, expected_middle
    first.reset()
    second.reset()
    del first, second
    after = _reserved_at_rest()
    check("memory is back after reset and empty_cache", after <= before < during, f"before {before}, during {during}, after {after}")

    _fresh_streams()
    _random_numbers()
    _graphed_training()


def _reserved_at_rest() -> int:
    """What is reserved once everything is given back that nobody uses; PyTorch keeps cuBLAS's workspaces otherwise, one of them in the graphs' pool."""
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
    """Streams that never allocated before the capture: the allocator meets them when they capture already."""
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
    check("a capture that forks to a stream that never allocated", torch.equal(result.cpu(), torch.arange(1000.0) * 3 + 1))


def _random_numbers() -> None:
    torch.cuda.manual_seed(3)
    drawn = torch.cuda.CUDAGraph()
    with torch.cuda.graph(drawn):
        numbers = torch.rand(1000, device="cuda")
    drawn.replay()
    once = numbers.clone()
    drawn.replay()
    check("a replay draws new random numbers", not torch.equal(once, numbers) and 0.4 < float(numbers.mean()) < 0.6)


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
        worst = max(worst, max(float((a.grad - b.grad).abs().max()) for a, b in zip(eager.parameters(), graphed.parameters())))
    check("a graphed model trains", worst < 1e-5, f"largest difference of a gradient {worst:.1e}")


def dropped_graph(allocator: str) -> None:
    """A graph that is dropped right after a long replay, with its memory: run.py has expandable segments on, where giving memory back does not wait."""
    child.enable(allocator)
    count, turns = 16 * MIB, 20
    out = torch.zeros(count, device="cuda")
    # Twice on the current stream, and once on one that never allocated anything.
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
        late = stream.query()
        del captured
        gc.collect()
        torch.cuda.empty_cache()
        given_back = torch.cuda.memory_reserved() < before
        others = [torch.full((count,), 5.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        check("the replay was still at work", not late)
        check("the graph's memory is given back", given_back, f"{before} -> {torch.cuda.memory_reserved()}")
        check("the replay came to its end", bool((out == turns + 1).all()), float(out[0]))
        check("new tensors are left alone", all(bool((other == 5.0).all()) for other in others))
        out.zero_()
        del others, static


def oom(allocator: str) -> None:
    """Out of memory is an exception with a report, and the process goes on."""
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

    fails("more than there is", lambda: torch.empty(2 * total, dtype=torch.uint8, device="cuda"))
    fails("piece by piece", lambda: [torch.empty(4 * GIB, dtype=torch.uint8, device="cuda") for _ in range(1 + total // (4 * GIB))])
    fails("in a backward pass", _backward_that_asks(2 * total))

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    pieces = [torch.empty(free // 20, dtype=torch.uint8, device="cuda") for _ in range(14)]
    del pieces
    whole = torch.empty(free // 10 * 7, dtype=torch.uint8, device="cuda")
    check("cached pieces make room for a whole", whole.numel() == free // 10 * 7)
    del whole
    torch.cuda.empty_cache()

    torch.cuda.set_per_process_memory_fraction(0.05)
    check("the fraction is told", torch.cuda.get_per_process_memory_fraction() == 0.05)
    fails("more than the fraction", lambda: torch.empty(int(total * 0.06), dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    check("without the fraction it fits", torch.empty(int(total * 0.06), dtype=torch.uint8, device="cuda").numel() > 0)
    check("they are counted", torch.cuda.memory_stats()["num_ooms"] >= ooms + 4, torch.cuda.memory_stats()["num_ooms"])


def _backward_that_asks(size: int) -> Any:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.empty(size, dtype=torch.uint8, device="cuda")[0]

    return lambda: Asks.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()


def snapshot(allocator: str) -> None:
    """A recorded training step, dumped: run.py gives the file to `warpool replay`."""
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
    check("segments sum up to memory_reserved", sum(s["total_size"] for s in read["segments"]) == reserved, reserved)
    trace: List[Any] = read["device_traces"][0]
    allocs = [entry for entry in trace if entry["action"] == "alloc"]
    frees = [entry for entry in trace if entry["action"] == "free_completed"]
    check("the trace has allocations and frees", allocs and frees, f"{len(trace)} entries")
    ours = [entry for entry in allocs if any(frame["filename"].endswith("model.py") for frame in entry.get("frames", ()))]
    check("stacks name the model's code", len(ours) > 50, f"{len(ours)} of {len(allocs)} allocations")
    blocks = [block for segment in read["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"]
    check("live blocks have stacks", any(block["frames"] for block in blocks))
    torch.cuda.memory._record_memory_history(None)
    check("an empty history once it is off", not torch.cuda.memory._snapshot()["device_traces"][0])
    try:
        torch.cuda.memory._dump_snapshot("/nowhere/at/all.pickle")
        check("an unwritable path is an error", False)
    except OSError as error:
        check("an unwritable path is an error", True, error)


def calls(allocator: str) -> None:
    """PyTorch's own calls about memory answer, and their answers agree."""
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
    held = cuda.memory_reserved()
    cuda.empty_cache()
    check("empty_cache", cuda.memory_reserved() == held - big, f"{held} -> {cuda.memory_reserved()}")
    check("the peak stays", cuda.max_memory_reserved() == held)
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
    check("memory_snapshot", sum(segment["total_size"] for segment in segments) == cuda.memory_reserved(), f"{len(segments)} segments")
    free, total = cuda.mem_get_info()
    check("mem_get_info", 0 < free < total)
    check("torch.accelerator", torch.accelerator.memory_allocated() == big and torch.accelerator.memory_reserved() == cuda.memory_reserved())
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.empty_cache()
    raw = cuda.caching_allocator_alloc(5 * MIB)
    check("caching_allocator_alloc", cuda.memory_allocated() == big + 5 * MIB)
    cuda.caching_allocator_delete(raw)
    check("caching_allocator_delete", cuda.memory_allocated() == big)
    check("an empty tensor", torch.empty(0, device="cuda").numel() == 0 and cuda.memory_allocated() == big)
    del x
    check("nothing is left", cuda.memory_allocated() == 0)


def threads(allocator: str) -> None:
    """Allocations from threads that never set a context, frees in other threads, and backward passes."""
    child.enable(allocator)
    made: "queue.Queue[Any]" = queue.Queue()
    wrong: List[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(200):
                    x = torch.full((1 + (number * 7919 + turn * 104729) % 500_000,), float(number), device="cuda")
                    if turn % 20 == 0 and not bool((x == number).all()):
                        wrong.append(f"thread {number}, turn {turn}")
                    torch.cuda.current_stream().synchronize()
                    made.put(x)
        except BaseException as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not made.empty():
        try:
            made.get(timeout=0.1)
        except queue.Empty:
            pass
    check("eight threads allocate, a ninth frees", not wrong, "; ".join(wrong[:3]))
    check("nothing is left", torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated())
    x = torch.arange(1000.0, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    check("a backward pass", torch.equal(x.grad, 2 * x.detach()))


def refusals(allocator: str) -> None:
    """Too late, twice, and what stays impossible: each says so."""
    if allocator == "native":
        return
    child.enable(allocator)
    import warpool.torch

    def refuses(name: str, work: Any, *words: str) -> None:
        try:
            work()
            check(name, False, "nothing was raised")
        except RuntimeError as error:
            check(name, all(word in str(error) for word in words), str(error)[:100])

    refuses("enable twice", warpool.torch.enable, "called before")
    torch.ones(1, device="cuda")
    refuses("MemPool", torch.cuda.MemPool, "Warpool")
    refuses("graph trees", lambda: torch._C._cuda_getCheckpointState(0, (0, 1)), "cudagraph_trees = False")
    refuses("sharing with another process", torch.ones(4, device="cuda").untyped_storage()._share_cuda_, "torch.distributed")
    refuses("wrong settings", lambda: warpool.torch.set_settings("no_such_key:1"), "no_such_key")
    check("the process goes on", float(torch.ones(MIB, device="cuda").sum()) == MIB)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.backends.cudnn.benchmark = True
    made = torch.nn.Conv2d(8, 8, 3).cuda()(torch.ones(2, 8, 32, 32, device="cuda"))
    check("cudnn.benchmark stays off with a word, and a convolution works", len(warned) == 1 and bool(made.isfinite().all()))


def late(allocator: str) -> None:
    """Enabling after CUDA was used is refused, and PyTorch goes on with its own allocator."""
    if allocator == "native":
        return
    kept = torch.ones(1, device="cuda")
    try:
        child.enable(allocator)
        check("too late is an error", False, "nothing was raised")
    except RuntimeError as error:
        check("too late is an error", "too late" in str(error), str(error)[:100])
    check("PyTorch goes on", torch.cuda.memory_allocated() == 512 * kept.numel() and float(torch.ones(MIB, device="cuda").sum()) == MIB)
