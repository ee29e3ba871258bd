"""Snapshots for the tests of the page: hostile ones, and a large one. They are made here and not kept."""

import lzma
import pickle
import random

MIB = 1 << 20
BASE = 0x7F00_0000_0000

# Runs if any text of a recording becomes HTML or script.
HTML = '</script></style><img src=x onerror="globalThis.executed = true"><script>globalThis.executed = true</script>'


def entry(action, addr, size, time_us, frames, **more):
    where = "device_free" if action == "oom" else "addr"
    return {"action": action, where: addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames, **more}


def segment(size, blocks):
    return {
        "device": 0, "address": BASE, "total_size": size, "allocated_size": size, "active_size": size,
        "requested_size": size, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }


def named_like_html():
    """A recording whose every text is HTML that would run a script."""
    frames = [{"name": HTML, "filename": f"{HTML}.py", "line": 1}]
    more = {"compile_context": HTML, "user_metadata": HTML}
    trace = [
        entry("segment_alloc", BASE, 40 * MIB, 1, frames, **more),
        entry("alloc", BASE, 30 * MIB, 2, frames, **more),
        entry("oom", MIB, 80 * MIB, 3, frames, **more),
    ]
    blocks = [
        {"address": BASE, "size": 30 * MIB, "requested_size": 30 * MIB, "state": "active_allocated", "frames": frames},
        {"address": BASE + 30 * MIB, "size": 10 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    notes = [{"stage": stage, "name": HTML, "device": 0, "time_us": time} for stage, time in [("START", 1), ("END", 3)]]
    return pickle.dumps({
        "segments": [segment(40 * MIB, blocks)], "device_traces": [trace], "external_annotations": notes,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": HTML},
    }, protocol=4)


def crafted():
    """Files that no program writes: name, content, and a part of the reason why they are refused."""
    head = b"\x80\x04"
    runs = head + b"cos\nsystem\n(X\x04\0\0\0true\x85R."
    trace = b"}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](]("
    nested = b"}(\x8c\x01x]q\x00"
    for level in range(60):
        nested += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return [
        ("runs.pickle", runs, "opcode"),
        ("lists.pickle", head + b"}(\x8c\x01x" + b"]" * (1 << 20), "cut off"),
        ("marks.pickle", head + b"}" + b"(" * (1 << 20), "cut off"),
        ("nested.pickle", head + nested, "cut off"),
        ("pairs.pickle", head + trace + b"}" + b"}\x86" * (1 << 16), "containers"),
        ("length.pickle", head + b"}(\x8d" + (1 << 62).to_bytes(8, "little") + b"x", ""),
        ("window.pickle.zst", b"\x28\xb5\x2f\xfd\x00\x90\x01\0\0", "memory"),
        # Two gigabytes of zeros, after a start that is read.
        ("zeros.pickle.xz", lzma.compress(head + b"}(\x8c\x01x]("[:6] + b"]" * (1 << 20), preset=0), ""),
        ("empty.pickle", b"", "empty"),
        ("page.html", HTML.encode() * 10, "text"),
        ("twice.xz", lzma.compress(lzma.compress(b"x" * 1000)), "compressed again"),
    ]


def large(path, size):
    """A recording of about `size` bytes: allocations and frees with call stacks, and an event out of memory. As many
    bytes for an event as real ones have, about 180. Returns the number of events."""
    rng = random.Random(5)
    events = size // 180

    def stack(number):
        return [
            {"name": f"function_{(number * 7 + level) % 3000}", "filename": f"/site-packages/package/module_{level}.py",
             "line": number % 2000 + level}
            for level in range(rng.randint(20, 40))]

    stacks = [stack(number) for number in range(events // 18)]
    trace, live, time = [], [], 0

    def add(action, addr, bytes_, frames):
        nonlocal time
        time += rng.randint(1, 20)
        trace.append(entry(action, addr, bytes_, time, frames, pool_id=(0, 0), compile_context="N/A", user_metadata=""))

    starts = [BASE + number * 64 * MIB for number in range(64)]
    free = list(starts)
    for number, start in enumerate(starts):
        add("segment_alloc", start, 64 * MIB, stacks[number])
    while len(trace) < events:
        if free and (rng.random() < 0.5 or not live):
            addr, frames = free.pop(rng.randrange(len(free))), rng.choice(stacks)
            add("alloc", addr, 64 * MIB, frames)
            live.append((addr, frames))
        else:
            addr, frames = live.pop(rng.randrange(len(live)))
            add("free_requested", addr, 64 * MIB, frames)
            add("free_completed", addr, 64 * MIB, frames)
            free.append(addr)
    add("oom", MIB, 8 << 30, stacks[0])
    held = dict(live)
    segments = []
    for start in starts:
        state = "active_allocated" if start in held else "inactive"
        block = {"address": start, "size": 64 * MIB, "requested_size": 64 * MIB if start in held else 0, "state": state,
                 "frames": held.get(start, [])}
        segments.append({**segment(64 * MIB, [block]), "address": start})
    with open(path, "wb") as file:
        pickle.dump({"segments": segments, "device_traces": [trace]}, file, protocol=4)
    return len(trace)
