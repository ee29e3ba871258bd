"""Elastic memory under PyTorch: `python elastic.py [--layers N] [--json]`. Needs a GPU, PyTorch, and Warpool (the
repository, or installed).

A decode loop over a paged KV cache, attention over block tables in a captured graph, with an elastic cache and with one
of `torch.empty`; what commits cost, of blocks that were there before and of new ones; and a prefill whose activations
come from the stock of the cache, next to the sum of both peaks that two separate pools would need. Exit status 0 if the
results are equal and the bounds hold (docs/elastic.md), 1 if not.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

TOKENS, HEADS, SIZE = 16, 8, 128
MIB = 1 << 20


def decode_step(torch: Any, kv: Any, tables: Any, query: Any, out: Any) -> Callable[[], None]:
    """One step over all layers: each sequence attends to the blocks of its table."""
    layers = kv.shape[0]

    def step() -> None:
        for layer in range(layers):
            keys, values = (kv[layer, which][tables].flatten(1, 2).transpose(1, 2) for which in (0, 1))
            out[layer] = torch.nn.functional.scaled_dot_product_attention(query[layer], keys, values)

    return step


def captured(torch: Any, step: Callable[[], None]) -> Any:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def seconds(torch: Any, act: Callable[[], None], times: int) -> float:
    """The median of the times of a call, with the device's work."""
    measured: List[float] = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        measured.append(time.perf_counter() - start)
    return sorted(measured)[times // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    import warpool.torch

    warpool.torch.enable()
    failed = 0

    def check(name: str, ok: bool, **values: Any) -> None:
        nonlocal failed
        failed += not ok
        line: Dict[str, Any] = {"verdict": "ok" if ok else "FAILED", "name": name, **values}
        print(json.dumps(line) if arguments.json else f"{line.pop('verdict'):<8}{line}", flush=True)

    torch.manual_seed(1)
    shape = (arguments.layers, 2, arguments.blocks, TOKENS, HEADS, SIZE)
    used = arguments.blocks // 2
    kv = warpool.torch.elastic(shape, torch.bfloat16, dim=2)
    tables = torch.randperm(used, device="cuda").view(32, -1)
    query = torch.randn(arguments.layers, 32, HEADS, 1, SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)

    # Captured before a GPU has memory for all of it.
    kv.commit(0, used)
    graph = captured(torch, decode_step(torch, kv, tables, query, out))
    kv[:, :, :used].normal_()
    graph.replay()
    elastic_out = out.clone()
    elastic = seconds(torch, graph.replay, 50)
    plain = torch.empty((arguments.layers, 2, used, *shape[3:]), dtype=torch.bfloat16, device="cuda")
    plain.copy_(kv[:, :, :used])
    plain_out = torch.empty_like(out)
    plain_graph = captured(torch, decode_step(torch, plain, tables, query, plain_out))
    plain_graph.replay()
    check("the contents are equal", torch.equal(plain, kv[:, :, :used]))
    # One or two of half a million numbers differ in the last bits between two copies of a cache, with any allocator.
    difference = (elastic_out.float() - plain_out.float()).abs().max().item()
    check("the results are equal", difference <= 1e-3, difference=difference)
    ratio = elastic / seconds(torch, plain_graph.replay, 50)
    check("a step, of one with torch.empty", ratio <= 1.01, ratio=round(ratio, 4), milliseconds=round(elastic * 1e3, 3))
    del plain, plain_graph, plain_out

    # What was there before, and what is new.
    info = kv.elastic.info()
    before = warpool.torch.page_stats()

    def again() -> None:
        kv.decommit(0, used)
        kv.commit(0, used)

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        again()
    per_block = (time.perf_counter() - start) / 20 / used
    after = warpool.torch.page_stats()
    calls = sum(after[name] - before[name] for name in ("pages_created", "pages_mapped", "pages_unmapped"))
    check("blocks that were there before", calls == 0 and per_block <= 2e-6, calls=calls, us=round(per_block * 1e6, 3))
    kv.decommit(0, arguments.blocks)
    torch.cuda.empty_cache()
    before = warpool.torch.page_stats()["pages_created"]
    torch.cuda.synchronize()
    start = time.perf_counter()
    kv.commit(0, used)
    cold = time.perf_counter() - start
    pages = warpool.torch.page_stats()["pages_created"] - before
    check("a new page", cold / pages <= 60e-6, us=round(cold / pages * 1e6, 1), pages=pages)
    blocks, before = used, warpool.torch.page_stats()["pages_created"]
    start = time.perf_counter()
    for block in range(blocks, min(blocks + 256, arguments.blocks)):
        kv.commit(block, block + 1)
    one_by_one = time.perf_counter() - start
    pages = warpool.torch.page_stats()["pages_created"] - before
    single = one_by_one / max(pages, 1)
    check("a new page, one block at a time", single <= 200e-6, us=round(single * 1e6, 1), pages=pages)

    # Prefill and decode in turns: the activations of one are the cache of the other. The memory of a captured graph
    # would be in use meanwhile, without being allocated.
    del graph
    kv.decommit(0, arguments.blocks)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    peak_live = peak_cache = peak_activations = 0
    base = torch.cuda.memory_allocated()
    for _ in range(4):
        activations = [torch.empty(info.bytes // 8, dtype=torch.uint8, device="cuda") for _ in range(3)]
        activations_bytes = sum(each.nbytes for each in activations)
        kv.commit(0, used // 4)
        peak_live = max(peak_live, torch.cuda.memory_allocated())
        peak_activations = max(peak_activations, activations_bytes)
        del activations
        kv.commit(0, used)
        peak_live = max(peak_live, torch.cuda.memory_allocated())
        peak_cache = max(peak_cache, kv.elastic.info().bytes_committed)
        kv.decommit(used // 4, used)
    reserved = torch.cuda.max_memory_reserved()
    check(
        "peak reserved, of what was live at a time",
        reserved <= 1.01 * peak_live,
        ratio=round(reserved / peak_live, 4),
        two_pools=round((base + peak_cache + peak_activations) / peak_live, 4),
        live_mib=peak_live // MIB,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
