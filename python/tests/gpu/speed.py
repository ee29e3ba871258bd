"""Compares the speed of PyTorch's allocator and of Warpool's: `python python/tests/gpu/speed.py --library PATH`.

Each round runs every allocator once, in a process of its own, and begins with another one; the figures are the best of
all rounds, because other load on the machine only adds time. Measured are pairs of an allocation and its free: through
PyTorch's C++ (`raw_alloc` and `raw_delete`, pinned memory), from Python (`torch.empty`), and a decode loop whose time
is the host's (a small transformer with a cache, batch of 4).

Needs a C++ compiler for the pairs in C++ (pairs.cpp). Figures only: nothing here fails for being slow.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

HERE = Path(__file__).resolve().parent
ALLOCATORS = ("native", "backend:native", "backend:paged")
SIZES = (512, 64 << 10, 4 << 20)


def measure(allocator: str, pairs: str) -> Dict[str, float]:
    """All figures of one process, in nanoseconds."""
    import child

    child.enable(allocator)
    import torch

    torch.ones(1, device="cuda")
    library = ctypes.CDLL(pairs)
    found: Dict[str, float] = {}
    for name, title in (("raw_pair", "raw pair"), ("pinned_pair", "pinned pair")):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_size_t, ctypes.c_long]
        for size in SIZES:
            function(size, 1000)
            found[f"{title}, {_size(size)}"] = min(function(size, 20_000) for _ in range(15))
    for size in (4096, 1 << 20):
        empty = torch.empty
        found[f"torch.empty, {_size(4 * size)}"] = _best(lambda: empty(size, device="cuda"), 2000, 25)
    found["a decoded token, batch of 4"] = _decode(torch)
    return found


def _best(work: Callable[[], Any], count: int, rounds: int) -> float:
    best = float("inf")
    turns = range(count)
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in turns:
            work()
        best = min(best, time.perf_counter() - begun)
    return best * 1e9 / count


def _decode(torch: Any) -> float:
    """Nanoseconds per token of a loop without waits for the GPU, which is faster than the host here."""
    torch.manual_seed(1)
    width, heads, layers, batch, cached = 256, 4, 6, 4, 64
    linear = torch.nn.functional.linear
    parts = [
        [torch.randn(rows, width, device="cuda", dtype=torch.half) / 16 for rows in (3 * width, width, width)]
        for _ in range(layers)
    ]

    @torch.no_grad()
    def token(x: Any, caches: List[Any]) -> Any:
        for number, (qkv, project, forward) in enumerate(parts):
            q, k, v = (part.view(batch, heads, 1, -1) for part in linear(x, qkv).chunk(3, dim=-1))
            keys, values = caches[number]
            keys, values = torch.cat((keys, k), dim=2)[:, :, 1:], torch.cat((values, v), dim=2)[:, :, 1:]
            caches[number] = (keys, values)
            mixed = (q @ keys.transpose(-2, -1)).softmax(dim=-1) @ values
            x = x + linear(mixed.reshape(batch, width), project)
            x = x + linear(x, forward).relu()
        return x

    shape = (batch, heads, cached, width // heads)
    best = float("inf")
    for _ in range(12):
        caches = [tuple(torch.zeros(shape, device="cuda", dtype=torch.half) for _ in range(2)) for _ in range(layers)]
        x = torch.zeros(batch, width, device="cuda", dtype=torch.half)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(50):
            x = token(x, caches)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best * 1e9 / 50


def compile_pairs(folder: Path) -> Path:
    """The pairs in C++, compiled against the installed PyTorch."""
    import torch

    sys.path.insert(0, str(HERE.parent.parent))
    from warpool import _backend

    compiler, parts = _backend.command(torch)
    flags = [part for part in parts if not part.endswith(".cpp")]
    made = folder / "libpairs.so"
    subprocess.run([*flags, str(HERE / "pairs.cpp"), "-o", str(made)], check=True)
    return made


def _size(bytes: int) -> str:
    return f"{bytes} B" if bytes < 1024 else f"{bytes >> 10} KiB" if bytes < 1 << 20 else f"{bytes >> 20} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="path of libwarpool_torch.so, if it is not the wheel's")
    parser.add_argument("--pairs", help="path of a compiled pairs.cpp, where there is no compiler")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--child", nargs=2, metavar=("ALLOCATOR", "PAIRS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return 0
    if options.library:
        os.environ["WARPOOL_LIBRARY"] = str(Path(options.library).resolve())
    runs: Dict[str, List[Dict[str, float]]] = {allocator: [] for allocator in ALLOCATORS}
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(options.pairs).resolve() if options.pairs else compile_pairs(Path(folder))
        for number in range(options.rounds):
            turned = ALLOCATORS[number % 3 :] + ALLOCATORS[: number % 3]
            for allocator in turned:
                command = [sys.executable, __file__, "--child", allocator, str(pairs)]
                ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if ended.returncode != 0:
                    print(f"{allocator}: exit status {ended.returncode}", file=sys.stderr)
                    return 1
                runs[allocator].append(json.loads(ended.stdout.splitlines()[-1]))
                if options.json:
                    print(json.dumps({"round": number, "allocator": allocator, **runs[allocator][-1]}), flush=True)
    best = {
        allocator: {name: min(run[name] for run in found) for name in found[0]} for allocator, found in runs.items()
    }
    if options.json:
        print(json.dumps({"best": best}))
        return 0
    print(f"{'nanoseconds, best of ' + str(options.rounds) + ' rounds':<32}" + "".join(f"{a:>24}" for a in ALLOCATORS))
    for name, native in best["native"].items():
        line = f"{name:<32}{native:>24,.0f}"
        for allocator in ALLOCATORS[1:]:
            line += f"{best[allocator][name]:>14,.0f} ({native / best[allocator][name]:>5.2f} x)"
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
