"""Memory that sleeps and wakes: the public functions are in `warpool.torch`.

A tag is a scope: memory that the calling thread allocates in it carries the tag. What carries a tag can give its GPU
memory back to the driver and get it again later, at the same addresses: tensors keep their data pointers, and captured
graphs work again.
"""

import contextlib
import ctypes
import importlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

from . import _native

_NAME_LENGTH = 64

TagNames = Union[None, str, Sequence[str]]


class _Totals(ctypes.Structure):
    _fields_ = [
        ("changed", ctypes.c_int64),
        ("unchanged", ctypes.c_int64),
        ("bytes_device", ctypes.c_int64),
        ("bytes_copied", ctypes.c_int64),
        ("bytes_not_returned", ctypes.c_int64),
    ]


class _TagValues(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * _NAME_LENGTH),
        ("device", ctypes.c_int),
        ("is_asleep", ctypes.c_int),
        ("keeps_contents", ctypes.c_int),
        ("segments", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("bytes_device", ctypes.c_int64),
        ("bytes_host", ctypes.c_int64),
        ("since_us", ctypes.c_int64),
    ]


_NAMES = ctypes.POINTER(ctypes.c_char_p)

# Argument types of the functions that return a status.
STATUS: Dict[str, Sequence[Any]] = {
    "warpool_tag_begin": (ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)),
    "warpool_tag_end": (ctypes.c_uint64,),
    "warpool_prepare_sleep": (_NAMES, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64)),
    "warpool_sleep": (_NAMES, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(_Totals)),
    "warpool_wake": (_NAMES, ctypes.c_size_t, ctypes.POINTER(_Totals)),
    "warpool_tags": (ctypes.POINTER(_TagValues), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)),
}


class SleepReport(NamedTuple):
    """What a call of `sleep` or `wake` did."""

    changed: int
    """How many tags fell asleep or woke, counted once per device."""
    unchanged: int
    """How many were in that state already."""
    bytes_device: int
    """Bytes of GPU memory that the driver got, or gave."""
    bytes_copied: int
    """Bytes that were copied to the host, or back."""
    bytes_not_returned: int
    """Bytes of GPU memory that the driver refused to take back; that is retried by later calls."""


class TagInfo(NamedTuple):
    """A tag's memory on one device."""

    tag: str
    device: int
    asleep: bool
    keep: Optional[str]
    """`host` or `discard`, if it sleeps."""
    segments: int
    bytes: int
    """Bytes of its addresses."""
    bytes_device: int
    """Bytes of GPU memory that it has."""
    bytes_host: int
    """Bytes of pinned host memory with its contents."""
    since_us: int
    """Since when it sleeps, in microseconds of the history's clock; 0 if it is awake."""


@contextlib.contextmanager
def tag(name: str, device: Optional[int] = None) -> Iterator[None]:
    """Tensors that the calling thread allocates on the device in this scope carry the tag.

    The device is the current one by default. Scopes may be nested: the newest counts. A `torch.cuda.MemPool` or a
    capture that is open comes first. A capture that begins in this scope carries the tag itself, as does a `MemPool`
    that is first used in it.
    """
    if device is None:
        device = importlib.import_module("torch").cuda.current_device()
    scope = ctypes.c_uint64()
    _native.call(STATUS, "warpool_tag_begin", device, _encoded(name), ctypes.byref(scope))
    try:
        yield
    finally:
        _native.call(STATUS, "warpool_tag_end", scope)


def prepare_sleep(tags: TagNames = None) -> int:
    """Pins the host memory that `sleep` with `keep="host"` needs for what the tags have now. Returns how many bytes.

    The first sleep need not pin it then, which takes several times as long as its copies. The memory stays in the cache
    of pinned memory, where `pin_memory` may use it meanwhile. It queues no work and may run in a thread of its
    own. Raises `Error` if there is not enough, or during a capture.
    """
    prepared = ctypes.c_int64()
    array, count = _array(tags)
    _native.call(STATUS, "warpool_prepare_sleep", array, count, ctypes.byref(prepared))
    return prepared.value


def sleep(tags: TagNames = None, keep: str = "host") -> SleepReport:
    """Puts the memory of tags to sleep, on all devices, all of it or none; without `tags`, that of all tags.

    With `keep="host"` the contents are copied to pinned host memory, with `keep="discard"` they are dropped and the
    memory is zero after waking. The GPU memory goes to the driver, so other processes can use it; addresses stay.
    Waits for all work of the devices. Tensors in it must not be used until `wake`; they may be freed.

    Raises `Error` if it cannot be done, for example if pinned memory runs out: then nothing has changed, and the text
    says what was missing.
    """
    if keep not in ("host", "discard"):
        raise ValueError(f"keep is {keep!r}: choose 'host' or 'discard'")
    totals = _Totals()
    array, count = _array(tags)
    _native.call(STATUS, "warpool_sleep", array, count, int(keep == "host"), ctypes.byref(totals))
    return _report(totals)


def wake(tags: TagNames = None) -> SleepReport:
    """Wakes the memory of tags, on all devices, all of it or none; without `tags`, that of all tags.

    Tensors are at the same addresses, with their contents, or zero if those were dropped. Raises `Error` if it cannot
    be done, for example if the GPU is full: then the tags sleep on, with their contents, and the text says what was
    missing.
    """
    totals = _Totals()
    array, count = _array(tags)
    _native.call(STATUS, "warpool_wake", array, count, ctypes.byref(totals))
    return _report(totals)


def tags() -> List[TagInfo]:
    """Every tag on every device: what sleeps, where, since when."""
    count = ctypes.c_size_t()
    _native.call(STATUS, "warpool_tags", None, 0, ctypes.byref(count))
    while True:
        capacity = count.value
        values = (_TagValues * max(capacity, 1))()
        _native.call(STATUS, "warpool_tags", values, capacity, ctypes.byref(count))
        # Another thread may have made one meanwhile.
        if count.value <= capacity:
            return [_info(values[at]) for at in range(count.value)]


def _info(values: _TagValues) -> TagInfo:
    keep = ("host" if values.keeps_contents else "discard") if values.is_asleep else None
    return TagInfo(
        values.name.decode("utf-8", "replace"),
        values.device,
        bool(values.is_asleep),
        keep,
        values.segments,
        values.bytes,
        values.bytes_device,
        values.bytes_host,
        values.since_us,
    )


def _report(totals: _Totals) -> SleepReport:
    return SleepReport(*(getattr(totals, name) for name in SleepReport._fields))


def _encoded(name: str) -> bytes:
    if "\0" in name:
        raise ValueError(f"the tag {name!r} has a null character")
    return name.encode()


def _array(tags: TagNames) -> "tuple[Optional[Any], int]":
    """The names as C strings; None is all tags."""
    if tags is None:
        return None, 0
    names = [tags] if isinstance(tags, str) else list(tags)
    return (ctypes.c_char_p * max(len(names), 1))(*[_encoded(name) for name in names]), len(names)
