"""Several processes on one GPU: `python sharing.py [--json]`. Needs a GPU that nobody else uses, PyTorch, and Warpool
(the repository, or installed).

Two and four processes peak in turn, each with half of the card or more, so that together they need more than it has.
With `share:True` none may run out of memory; without it, the control, one must. Then: how much of the card processes
can use together, how long it takes until 10 GiB that one process has freed are another's, and the steps per second of
each process at its peak beside a run in which it has the card alone. Exit status 0 if the bounds hold
(docs/sharing.md), 1 if not.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

HERE = Path(__file__).resolve().parent
GIB, MIB = 1 << 30, 1 << 20
USABLE_MIN, HANDOVER_MAX_S, THROUGHPUT_MIN = 0.98, 0.150, 0.97
RECLAIM_MS = 50


class Process:
    """A child that obeys lines: each is answered by one line of JSON."""

    def __init__(self, conf: str) -> None:
        command = [sys.executable, str(HERE / "sharing.py"), "--child", conf]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.send("ready")

    def ready(self) -> "Process":
        """Waits until it has started: several start at the same time."""
        self.state = self.answer()
        return self

    def send(self, what: str, number: float = 0) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps([what, number]) + "\n")
        self.child.stdin.flush()

    def answer(self) -> Dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self.child.wait()}")
        found: Dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str, number: float = 0) -> Dict[str, Any]:
        self.send(what, number)
        return self.answer()

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def child(conf: str) -> None:
    """The program of a process: a working set of matrices that are multiplied in turn."""
    sys.path.insert(0, str(HERE.parent.parent))
    import torch

    import warpool.torch

    warpool.torch.enable(conf)
    side = 8192  # 128 MiB in bfloat16
    tensor_bytes = side * side * 2
    kept = [torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def reserved() -> int:
        return torch.cuda.memory_reserved()

    def steps(tensors: List[Any], seconds: float) -> float:
        """Steps per second: each multiplies every matrix of the working set once."""
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for tensor in tensors:
                torch.mm(tensor, kept[0], out=kept[1])
            torch.cuda.synchronize()
            count += 1
        return count / (time.perf_counter() - start)

    def act(what: str, number: float) -> Dict[str, Any]:
        if what == "ready":
            return {"total": torch.cuda.mem_get_info()[1], "free": torch.cuda.mem_get_info()[0]}
        if what == "peak":  # works with so many bytes for a while, and frees them
            try:
                tensors = [torch.empty_like(kept[0]).normal_() for _ in range(int(number) // tensor_bytes)]
            except torch.OutOfMemoryError as error:
                return {"out_of_memory": str(error)}
            return {"steps_per_s": steps(tensors, 1.5), "reserved": reserved()}
        if what == "hold":  # has had so many bytes, which are free again
            blocks = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(int(number) // (64 * MIB))]
            torch.cuda.synchronize()
            held = reserved()
            del blocks
            return {"reserved": held}
        if what == "take":  # one allocation, as long as it takes
            start = time.perf_counter()
            try:
                block = torch.empty(int(number), dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                return {"out_of_memory": str(error)}
            seconds = time.perf_counter() - start
            del block
            return {"seconds": seconds, "reserved": reserved()}
        if what == "fill":  # all that it can get, and keeps it until "empty"
            try:
                while True:
                    kept.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                return {"reserved": reserved()}
        if what == "empty":
            del kept[3:]
            return {"reserved": reserved()}
        if what == "reserved":
            return {"reserved": reserved()}
        raise ValueError(what)

    for line in sys.stdin:
        what, number = json.loads(line)
        print(json.dumps(act(what, number)), flush=True)


def conf(shares: bool) -> str:
    share = f",share:True,share_guaranteed:4GiB,share_reclaim_ms:{RECLAIM_MS}"
    return "backend:paged" + (share if shares else "")


def peaks(count: int, shares: bool) -> List[Dict[str, Any]]:
    """Each process peaks in turn, twice; the others keep what they can meanwhile."""
    processes = [process.ready() for process in [Process(conf(shares)) for _ in range(count)]]
    total = processes[0].state["total"]
    peak = total * (0.75 if count == 2 else 0.6)
    results = [process.ask("peak", peak) for _ in range(2) for process in processes]
    for process in processes:
        process.end()
    return results


def alone(fraction: float) -> float:
    process = Process(conf(False)).ready()
    found = process.ask("peak", process.ask("ready")["total"] * fraction)
    process.end()
    rate: float = found["steps_per_s"]
    return rate


def usable() -> float:
    """What a process can get beside an idle one that has had most of the card."""
    first, second = (process.ready() for process in [Process(conf(True)), Process(conf(True))])
    free = second.ask("ready")["free"] + first.ask("reserved")["reserved"] + second.ask("reserved")["reserved"]
    first.ask("hold", free * 0.8)
    # The first one keeps its guarantee of 4 GiB: it fills that afterwards.
    second.ask("fill")
    both = first.ask("fill")["reserved"] + second.ask("reserved")["reserved"]
    first.end()
    second.end()
    return float(both / free)


def handovers() -> List[float]:
    first, second = (process.ready() for process in [Process(conf(True)), Process(conf(True))])
    free = second.ask("ready")["free"]
    times = []
    for _ in range(5):
        # All but 1 GiB is the first one's, free in its cache; it makes no call while the second one allocates.
        first.ask("hold", free - GIB)
        found = second.ask("take", 10 * GIB)
        times.append(found.get("seconds", float("inf")))
    first.end()
    second.end()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return 0
    results: Dict[str, Any] = {"schema_version": 1}
    passed = True

    def check(name: str, holds: Optional[bool], detail: Any) -> None:
        nonlocal passed
        passed &= holds is not False
        results[name] = {"holds": holds, "value": detail}
        if not options.json:
            print(f"{'ok' if holds else 'note' if holds is None else 'FAILED'}: {name}: {detail}", flush=True)

    for count, fraction in ((2, 0.75), (4, 0.6)):
        shared = peaks(count, True)
        out = [found["out_of_memory"] for found in shared if "out_of_memory" in found]
        check(f"{count} processes: none runs out", not out, out[:1])
        rates = [found["steps_per_s"] for found in shared if "steps_per_s" in found]
        base = alone(fraction)
        worst = min(rates, default=0.0) / base
        check(f"{count} processes: throughput of alone", worst >= THROUGHPUT_MIN, round(worst, 4))
    control = peaks(2, False)
    check("without sharing one runs out", any("out_of_memory" in found for found in control), len(control))
    part = usable()
    check("part of the card that is usable", part >= USABLE_MIN, round(part, 4))
    times = handovers()
    check("10 GiB change hands, worst of five", max(times) <= HANDOVER_MAX_S, [round(each, 4) for each in times])
    if options.json:
        print(json.dumps(results))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
