"""Runs PyTorch's own tests over PyTorch's allocator and over Warpool's, and compares them test by test.

usage: suite.py FILE [--class NAME ...] [--mode native backend:native backend:paged] [--out FOLDER] [--known FILE]

FILE is one of PyTorch's test files, of the version of PyTorch that is installed (test/test_cuda.py of the 2.11 branch).
Every mode runs in `--jobs` processes of its own, each of which has its part of the tests and is started again behind a
test that crashed, hung (`--limit` seconds) or broke the device. `--together` runs all modes at the same time; tests
that look at the device's free memory may fail then, and can be run again with `--only`. `--known` is a file of an
earlier run with PyTorch's allocator, so that it need not run again.

`--set SETTINGS` changes the allocator's settings at run time, before the tests, through PyTorch's own function.
Processes that tests spawn use the allocator of the process that starts them; with `--others-native` PyTorch's.

One line per test that passes with PyTorch's allocator and not with Warpool's; then one line per mode. `states.txt` in
the folder has a line for every test. Exit status: 0 if there is none but those of EXPECTED, 1 if there are others, 2 if
the tests could not be run.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

HERE = Path(__file__).resolve().parent

# Tests that fail with pages because they assert PyTorch's placement (python/README.md says what each asserts).
EXPECTED = {
    "backend:paged": {
        "TestBlockStateAbsorption.test_allocate_in_thread_to_pool",
        "TestBlockStateAbsorption.test_expandable_segment_checkpoint_growth",
        "TestCudaMallocAsync.test_allocator_settings",
        "TestMemPool.test_graph_capture_reclaim_2_streams",
        "TestMemPool.test_graph_capture_reclaim_4_streams",
        "TestCuda.test_graph_memory_stats_and_use_result_after_destroy_graph",
    }
}
# After these the device of the process does not work any more.
BROKEN = ("illegal memory access", "illegal instruction", "device-side assert", "unspecified launch")
# The mode of processes that tests spawn: they import this file again.
SPAWNED = "WARPOOL_TEST_SPAWNED_MODE"


def run_tests(options: argparse.Namespace) -> None:
    """The child: runs its part of the tests from number `first` on, with a line of JSON before and after each."""
    import faulthandler
    import unittest

    faulthandler.enable()
    mode, out, job, first = options.child
    path = Path(options.file).resolve()
    sys.path[:0] = [str(path.parent), str(HERE)]
    import child

    child.enable(mode)
    if not options.others_native:
        os.environ[SPAWNED] = mode
    sys.argv = [str(path)]
    module = importlib.import_module(path.stem)
    if options.set:
        _change_settings(module, options.set)
    tests = [test for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)) if _chosen(test, options)]
    tests = tests[int(job) :: options.jobs]
    with open(out, "a", encoding="utf-8") as log:
        for number, test in list(enumerate(tests))[int(first) :]:
            name = test.id().partition(".")[2]
            _write(log, number=number, test=name, state="started")
            result, begun = unittest.TestResult(), time.monotonic()
            # A suite prepares the test's class too.
            unittest.TestSuite([test]).run(result)
            outcomes = (("skipped", result.skipped), ("failed", result.failures), ("failed", result.errors))
            state, why = next(((state, found[0][1][-900:]) for state, found in outcomes if found), ("passed", ""))
            _write(log, number=number, test=name, state=state, seconds=round(time.monotonic() - begun, 2), why=why)
            if any(text in why for text in BROKEN):
                os._exit(3)
        _write(log, number=len(tests), state="end")
    # Leftovers of tests may hang or crash at exit.
    os._exit(0)


def enable_spawned() -> None:
    """In a process that a test spawned: the allocator of the one that started it."""
    if os.environ.get(SPAWNED):
        sys.path.insert(0, str(HERE))
        import child

        child.enable(os.environ[SPAWNED])


def _change_settings(module: Any, settings: str) -> None:
    """Changes settings at run time, as PyTorch's test_cuda_expandable_segments.py does when it is run as a program."""
    import torch

    torch.cuda.memory._set_allocator_settings(settings)
    for value in vars(module).values():
        if "expandable_segments:True" in settings and hasattr(value, "expandable_segments"):
            value.expandable_segments = lambda _: True


def _flat(suite: Any) -> Iterator[Any]:
    import unittest

    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def _chosen(test: Any, options: argparse.Namespace) -> bool:
    name = test.id().rpartition(".")[2]
    if options.only and name not in options.only:
        return False
    return (not options.classes or type(test).__name__ in options.classes) and name not in options.without


def _write(log: Any, **row: Any) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()


def run_mode(mode: str, options: argparse.Namespace) -> Dict[str, str]:
    """Runs all tests in one mode; the state of each."""
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = list(pool.map(lambda job: run_job(mode, job, options), range(options.jobs)))
    return {test: state for states in jobs for test, state in states.items()}


def run_job(mode: str, job: int, options: argparse.Namespace) -> Dict[str, str]:
    """Runs one part of the tests, in as many processes as crashes and hangs make it."""
    named = f"{mode.replace(':', '-')}.{job}"
    out = options.out / f"{named}.jsonl"
    out.write_text("")
    first, stopped = 0, time.monotonic() + options.total
    while time.monotonic() < stopped:
        passed_on = sys.argv[1:]
        process = subprocess.Popen(
            [sys.executable, __file__, *passed_on, "--child", mode, str(out), str(job), str(first)],
            stdout=subprocess.DEVNULL,
            stderr=(options.out / f"{named}.stderr").open("ab"),
        )
        _wait(process, out, options.limit, stopped)
        rows = _rows(out)
        if not rows:
            print(f"{mode}: the tests do not start; see {options.out / f'{named}.stderr'}", file=sys.stderr)
            return {}
        if rows[-1]["state"] == "end":
            break
        if rows[-1]["state"] == "started":
            with out.open("a", encoding="utf-8") as log:
                _write(log, number=rows[-1]["number"], test=rows[-1]["test"], state="failed", why="crashed or hung")
        first = rows[-1]["number"] + 1
    return {row["test"]: row["state"] for row in _rows(out) if "test" in row}


def _wait(process: "subprocess.Popen[bytes]", out: Path, limit: float, stopped: float) -> None:
    """Until the process ends; ends it if it wrote nothing for `limit` seconds after its first line, or at the end of
    all time. Before that it imports the file, which may take long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if out.stat().st_size != size:
            size, since = out.stat().st_size, now
        if (size > 0 and now - since > limit) or now > stopped:
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


def compare(native: Dict[str, str], found: Dict[str, Dict[str, str]], options: argparse.Namespace) -> int:
    """One line per test that passes with PyTorch's allocator alone, one per mode. How many were not expected to."""
    passing = [test for test, state in native.items() if state == "passed" and _of(test, options)]
    unexpected = 0
    for mode, states in found.items():
        for test in passing:
            if states.get(test) != "passed":
                expected = test in EXPECTED.get(mode, ())
                unexpected += not expected
                print(f"{mode}: {test}: {states.get(test, 'not run')}{', as expected' if expected else ''}", flush=True)
        held = sum(states.get(test) == "passed" for test in passing)
        print(f"{mode}: {held} of {len(passing)} tests pass that pass with PyTorch's allocator", flush=True)
    return unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--class", dest="classes", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST", help="these tests only")
    parser.add_argument("--without", nargs="+", default=[], metavar="TEST", help="tests that are left out")
    parser.add_argument("--mode", nargs="+", default=["native", "backend:native", "backend:paged"])
    parser.add_argument("--set", default="", metavar="SETTINGS", help="settings that are changed at run time")
    parser.add_argument("--others-native", action="store_true", help="PyTorch's allocator in processes of tests")
    parser.add_argument("--jobs", type=int, default=1, help="processes for each mode (1)")
    parser.add_argument("--together", action="store_true", help="all modes at the same time")
    parser.add_argument("--out", type=Path, default=Path("suite"), help="the folder of the results (suite)")
    parser.add_argument("--known", type=Path, help="an earlier run with PyTorch's allocator")
    parser.add_argument("--limit", type=float, default=60, help="seconds without news that make a hang")
    parser.add_argument("--total", type=float, default=1200, help="seconds for one mode")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # Under the name that it has in PyTorch, without a version: some tests start the file again by it.
    named = re.sub(r"_[0-9.]+$", "", Path(options.file).stem) + ".py"
    if named != Path(options.file).name:
        if not options.child:
            shutil.copyfile(options.file, options.out / named)
        options.file = str(options.out / named)
    if options.child:
        run_tests(options)
    found: Dict[str, Dict[str, str]] = {}
    with ThreadPoolExecutor(len(options.mode) if options.together else 1) as pool:
        for mode, states in zip(options.mode, pool.map(lambda mode: run_mode(mode, options), options.mode)):
            found[mode] = states
    tests = sorted({test for states in found.values() for test in states})
    with (options.out / "states.txt").open("w", encoding="utf-8") as file:
        for test in tests:
            states = (f"{mode} {states.get(test, 'not run')}" for mode, states in found.items())
            print(f"{test}: {', '.join(states)}", file=file)
    if not all(found.values()):
        return 2
    native = found.pop("native", None) or known(options.known)
    return 1 if compare(native, found, options) else 0


def _of(test: str, options: argparse.Namespace) -> bool:
    of_class, _, name = test.partition(".")
    return (not options.classes or of_class in options.classes) and (not options.only or name in options.only)


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__":
    enable_spawned()
