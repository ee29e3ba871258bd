"""Warpool under PyTorch on a GPU, checked and measured: `python python/tests/gpu/run.py`. Needs PyTorch with CUDA, a GPU, and the shared
object: in an installed wheel, or by --library (`cargo build --release -p warpool-torch` makes target/release/libwarpool_torch.so).

Each scenario runs in a process of its own, with PyTorch's allocator as the control and with Warpool; training runs in turns.
One line per check. Exit status: 0 all of Warpool's checks hold, 1 some do not, 2 they could not be run.
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

HERE = Path(__file__).resolve().parent
SCENARIOS = ("calls", "side_stream", "graph", "dropped_graph", "oom", "threads", "snapshot", "refusals", "late")
WARM_UP = 10
SLOWER_AT_MOST = 1.02


class Report:
    """What was found, printed as it comes."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.failed, self.held = as_json, 0, 0

    def check(self, allocator: str, scenario: str, name: str, ok: bool, detail: str = "") -> None:
        """A verdict. With the native allocator it is a control: it tells of the check, not of Warpool."""
        control = allocator == "native"
        if not control:
            self.failed, self.held = self.failed + (not ok), self.held + ok
        word = "ok" if ok else "FAILED"
        self._line("control " + word if control else word, allocator, scenario, name, detail)

    def note(self, allocator: str, scenario: str, name: str, detail: str) -> None:
        """Something that cannot fail."""
        self._line("note", allocator, scenario, name, detail)

    def _line(self, verdict: str, allocator: str, scenario: str, name: str, detail: str) -> None:
        if self.as_json:
            print(json.dumps({"verdict": verdict, "allocator": allocator, "scenario": scenario, "name": name, "detail": detail}), flush=True)
        else:
            tail = f": {detail}" if detail else ""
            print(f"{verdict:<14} {allocator:<8} {scenario}: {name}{tail}", flush=True)


def child(report: Report, scenario: str, allocator: str, shown: str = "", **environment: str) -> List[Dict[str, Any]]:
    """Runs a scenario; reports its checks, and returns its data."""
    command = [sys.executable, str(HERE / "child.py"), scenario, allocator]
    shown = shown or scenario
    # Without the workspace's form cuBLAS may add in another order each time.
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        report.check(allocator, shown, "the process ends", False, "not within 300 s")
        return []
    found, failed = [], 0
    for line in ended.stdout.splitlines():
        if not line.startswith("@"):
            continue
        said = json.loads(line[1:])
        kind = said.pop("kind")
        if kind == "data":
            found.append(said)
        elif kind == "note":
            report.note(allocator, shown, said["name"], said["detail"])
        else:
            failed += not said["ok"]
            report.check(allocator, shown, said["name"], said["ok"], said["detail"])
    if ended.returncode != 0:
        failed += 1
        report.check(allocator, shown, "the process ends well", False, f"exit status {ended.returncode}")
    if failed:
        print(ended.stdout[-2000:] + ended.stderr[-4000:], file=sys.stderr, flush=True)
    return found


def train(report: Report, rounds: int) -> None:
    """The same losses bit for bit, and the time of a step, in turns."""
    runs: Dict[str, List[Dict[str, Any]]] = {"native": [], "warpool": []}
    for _ in range(rounds):
        for allocator in runs:
            runs[allocator] += child(report, "train", allocator)
    native, warpool = runs["native"], runs["warpool"]
    if len(native) < rounds or len(warpool) < rounds:
        report.check("warpool", "train", "every run came to its end", False)
        return
    reproducible = all(run["losses"] == native[0]["losses"] for run in native)
    same = all(run["losses"] == native[0]["losses"] for run in warpool)
    losses = [float.fromhex(loss) for loss in native[0]["losses"]]
    if reproducible:
        report.check("warpool", "train", "50 losses are the same, bit for bit", same, f"{losses[0]:.4f} to {losses[-1]:.4f}, {rounds} runs each")
    else:
        ours = [float.fromhex(loss) for loss in warpool[0]["losses"]]
        worst = max(abs(a - b) for a, b in zip(losses, ours))
        report.note("native", "train", "not reproducible", "PyTorch's own runs differ from one another here")
        report.check("warpool", "train", "50 losses are about the same", worst < 1e-2, f"largest difference {worst:.1e}")
    for name, found in runs.items():
        medians = (1e3 * statistics.median(run["seconds"][WARM_UP:]) for run in found)
        report.note(name, "train", "a step, median of each round", ", ".join(f"{ms:.3f} ms" for ms in medians))
    ratio = _best_steps(warpool) / _best_steps(native)
    report.check("warpool", "train", "a step's time", ratio <= SLOWER_AT_MOST, f"{ratio:.4f} times native's, each step at its best of {rounds} rounds")
    for name, found in runs.items():
        peak, live, pair = found[0]["reserved"], found[0]["allocated"], min(run["pair_us"] for run in found)
        report.note(name, "train", "peaks", f"reserved {peak / 2**20:.0f} MiB, allocated {live / 2**20:.0f} MiB; torch.empty and free {pair:.2f} us")


def _best_steps(runs: List[Dict[str, Any]]) -> float:
    """The time of all steps after the warm-up, each at its best: what a shared machine adds to a step, it seldom adds in every round."""
    return sum(min(seconds) for seconds in zip(*(run["seconds"][WARM_UP:] for run in runs)))


def calls(report: Report) -> None:
    """The calls answer with the same names as PyTorch's."""
    native, warpool = (child(report, "calls", allocator) for allocator in ("native", "warpool"))
    if native and warpool:
        missing = sorted(set(native[0]["names"]) - set(warpool[0]["names"]))
        report.check("warpool", "calls", "every statistic of PyTorch is there", not missing, ", ".join(missing))


def snapshot(report: Report, binary: Optional[str]) -> None:
    """A dump is read by Python, and by `warpool replay`, address for address."""
    cases = [("native", "", {}), ("warpool", "", {}), ("warpool", " (expandable)", {"WARPOOL_CONF": "expandable_segments:True"})]
    for allocator, kind, environment in cases:
        with tempfile.TemporaryDirectory() as folder:
            path, shown = str(Path(folder) / "snapshot.pickle"), "snapshot" + kind
            child(report, "snapshot", allocator, shown, WARPOOL_TEST_SNAPSHOT=path, **environment)
            if binary is None:
                report.note(allocator, shown, "warpool replay", "not tried: --warpool was not given")
                continue
            ended = subprocess.run([binary, "replay", "--json", path], capture_output=True, text=True, timeout=300)
            try:
                read = json.loads(ended.stdout.splitlines()[0])
                fidelity = read["fidelity"]
                detail = f"{fidelity['addresses_equal']} of {fidelity['addresses_total']} addresses"
                detail += f"; {fidelity['first_difference']}" if fidelity["first_difference"] else ""
                report.check(allocator, shown, "warpool replay: exact", fidelity["checked"] and fidelity["exact"], detail)
            except (ValueError, LookupError):
                report.check(allocator, shown, "warpool replay: exact", False, (ended.stderr or ended.stdout).strip()[-300:])


def find_gpu() -> str:
    """The GPU's name and PyTorch's version, found in another process; else a sentence and exit status 2."""
    question = "import torch; print(torch.cuda.get_device_name(0), '; PyTorch', torch.__version__) if torch.cuda.is_available() else exit(3)"
    ended = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    if ended.returncode == 0:
        return ended.stdout.strip().replace(" ;", ";")
    why = "PyTorch finds no CUDA GPU here" if ended.returncode == 3 else (ended.stderr.strip().splitlines() or ["PyTorch does not start"])[-1]
    print(f"cannot run: {why}", file=sys.stderr)
    sys.exit(2)


def find_library(options: argparse.Namespace) -> str:
    """The shared object that every child will load; else a sentence and exit status 2."""
    wheel = options.wheel
    if wheel:
        # Only unpacked, beside nothing else: no installation is changed.
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
    source.add_argument("--library", help="libwarpool_torch.so to use")
    source.add_argument("--wheel", help="a wheel of Warpool to take it from")
    parser.add_argument("--warpool", help="the `warpool` binary, to replay what was recorded")
    parser.add_argument("--rounds", type=int, default=5, help="training runs with each allocator (5)")
    parser.add_argument("--only", action="append", choices=("train", *SCENARIOS), help="run this scenario only; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()

    os.environ.pop("WARPOOL_DRIVER", None)
    library, gpu = find_library(options), find_gpu()
    report = Report(options.json)
    report.note("", "machine", "GPU", gpu)
    report.note("", "machine", "library", library)
    for scenario in options.only or ("train", *SCENARIOS):
        if scenario == "train":
            train(report, options.rounds)
        elif scenario == "calls":
            calls(report)
        elif scenario == "snapshot":
            snapshot(report, options.warpool)
        elif scenario == "dropped_graph":
            for allocator in ("native", "warpool"):
                child(report, scenario, allocator, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        else:
            for allocator in ("native", "warpool"):
                child(report, scenario, allocator)
    report.note("", "machine", "all", f"{report.held} checks hold, {report.failed} do not")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
