"""What may be given to the functions: recordings, sizes, settings."""

import operator
import os
import pickle
from typing import Any, Iterable, List, Mapping, Optional, Protocol, Union

from ._library import Input


class Readable(Protocol):
    """A binary file."""

    def read(self) -> bytes:
        """All that is left."""


Recording = Union[
    str, "os.PathLike[str]", "os.PathLike[bytes]", bytes, bytearray, memoryview, Mapping[str, Any], Readable
]
"""A recording: the path of a file, its content, a binary file, or what `torch.cuda.memory._snapshot()` returns."""

Size = Union[int, str]
"""A size: bytes, or a text with a unit such as "79.1GiB"."""

Settings = Union[str, Iterable[str], Mapping[str, object]]
"""Settings as in PYTORCH_CUDA_ALLOC_CONF: "key:value,…", a list of "key:value", or a dictionary."""


def recording_input(given: Recording) -> Input:
    """The recording as the shared object takes it."""
    if isinstance(given, bytes):
        return Input(given, False)
    if isinstance(given, (str, os.PathLike)):
        return Input(_path_bytes(given), True)
    if isinstance(given, Mapping):
        # A dictionary of plain values. The reader accepts no pickle that would run code.
        return Input(pickle.dumps(dict(given), protocol=4), False)
    if hasattr(given, "read"):
        content = given.read()
        if not isinstance(content, bytes):
            raise TypeError(f"a file with a recording must be opened in binary mode: read() gave {_kind(content)}")
        return Input(content, False)
    try:
        # A copy, since others could change it meanwhile.
        return Input(bytes(memoryview(given)), False)
    except TypeError:
        raise TypeError(
            "a recording is a path, bytes, a binary file or what torch.cuda.memory._snapshot() returns, not "
            f"{_kind(given)}"
        ) from None


def _path_bytes(given: "Union[str, os.PathLike[str], os.PathLike[bytes]]") -> bytes:
    path = os.fsencode(given)
    # The system would take the part before the null character as the path.
    if b"\0" in path:
        raise ValueError("a path cannot have a zero in it")
    return path


def size_option(name: str, given: Optional[Size]) -> Optional[Size]:
    """A size; other numbers, such as numpy's, as ints."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, bool):
        raise TypeError(f"{name} is a size in bytes or a text such as '80GiB', not {_kind(given)}")
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is a size in bytes or a text such as '80GiB', not {_kind(given)}") from None


def count_option(name: str, given: Optional[int]) -> Optional[int]:
    """A whole number."""
    if given is None:
        return None
    if isinstance(given, bool):
        raise TypeError(f"{name} is a whole number, not {_kind(given)}")
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {_kind(given)}") from None


def text_list(name: str, given: Union[str, Iterable[str]]) -> List[str]:
    """Texts; a single one need not be in a list."""
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} is a text or a list of texts, and has {_kind(text)}")
    return texts


def settings_list(name: str, given: Settings) -> List[str]:
    """Settings as entries "key:value"."""
    if isinstance(given, Mapping):
        return [f"{key}:{value}" for key, value in given.items()]
    return text_list(name, given)


def _kind(value: object) -> str:
    return type(value).__name__
