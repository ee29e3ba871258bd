#!/usr/bin/env python3
"""Makes the files in this folder.

Run it here after a change: `python3 make.py`. Needs the command `zstd`. The tests read the files that are checked in,
and need no Python.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import subprocess
import tarfile
import zipfile

MIB = 1 << 20
BASE = 0x7F00_0000_0000


def stack(*lines):
    return [{"name": name, "filename": filename, "line": line} for name, filename, line in lines]


# Stacks that several entries share are one object, as in PyTorch; `equal` is another object of the same content.
TRAIN = stack(("forward", "model.py", 12), ("<module>", "train.py", 70000))
EQUAL = stack(("forward", "model.py", 12), ("<module>", "train.py", 70000))
LOAD = stack(("load", "data.py", 3))


def entry(action, addr, size, stream, time_us, **more):
    where = "device_free" if action == "oom" else "addr"
    made = {"action": action, where: addr, "size": size, "stream": stream, "time_us": time_us}
    made.update({"compile_context": "N/A", "user_metadata": ""})
    made.update(more)
    return made


SNAPSHOT = {
    "unknown": {"frames": LOAD, "deep": [[[{"a": (1, 2, 3, [4])}]]], "none": None, "huge": 1 << 200, 5: 6},
    "segments": [
        {
            "device": 0,
            "address": BASE,
            "total_size": 20 * MIB,
            "allocated_size": 2 * MIB,
            "active_size": 3 * MIB,
            "requested_size": 3 * MIB - 100,
            "stream": 0xFEDC_BA98_7654_3210,
            "segment_type": "large",
            "segment_pool_id": (0, 3),
            "is_expandable": True,
            "frames": TRAIN,
            "registration_counter": -7,
            "blocks": [
                {"address": BASE, "size": 2 * MIB, "requested_size": 2 * MIB - 50, "state": "active_allocated",
                 "frames": TRAIN, "more": [1, [2]]},
                {"address": BASE + 2 * MIB, "size": MIB, "requested_size": MIB - 50, "state": "active_pending_free",
                 "frames": LOAD},
                {"address": BASE + 3 * MIB, "size": 17 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        },
        {
            "device": 1,
            "address": BASE + 64 * MIB,
            "total_size": 2 * MIB,
            "allocated_size": 0,
            "active_size": 0,
            "requested_size": 0,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": BASE + 64 * MIB, "size": 2 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
            ],
        },
    ],
    "device_traces": [
        [
            entry("segment_alloc", BASE, 20 * MIB, 0, 1_794_702_992_267_588, pool_id=(0, 3), frames=TRAIN),
            entry("alloc", BASE, 2 * MIB - 50, 0, 1_794_702_992_267_589, pool_id=(0, 3), frames=EQUAL,
                  forward_frames=LOAD),
            entry("alloc", BASE + 2 * MIB, MIB - 50, 5, 1_794_702_992_267_590,
                  compile_context="Torch-Compiled Region: 0/0", user_metadata="weights, größer", pool_id=(0, 3),
                  frames=LOAD),
            entry("free_requested", BASE + 2 * MIB, MIB - 50, 5, 1_794_702_992_267_600,
                  user_metadata="weights, größer"),
            entry("oom", 12_345, 1 << 40, 0, 1_794_702_992_267_700, unknown=[{}]),
            entry("snapshot", 0, 3 * MIB, 0, 1_794_702_992_267_800),
        ],
        [],
        [entry("alloc", 70_000, 1, 0, -5)],
    ],
    "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:200",
        "max_split_size": 200 * MIB,
        "garbage_collection_threshold": 0.8,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "unknown": "x",
        "roundup_power2_divisions": {"1": 0, "2": 4},
    },
    "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 17}],
    "host_segments": [],
    "host_traces": [entry("alloc", BASE + 128 * MIB, 4096, 0, 18)],
}

# As PyTorch 2.0 and older write it: no traces, no pools, blocks without addresses but with a history.
LEGACY = [
    {
        "device": 0,
        "address": BASE,
        "total_size": 2 * MIB,
        "allocated_size": 1024,
        "active_size": 1536,
        "segment_type": "small",
        "blocks": [
            {"size": 1024, "state": "active_allocated",
             "history": [{"addr": BASE, "real_size": 1000, "frames": TRAIN}, {"addr": BASE, "real_size": 7}]},
            {"size": 512, "state": "active_awaiting_free"},
            {"size": 2 * MIB - 1536, "state": "inactive"},
        ],
    }
]

# As PyTorch 2.0 writes it: a history without times and pools, and blocks with a history of their own. C++ frames are
# texts.
TORCH_2_0 = {
    "segments": [
        dict(LEGACY[0], stream=0, requested_size=1512, blocks=[
            {"size": 1024, "requested_size": 1000, "state": "active_allocated",
             "history": [{"addr": BASE, "real_size": 1000, "frames": TRAIN, "cpp_frames": ["at::empty", "main"]}]},
            {"size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive"},
        ])
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": BASE, "size": 2 * MIB, "stream": 0, "frames": TRAIN},
            {"action": "alloc", "addr": BASE, "size": 1000, "stream": 0, "frames": TRAIN, "cpp_frames": []},
            {"action": "oom", "device_free": 512, "size": 1 << 40, "stream": 0, "frames": TRAIN},
        ]
    ],
}

# One item per container: pickles without marks.
SINGLE = {"segments": [], "device_traces": [[entry("alloc", BASE, 512, 0, 1, frames=stack(("f", "g.py", 1)))]]}
SINGLE_LIST = {"device_traces": [], "segments": [
    dict(SNAPSHOT["segments"][1], blocks=[SNAPSHOT["segments"][1]["blocks"][0]])]}


class TorchScript:
    """A pickle as PyTorch's C++ pickler writes it: protocol 2, objects memoized when complete, one batch per list."""

    def __init__(self):
        self.out = bytearray(b"\x80\x02")
        self.memo = {}

    def dump(self, value):
        self.value(value)
        return bytes(self.out + b".")

    def memoize(self, key, kept):
        number = len(self.memo)
        self.memo[key] = (number, kept)
        self.out += b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def value(self, value):
        key = value if isinstance(value, str) else id(value)
        if isinstance(value, (str, list, dict)) and key in self.memo:
            number = self.memo[key][0]
            self.out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        elif value is None:
            self.out += b"N"
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            if 0 <= value < 256:
                self.out += b"K" + bytes([value])
            elif 0 <= value < 65536:
                self.out += b"M" + struct.pack("<H", value)
            elif -(1 << 31) <= value < 1 << 31:
                self.out += b"J" + struct.pack("<i", value)
            else:
                length = 8 if -(1 << 63) <= value < 1 << 63 else 32
                self.out += b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            text = value.encode()
            self.out += b"X" + struct.pack("<I", len(text)) + text
            self.memoize(key, value)
        elif isinstance(value, tuple):
            self.out += b"(" if len(value) > 3 else b""
            for item in value:
                self.value(item)
            self.out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")
        elif isinstance(value, list):
            self.out += b"]("
            for item in value:
                self.value(item)
            self.out += b"e"
            self.memoize(key, value)
        elif isinstance(value, dict):
            self.out += b"}("
            for name, item in value.items():
                self.value(name)
                self.value(item)
            self.out += b"u"
            self.memoize(key, value)


def write(name, content):
    with open(name, "wb") as file:
        file.write(content)


def torch_save(content):
    """An archive as torch.save writes it: stored files, with sizes only after their data and in the directory."""

    class Unseekable(io.RawIOBase):
        """Without seeking, zipfile writes the sizes after the data."""

        def __init__(self):
            self.content = bytearray()

        def writable(self):
            return True

        def write(self, part):
            self.content += part
            return len(part)

    out = Unseekable()
    with zipfile.ZipFile(out, "w") as archive:
        for name, part in (("data.pkl", content), (".format_version", b"1"), ("byteorder", b"little"),
                           ("version", b"3\n"), (".data/serialization_id", b"0" * 40)):
            archive.writestr(zipfile.ZipInfo(f"snapshot/{name}"), part)
    return bytes(out.content)


def tar(files, form=tarfile.GNU_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, part in files:
            info = tarfile.TarInfo(name)
            info.size = len(part)
            archive.addfile(info, io.BytesIO(part))
    return out.getvalue()


for protocol in (2, 3, 4, 5):
    write(f"snapshot.p{protocol}.pickle", pickle.dumps(SNAPSHOT, protocol))
write("snapshot.imports.pickle", pickle.dumps(SNAPSHOT, 2, fix_imports=False))
write("snapshot.torchscript.pickle", TorchScript().dump(SNAPSHOT))
plain = pickle.dumps(SNAPSHOT, 4)
write("snapshot.pickle.xz", lzma.compress(plain))
write("snapshot.pickle.gz", gzip.compress(plain, mtime=0))
zstd = subprocess.run(["zstd", "-c", "--check"], input=plain, stdout=subprocess.PIPE, check=True)
write("snapshot.pickle.zst", zstd.stdout)
write("snapshot.pickle.bz2", bz2.compress(plain))
# A round trip through JSON makes lists of tuples, and texts of all keys.
write("snapshot.lists.pickle", pickle.dumps(json.loads(json.dumps(SNAPSHOT)), 4))
write("snapshot.pt", torch_save(pickle.dumps(SNAPSHOT, 2)))
deflated = io.BytesIO()
with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr(zipfile.ZipInfo("run/"), b"")
    archive.writestr(zipfile.ZipInfo("run/notes.txt"), b"one of eight ranks")
    archive.writestr(zipfile.ZipInfo("run/snapshot.pickle"), plain, zipfile.ZIP_DEFLATED)
write("snapshot.zip", deflated.getvalue())
files = [("notes.txt", b"one of eight ranks"), ("r/" * 60 + "snapshot.pickle", plain), ("empty", b"")]
write("snapshot.tar.gz", gzip.compress(tar(files), mtime=0))
write("snapshot.pax.tar.bz2", bz2.compress(tar(files, tarfile.PAX_FORMAT)))
ranks = [(f"ranks/rank{rank}.pickle", plain) for rank in range(2)]
write("ranks.tar.xz", lzma.compress(tar(ranks)))
write("torch_2_0.pickle", pickle.dumps(TORCH_2_0, 4))
write("legacy.pickle", pickle.dumps(LEGACY, 4))
write("single.pickle", pickle.dumps(SINGLE, 2))
write("single_list.pickle", pickle.dumps(SINGLE_LIST, 4))
write("surrogate.pickle", pickle.dumps(
    {"segments": [], "device_traces": [[entry("alloc", BASE, 512, 0, 1, user_metadata="a\udc80b")]]}, 4))
# More elements than Python writes in one batch.
write("batches.pickle.xz", lzma.compress(pickle.dumps(
    {"segments": [], "device_traces": [[entry("alloc", BASE + i, i, 0, i) for i in range(2001)]]}, 4)))
