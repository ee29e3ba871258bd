"""Runs PyTorch's own tests over PyTorch's allocator and over Warpool's, and compares them test by test.

usage: suite.py FILE [--class NAME ...] [--mode native backend:native backend:paged] [--out FOLDER] [--known FILE]

FILE is one of PyTorch's test files, of the version of PyTorch that is installed (test/test_cuda.py of the 2.11 branch).
Each mode runs in a process of its own, which is started again behind a test that crashed, hung (`--limit` seconds) or
broke the device. `--known` is a file of an earlier run with PyTorch's allocator, so that it need not run again.

One line per test that passes with PyTorch's allocator and not with Warpool's; then one line per mode. Exit status: 0 if
there is none but those of EXPECTED, 1 if there are others, 2 if the tests could not be run.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

HERE = Path(__file__).resolve().parent

# With pages: what asserts PyTorch's placement (python/README.md says what each asserts).
EXPECTED = {
    "backend:paged": {
        "TestBlockStateAbsorption.test_allocate_in_thread_to_pool",
        "TestCudaMallocAsync.test_allocator_settings",
        "TestMemPool.test_graph_capture_reclaim_2_streams",
        "TestMemPool.test_graph_capture_reclaim_4_streams",
        "TestCuda.test_graph_memory_stats_and_use_result_after_destroy_graph",
    }
}
# After these the device of the process does not work any more.
BROKEN = ("illegal memory access", "device-side assert", "unspecified launch")


def run_tests(mode: str, path: str, out: str, first: int, classes: List[str]) -> None:
    """The child: runs the tests from number `first` on, with a line of JSON before and after each."""
    import faulthandler
    import unittest

    faulthandler.enable()
    sys.path[:0] = [str(Path(path).resolve().parent), str(HERE)]
    import child

    child.enable(mode)
    sys.argv = [path]
    module = importlib.import_module(Path(path).stem)
    tests = [test for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)) if _chosen(test, classes)]
    with open(out, "a", encoding="utf-8") as log:
        for number, test in list(enumerate(tests))[first:]:
            name = test.id().partition(".")[2]
            _write(log, number=number, test=name, state="started")
            result, begun = unittest.TestResult(), time.monotonic()
            test.run(result)
            outcomes = (("skipped", result.skipped), ("failed", result.failures), ("failed", result.errors))
            state, why = next(((state, found[0][1][-900:]) for state, found in outcomes if found), ("passed", ""))
            _write(log, number=number, test=name, state=state, seconds=round(time.monotonic() - begun, 2), why=why)
            if any(text in why for text in BROKEN):
                os._exit(3)
        _write(log, number=len(tests), state="end")
    # What tests left behind may hang or crash at exit.
    os._exit(0)


def _flat(suite: Any) -> Iterator[Any]:
    import unittest

    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def _chosen(test: Any, classes: List[str]) -> bool:
    return not classes or type(test).__name__ in classes


def _write(log: Any, **row: Any) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()


def run_mode(mode: str, options: argparse.Namespace) -> Dict[str, str]:
    """Runs all tests in one mode; the state of each."""
    out = options.out / f"{mode.replace(':', '-')}.jsonl"
    out.write_text("")
    first, stopped = 0, time.monotonic() + options.total
    while time.monotonic() < stopped:
        command = [sys.executable, __file__, options.file, "--child", mode, str(out), str(first)]
        process = subprocess.Popen(
            [*command, *options.classes], stdout=subprocess.DEVNULL, stderr=(options.out / "stderr.log").open("ab")
        )
        _wait(process, out, options.limit, stopped)
        rows = _rows(out)
        if not rows:
            print(f"{mode}: the tests do not start; see {options.out / 'stderr.log'}", file=sys.stderr)
            sys.exit(2)
        if rows[-1]["state"] == "end":
            break
        if rows[-1]["state"] == "started":
            with out.open("a", encoding="utf-8") as log:
                _write(log, number=rows[-1]["number"], test=rows[-1]["test"], state="failed", why="crashed or hung")
        first = rows[-1]["number"] + 1
    return {row["test"]: row["state"] for row in _rows(out) if "test" in row}


def _wait(process: "subprocess.Popen[bytes]", out: Path, limit: float, stopped: float) -> None:
    """Until the process ends; ends it if it wrote nothing for `limit` seconds, or at the end of all time."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if out.stat().st_size != size:
            size, since = out.stat().st_size, now
        if now - since > limit or now > stopped:
            process.kill()
            process.wait()
            return
        threading.Event().wait(0.1)


def _rows(path: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def known(path: Optional[Path]) -> Dict[str, str]:
    """States of an earlier run with PyTorch's allocator: of this script, or of one line per test with `native`."""
    if path is None:
        return {}
    words = {"pass": "passed", "skip": "skipped"}
    found = {}
    for row in _rows(path):
        state = row.get("state", row.get("native"))
        test = row.get("test", row.get("id"))
        if test is not None and state is not None:
            found[test] = words.get(state, state)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--class", dest="classes", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--mode", nargs="+", default=["native", "backend:native", "backend:paged"])
    parser.add_argument("--out", type=Path, default=Path("suite"), help="the folder of the results (suite)")
    parser.add_argument("--known", type=Path, help="an earlier run with PyTorch's allocator")
    parser.add_argument("--limit", type=float, default=60, help="seconds without news that make a hang")
    parser.add_argument("--total", type=float, default=1200, help="seconds for one mode")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, out, first, *classes = options.child
        run_tests(mode, options.file, out, int(first), classes)
    options.out.mkdir(parents=True, exist_ok=True)
    # Under the name that it has in PyTorch, without a version: some tests start the file again by it.
    named = options.out / (re.sub(r"_[0-9.]+$", "", Path(options.file).stem) + ".py")
    shutil.copyfile(options.file, named)
    options.file = str(named)
    native = known(options.known)
    unexpected = 0
    for mode in options.mode:
        states = run_mode(mode, options)
        if mode == "native":
            native = states
        passing = [test for test, state in native.items() if state == "passed" and _of(test, options.classes)]
        held = [test for test in passing if states.get(test) == "passed"]
        for test in passing:
            if states.get(test) != "passed":
                expected = test in EXPECTED.get(mode, ())
                unexpected += not expected
                print(f"{mode}: {test}: {states.get(test, 'not run')}{', as expected' if expected else ''}", flush=True)
        print(f"{mode}: {len(held)} of {len(passing)} tests pass that pass with PyTorch's allocator", flush=True)
    return 1 if unexpected else 0


def _of(test: str, classes: List[str]) -> bool:
    return not classes or test.partition(".")[0] in classes


if __name__ == "__main__":
    sys.exit(main())
