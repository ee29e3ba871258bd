#!/usr/bin/env python3
"""Computes what `warpool explain` says about a PyTorch memory snapshot a second time, and compares.

Usage: independent.py WARPOOL FILE...

The second computation is written from the snapshot's format and from the rules of PyTorch's caching
allocator; it shares no code with the command. It needs Python 3.9 and nothing else.

Per device:

* out-of-memory events: how many, and of the last one its index, request and free device memory;
* the peaks of requested, allocated and reserved bytes, each with the first event after which it holds;
* the allocated blocks at the moment that `explain` is about, summed by line of the user's code.

The history may start late. The state before its first event is the snapshot's state with the events
undone from the last to the first. Three byte counts, as PyTorch has them:

* requested: what the program asked for, from `alloc` to `free_requested`;
* allocated: sizes of the same blocks (`torch.cuda.memory_allocated()`). A block is its request rounded
  up, and the whole free block where the allocator does not split off the rest;
* reserved: segments and mapped parts of expandable segments.

A further snapshot is written here, with stacks of which it is known by hand what line they are: see STACKS.

Exit status: 0 all agree, 1 a disagreement, 2 wrong usage.
"""

import bisect
import bz2
import gc
import gzip
import io
import json
import lzma
import pickle
import re
import subprocess
import sys
import tempfile

MIB = 1 << 20
MIN_BLOCK = 512
# Requests up to here are served from the small pool, and a remainder up to here stays in a large block.
SMALL_SIZE = MIB
SCHEMA_VERSION = 2
ROWS_MAX = 100

FRAMEWORKS = frozenset(
    "torch torch_xla functorch triton lightning pytorch_lightning lightning_fabric accelerate deepspeed ignite"
    " apex importlib".split()
)
# What the Python folder of PyTorch contains: a checkout of PyTorch, and not a project in a folder named `torch`.
TORCH_PARTS = frozenset(
    "nn optim autograd cuda distributed distributions utils fx jit func fft linalg amp _C _dynamo _functorch _inductor"
    " _subclasses __init__.py functional.py random.py serialization.py _tensor.py _ops.py _compile.py _utils.py"
    " _utils_internal.py".split()
)
# Programs that were typed in.
TYPED_IN = ("<stdin>", "<ipython-input", "<cell")
# PyTorch's nodes of autograd's graph: those of its operators, and those that it has by hand.
NODE = re.compile(r"\btorch::autograd::(?:generated::)?\w*(?:Backward\d*|AccumulateGrad)::(?:apply|operator\(\))")


# What is compared: the field of the command's JSON, and the reader's own value for it.
CHECKS = [
    ("ooms", lambda d, m: len(d.ooms)),
    ("moment.kind", lambda d, m: m.kind),
    ("moment.event", lambda d, m: m.event),
    ("moment.requested_bytes", lambda d, m: m.state[0]),
    ("moment.allocated_bytes", lambda d, m: m.state[1]),
    ("moment.reserved_bytes", lambda d, m: m.state[2]),
    ("moment.bytes_requested", lambda d, m: m.request if m.kind == "oom" else ANY),
    ("moment.device_free_bytes", lambda d, m: m.device_free if m.kind == "oom" else ANY),
    ("peaks.requested.bytes", lambda d, m: d.peak(0)[0]),
    ("peaks.requested.event", lambda d, m: d.peak(0)[1]),
    ("peaks.allocated.bytes", lambda d, m: d.peak(1)[0]),
    ("peaks.allocated.event", lambda d, m: d.peak(1)[1]),
    ("peaks.reserved.bytes", lambda d, m: d.peak(2)[0]),
    ("peaks.reserved.event", lambda d, m: d.peak(2)[1]),
    ("bytes_with_stack", lambda d, m: m.bytes_with_stack),
]
ANY = object()
MISSING = "(missing)"


# --- Reading -------------------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """Snapshots contain plain data only; anything else in the file is not loaded."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith(b"\xfd7zXZ\x00"):
        data = lzma.decompress(data)
    elif data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    elif data.startswith(b"BZh"):
        data = bz2.decompress(data)
    snapshot = PlainUnpickler(io.BytesIO(data)).load()
    # `torch.cuda.memory_snapshot()` gives the list of segments alone.
    return {"segments": snapshot} if isinstance(snapshot, list) else snapshot


# --- Settings ------------------------------------------------------------------------------------------------


class Settings:
    """The settings that decide how large a block is. Old snapshots contain none: then the defaults."""

    def __init__(self, settings):
        max_split = settings.get("max_split_size", -1)
        self.max_split = max_split if 0 < max_split < 1 << 62 else None
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        self.expandable = settings.get("expandable_segments", "expandable_segments:true" in text.lower())
        divisions = settings.get("roundup_power2_divisions") or {}
        self.divisions = [divisions.get(str(1 << i), 0) for i in range(16)]

    def round(self, size):
        if size < MIN_BLOCK:
            return MIN_BLOCK
        # One number of divisions per power of two, from 1 MiB (and less) to 32 GiB (and more).
        divisions = self.divisions[min(max(size.bit_length() - 1 - 20, 0), 15)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            step = (1 << size.bit_length() - 1) // divisions
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK


# --- Address ranges ------------------------------------------------------------------------------------------


class Ranges:
    """Reserved address ranges. Segments stay apart; mapped parts of expandable segments join."""

    def __init__(self):
        self.starts = []
        self.ends = {}

    def find(self, address):
        """The range that contains the address, or None."""
        i = bisect.bisect_right(self.starts, address) - 1
        if i < 0 or address >= self.ends[self.starts[i]]:
            return None
        return self.starts[i], self.ends[self.starts[i]]

    def insert(self, start, end):
        bisect.insort(self.starts, start)
        self.ends[start] = end

    def remove(self, start):
        i = bisect.bisect_left(self.starts, start)
        if i < len(self.starts) and self.starts[i] == start:
            del self.starts[i], self.ends[start]

    def map(self, start, end):
        i = bisect.bisect_left(self.starts, start)
        if i < len(self.starts) and self.starts[i] == end:
            end = self.ends[end]
            self.remove(self.starts[i])
        if i > 0 and self.ends[self.starts[i - 1]] == start:
            start = self.starts[i - 1]
            self.remove(start)
        self.insert(start, end)

    def unmap(self, start, end):
        while True:
            i = bisect.bisect_left(self.starts, end) - 1
            if i < 0 or self.ends[self.starts[i]] <= start:
                return
            left = self.starts[i]
            right = self.ends[left]
            self.remove(left)
            if right > end:
                self.insert(end, right)
            if left < start:
                self.insert(left, start)


# --- One device ----------------------------------------------------------------------------------------------


class Block:
    __slots__ = ("requested", "size", "allocated", "frames")

    def __init__(self, requested, size, allocated, frames):
        self.requested = requested
        self.size = size  # None: not known yet
        self.allocated = allocated  # False: freed, and waits for streams
        self.frames = frames


class Choice:
    """A large allocation whose size depends on whether expandable segments were on."""

    __slots__ = ("event", "split_end", "whole_end")

    def __init__(self, event, split_end, whole_end):
        self.event = event
        self.split_end = split_end
        self.whole_end = whole_end  # None: the segment's end, where nothing can be allocated later


class Device:
    """The history of one device, replayed once backward for its start and once forward for its states."""

    def __init__(self, index, segments, events, settings):
        self.index = index
        self.events = events
        self.settings = settings
        self.doubts = []
        self.ooms = [i for i, event in enumerate(events) if event["action"] == "oom"]
        self.blocks_end = {}
        self.segments = Ranges()
        self.mapped = Ranges()
        self.reserved = 0
        self.read_segments(segments)
        self.blocks_start = self.walk_back()
        self.start_sizes()
        self.states = self.walk_forward()

    def read_segments(self, segments):
        for segment in segments:
            start, size = segment["address"], segment["total_size"]
            self.reserved += size
            if segment.get("is_expandable"):
                self.mapped.map(start, start + size)
            else:
                self.segments.insert(start, start + size)
            address = start
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] != "inactive":
                    # PyTorch 2.0 has the request and the stack in a list of past owners.
                    past = (block.get("history") or [{}])[0]
                    requested = block.get("requested_size", past.get("real_size", block["size"]))
                    frames = block.get("frames", past.get("frames"))
                    allocated = block["state"] == "active_allocated"
                    self.blocks_end[address] = Block(requested, block["size"], allocated, frames)
                address += block["size"]

    def doubt(self, index, text):
        event = self.events[index]
        self.doubts.append(f"event {index} ({event['action']} at {event.get('addr', 0):#x}): {text}")

    def reserve(self, event, sign):
        """Does (1) or undoes (-1) an event that reserves or releases memory."""
        action = event["action"]
        start, size = event["addr"], event["size"]
        if action in ("segment_free", "segment_unmap"):
            sign = -sign
        self.reserved += sign * size
        if action in ("segment_map", "segment_unmap"):
            (self.mapped.map if sign > 0 else self.mapped.unmap)(start, start + size)
        elif sign > 0:
            self.segments.insert(start, start + size)
        else:
            self.segments.remove(start)

    def walk_back(self):
        """Undoes all events from the snapshot's state; returns the blocks before the first event."""
        blocks = dict(self.blocks_end)
        for i in range(len(self.events) - 1, -1, -1):
            event = self.events[i]
            action = event["action"]
            if action == "alloc":
                block = blocks.pop(event["addr"], None)
                if block is None or not block.allocated:
                    self.doubt(i, "no allocated block afterwards")
            elif action == "free_requested":
                block = blocks.get(event["addr"])
                if block is None or block.allocated:
                    self.doubt(i, "no block waits for its streams afterwards")
                blocks[event["addr"]] = Block(event["size"], block and block.size, True, block and block.frames)
            elif action == "free_completed":
                if event["addr"] in blocks:
                    self.doubt(i, "there is a block afterwards")
                blocks[event["addr"]] = Block(event["size"], None, False, None)
            elif action.startswith("segment_"):
                self.reserve(event, -1)
        return blocks

    def start_sizes(self):
        """Sizes of the blocks that were there before the history and are freed in it.

        Small blocks and blocks of expandable segments are as large as the rounded request. A large block of
        a segment keeps a remainder of up to 1 MiB. Blocks and free blocks of the large pool are larger than
        that, so a distance of up to 1 MiB to what follows, at any time while the block lives, is a remainder.
        """
        unknown = {}
        for address, block in self.blocks_start.items():
            if block.size is None:
                block.size = self.settings.round(block.requested)
                if block.size > SMALL_SIZE and self.segments.find(address):
                    unknown[address] = self.segments.find(address)[1]
        if not unknown:
            return
        order = sorted(unknown)
        starts = sorted(self.blocks_start)
        for address in order:
            i = bisect.bisect_right(starts, address)
            if i < len(starts):
                unknown[address] = min(unknown[address], starts[i])
        alive = set(order)
        for event in self.events:
            if event["action"] == "alloc":
                i = bisect.bisect_left(order, event["addr"]) - 1
                if i >= 0 and order[i] in alive and event["addr"] < unknown[order[i]]:
                    unknown[order[i]] = event["addr"]
            elif event["action"] == "free_completed":
                alive.discard(event["addr"])
        for address, end in unknown.items():
            block = self.blocks_start[address]
            block.size = self.block_size(block.size, end - address)

    def block_size(self, rounded, free):
        """Size of the block that a large request gets from a free block, without expandable segments."""
        if self.settings.max_split and rounded >= self.settings.max_split:
            return free
        return free if free - rounded <= SMALL_SIZE else rounded

    def large_sizes(self):
        """Sizes of the large blocks that are allocated in the history, by event.

        With expandable segments a remainder is always split off. That setting can change while the program
        runs, and the snapshot has its last value only. It shows where a new segment is made, and where a later
        allocation starts: right after the rounded request (split), or where the next block was (not split).
        """
        sizes, choices, shown, open_choices = {}, [], [], {}
        large = sorted(a for a, b in self.blocks_start.items() if b.size > SMALL_SIZE)
        for i, event in enumerate(self.events):
            action = event["action"]
            if action == "alloc":
                address = event["addr"]
                rounded = self.settings.round(event["size"])
                if rounded <= SMALL_SIZE:
                    continue
                at = bisect.bisect_left(large, address)
                choice = open_choices.get(large[at - 1]) if at > 0 else None
                if choice is not None and address in (choice.split_end, choice.whole_end):
                    shown.append((choice.event, address == choice.split_end))
                    del open_choices[large[at - 1]]
                within = self.segments.find(address) or self.mapped.find(address)
                if within is None:
                    self.doubt(i, "not in a segment")
                    sizes[i] = rounded
                else:
                    end = min(within[1], large[at] if at < len(large) else within[1])
                    sizes[i] = self.block_size(rounded, end - address)
                    if sizes[i] != rounded:
                        choices.append(Choice(i, address + rounded, end if end < within[1] else None))
                        open_choices[address] = choices[-1]
                large.insert(at, address)
            elif action == "free_completed":
                at = bisect.bisect_left(large, event["addr"])
                if at < len(large) and large[at] == event["addr"]:
                    del large[at]
                    open_choices.pop(event["addr"], None)
            elif action.startswith("segment_"):
                if action in ("segment_alloc", "segment_map"):
                    shown.append((i, action == "segment_map"))
                self.reserve(event, 1)
        for address, choice in open_choices.items():
            if address in self.blocks_end:
                shown.append((choice.event, address + self.blocks_end[address].size == choice.split_end))
        shown.sort()
        for choice in choices:
            at = bisect.bisect_right(shown, (choice.event, True))
            split = shown[max(at - 1, 0)][1] if shown else self.settings.expandable
            if split:
                sizes[choice.event] = self.settings.round(self.events[choice.event]["size"])
        return sizes

    def walk_forward(self):
        """Replays the history; returns (requested, allocated, reserved) before it and after each event."""
        blocks = {a: Block(b.requested, b.size, b.allocated, None) for a, b in self.blocks_start.items()}
        requested = sum(b.requested for b in blocks.values() if b.allocated)
        allocated = sum(b.size for b in blocks.values() if b.allocated)
        reserved = self.reserved
        sizes = self.large_sizes()
        states = [(requested, allocated, reserved)]
        for i, event in enumerate(self.events):
            action = event["action"]
            if action == "alloc":
                size = sizes.get(i) or self.settings.round(event["size"])
                blocks[event["addr"]] = Block(event["size"], size, True, None)
                requested += event["size"]
                allocated += size
            elif action == "free_requested":
                block = blocks.get(event["addr"])
                if block is not None and block.allocated:
                    block.allocated = False
                    requested -= block.requested
                    allocated -= block.size
            elif action == "free_completed":
                blocks.pop(event["addr"], None)
            elif action in ("segment_alloc", "segment_map"):
                reserved += event["size"]
            elif action in ("segment_free", "segment_unmap"):
                reserved -= event["size"]
            states.append((requested, allocated, reserved))
        self.check_end(blocks)
        return states

    def check_end(self, blocks):
        """The forward replay has to end in the snapshot's state."""
        for address in sorted(blocks.keys() | self.blocks_end.keys()):
            mine, theirs = blocks.get(address), self.blocks_end.get(address)
            if mine is None or theirs is None or mine.size != theirs.size or mine.allocated != theirs.allocated:
                mine, theirs = mine and mine.size, theirs and theirs.size
                self.doubts.append(f"block {address:#x}: {mine} bytes by the history, {theirs} in the snapshot")

    def peak(self, which):
        """The most bytes, and the first event after which there are so many (None: before the first)."""
        most = max(state[which] for state in self.states)
        first = next(i for i, state in enumerate(self.states) if state[which] == most)
        return most, first - 1 if first > 0 else None

    def allocated_after(self, event):
        """The blocks that are allocated after an event (None: before the first), as (requested, frames)."""
        blocks = {a: (b.requested, b.frames) for a, b in self.blocks_start.items() if b.allocated}
        for event in self.events[: 0 if event is None else event + 1]:
            if event["action"] == "alloc":
                blocks[event["addr"]] = (event["size"], event.get("frames"))
            elif event["action"] == "free_requested":
                blocks.pop(event["addr"], None)
        return blocks.values()


class Moment:
    """What `explain` is about: the last out-of-memory event, else the most allocated bytes."""

    def __init__(self, device):
        self.request = self.device_free = None
        if device.ooms:
            self.kind, self.event = "oom", device.ooms[-1]
            oom = device.events[self.event]
            self.request = oom["size"]
            self.device_free = oom.get("device_free", oom.get("addr"))
        elif device.events:
            self.kind, self.event = "allocated", device.peak(1)[1]
        else:
            self.kind, self.event = "event", None
        self.state = device.states[0 if self.event is None else self.event + 1]
        self.bytes_with_stack = 0
        self.lines = {}  # line: [bytes, blocks]
        names = {}  # by identity: a stack is one object in all events that share it
        for requested, frames in device.allocated_after(self.event):
            if not frames:
                continue
            self.bytes_with_stack += requested
            if id(frames) not in names:
                names[id(frames)] = line_of(frames)
            if names[id(frames)] is not None:
                row = self.lines.setdefault(names[id(frames)], [0, 0])
                row[0] += requested
                row[1] += 1


# --- Lines ---------------------------------------------------------------------------------------------------


def is_python(path):
    return path.endswith((".py", ".ipynb")) or path.startswith("<")


def is_framework(path):
    """Whether a file is not the program's own: a framework's, Python's, or written by a compiler."""
    path = path.replace("\\", "/")
    if path.startswith("<"):
        return not path.startswith(TYPED_IN)
    if "/torchinductor_" in path:
        return True
    # Of an installed file the package tells. The folders above it may be named after anything.
    installed = re.split(r"(?:site|dist)-packages/", path)
    if len(installed) > 1:
        return installed[-1].split("/")[0] in FRAMEWORKS
    if re.search(r"/lib/python3|/Lib/", path):
        return True
    parts = path.split("/")
    return any(
        folder in FRAMEWORKS and (folder != "torch" or following in TORCH_PARTS)
        for folder, following in zip(parts, parts[1:])
    )


def is_backward(frames):
    """Whether a stack runs a node of autograd's graph."""
    return any(NODE.search(frame["name"]) for frame in frames if not is_python(frame["filename"]))


def line_of(frames):
    """The innermost Python line of the program's own; None if there is none and the stack is of the backward pass,
    which autograd runs on a thread of its own; else the outermost Python line."""
    python = [frame for frame in frames if is_python(frame["filename"])]
    own = next((frame for frame in python if not is_framework(frame["filename"])), None)
    if own is None and (not python or is_backward(frames)):
        return None
    frame = own or python[-1]
    path = frame["filename"].replace("\\", "/")
    for folder in ("site-packages/", "dist-packages/"):
        path = path.rpartition(folder)[2]
    return f"{frame['name']} ({path}:{frame['line']})"


def names_python(name):
    match = re.search(r"\((.*):\d+\)$", name)
    return bool(match) and is_python(match[1])


# --- Stacks of which the line is known ---------------------------------------------------------------------

OWN = ("step", "/home/me/train.py", 7)
LINEAR = ("forward", "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py", 134)
UNWIND = ("torch::unwind::unwind()", "??", 0)
NODE_FRAME = ("torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)", "??", 0)
ENGINE = ("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)", "??", 0)
BACKWARD = ("backward", "/venv/lib/python3.12/site-packages/torch/_tensor.py", 600)

# Frames from the innermost, and the line of the program that they are; None: there is none.
STACKS = [
    ([UNWIND, LINEAR, OWN], "step (/home/me/train.py:7)"),
    # Of an installed package the first folder tells, whatever stands above it.
    ([UNWIND, ("embed", "/srv/torch/site-packages/diffusers/unet.py", 12)], "embed (diffusers/unet.py:12)"),
    ([("wrap", "/home/deepspeed/site-packages/peft/tuners/lora.py", 3), OWN], "wrap (peft/tuners/lora.py:3)"),
    ([("prepare", "/opt/x/site-packages/accelerate/accelerator.py", 9), OWN], "step (/home/me/train.py:7)"),
    # A checkout of PyTorch, and a project that is only named like it.
    ([("forward", "/src/torch/nn/modules/conv.py", 5), ("fit", "/home/me/fit.py", 2)], "fit (/home/me/fit.py:2)"),
    ([("fit", "/home/me/torch/experiments/fit.py", 21)], "fit (/home/me/torch/experiments/fit.py:21)"),
    # Typed in, generated, and Python's own.
    ([LINEAR, ("<module>", "<ipython-input-3-abc>", 4)], "<module> (<ipython-input-3-abc>:4)"),
    ([("<lambda>", "<string>", 1), ("loop", "/home/me/loop.py", 8)], "loop (/home/me/loop.py:8)"),
    ([("call", "/tmp/torchinductor_me/ab/cabc.py", 77), ("run", "/home/me/run.py", 31)], "run (/home/me/run.py:31)"),
    ([("run", "/usr/lib/python3.12/threading.py", 1012), ("work", "/home/me/work.py", 3)], "work (/home/me/work.py:3)"),
    ([LINEAR, ("load", "C:\\Users\\me\\load.py", 6)], "load (C:/Users/me/load.py:6)"),
    # Nothing of the program's own: the outermost Python line, but not in the backward pass.
    ([UNWIND, LINEAR, ("main", "/usr/lib/python3.12/runpy.py", 88)], "main (/usr/lib/python3.12/runpy.py:88)"),
    ([UNWIND, NODE_FRAME, ENGINE], None),
    ([NODE_FRAME, ENGINE, BACKWARD], None),
    ([NODE_FRAME, ENGINE, BACKWARD, ("loss", "/home/me/loss.py", 5)], "loss (/home/me/loss.py:5)"),
    ([UNWIND, ("c10::cuda::malloc(unsigned long)", "??", 0)], None),
]


def write_stacks(path):
    """A snapshot with one allocation by each of STACKS, of different sizes."""
    events, base = [], 0x7F0000000000
    for number, (frames, _) in enumerate(STACKS):
        size = (number + 2) * MIB
        frames = [dict(zip(("name", "filename", "line"), frame)) for frame in frames]
        common = {"stream": 0, "frames": frames, "addr": base + number * 64 * MIB}
        # As PyTorch has it: 20 MiB for what is below 10, else whole steps of 2 MiB.
        segment = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        events.append({"action": "segment_alloc", "size": segment, "time_us": 2 * number, **common})
        events.append({"action": "alloc", "size": size, "time_us": 2 * number + 1, **common})
    segments = []
    for segment, block in zip(events[::2], events[1::2]):
        size, rest = block["size"], segment["size"] - block["size"]
        whole = rest <= SMALL_SIZE
        blocks = [{"address": block["addr"], "size": segment["size"] if whole else size, "requested_size": size,
                   "state": "active_allocated", "frames": block["frames"]}]
        if not whole:
            free = {"address": block["addr"] + size, "size": rest, "requested_size": 0}
            blocks.append({**free, "state": "inactive", "frames": []})
        segments.append({
            "device": 0, "address": block["addr"], "total_size": segment["size"], "allocated_size": blocks[0]["size"],
            "active_size": blocks[0]["size"], "requested_size": size, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
        })
    with open(path, "wb") as file:
        pickle.dump({"segments": segments, "device_traces": [events], "allocator_settings": {}}, file)


def check_stacks(command):
    """Yields what the command says differently of STACKS than is known; and that the reader says."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/stacks.pickle"
        write_stacks(path)
        for _, differences in check_file(command, path):
            yield from differences
        expected = {}
        for number, (_, name) in enumerate(STACKS):
            if name is not None:
                expected[name] = expected.get(name, 0) + (number + 2) * MIB
        rows = answers_of(command, path)[0]["holders_by_line"]
        found = {row["name"].replace("\\", "/"): row["bytes"] for row in rows if names_python(row["name"])}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                yield f"{name}: {found.get(name)}, {expected.get(name)} is right"


# --- Comparing -----------------------------------------------------------------------------------------------


def compare_rows(mine, rows):
    """Compares the rows that name a Python line; yields what differs."""
    # Windows has both separators.
    rows = [(row["name"].replace("\\", "/"), row["bytes"], row["count"]) for row in rows]
    full = len(rows) >= ROWS_MAX
    sizes = [size for _, size, _ in rows]
    if sizes != sorted(sizes, reverse=True):
        yield "rows are not ordered by size"
    listed = {}
    for name, size, count in rows:
        if name in listed:
            yield f"{name} is listed twice"
        listed[name] = (size, count)
        if names_python(name) and (size, count) != tuple(mine.get(name, (0, 0))):
            size_mine, count_mine = mine.get(name, (0, 0))
            yield f"{name}: {size} in {count} blocks, the reader has {size_mine} in {count_mine}"
    for name, (size, count) in mine.items():
        if name not in listed and (not full or size > sizes[-1]):
            yield f"{name}: not listed, the reader has {size} in {count} blocks"


def field(answer, path):
    for key in path.split("."):
        if not isinstance(answer, dict) or key not in answer:
            return MISSING
        answer = answer[key]
    return answer


def compare(device, answer):
    """Yields what differs between one device and the answer of the command."""
    moment = Moment(device)
    for doubt in device.doubts[:5]:
        yield f"the reader's replay does not fit the snapshot: {doubt}"
    if len(device.doubts) > 5:
        yield f"the reader's replay does not fit the snapshot in {len(device.doubts) - 5} more places"
    for path, own in CHECKS:
        mine, theirs = own(device, moment), field(answer, path)
        if mine is not ANY and (mine != theirs or isinstance(theirs, bool)):
            yield f"{path}: {theirs}, the reader has {mine}"
    rows = field(answer, "holders_by_line")
    if rows is MISSING:
        yield "holders_by_line: (missing)"
    else:
        for text in compare_rows(moment.lines, rows):
            yield f"holders_by_line: {text}"


def devices_of(snapshot):
    settings = Settings(snapshot.get("allocator_settings") or {})
    traces = snapshot.get("device_traces") or []
    segments = {}
    for segment in snapshot["segments"]:
        segments.setdefault(segment["device"], []).append(segment)
    indices = {i for i, events in enumerate(traces) if events} | set(segments)
    for i in sorted(indices):
        yield Device(i, segments.get(i, []), traces[i] if i < len(traces) else [], settings)


def answers_of(command, path):
    """The command's JSON objects by device."""
    done = subprocess.run([command, "explain", "--no-fits", "--json", path], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()}")
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
    for answer in answers:
        if answer.get("schema_version") != SCHEMA_VERSION:
            raise RuntimeError(f"schema version {answer.get('schema_version')}, {SCHEMA_VERSION} expected")
    return {answer["device"]: answer for answer in answers}


def check_file(command, path):
    """Yields (device or None, list of disagreements) for one file."""
    try:
        answers = answers_of(command, path)
        devices = {device.index: device for device in devices_of(load(path))}
    except Exception as error:
        yield None, [f"{type(error).__name__}: {error}"]
        return
    for index in sorted(answers.keys() | devices.keys()):
        if index not in answers:
            yield index, ["the command has no answer for this device"]
        elif index not in devices:
            yield index, ["the snapshot has nothing of this device"]
        else:
            yield index, list(compare(devices[index], answers[index]))


def main(arguments):
    if len(arguments) < 2:
        print("usage: independent.py WARPOOL FILE...", file=sys.stderr)
        return 2
    # Snapshots are large trees without cycles.
    gc.disable()
    differences = list(check_stacks(arguments[0]))
    for text in differences:
        print(f"stacks by hand: {text}")
    passed, failed = int(not differences), int(bool(differences))
    for path in arguments[1:]:
        for device, differences in check_file(arguments[0], path):
            name = path if device is None else f"{path} GPU {device}"
            for text in differences:
                print(f"{name}: {text}")
            passed += not differences
            failed += bool(differences)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
