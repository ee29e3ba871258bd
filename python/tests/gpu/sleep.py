"""A transformer under PyTorch that generates, sleeps, lets another process fill the GPU, wakes, and generates the same
tokens: `python sleep.py [--conf CONF] [--json]`. Needs a GPU, PyTorch, and Warpool (the repository, or installed).

Checks that the GPU's memory is the driver's meanwhile, that another process can use it, that a graph captured before
replays after waking, that data pointers are the same, and that a full GPU at waking is an error that changes nothing.
Exit status 0 if all hold, 1 if not.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent.parent))

GIB = 1 << 30


def other_process(share: float) -> None:
    """Another process: fills a share of the GPU's free memory, checks it, and waits for a line."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    taken, piece = [], GIB
    while sum(one.numel() for one in taken) + piece <= free * share:
        taken.append(torch.full((piece,), len(taken) % 251, dtype=torch.uint8, device="cuda"))
    ok = all(int(one[::4096].max()) == int(one[::4096].min()) == at % 251 for at, one in enumerate(taken))
    print(json.dumps({"bytes": sum(one.numel() for one in taken), "ok": ok}), flush=True)
    sys.stdin.readline()


class Checks:
    def __init__(self, as_json: bool) -> None:
        self.as_json, self.failed = as_json, 0

    def check(self, name: str, ok: Any, detail: Any = "") -> None:
        self.failed += not ok
        self.line("ok" if ok else "FAILED", name, detail)

    def line(self, verdict: str, name: str, detail: Any) -> None:
        if self.as_json:
            print(json.dumps({"verdict": verdict, "name": name, "detail": str(detail)}), flush=True)
        else:
            print(f"{verdict:<8}{name}{f': {detail}' if detail != '' else ''}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conf", default=None, help="settings, as for warpool.torch.enable")
    parser.add_argument("--cache-gib", type=int, default=20, help="size of the tag kv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--other-process", type=float, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other_process is not None:
        other_process(arguments.other_process)
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    import warpool.torch

    warpool.torch.enable(arguments.conf)
    import model

    checks = Checks(arguments.json)
    model.reproducible()
    with warpool.torch.tag("weights"):
        transformer = model.Transformer(layers=12, width=1024, heads=16).cuda().eval()
        prompt = torch.randint(model.VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(3)).cuda()
    with warpool.torch.tag("kv"):
        cache = torch.empty(arguments.cache_gib * GIB, dtype=torch.uint8, device="cuda")
    cache[:: 1 << 20] = 7

    def asleep() -> List[str]:
        return [one.tag for one in warpool.torch.tags() if one.asleep]

    @torch.no_grad()
    def generate(count: int = 24) -> List[int]:
        tokens = prompt
        for _ in range(count):
            tokens = torch.cat([tokens, transformer(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens[0].tolist()

    before = generate()
    # A decoding step as a graph over the same weights. Its own memory carries a tag too.
    static = torch.zeros(1, 64, dtype=torch.long, device="cuda")
    static[0, :32] = prompt[0]
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            transformer(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), warpool.torch.tag("graphs"), torch.cuda.graph(graph):
        logits = transformer(static)
    graph.replay()
    torch.cuda.synchronize()
    expected = logits.clone()
    pointers = [one.data_ptr() for one in transformer.parameters()] + [cache.data_ptr()]

    torch.cuda.empty_cache()
    free_awake, total = torch.cuda.mem_get_info()
    reserved_awake = torch.cuda.memory_reserved()
    started = time.perf_counter()
    slept = warpool.torch.sleep(["weights", "kv", "graphs"])
    seconds = time.perf_counter() - started
    free_asleep, _ = torch.cuda.mem_get_info()
    gained = free_asleep - free_awake
    tagged = slept.bytes_device
    graph_bytes = sum(one.bytes for one in warpool.torch.tags() if one.tag == "graphs")
    checks.line("note", "memory of the graph that sleeps", f"{graph_bytes >> 20} MiB")
    checks.check("the graph's own memory sleeps too", graph_bytes > 0)
    checks.check("the driver has the memory", gained > tagged * 0.98, f"{gained / GIB:.2f} of {tagged / GIB:.2f} GiB")
    checks.check("memory_reserved fell by it", torch.cuda.memory_reserved() == reserved_awake - tagged)
    counted = all(one.asleep and one.bytes_device == 0 for one in warpool.torch.tags())
    checks.check("all of it is counted as asleep", counted, warpool.torch.tags())
    checks.line("note", "first sleep", f"{seconds:.2f} s, {tagged / seconds / 1e9:.1f} GB/s, pinning included")

    command = [sys.executable, __file__, "--other-process", "0.95"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARPOOL")}
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert other.stdin is not None and other.stdout is not None
    filled = json.loads(other.stdout.readline())
    more = filled["bytes"] > free_awake
    checks.check("another process uses it meanwhile", filled["ok"] and more, f"{filled['bytes'] / GIB:.1f} GiB")
    try:
        warpool.torch.wake()
        checks.check("a full GPU refuses to wake", False)
    except warpool.Error as error:
        text = str(error)
        checks.check("a full GPU at waking is an error that says so", "device memory are needed" in text, text)
    checks.check("and all sleep on", all(one.asleep for one in warpool.torch.tags()))
    other.stdin.write("\n")
    other.stdin.close()
    other.wait()

    started = time.perf_counter()
    woken = warpool.torch.wake("weights")
    checks.check("weights wake before the cache", sorted(asleep()) == ["graphs", "kv"])
    checks.check("the same tokens, with the cache asleep", generate() == before)
    woken_cache = warpool.torch.wake()
    seconds = time.perf_counter() - started
    checks.line("note", "waking, with generation between", f"{seconds:.2f} s")
    again = [one.data_ptr() for one in transformer.parameters()] + [cache.data_ptr()]
    checks.check("the same data pointers", again == pointers)
    returned = woken.bytes_device + woken_cache.bytes_device
    checks.check("as much memory as slept", returned == tagged, f"{returned} of {tagged} bytes")
    checks.check("the cache's contents", int(cache[:: 1 << 20].min()) == int(cache[:: 1 << 20].max()) == 7)
    logits.zero_()
    graph.replay()
    torch.cuda.synchronize()
    checks.check("the captured graph gives the same logits", torch.equal(logits, expected))
    checks.check("the same tokens", generate() == before)

    for keep in ("host", "discard"):
        started = time.perf_counter()
        one = warpool.torch.sleep("kv", keep=keep)
        middle = time.perf_counter()
        warpool.torch.wake("kv")
        ended = time.perf_counter()
        rates = [one.bytes_device / seconds / 1e9 for seconds in (middle - started, ended - middle)]
        checks.line("note", f"kv again, keep={keep}", f"sleep {rates[0]:.1f} GB/s, wake {rates[1]:.1f} GB/s")
    checks.check("discarded contents are zero", int(cache[::4096].max()) == 0)
    checks.check("the same tokens at last", generate() == before)
    checks.line("note", "device", f"{torch.cuda.get_device_name()}, {total / GIB:.1f} GiB, PyTorch {torch.__version__}")
    checks.line("note", "settings", warpool.torch.settings())
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
