"""Elastic memory: tensors whose addresses never change, and of which blocks come and go. The public functions are in
`warpool.torch`."""

import ctypes
import importlib
import math
from typing import Any, Dict, NamedTuple, Optional, Sequence

from . import _native

_OUT_OF_MEMORY = 2


class _Info(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_int64),
        ("committed", ctypes.c_int64),
        ("bytes_committed", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("blocks_per_page", ctypes.c_int64),
    ]


_U64 = ctypes.c_uint64

# Argument types of the functions that return a status.
STATUS: Dict[str, Sequence[Any]] = {
    "warpool_elastic_reserve": (
        ctypes.c_int,
        ctypes.c_void_p,
        _U64,
        _U64,
        _U64,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "warpool_elastic_commit": (ctypes.c_void_p, _U64, _U64, ctypes.c_void_p),
    "warpool_elastic_decommit": (ctypes.c_void_p, _U64, _U64, ctypes.c_void_p),
    "warpool_elastic_record_stream": (ctypes.c_void_p, ctypes.c_void_p),
    "warpool_elastic_info": (ctypes.c_void_p, ctypes.POINTER(_Info)),
    "warpool_elastic_committed": (ctypes.c_void_p, _U64, _U64, ctypes.POINTER(ctypes.c_int)),
    "warpool_headroom": (ctypes.c_int, ctypes.POINTER(ctypes.c_int64)),
}


class ElasticInfo(NamedTuple):
    """Elastic memory at this moment."""

    blocks: int
    """Blocks that there are."""
    committed: int
    """Blocks that have memory."""
    bytes_committed: int
    """Their bytes."""
    bytes: int
    """The bytes of all addresses."""
    page_bytes: int
    """The largest page of its memory."""
    blocks_per_page: int
    """Ranges of blocks that begin and end at multiples of this share no page with other blocks, so that decommitting
    them returns all of their memory; 0 if there is no such number."""


class Elastic:
    """The memory behind a tensor of `warpool.torch.elastic`, as its attribute `elastic`."""

    def __init__(self, ptr: int, device: int) -> None:
        self.ptr = ptr
        self.device = device

    def __repr__(self) -> str:
        info = self.info()
        return f"<elastic memory of {info.blocks} blocks at {self.ptr:#x}, {info.committed} committed>"

    def commit(self, first: int, last: int, stream: Optional[Any] = None) -> None:
        """The blocks `first` to `last`, without the last one, have memory from now on, for work that is queued in the
        stream afterwards: the current one by default.

        Blocks that have memory keep it, with their contents; those of the others are undefined. All or nothing: raises
        `torch.OutOfMemoryError` if there is not enough. Not in a capture.
        """
        self._change("warpool_elastic_commit", first, last, stream)

    def decommit(self, first: int, last: int, stream: Optional[Any] = None) -> None:
        """The blocks `first` to `last`, without the last one, have no memory from now on, once the work that the stream
        holds now is done. Their pages serve whoever asks next, this tensor and all others."""
        self._change("warpool_elastic_decommit", first, last, stream)

    def is_committed(self, first: int, last: int) -> bool:
        """Whether all of these blocks have memory."""
        all_of_them = ctypes.c_int()
        _native.call(STATUS, "warpool_elastic_committed", self.ptr, first, last, ctypes.byref(all_of_them))
        return bool(all_of_them.value)

    def record_stream(self, stream: Any) -> None:
        """Work in this stream uses the memory without being ordered by commits and decommits there: pages then serve
        others only after that stream's work, too."""
        _native.call(STATUS, "warpool_elastic_record_stream", self.ptr, _handle(stream, self.device))

    def info(self) -> ElasticInfo:
        """How much of it has memory."""
        info = _Info()
        _native.call(STATUS, "warpool_elastic_info", self.ptr, ctypes.byref(info))
        return ElasticInfo(*(getattr(info, name) for name in ElasticInfo._fields))

    def _change(self, name: str, first: int, last: int, stream: Optional[Any]) -> None:
        for value in (first, last):
            if value < 0:
                raise IndexError(f"block {value} is negative")
        status = _native.status(STATUS, name, self.ptr, first, last, _handle(stream, self.device))
        if status == _OUT_OF_MEMORY:
            raise importlib.import_module("torch").OutOfMemoryError(_native.last_error())
        _native.raise_if(status, name)


def elastic(
    shape: Sequence[int],
    dtype: Any = None,
    *,
    dim: Optional[int] = None,
    device: Optional[int] = None,
    tag: Optional[str] = None,
) -> Any:
    """A tensor of addresses alone: none of it has memory, until blocks of it are committed.

    A block is one index of the dimension `dim`, the longest one by default. `tensor.commit(first, last)` gives blocks
    memory, `tensor.decommit(first, last)` takes it; `tensor.elastic` is the `Elastic` with these and further calls.
    Otherwise it is a plain tensor: its address never changes, so views, pointers and captured graphs stay valid.
    Using a block without memory is an illegal access, or changes memory of others. The memory returns with the tensor,
    after the work of the stream that is current now; order other work before that, or record its stream.

    Its memory comes from the same pages as that of all tensors, and returns to them, so that a cache and activations
    share one stock. With a `tag`, or in the scope of one, it sleeps and wakes with the other memory of that
    tag.

    Needs `backend:paged`, the default of `warpool.torch.enable()`. Raises `Error` with another backend.
    """
    torch = importlib.import_module("torch")
    dtype = dtype or torch.get_default_dtype()
    if device is None:
        device = torch.cuda.current_device()
    sizes = [int(size) for size in shape]
    item = dtype.itemsize
    ptr = reserve(sizes, item, dim, device, _handle(None, device), tag)
    # As integers, which every version of PyTorch exchanges; then viewed as what they are.
    words = max(item // 8, 1)
    capsule = _capsule(ptr, item // words * 8, [*sizes[:-1], sizes[-1] * words])
    try:
        tensor = torch.from_dlpack(capsule).view(dtype)
    finally:
        _free_unless_taken(capsule)
    memory = Elastic(ptr, device)
    tensor.elastic, tensor.commit, tensor.decommit = memory, memory.commit, memory.decommit
    return tensor


def reserve(
    sizes: Sequence[int], item: int, dim: Optional[int], device: int, stream: int, tag: Optional[str]
) -> int:
    """Reserves the addresses of a tensor. Returns the first one."""
    if not sizes or min(sizes) <= 0:
        raise ValueError(f"elastic memory needs a dimension, and no empty one: {tuple(sizes)}")
    if dim is None:
        dim = max(range(len(sizes)), key=lambda at: sizes[at])
    if not -len(sizes) <= dim < len(sizes):
        raise IndexError(f"there is no dimension {dim} of {tuple(sizes)}")
    dim %= len(sizes)
    rows, blocks, inner = math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :])
    ptr = ctypes.c_void_p()
    name = None if tag is None else tag.encode()
    _native.call(
        STATUS, "warpool_elastic_reserve", device, stream, rows, blocks, inner * item, name, ctypes.byref(ptr)
    )
    return ptr.value or 0


def headroom(device: Optional[int] = None) -> int:
    """The bytes that could be committed, or allocated in whole pages, on a device now: what the driver has left within
    the limits, and free pages of all streams, those of activations too. Others may take them before the next call does.
    The device is the current one by default."""
    if device is None:
        device = importlib.import_module("torch").cuda.current_device()
    found = ctypes.c_int64()
    _native.call(STATUS, "warpool_headroom", device, ctypes.byref(found))
    return found.value


def _handle(stream: Optional[Any], device: int) -> int:
    """A stream as the driver knows it; the current one if none is given."""
    if stream is None:
        stream = importlib.import_module("torch").cuda.current_stream(device)
    return stream if isinstance(stream, int) else stream.cuda_stream


def _capsule(ptr: int, bits: int, sizes: Sequence[int]) -> Any:
    """A tensor over all of it in the exchange format, of signed integers. Who takes it owns the memory."""
    make = _native.library().warpool_elastic_tensor
    make.restype = ctypes.c_void_p
    make.argtypes = [ctypes.c_void_p, ctypes.c_uint8, ctypes.c_uint8, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]
    made = make(ptr, 0, bits, len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))
    if not made:
        raise _native.Error(_native.last_error())
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    # Python keeps the address of the name.
    return new(made, _CAPSULE_NAME, None)


def _free_unless_taken(capsule: Any) -> None:
    """Who takes a tensor of the exchange format renames its capsule, and frees it."""
    is_valid, pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer.restype = ctypes.c_void_p
    if is_valid(capsule, _CAPSULE_NAME):
        _native.library().warpool_elastic_tensor_free(ctypes.c_void_p(pointer(capsule, _CAPSULE_NAME)))


_CAPSULE_NAME = b"dltensor"
