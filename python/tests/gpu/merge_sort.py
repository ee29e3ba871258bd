"""Sorts in two threads of several processes at once, as PyTorch's `test_cusparse_multiple_threads_same_device` does.

usage: merge_sort.py ALLOCATOR [--overwrite] [--seconds 60] [--processes 3]

ALLOCATOR is `native`, PyTorch's own, or one of Warpool's backends (WARPOOL_LIBRARY has the shared object). With
--overwrite, what is free in the cache is overwritten before every product, with floats of 1.

PyTorch 2.11 has a merge sort that may read its temporary memory before that is written (NVIDIA/cccl#5297; merge_sort.cu
shows it without PyTorch), so some rounds fail with every allocator. One line per round that fails, then one for all.
Exit status: 0 no round fails, 1 some do, 2 they could not be run.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any, Dict, List

SIZE, PRODUCTS, TRIALS, THREADS = 1024, 500, 3, 2
FAILED = 3


def run_round(allocator: str, overwrites: bool) -> int:
    """One round, in a process of its own: its device does not work any more after an error."""
    import child

    child.enable(allocator)
    import torch

    index = torch.arange(SIZE, device="cuda")
    ones = torch.ones(SIZE * SIZE, device="cuda")
    weight = torch.sparse_coo_tensor(torch.cartesian_prod(index, index).t(), ones, check_invariants=False)
    sizes = allocated_by_product(weight) if overwrites else []
    for _ in range(TRIALS):
        results = {thread: torch.ones((SIZE, SIZE), device="cuda") for thread in range(THREADS)}
        errors: List[str] = []
        barrier = threading.Barrier(THREADS)
        arguments = (weight, results, sizes, barrier, errors)
        threads = [threading.Thread(target=multiply, args=(thread, *arguments)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not errors and any(result.sum().item() != SIZE * SIZE for result in results.values()):
            errors.append("a product is wrong")
        if errors:
            print(errors[0], flush=True)
            return FAILED
    return 0


def allocated_by_product(weight: Any) -> List[int]:
    """The sizes of what a product allocates."""
    import torch

    result = weight.mm(torch.ones((SIZE, SIZE), device="cuda"))
    torch.cuda.memory._record_memory_history(max_entries=1000)
    weight.mm(result)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return sorted((entry["size"] for entry in entries if entry["action"] == "alloc"), reverse=True)


def multiply(
    thread: int,
    weight: Any,
    results: Dict[int, Any],
    sizes: List[int],
    barrier: threading.Barrier,
    errors: List[str],
) -> None:
    """Products one after another, on a stream of this thread's own."""
    import torch

    stream, product = torch.cuda.Stream(), 0
    torch.cuda.synchronize()
    barrier.wait()
    try:
        with torch.cuda.stream(stream):
            for product in range(PRODUCTS):
                # All at once, so that the cache contains exactly these; they are freed again at once.
                [torch.ones(size // 4, device="cuda") for size in sizes]
                results[thread] = weight.mm(results[thread])
                results[thread].div_(float(SIZE))
        torch.cuda.synchronize()
    except RuntimeError as error:
        errors.append(f"product {product}: {str(error).splitlines()[0]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("allocator")
    parser.add_argument("--overwrite", action="store_true", help="overwrite what is free before every product")
    parser.add_argument("--seconds", type=float, default=60, help="no round begins later (60)")
    parser.add_argument("--processes", type=int, default=3, help="rounds at the same time (3)")
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        # A broken device may hang at exit.
        status = run_round(options.allocator, options.overwrite)
        os._exit(status)
    ended: "Counter[int]" = Counter()
    stop = time.monotonic() + options.seconds

    def rounds() -> None:
        while time.monotonic() < stop:
            command = [sys.executable, __file__, *sys.argv[1:], "--round"]
            process = subprocess.run(command, capture_output=True, text=True)
            ended[process.returncode] += 1
            if process.returncode == FAILED:
                print(process.stdout.strip(), flush=True)
            elif process.returncode != 0:
                print(process.stderr.strip()[-2000:], file=sys.stderr, flush=True)

    lanes = [threading.Thread(target=rounds) for _ in range(options.processes)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    overwritten = ", overwritten" if options.overwrite else ""
    print(f"{options.allocator}{overwritten}: {ended[FAILED]} of {sum(ended.values())} rounds fail", flush=True)
    if set(ended) - {0, FAILED}:
        return 2
    return 1 if ended[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
