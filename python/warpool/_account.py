"""Whose the memory of a GPU is, beyond what the allocator has: `account()`, public in `warpool.torch`.

What belongs to which library is counted by a shared object that has to be loaded before CUDA: `warpool record --
COMMAND` does that. Without it there are the allocator, the other processes, and the rest.
"""

import ctypes
import importlib
import json
from typing import List, NamedTuple, Optional

from . import _native
from ._native import Error

_ARGUMENTS = (
    ctypes.c_int,
    *(ctypes.c_uint64,) * 3,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)


class AccountRow(NamedTuple):
    """Bytes of one owner."""

    owner: str
    """A library, CUDA, other processes, or the allocator."""
    what: str
    """What they are for: modules and kernels, for example."""
    bytes: int
    known_by: str
    """How that is known."""


class Account(NamedTuple):
    """What a GPU has in use, by owner. Printed, it is a table."""

    device: int
    total_bytes: int
    used_bytes: int
    """By all processes."""
    unexplained_bytes: int
    """In use, and of no row; negative if the rows have more than is in use."""
    rows: List[AccountRow]
    remarks: List[str]
    """What could not be found out, and why."""

    def __str__(self) -> str:
        lines = [f"GPU {self.device}: {_mib(self.used_bytes)} of {_mib(self.total_bytes)} in use"]
        unexplained = AccountRow("unexplained", "in use, and of nobody above", self.unexplained_bytes, "")
        for row in (*self.rows, unexplained):
            known_by = f" ({row.known_by})" if row.known_by else ""
            share = row.bytes / max(self.used_bytes, 1)
            lines.append(f"{_mib(row.bytes):>16} {share:>7.1%}  {row.owner}: {row.what}{known_by}")
        return "\n".join([*lines, *(f"  Remark: {remark}." for remark in self.remarks)])


def account(device: Optional[int] = None) -> Account:
    """Whose the memory of a GPU is, now; the current one by default.

    Works with Warpool's allocator and with PyTorch's. What belongs to which library is known if the program was started
    with `warpool record -- COMMAND`; else it is in one row, or unexplained. `Error` if the shared object is missing.
    """
    torch = importlib.import_module("torch")
    index: int = torch.cuda.current_device() if device is None else device
    free, total = torch.cuda.mem_get_info(index)
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    found = json.loads(_text(index, total, free, torch.cuda.memory_reserved(index), uuid))
    rows = [AccountRow(**row) for row in found.pop("rows")]
    remarks = found.pop("remarks")
    return Account(rows=rows, remarks=remarks, **found)


def _text(device: int, total: int, free: int, reserved: int, uuid: str) -> str:
    function = _native.library().warpool_account
    function.restype, function.argtypes = ctypes.c_size_t, list(_ARGUMENTS)
    size = 16 << 10
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(device, total, free, reserved, uuid.encode() or None, buffer, size)
        if length == 0:
            raise Error(_native.last_error() or "warpool_account failed without a reason")
        if length < size:
            return buffer.value.decode("utf-8", "replace")
        size = length + (4 << 10)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
