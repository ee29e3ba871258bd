#!/usr/bin/env python3
"""Checks that Python's pickle loads what the crate writes, with the content of the original.

`python3 crates/trace/tests/python.py [--examples FOLDER] [FILE…]`, from anywhere; FILE is a snapshot, plain or in xz.
Needs Python 3, but no PyTorch, and cargo, unless FOLDER has the crate's examples ready built. It is not part of
`cargo test`, which must not depend on Python.
"""

import argparse
import lzma
import pathlib
import pickle
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FOLDERS = [HERE / "data", HERE.parents[2] / "recordings"]
FILES = ["snapshot.p4.pickle", "single.pickle", "batches.pickle.xz", "mempool.native.pickle.xz",
         "graphs.expandable.pickle.xz"]
ROOT = {"segments", "device_traces", "allocator_settings", "external_annotations", "host_segments", "host_traces"}
IGNORED = {"unknown", "more", "registration_counter"}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--examples", type=pathlib.Path, metavar="FOLDER")
parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
arguments = parser.parse_args()


def run(example, *options):
    """Runs an example of the crate."""
    cargo = ["cargo", "run", "--quiet", "--package", "warpool-trace", "--example", example, "--"]
    command = [str(arguments.examples.resolve() / example)] if arguments.examples else cargo
    subprocess.run([*command, *options], cwd=HERE, check=True, capture_output=True)


def find(name):
    """The file of that name in the test data or the recordings."""
    return next(folder / name for folder in FOLDERS if (folder / name).exists())


def known(value):
    """The value without keys that the reader ignores, and without empty stacks, which may be left out."""
    if isinstance(value, dict):
        return {key: known(item) for key, item in value.items()
                if key not in IGNORED and not (key == "frames" and item == [])}
    return [known(item) for item in value] if isinstance(value, list) else value


def stacks(snapshot):
    return [item["frames"] for trace in snapshot["device_traces"] for item in trace if item.get("frames")]


def check(path, out):
    load = lzma.open if path.suffix == ".xz" else open
    with load(path, "rb") as file:
        original = pickle.load(file)
    run("summary", str(path), "--stacks", "--rewrite", out)
    with open(out, "rb") as file:
        written = pickle.load(file)
    before = known({key: item for key, item in original.items() if key in ROOT})
    after = known(written)
    for key in ROOT & before.keys():
        assert before[key] == after[key], f"{path.name}: `{key}` differs"
    objects = {id(stack) for stack in stacks(written)}
    different = {str(stack) for stack in stacks(written)}
    assert len(objects) == len(different), f"{path.name}: equal stacks are different objects"
    print(f"{path.name}: {sum(map(len, after['device_traces']))} events, {len(different)} stacks, as in the original")


def check_device_and_host(path):
    """A snapshot of device and host memory, with stacks that both share."""
    run("device_and_host", str(path))
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    for side in "segments", "host_segments":
        for segment in snapshot[side]:
            assert segment["device"] == (-1 if side == "host_segments" else 0)
            ends = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == ends, "blocks leave gaps"
                ends += block["size"]
            assert ends == segment["address"] + segment["total_size"]
    states = sorted(block["state"] for segment in snapshot["host_segments"] for block in segment["blocks"])
    assert states.count("active_allocated") == 1 and states.count("active_pending_free") == 1, states
    traces = snapshot["host_traces"]
    host = [entry for part in traces for entry in (part if isinstance(part, list) else [part])]
    actions = [entry["action"] for entry in host]
    assert actions == ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "alloc",
                       "free_requested", "free_completed"], actions
    assert len({id(entry["frames"]) for entry in host + snapshot["device_traces"][0]}) == 1
    print(f"{path.name}: {len(host)} events of the host beside {len(snapshot['device_traces'][0])} of the device")


with tempfile.TemporaryDirectory() as folder:
    for path in arguments.files or [find(name) for name in FILES]:
        check(path.resolve(), str(pathlib.Path(folder) / "written.pickle"))
    if not arguments.files:
        both = pathlib.Path(folder) / "device_and_host.pickle"
        check_device_and_host(both)
        check(both, str(pathlib.Path(folder) / "written.pickle"))
