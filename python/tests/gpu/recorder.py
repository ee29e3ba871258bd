"""Recordings that a program writes about itself, on a GPU. Started by child.py (`recorder`): what is recorded where
memory runs out, what the events take in host memory, and how long other threads wait while a recording is written.

run.py (`--only recorder`) also compares the two trainings with it on, call stacks included, with PyTorch's allocator.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, List

import child
from child import check, note

RECORDED = "record:oom,record_events:1000000"
EVENTS = 1_000_000
MEMORY_MAX = 256 * 10**6
PAUSE_MAX = 0.020
GIB = 1 << 30


def recorder(allocator: str) -> None:
    """All of it, in one process."""
    folder = tempfile.TemporaryDirectory()
    os.environ["WARPOOL_RECORD_DIR"] = folder.name
    child.enable(f"{allocator},{RECORDED}")
    import torch

    import warpool.torch

    _out_of_memory(torch, Path(folder.name))
    _events(torch)
    _pauses(torch, warpool.torch, Path(folder.name))
    folder.cleanup()


def _weights(torch: Any) -> Any:
    return torch.empty(GIB, dtype=torch.uint8, device="cuda")


def _out_of_memory(torch: Any, folder: Path) -> None:
    import warpool

    kept = _weights(torch)
    total = torch.cuda.get_device_properties(0).total_memory
    begun = time.perf_counter()
    try:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        check("it runs out of memory", False, "nothing was raised")
        return
    except torch.cuda.OutOfMemoryError as error:
        text = str(error)
    note("the exception took", f"{time.perf_counter() - begun:.3f} s")
    lines = text.splitlines()[-6:]
    begins = ("Why: ", "Asked for: ", "Then: ", "Most is held by: ", "What to do: ", "Recording: ")
    right = len(lines) == 6 and all(line.startswith(begin) for line, begin in zip(lines, begins))
    check("the text ends with the lines that matter", right, text)
    check("the line that holds most is named", "recorder.py" in lines[3], lines[3])
    recordings = sorted(folder.glob("*.pickle"))
    check("there is one recording", len(recordings) == 1, recordings)
    found = warpool.explain(str(recordings[0]), fits=False)
    check("it explains itself", found.holders[0].bytes == kept.numel(), found.holders[0])


def _events(torch: Any) -> None:
    """A million events of realistic stacks: those of a model's layers."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).cuda()
    x = torch.zeros(4, 64, device="cuda")

    def call(depth: int) -> None:
        if depth:
            call(depth - 1)
        else:
            layers(x)

    call(20)
    before = _resident()
    rounds = EVENTS // (3 * 8)
    for number in range(rounds):
        call(number % 30)
    torch.cuda.synchronize()
    grown = _resident() - before
    check("a million events take at most 256 MB of the host", grown <= MEMORY_MAX, f"{grown / 1e6:.1f} MB")


def _pauses(torch: Any, pool: Any, folder: Path) -> None:
    """The longest pair of an allocation and its free in a thread, with and without a recording at the same time."""
    longest: List[float] = []
    running = [True]

    def work() -> None:
        most = 0.0
        with torch.cuda.stream(torch.cuda.Stream()):
            while running[0]:
                begun = time.perf_counter()
                torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
                most = max(most, time.perf_counter() - begun)
        longest.append(most)

    for recorded in (False, True):
        running[0] = True
        thread = threading.Thread(target=work)
        thread.start()
        begun = time.perf_counter()
        if recorded:
            pool.record_now(folder / "pauses.pickle")
        else:
            time.sleep(1)
        took = time.perf_counter() - begun
        running[0] = False
        thread.join()
        note("longest pair" + (" while a recording is written" if recorded else ""), f"{longest[-1] * 1e3:.3f} ms")
        note("took", f"{took:.3f} s")
    check("no pair waits for more than 20 ms", longest[1] <= PAUSE_MAX, f"{longest[1] * 1e3:.3f} ms")


def _resident() -> int:
    """Bytes of this process in the host's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
