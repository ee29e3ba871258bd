"""Checks and measures Warpool as PyTorch's allocator on a GPU: `python python/tests/gpu/run.py`.

Needs PyTorch with CUDA, a GPU, and the shared object: from an installed wheel, or by --library
(`cargo build --release -p warpool-torch` builds target/release/libwarpool_torch.so).

Each scenario runs in its own process, with PyTorch's allocator as the control, and with Warpool's `backend:native` and
`backend:paged`; training runs in turns, with Warpool as it is by default. `--only trainings` compares four allocators
instead: two longer trainings, with one line of JSON per run. `--only recorder` checks recordings, and compares the two
trainings with and without them.

One line per check. Exit status: 0 all of Warpool's checks pass, 1 some fail, 2 they could not be run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from compare import PAGED, TRAININGS, compare_recorded, compare_trainings
from processes import Report, child

HERE = Path(__file__).resolve().parent
SCENARIOS = (
    *("calls", "side_stream", "graph", "dropped_graph", "oom", "threads", "snapshot", "refusals", "features", "late"),
    *("mempool", "cudnn", "sharing", "loader", "profiler", "cpp_frames", "collected_graphs"),
    *("reduce_overhead", "max_autotune"),
)
# PyTorch's, and Warpool's with PyTorch's placement and with pages.
ALLOCATORS = ("native", "backend:native", PAGED)
WARM_UP = 10
STEP_RATIO_MAX = 1.02


def train(report: Report, rounds: int) -> None:
    """Compares the losses bit for bit and the time of a step, with runs in turns."""
    runs: Dict[str, List[Dict[str, Any]]] = {"native": [], "warpool": []}
    for _ in range(rounds):
        for allocator in runs:
            runs[allocator] += child(report, "train", allocator)
    native, warpool = runs["native"], runs["warpool"]
    if len(native) < rounds or len(warpool) < rounds:
        report.check("warpool", "train", "all runs complete", False)
        return
    reproducible = all(run["losses"] == native[0]["losses"] for run in native)
    same = all(run["losses"] == native[0]["losses"] for run in warpool)
    losses = [float.fromhex(loss) for loss in native[0]["losses"]]
    if reproducible:
        detail = f"{losses[0]:.4f} to {losses[-1]:.4f}, {rounds} runs each"
        report.check("warpool", "train", "50 losses are the same, bit for bit", same, detail)
    else:
        others = [float.fromhex(loss) for loss in warpool[0]["losses"]]
        worst = max(abs(a - b) for a, b in zip(losses, others))
        report.note("native", "train", "not reproducible", "PyTorch's own runs differ from one another here")
        detail = f"largest difference {worst:.1e}"
        report.check("warpool", "train", "50 losses are about the same", worst < 1e-2, detail)
    for name, found in runs.items():
        medians = (1e3 * statistics.median(run["seconds"][WARM_UP:]) for run in found)
        report.note(name, "train", "a step, median of each round", ", ".join(f"{ms:.3f} ms" for ms in medians))
    ratio = _best_steps(warpool) / _best_steps(native)
    detail = f"{ratio:.4f} times native's, each step at its best of {rounds} rounds"
    report.check("warpool", "train", "a step's time", ratio <= STEP_RATIO_MAX, detail)
    for name, found in runs.items():
        peak, live, pair = found[0]["reserved"], found[0]["allocated"], min(run["pair_us"] for run in found)
        memory = f"reserved {peak / 2**20:.0f} MiB, allocated {live / 2**20:.0f} MiB"
        report.note(name, "train", "peaks", f"{memory}; torch.empty and free {pair:.2f} us")


def _best_steps(runs: List[Dict[str, Any]]) -> float:
    """The time of all steps after the warm-up, each at its fastest round: delays on a shared machine rarely hit a step
    in every round."""
    return sum(min(seconds) for seconds in zip(*(run["seconds"][WARM_UP:] for run in runs)))


def calls(report: Report) -> None:
    """Compares the names of the statistics with PyTorch's."""
    native, *ours = ((allocator, child(report, "calls", allocator)) for allocator in ALLOCATORS)
    for allocator, found in ours:
        if native[1] and found:
            missing = sorted(set(native[1][0]["names"]) - set(found[0]["names"]))
            report.check(allocator, "calls", "all statistics of PyTorch are present", not missing, ", ".join(missing))


def snapshot(report: Report, binary: Optional[str]) -> None:
    """Reads a dump with Python, and replays it with `warpool replay`, which compares every address."""
    for allocator in ("native", "backend:native", "backend:expandable", PAGED):
        with tempfile.TemporaryDirectory() as folder:
            path, title = str(Path(folder) / "snapshot.pickle"), "snapshot"
            child(report, title, allocator, WARPOOL_TEST_SNAPSHOT=path)
            if binary is None:
                report.note(allocator, title, "warpool replay", "skipped: --warpool was not given")
                continue
            ended = subprocess.run([binary, "replay", "--json", path], capture_output=True, text=True, timeout=300)
            try:
                read = json.loads(ended.stdout.splitlines()[0])
                fidelity = read["fidelity"]
                detail = f"{fidelity['addresses_equal']} of {fidelity['addresses_total']} addresses"
                detail += f"; {fidelity['first_difference']}" if fidelity["first_difference"] else ""
                exact = fidelity["checked"] and fidelity["exact"]
            except (ValueError, LookupError):
                exact, detail = False, (ended.stderr or ended.stdout).strip()[-300:]
            if allocator == PAGED:
                # The placement of its pages may depend on the progress of the GPU.
                report.note(allocator, title, "warpool replay: exact" if exact else "warpool replay: not exact", detail)
            else:
                report.check(allocator, title, "warpool replay: exact", exact, detail)


def compiled(report: Report, scenario: str) -> None:
    """Compares what a compiled model gives with what it gives with PyTorch's allocator, whose process is the first
    and fills the cache of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder)
        runs = {}
        for allocator in ALLOCATORS:
            runs[allocator] = child(report, scenario, allocator, TORCHINDUCTOR_CACHE_DIR=cache)
    native = runs.pop("native")
    for allocator, found in runs.items():
        if not native or not found:
            report.check(allocator, scenario, "the run completes", False, "no result, here or with native")
            continue
        for name in ("losses", "tokens"):
            same = found[0][name] == native[0][name]
            first = next((i for i, (a, b) in enumerate(zip(found[0][name], native[0][name])) if a != b), None)
            detail = f"{len(native[0][name])} values" if same else f"the first that differs is number {first}"
            report.check(allocator, scenario, f"{name} are those with PyTorch's allocator", same, detail)


def find_gpu() -> str:
    """The GPU's name and PyTorch's version, from another process; without a GPU, exits with status 2."""
    program = (
        "import torch; torch.cuda.is_available() or exit(3)\n"
        "print(torch.cuda.get_device_name(0), '; PyTorch', torch.__version__)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if ended.returncode == 0:
        return ended.stdout.strip().replace(" ;", ";")
    lines = ended.stderr.strip().splitlines() or ["PyTorch does not start"]
    reason = "PyTorch finds no CUDA GPU here" if ended.returncode == 3 else lines[-1]
    print(f"cannot run: {reason}", file=sys.stderr)
    sys.exit(2)


def find_library(options: argparse.Namespace) -> str:
    """The shared object that every child will load; without one, exits with status 2."""
    wheel = options.wheel
    if wheel:
        # Unpacked to a temporary folder; no installation is changed.
        import zipfile

        folder = tempfile.mkdtemp(prefix="warpool-wheel-")
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("libwarpool_torch.so"))
            options.library = archive.extract(inside, folder)
    if options.library:
        os.environ["WARPOOL_LIBRARY"] = str(Path(options.library).resolve())
    sys.path.insert(0, str(HERE.parent.parent))
    import warpool
    from warpool import _native

    try:
        return f"Warpool {_native.version()}, {warpool.library_path()}"
    except warpool.Error as error:
        print(f"cannot run: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and measures Warpool as PyTorch's allocator on a GPU.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--library", help="path of libwarpool_torch.so")
    source.add_argument("--wheel", help="a wheel of Warpool that contains it")
    parser.add_argument("--warpool", help="path of the `warpool` binary, to replay recordings")
    parser.add_argument("--rounds", type=int, help="training runs with each allocator (5; of `trainings` 3)")
    scenarios = ("train", *SCENARIOS)
    choices = (*scenarios, "recorder", "trainings", *TRAININGS)
    only = "run this scenario only; may be repeated. `recorder` is not run otherwise, nor is `trainings`, all of "
    parser.add_argument("--only", action="append", choices=choices, help=only + " and ".join(TRAININGS))
    parser.add_argument("--steps", type=int, help="steps of each of the trainings, a multiple of 20")
    parser.add_argument("--out", help="append the runs of the trainings to this file, with every loss; JSON lines")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()

    os.environ.pop("WARPOOL_DRIVER", None)
    library, gpu = find_library(options), find_gpu()
    report = Report(options.json)
    report.note("", "machine", "GPU", gpu)
    report.note("", "machine", "library", library)
    for scenario in options.only or scenarios:
        if scenario == "train":
            train(report, options.rounds or 5)
        elif scenario == "trainings" or scenario in TRAININGS:
            named = TRAININGS if scenario == "trainings" else (scenario,)
            compare_trainings(report, named, options.rounds or 3, options.steps, options.out)
        elif scenario == "recorder":
            for allocator in ALLOCATORS[1:]:
                child(report, scenario, allocator)
            compare_recorded(report, options.rounds or 3, options.steps, options.out)
        elif scenario == "calls":
            calls(report)
        elif scenario == "snapshot":
            snapshot(report, options.warpool)
        elif scenario in ("reduce_overhead", "max_autotune"):
            compiled(report, scenario)
        elif scenario == "dropped_graph":
            for allocator in ALLOCATORS:
                child(report, scenario, allocator, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        else:
            for allocator in ALLOCATORS:
                child(report, scenario, allocator)
    report.note("", "machine", "all", f"{report.passed} checks passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
