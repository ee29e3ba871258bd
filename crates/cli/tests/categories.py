#!/usr/bin/env python3
"""Compares the kinds of memory that `warpool explain` finds with what the recorded programs say themselves.

Usage: categories.py WARPOOL [TRUTH...]

A truth file `recordings/NAME.truth.json` was written by the program of `recordings/NAME.pickle.xz` while it ran on
a GPU. It has a moment (`event`; `is_oom`: the last out-of-memory event), every block that was allocated then, as
[address, requested bytes, category], and the peaks of PyTorch's own counters. A recording passes if

* the same blocks are allocated at that moment,
* at least 97 % of their bytes have the category that the program says,
* the peaks of allocated and reserved bytes are PyTorch's.

Needs Python 3.9 and nothing else. Exit status: 0 all passed, 1 one failed, 2 wrong usage.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

RECORDINGS = Path(__file__).resolve().parents[3] / "recordings"
SHARE_MIN = 0.97


def explained(command, truth, recording):
    """The command's answer for the moment of the truth."""
    at = "oom" if truth["is_oom"] else str(truth["event"])
    arguments = [command, "explain", "--no-fits", "--json", "--blocks", "--at", at, str(recording)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != 1:
        raise RuntimeError(f"{len(answers)} devices, one expected")
    return answers[0]


def check(truth, answer):
    """Returns the share of bytes with the right category, what is wrong with categories, and what fails."""
    failures = []
    for name in ("allocated", "reserved"):
        mine, theirs = answer["peaks"][name]["bytes"], truth[f"{name}_peak"]
        if mine != theirs:
            failures.append(f"peaks.{name}.bytes: {mine}, PyTorch counted {theirs}")
    if answer["moment"]["event"] != truth["event"]:
        failures.append(f"moment.event: {answer['moment']['event']}, the program has {truth['event']}")
    found = {block["address"]: block for block in answer["blocks"]}
    missing = [address for address, _, _ in truth["blocks"] if address not in found]
    if missing:
        failures.append(f"{len(missing)} blocks of the program are not listed, the first at {missing[0]:#x}")
    more = found.keys() - {address for address, _, _ in truth["blocks"]}
    if more:
        failures.append(f"{len(more)} blocks are listed that the program does not have, the first at {min(more):#x}")
    right = whole = 0
    wrong = Counter()
    for address, size, category in truth["blocks"]:
        whole += size
        block = found.get(address)
        if block is None:
            continue
        if block["bytes"] != size:
            failures.append(f"block {address:#x}: {block['bytes']} bytes, the program requested {size}")
        if block["category"] == category:
            right += size
        else:
            wrong[category, block["category"], block["rule"]] += size
    share = right / max(whole, 1)
    if share < SHARE_MIN:
        failures.append(f"{100 * share:.2f} % of the bytes have the right category, {100 * SHARE_MIN:g} % expected")
    return share, wrong, failures


def main(arguments):
    if not arguments:
        print("usage: categories.py WARPOOL [TRUTH...]", file=sys.stderr)
        return 2
    paths = [Path(path) for path in arguments[1:]] or sorted(RECORDINGS.glob("*.truth.json"))
    passed = failed = 0
    for path in paths:
        name = path.name[: -len(".truth.json")]
        try:
            truth = json.loads(path.read_text())
            share, wrong, failures = check(truth, explained(arguments[0], truth, path.with_name(f"{name}.pickle.xz")))
            print(f"{name}: {100 * share:.2f} % of {truth['requested_bytes']} bytes have the right category")
            for (category, instead, rule), size in wrong.most_common():
                print(f"{name}: {size} bytes of {category} are {instead} ({rule})")
        except Exception as error:
            failures = [f"{type(error).__name__}: {error}"]
        for text in failures:
            print(f"{name}: FAILED: {text}")
        passed += not failures
        failed += bool(failures)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
