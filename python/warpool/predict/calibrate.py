"""Measures what operators allocate inside: `python -m warpool.predict.calibrate measure -o raw.jsonl.xz` on a machine
with a GPU, about three minutes.

`measure` runs the programs of `cases.py` in several processes and writes each distinct call of an operator once, with
the requests to PyTorch's caching allocator in it. A program that fails is written down with its error. `--dry` runs
them on fake tensors of a CPU, which finds mistakes in the programs; it measures nothing.
"""

import argparse
import ctypes
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

# One program may take this long, in seconds.
CASE_SECONDS = 20
# Cached memory of a process above this is given back between programs.
CACHED_MAX = 4 << 30
# Exit status of a process whose CUDA context is of no use any more: another one goes on after the program.
BROKEN = 3
FORMAT = 1


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m warpool.predict.calibrate", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure with the GPU of this machine")
    measuring.add_argument("-o", "--output", required=True, help="file to write: raw measurements, .jsonl.xz")
    measuring.add_argument("--jobs", type=int, default=8, help="processes at a time (8)")
    measuring.add_argument(
        "--seconds", type=float, default=170, help="stop after this time and keep what there is (170)"
    )
    measuring.add_argument("--constants", help="what the command `constants` printed, if it was run before")
    measuring.add_argument("--only", action="append", help="this family of programs only; may be repeated")
    measuring.add_argument("--dry", action="store_true", help="without a GPU, on fake tensors; measures nothing")
    worker = commands.add_parser("worker")
    worker.add_argument("family")
    worker.add_argument("part", type=int)
    worker.add_argument("output")
    worker.add_argument("--until", type=float, required=True)
    worker.add_argument("--dry", action="store_true")
    commands.add_parser("constants", help="print memory outside the allocator; nothing else may use the GPU meanwhile")
    fitting = commands.add_parser("fit", help="make a table of rules of raw measurements; needs no GPU")
    fitting.add_argument("raw", nargs="+", help="what `measure` wrote")
    fitting.add_argument("-o", "--output", required=True, help="file to write: tables/CARD.json")
    fitting.add_argument("--only", action="append", help="this operator only, as aten.sum.default; may be repeated")
    checking = commands.add_parser("check", help="compare a table with the operators of whole programs")
    checking.add_argument("operators", help="operators.jsonl.xz of tests/gpu/predict_truth.py")
    checking.add_argument("table", help="what `fit` wrote")
    checking.add_argument("--most", type=int, default=40, help="operators to print (40)")
    extending = commands.add_parser("extend", help="add the convolutions of whole programs to a table")
    extending.add_argument("operators", nargs="+", help="operators.jsonl.xz of tests/gpu/predict_truth.py")
    extending.add_argument("table", help="tables/CARD.json, which is written again")
    sampling = commands.add_parser("sample", help="choose a few held-out measurements, for the tests")
    sampling.add_argument("raw", help="what `measure` wrote")
    sampling.add_argument("-o", "--output", required=True, help="file to write, .jsonl")
    chosen = parser.parse_args(arguments)
    if chosen.command == "fit":
        return _fit(chosen)
    if chosen.command == "sample":
        return _sample(chosen)
    if chosen.command == "extend":
        return _extend(chosen)
    if chosen.command == "check":
        from . import compare_programs

        return compare_programs.main(chosen.table, chosen.operators, chosen.most)
    if chosen.command == "measure":
        return measure(chosen)
    if chosen.command == "worker":
        return _worker(chosen)
    return _constants()


def read(path: str) -> Iterator[Dict[str, Any]]:
    """The lines of raw measurements."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _fit(chosen: argparse.Namespace) -> int:
    """Writes the table, and prints the error of each rule on calls that it was not fitted to."""
    from . import fit

    table, rows = fit.fit((line for path in chosen.raw for line in read(path)), chosen.only)
    text = json.dumps(table, separators=(",", ":"))
    Path(chosen.output).write_text(text + "\n")
    print(f"{'operator':55} {'rule':10} {'calls':>6} {'error':>8}  wrong of held out")
    for name, kind, count, error, bad, tried in sorted(rows, key=lambda it: -it[3]):
        print(f"{name:55} {kind:10} {count:6} {error:8.2%}  {bad} of {tried}")
    print(f"{len(table['outputs'])} operators ask for outputs only, {len(rows)} have rules; {len(text) / 1024:.0f} KiB")
    return 0


def _extend(chosen: argparse.Namespace) -> int:
    """Adds the convolutions of whole programs to a table."""
    from . import compare_programs, convolutions, fit

    table = json.loads(Path(chosen.table).read_text())
    samples = [it for path in chosen.operators for _, _, calls in compare_programs.programs(path) for it in calls]
    for name in fit.CONVOLUTIONS:
        rule = table["operators"][name]
        before = sum(map(len, rule["near"].values()))
        rule.update(convolutions.fit([it for it in samples if it.call.name == name], rule))
        print(f"{name}: {sum(map(len, rule['near'].values())) - before} more")
    Path(chosen.table).write_text(json.dumps(table, separators=(",", ":")) + "\n")
    return 0


def _sample(chosen: argparse.Namespace) -> int:
    """Writes two held-out calls of each operator, more of convolutions, without those of long arguments."""
    from . import fit

    counts: Dict[str, int] = {}
    with open(chosen.output, "w") as file:
        for line in read(chosen.raw):
            if "op" not in line or line["f"] == "convolutions_benchmark" or any(it[0] in "rx" for it in line["ev"]):
                continue
            most = 20 if line["op"] in fit.CONVOLUTIONS else 2 if any(it[0] == "a" for it in line["ev"]) else 0
            if not most and counts.get("outputs only", 0) < 100:
                most, name = 1, "outputs only"
            else:
                name = line["op"]
            text = json.dumps([line["op"], line["in"], line["out"], line["ev"]], separators=(",", ":"))
            if counts.get(line["op"], 0) >= most or len(text) > 900:
                continue
            if not fit.sample(line["op"], line["in"], line["out"], line["ev"]).held_out:
                continue
            counts[line["op"]] = counts.get(line["op"], 0) + 1
            counts[name] = counts.get(name, 0) + (name != line["op"])
            file.write(text + "\n")
    return 0


def measure(chosen: argparse.Namespace) -> int:
    """Starts the processes, and joins what they write."""
    from . import cases

    began = time.monotonic()
    until = time.time() + chosen.seconds
    families = chosen.only or list(cases.FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        header, lines = _machine(chosen.dry), []
        if chosen.constants:
            lines = [json.loads(line) for line in Path(chosen.constants).read_text().splitlines() if line[:1] == "{"]
        elif not chosen.dry:
            # Alone, before any other process uses the GPU.
            ended = subprocess.run(_command("constants"), capture_output=True, text=True, env=_environment())
            lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
            if ended.returncode:
                lines.append({"failed": "constants", "error": ended.stderr[-500:]})
        parts = [(family, part) for family in families for part in range(cases.PARTS[family])]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            work = [pool.submit(_part, family, part, folder, until, chosen.dry) for family, part in parts]
            summary = [it.result() for it in work]
        header["seconds"] = round(time.monotonic() - began, 1)
        with open(chosen.output, "wb") as joined:
            text = "".join(json.dumps(it) + "\n" for it in [header, *lines])
            joined.write(lzma.compress(text.encode()))
            for files in (it["files"] for it in summary):
                joined.writelines(Path(path).read_bytes() for path in files)
    for it in summary:
        print(it["text"])
    size = os.path.getsize(chosen.output)
    print(f"measured in {time.monotonic() - began:.0f} s: {chosen.output}, {size / 2**20:.1f} MiB")
    return 0


def _command(*arguments: str) -> List[str]:
    return [sys.executable, "-m", "warpool.predict.calibrate", *arguments]


def _environment() -> Dict[str, str]:
    package = str(Path(__file__).resolve().parent.parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    # A size is what is asked for, whatever the allocator does; its settings are the default ones.
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}


def _part(family: str, part: int, folder: str, until: float, dry: bool) -> Dict[str, Any]:
    """One part of a family: a process, and another one each time that it breaks."""
    began, files, statuses = time.monotonic(), [], []
    progress = Path(folder) / f"{family}-{part}.progress"
    for attempt in range(12):
        path = str(Path(folder) / f"{family}-{part}-{attempt}.xz")
        command = _command("worker", family, str(part), path, "--until", str(until), *(["--dry"] if dry else []))
        log = Path(folder) / f"{family}-{part}-{attempt}.log"
        with log.open("w") as output:
            started = subprocess.Popen(command, env=_environment(), stdout=output, stderr=output)
            try:
                started.wait(max(1.0, until + CASE_SECONDS + 10 - time.time()))
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
                statuses.append("killed: out of time")
                break
            finally:
                if os.path.exists(path):
                    files.append(path)
        if started.returncode == 0:
            break
        tail = log.read_text()[-300:].replace("\n", " | ")
        statuses.append(f"status {started.returncode}: {tail}")
        if not progress.exists() or time.time() > until:
            break
    done = json.loads(progress.read_text()) if progress.exists() else {}
    text = f"{family} {part}: {done.get('next', 0)} of {done.get('of', '?')} programs, {done.get('calls', 0)} calls, "
    text += f"{done.get('failed', 0)} failed, {time.monotonic() - began:.0f} s {'; '.join(statuses)}"
    return {"files": [it for it in files if _whole(it)], "text": text}


def _whole(path: str) -> bool:
    """What a killed process wrote may end within a block: repairs it by reading what can be read."""
    lines = []
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                lines.append(line)
        return True
    except (EOFError, lzma.LZMAError, UnicodeDecodeError):
        kept = "".join(line for line in lines if line.endswith("\n"))
        Path(path).write_bytes(lzma.compress(kept.encode()))
        return bool(kept)


def _machine(dry: bool) -> Dict[str, Any]:
    """What the measurements hold for."""
    import torch

    about: Dict[str, Any] = {"format": FORMAT, "torch": torch.__version__, "cuda": torch.version.cuda, "dry": dry}
    if dry:
        return about
    # In another process: this one must have no context while the constants are measured.
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0);"
        "names = [n for n in dir(p) if not n.startswith('_') and isinstance(getattr(p, n), (int, float, str))];"
        "print(json.dumps({**{n: getattr(p, n) for n in names}, 'cudnn': torch.backends.cudnn.version()}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"cannot measure: {(ended.stderr.strip().splitlines() or ['no GPU'])[-1]}")
    properties = json.loads(ended.stdout)
    return {**about, "card": properties["name"], "cudnn": properties.pop("cudnn"), "properties": properties}


class _OutOfTime(Exception):
    """A program takes too long."""


def _worker(chosen: argparse.Namespace) -> int:
    """Measures a part of a family, from where the process before it stopped."""
    import torch

    from . import cases
    from .watch import Watch

    def stop(*_: Any) -> None:
        raise _OutOfTime(f"more than {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    listed = list(cases.FAMILIES[chosen.family](random.Random(f"{chosen.family}")))
    # In another order, so that a family that runs out of time has something of everything.
    random.Random(1).shuffle(listed)
    listed = listed[chosen.part :: cases.PARTS[chosen.family]]
    progress = Path(chosen.output.rsplit("-", 1)[0] + ".progress")
    done = json.loads(progress.read_text()) if progress.exists() else {"next": 0, "calls": 0, "failed": 0}
    first = done["next"]
    mode = _Dry(cases) if chosen.dry else None
    watch = Watch(gpu=not chosen.dry)
    torch.manual_seed(0)
    known = set()
    status = 0
    with lzma.open(chosen.output, "wt", encoding="utf-8", preset=2) as file:
        for number in range(first, len(listed)):
            if time.time() > chosen.until:
                break
            label, program = listed[number]
            # Before the program, so that one that ends the process is not tried again.
            done.update(next=number + 1, of=len(listed))
            progress.write_text(json.dumps(done))
            signal.alarm(CASE_SECONDS)
            try:
                with watch if mode is None else mode.watched(watch):
                    program()
                entries = [it for it, _ in watch.found() if it is not None]
                signal.alarm(0)
            except Exception as error:  # noqa: BLE001
                signal.alarm(0)
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                file.write(json.dumps({"failed": f"{chosen.family}: {label}", "error": text}) + "\n")
                done["failed"] += 1
                if "CUDA error" in text or "illegal" in text:
                    status = BROKEN
                    break
                error = None  # type: ignore[assignment]
                watch.clear()
                continue
            for entry in entries:
                key = entry.key()
                if key in known:
                    continue
                known.add(key)
                line = {"f": chosen.family, "c": number, "op": entry.name, "in": entry.arguments, "out": entry.outputs}
                line["ev"] = entry.events
                if entry.thread or entry.stream:
                    line["at"] = [entry.thread, entry.stream]
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                done["calls"] += 1
            del entries
            if mode is None and torch.cuda.memory_reserved() > CACHED_MAX:
                torch.cuda.empty_cache()
                watch.clear()
    progress.write_text(json.dumps(done))
    return status


class _Dry:
    """Fake tensors on the CPU in place of a GPU."""

    def __init__(self, cases: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        cases.DEVICE = "cpu"
        self.mode = lambda: FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def watched(self, watch: Any) -> Any:
        """A watch around fake tensors."""
        import contextlib

        stack = contextlib.ExitStack()
        stack.enter_context(self.mode())
        stack.enter_context(watch)
        return stack


# Constants: memory outside the allocator.


def card_used() -> int:
    """Bytes in use on the card, by its management library, which needs no context."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    for call in (
        lambda: library.nvmlInit_v2(),
        lambda: library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        lambda: library.nvmlDeviceGetMemoryInfo(handle, memory),
    ):
        code = call()
        if code:
            raise RuntimeError(f"NVML returned {code}")
    return int(memory[2])


def _constants() -> int:
    """Prints the memory that the context takes, and each library's first use, outside the allocator."""
    try:
        idle: Optional[int] = card_used()
    except (OSError, RuntimeError) as error:
        print(json.dumps({"failed": "constants: idle", "error": str(error)}))
        idle = None
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def attention(backend: Any) -> None:
        x = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(x, x, x).sum().backward()

    def model(dtype: Any) -> None:
        layers = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).to("cuda", dtype)
        layers(torch.randn(4, 16, 32, 32, device="cuda", dtype=dtype)).sum().backward()

    x = lambda dtype=torch.float32: torch.randn(256, 256, device="cuda", dtype=dtype)
    stages: List[Tuple[str, Any]] = [
        ("fill", lambda: torch.zeros(1000, device="cuda")),
        ("random numbers", lambda: torch.randn(1000, device="cuda")),
        ("elementwise", lambda: (x() * 2 + 1).relu().sum()),
        ("cuBLAS f32", lambda: x() @ x()),
        ("cuBLAS bf16", lambda: x(torch.bfloat16) @ x(torch.bfloat16)),
        ("cuBLASLt", lambda: F.linear(x(torch.bfloat16), x(torch.bfloat16), x(torch.bfloat16)[0])),
        ("batched", lambda: torch.bmm(x()[None], x()[None])),
        ("layer_norm, softmax", lambda: F.layer_norm(x().requires_grad_(), (256,)).softmax(-1).sum().backward()),
        (
            "cross_entropy",
            lambda: F.cross_entropy(x().requires_grad_(), torch.zeros(256, device="cuda").long()).backward(),
        ),
        ("embedding", lambda: F.embedding(torch.zeros(9, device="cuda").long(), x().requires_grad_()).sum().backward()),
        ("sort", lambda: torch.randn(100_000, device="cuda").sort()),
        ("AdamW foreach", lambda: _step(torch.optim.AdamW, foreach=True)),
        ("AdamW fused", lambda: _step(torch.optim.AdamW, fused=True)),
        ("SGD", lambda: _step(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("attention flash", lambda: attention(SDPBackend.FLASH_ATTENTION)),
        ("attention efficient", lambda: attention(SDPBackend.EFFICIENT_ATTENTION)),
        ("attention cudnn", lambda: attention(SDPBackend.CUDNN_ATTENTION)),
        ("cuDNN f32", lambda: model(torch.float32)),
        ("cuDNN bf16", lambda: model(torch.bfloat16)),
        ("cuDNN LSTM", lambda: nn.LSTM(64, 64).cuda()(torch.randn(9, 3, 64, device="cuda"))[0].sum().backward()),
        ("cuFFT", lambda: torch.fft.fft(x())),
        ("cuSOLVER", lambda: torch.linalg.inv(x())),
        ("second stream", _second_stream),
    ]
    torch.cuda.init()
    last = outside()
    line: Dict[str, Any] = {"idle": idle, "context": last, "stages": []}
    if idle is not None:
        line["context"] = card_used() - idle - torch.cuda.memory_reserved()
        line["before"] = last - line["context"]
    for name, stage in stages:
        try:
            stage()
            now = outside()
            line["stages"].append([name, now - last])
            last = now
        except Exception as error:  # noqa: BLE001
            line["stages"].append([name, f"{type(error).__name__}: {error}".splitlines()[0][:200]])
    print(json.dumps({"constants": line}))
    return 0


def _step(kind: Any, **options: Any) -> None:
    import torch

    parameters = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(4)]
    for it in parameters:
        it.grad = torch.ones_like(it)
    kind(parameters, **options).step()


def _second_stream() -> None:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.randn(256, 256, device="cuda") @ torch.randn(256, 256, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
