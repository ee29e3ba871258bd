"""What programs really take on this machine's GPU: `python predict_truth.py --out FOLDER`, with `--programs
stranger_programs` those of that file in place of `predict_programs.py`.

Each program runs in a process of its own, three steps:
- `native`: alone on the GPU; peaks of allocated and reserved bytes, memory outside the allocator, time of the steps,
  and a snapshot of the allocator without call stacks;
- `expandable`: the peaks with expandable segments;
- `operators`: operator by operator, what the allocator was asked for, for two steps.

In FOLDER there are then `truth.jsonl`, `snapshots.tar` (of PROGRAM.pickle.xz) and `operators.jsonl.xz`;
`read_operators` reads the last one.

`--verdict FILE` reads a list of {"program", "setting": "native" or "expandable", "bytes"} and runs each program with
0.95 and 1.05 of these bytes as the most that the allocator may reserve: the prediction is right if only the second
fits.
"""

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
STEPS, STEPS_OPERATORS = 3, 2
# One program may take this long, in seconds.
CHILD_SECONDS = 150
MODES = ("native", "expandable", "operators")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time (6)")
    parser.add_argument("--programs", default="predict_programs", help="the file of the programs (predict_programs)")
    parser.add_argument("--only", action="append", help="this program only; may be repeated")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {','.join(MODES)} (all)")
    parser.add_argument("--seconds", type=float, default=500, help="start nothing after this time (500)")
    parser.add_argument("--verdict", help="file of predictions to try with 0.95 and 1.05 of the predicted bytes")
    parser.add_argument("--dry", action="store_true", help="on fake tensors of the CPU, to test the programs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    out = Path(chosen.out)
    if chosen.child:
        return _child(chosen.child, chosen, out)
    out.mkdir(parents=True, exist_ok=True)
    if chosen.verdict:
        return _verdicts(chosen, out)
    until = time.monotonic() + chosen.seconds
    programs = chosen.only or list(importlib.import_module(chosen.programs).PROGRAMS)
    runs = [(mode, name) for mode in chosen.modes.split(",") for name in programs]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        scratch = Path(folder)
        waiting = [pool.submit(_run, name, mode, scratch, until, None, chosen) for mode, name in runs]
        with (out / "truth.jsonl").open("a") as file:
            for it in waiting:
                result = it.result()
                file.write(json.dumps(result) + "\n")
                file.flush()
                print(_line(result), flush=True)
        snapshots = sorted(scratch.glob("*.pickle.xz"))
        if snapshots:
            with tarfile.open(out / "snapshots.tar", "w") as archive:
                for path in snapshots:
                    archive.add(path, path.name)
        sequences = sorted(scratch.glob("*.operators.xz"))
        if sequences:
            (out / "operators.jsonl.xz").write_bytes(b"".join(path.read_bytes() for path in sequences))
    for path in sorted(out.iterdir()):
        if path.is_file():
            print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")
    return 0


def _line(result: Dict[str, Any]) -> str:
    name = f"{result['program']:30} {result['mode']:10}"
    if "error" in result:
        return f"{name} FAILED {result['error'][:200]}"
    text = f"{name} {result['wall']:5.1f} s"
    for key in ("allocated", "reserved", "outside"):
        if key in result:
            text += f", {key} {result[key] / 2**20:.1f} MiB"
    return text + (f", steps {sum(result['steps']):.2f} s" if "steps" in result else "")


def _run(
    name: str, mode: str, scratch: Path, until: float, cap: Optional[int], chosen: argparse.Namespace
) -> Dict[str, Any]:
    """One process; what it reports."""
    about: Dict[str, Any] = {"program": name, "mode": mode, **({"cap": cap} if cap else {})}
    if time.monotonic() > until:
        return {**about, "error": "not started: out of time"}
    began = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    environment["OMP_NUM_THREADS"] = "2"
    if mode == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--out", str(scratch), "--child", name, "--mode", mode]
    command += ["--programs", chosen.programs]
    command += ["--cap", str(cap)] if cap else []
    command += ["--dry"] if chosen.dry else []
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return {**about, "error": f"more than {CHILD_SECONDS} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@")]
    found = json.loads(lines[-1][1:]) if lines else {"error": f"status {ended.returncode}: {ended.stderr[-600:]}"}
    return {**about, **found, "wall": round(time.monotonic() - began, 2)}


class Turn:
    """The GPU for one process alone, or for several: from the first use of CUDA to the end of the process."""

    def __init__(self, scratch: Path, alone: bool) -> None:
        import torch

        self.file, self.alone, self.idle = (scratch / "turn").open("a"), alone, None  # type: ignore[var-annotated]
        self.before = torch.cuda._lazy_init
        torch.cuda._lazy_init = self._take
        # A loader's processes must not keep the turn.
        os.register_at_fork(after_in_child=self.file.close)

    def _take(self) -> None:
        import torch

        torch.cuda._lazy_init = self.before
        fcntl.flock(self.file, fcntl.LOCK_EX if self.alone else fcntl.LOCK_SH)
        with contextlib.suppress(OSError, RuntimeError):
            from warpool.predict.calibrate import card_used

            # The process before may not be gone yet.
            for _ in range(20):
                last, self.idle = self.idle, card_used()
                if self.idle == last:
                    break
                time.sleep(0.15)
        self.before()


def _child(name: str, chosen: argparse.Namespace, scratch: Path) -> int:
    """Runs a program; the last line of the output is what it took."""
    import torch

    mode, cap = chosen.mode, chosen.cap
    os.environ["TQDM_DISABLE"] = "1"
    random.seed(0)
    torch.manual_seed(0)
    try:
        make = importlib.import_module(chosen.programs).PROGRAMS[name]
        if chosen.dry:
            found = _dry(name, make)
        else:
            turn = Turn(scratch, mode == "native" and cap is None)
            if mode == "operators":
                found = _operators(name, make, scratch)
            else:
                found = _measured(name, make, mode, scratch, cap, turn)
    except Exception as error:  # noqa: BLE001
        where = traceback.format_exc().splitlines()[-7:]
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:500], "where": where}
        if isinstance(error, torch.cuda.OutOfMemoryError):
            found["oom"] = True
    sys.stdout.flush()
    print("@" + json.dumps(found), flush=True)
    # What is left (loaders, threads) is of no interest.
    os._exit(0)


def _measured(name: str, make: Any, mode: str, scratch: Path, cap: Optional[int], turn: Turn) -> Dict[str, Any]:
    import torch

    from warpool.predict import watch

    recorded = mode == "native" and cap is None
    if recorded or cap:
        # The lock is taken when the program first uses CUDA; both need the context before.
        first = turn._take

        def take() -> None:
            first()
            if recorded:
                options = {"context": None, "max_entries": watch.MAX_ENTRIES, "clear_history": True}
                torch.cuda.memory._record_memory_history("all", **options)
            if cap:
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(cap / total)

        torch.cuda._lazy_init = take
    began = time.perf_counter()
    step = make()
    torch.cuda.synchronize()
    made, seconds, marks = time.perf_counter() - began, [], [watch.position()]
    peaks = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - began, 4))
        marks.append(watch.position())
        peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    stats = torch.cuda.memory_stats()
    found: Dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "requested": stats["requested_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "peaks": peaks,
        "steps": seconds,
        "made": round(made, 3),
        "marks": marks,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if recorded:
        free, total = torch.cuda.mem_get_info()
        found["outside_by_device"] = total - free - torch.cuda.memory_reserved()
        if turn.idle is not None:
            from warpool.predict.calibrate import card_used

            found["outside"] = card_used() - turn.idle - torch.cuda.memory_reserved()
        snapshot = torch.cuda.memory._snapshot()
        found["events"] = sum(map(len, snapshot["device_traces"]))
        with lzma.open(scratch / f"{name}.pickle.xz", "wb") as file:
            pickle.dump(snapshot, file, protocol=4)
    # Ends the processes of a loader.
    del step
    gc.collect()
    return found


def _operators(name: str, make: Any, scratch: Path, dry: bool = False) -> Dict[str, Any]:
    """Writes what the allocator was asked for, operator by operator."""
    from warpool.predict.watch import Watch

    if not dry:
        import torch

        torch.cuda.init()
    watch, begins = Watch(gpu=not dry), []
    with watch:
        step = make()
        for _ in range(STEPS_OPERATORS):
            begins.append(len(watch.seen))
            step()
    # What is called, once; then numbers of calls, and between them frees (negative bytes) and allocations (in a list).
    calls: Dict[str, int] = {}
    sequence: List[Any] = []
    places, count = [], 0
    for entry, between in watch.found():
        sequence += [-size if action == "f" else [size] for action, size in between]
        if count in begins:
            places.append(len(sequence))
        count += 1
        if entry is not None:
            key = json.dumps([*entry], separators=(",", ":"))
            sequence.append(calls.setdefault(key, len(calls)))
    if not dry:
        line = json.dumps({"program": name, "begins": places, "sequence": sequence}, separators=(",", ":"))
        text = "".join(f"{it}\n" for it in [line, *calls, "0"])
        (scratch / f"{name}.operators.xz").write_bytes(lzma.compress(text.encode(), preset=4))
    return {"operators": count - 1, "distinct": len(calls)}


def read_operators(path: str) -> Iterator[Tuple[Dict[str, Any], List[Any]]]:
    """Of each program: its line (`program`, `begins` of the steps in `sequence`), and the calls, by their numbers."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        about, calls = None, []  # type: ignore[var-annotated]
        for line in file:
            value = json.loads(line)
            if isinstance(value, dict):
                about, calls = value, []
            elif value == 0:
                assert about is not None
                yield about, calls
            else:
                calls.append(value)


def _verdicts(chosen: argparse.Namespace, out: Path) -> int:
    """Tries the predictions."""
    predictions = json.loads(Path(chosen.verdict).read_text())
    until = time.monotonic() + chosen.seconds
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        waiting = []
        for it in predictions:
            caps = [int(it["bytes"] * share) for share in (0.95, 1.05)]
            run = [pool.submit(_run, it["program"], it["setting"], Path(folder), until, cap, chosen) for cap in caps]
            waiting.append((it, run))
        with (out / "verdicts.jsonl").open("a") as file:
            for it, (below, above) in waiting:
                low, high = below.result(), above.result()
                broken = [x["error"] for x in (low, high) if "error" in x and not x.get("oom")]
                fits = [not x.get("oom") for x in (low, high)]
                right = not broken and fits == [False, True]
                wrong += not right
                line = {**it, "fits_at_095": fits[0], "fits_at_105": fits[1], "right": right, "errors": broken}
                file.write(json.dumps(line) + "\n")
                file.flush()
                text = "right" if right else f"WRONG {broken or ''} fits at 0.95: {fits[0]}, at 1.05: {fits[1]}"
                print(f"{it['program']:30} {it['setting']:10} {it['bytes'] / 2**20:.0f} MiB: {text}", flush=True)
    print(f"{len(predictions) - wrong} of {len(predictions)} verdicts are right")
    return 1 if wrong else 0


# Without a GPU.


def _dry(name: str, make: Any) -> Dict[str, Any]:
    """Runs a program on fake tensors of the CPU, with what CUDA would do left out; finds mistakes in the programs."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.overrides import TorchFunctionMode

    class Nothing:
        """A stream that has nothing to do."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

        def wait_stream(self, _: Any) -> None: ...

    def device(value: Any) -> Any:
        text = str(value)
        return torch.device("cpu") if isinstance(value, (str, torch.device)) and text.startswith("cuda") else value

    class OnCpu(TorchFunctionMode):
        """Any CUDA device is the CPU."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {key: device(value) for key, value in (kwargs or {}).items()}
            return func(*(device(it) if isinstance(it, torch.device) else it for it in args), **kwargs)

    class Fake(FakeTensorMode):
        """Values are guesses."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].dtype.is_floating_point else 1
            if func is torch.ops.aten.equal.default:
                return True
            return super().__torch_dispatch__(func, types, args, kwargs)

    to, autocast, scaler = torch.Tensor.to, torch.autocast, torch.amp.GradScaler
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, _: None  # type: ignore[method-assign]
    torch.Tensor.to = lambda self, *a, **k: to(  # type: ignore[method-assign]
        self, *map(device, a), **{name: device(value) for name, value in k.items()}
    )
    nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
    nn.Module.to = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
    nn.Module.bfloat16 = nn.Module.half = lambda self: self  # type: ignore[method-assign]
    torch.cuda.Stream = torch.cuda.stream = Nothing  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: Nothing()  # type: ignore[assignment]
    torch.autocast = lambda *_, **k: autocast("cpu", k.get("dtype", torch.bfloat16))  # type: ignore[assignment,misc]
    torch.amp.GradScaler = lambda *_: scaler("cpu")  # type: ignore[assignment,misc]
    with Fake(allow_non_fake_inputs=True, shape_env=ShapeEnv()), OnCpu():
        found = _operators(name, make, Path("."), dry=True)
    return {**found, "wall": 0.0}


if __name__ == "__main__":
    sys.exit(main())
