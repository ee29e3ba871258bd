"""`warpool.torch.memory_saver` in place of torch_memory_saver, with PyTorch on a GPU: `python memory_saver.py [--conf
CONF]`. Needs a GPU, PyTorch, and Warpool (the repository, or installed).

A program imports torch_memory_saver by name, makes weights, a cache and a captured graph, pauses and resumes them, and
compares pointers, contents, the graph's result and the driver's free memory. Exit status 0 if all hold, 1 if not.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conf", default=None, help="settings, as for warpool.torch.enable")
    arguments = parser.parse_args()
    import torch

    import warpool.torch

    warpool.torch.enable(arguments.conf)
    warpool.torch.memory_saver.install()
    from torch_memory_saver import torch_memory_saver as saver

    failed: List[str] = []

    def check(name: str, ok: Any, detail: Any = "") -> None:
        print(f"{'ok' if ok else 'FAILED':<8}{name}{f': {detail}' if detail != '' else ''}", flush=True)
        if not ok:
            failed.append(name)

    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.arange(256 * MIB, dtype=torch.int32, device="cuda")
        with saver.disable():
            helper = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    with saver.region("cache"):
        cache = torch.full((1024 * MIB,), 3, dtype=torch.uint8, device="cuda")
    graph, given = torch.cuda.CUDAGraph(), torch.zeros(64 * MIB, device="cuda")
    with saver.cuda_graph(graph, tag="graph"):
        result = ((given + 1) * 2).sum()
    graph.replay()
    expected = result.item()
    pointers = [each.data_ptr() for each in (weights, cache, helper)]
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    done = saver.pause()
    freed = torch.cuda.mem_get_info()[0] - before
    # To map the pinned copy of the weights the driver itself takes some memory of the device.
    returned = freed + 16 * MIB >= done.bytes_device > 2048 * MIB
    check("the driver has the memory", returned, f"{freed >> 20} MiB, {done}")
    check("what belongs to no region is there", int(helper.min()) == 7 == int(helper.max()))
    check("weights wake alone", saver.resume("weights").changed == 1)
    check("with their contents", bool((weights == torch.arange(256 * MIB, dtype=torch.int32, device="cuda")).all()))
    saver.resume()
    check("the cache is zero", int(cache.max()) == 0)
    graph.replay()
    check("the graph gives the same", result.item() == expected, expected)
    check("at the same addresses", pointers == [each.data_ptr() for each in (weights, cache, helper)])
    saver.pause("weights")
    saver.pause("weights")
    saver.resume()
    check("twice is the same", int(weights[-1]) == 256 * MIB - 1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
