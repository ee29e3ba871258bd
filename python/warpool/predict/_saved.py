"""`torch.save` and `torch.load` of what is saved in a prediction: its structure is kept, tensors without their memory.

Nothing is written to a path; a file that is open gets a short mark.
"""

import io
import os
import pickle
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MARK = b"warpool.predict "


class _Saved(NamedTuple):
    """A tensor: its place in a storage, and its values where they are known."""

    storage: int
    elements: int
    size: Any
    stride: Any
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool
    values: Optional[torch.Tensor]


class _File(NamedTuple):
    pickled: bytes
    tensors: List[_Saved]


def functions(recorder: Any, original: Any) -> Any:
    """`save` and `load`."""
    paths: Dict[str, _File] = {}
    numbered: List[_File] = []

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        tensors: List[_Saved] = []
        written = io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return None
                tensors.append(_saved(recorder, value))
                return len(tensors) - 1

        Pickler(written, protocol=2).dump(obj)
        file = _File(written.getvalue(), tensors)
        if isinstance(f, (str, os.PathLike)):
            paths[os.path.realpath(f)] = file
            recorder.remarks.add("torch.save wrote nothing; torch.load in the same run gives back what was saved")
        else:
            numbered.append(file)
            f.write(_MARK + b"%d\n" % (len(numbered) - 1))

    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        file = None
        if isinstance(f, (str, os.PathLike)):
            file = paths.get(os.path.realpath(f))
            if file is None and os.path.isfile(f):
                with open(f, "rb") as opened:
                    file = _numbered(numbered, opened)
        elif hasattr(f, "read"):
            file = _numbered(numbered, f)
        if file is None:
            return original(f, map_location, *args, **options)
        storages: Dict[Any, Any] = {}

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Any:
                return _loaded(recorder, file.tensors[number], map_location, storages)

        return Unpickler(io.BytesIO(file.pickled)).load()

    return save, load


def _numbered(files: List[_File], opened: Any) -> Optional[_File]:
    at = opened.tell()
    line = opened.read(64).partition(b"\n")[0]
    if line.startswith(_MARK) and line[len(_MARK) :].isdigit():
        opened.seek(at + len(line) + 1)
        return files[int(line[len(_MARK) :])]
    opened.seek(at)
    return None


def _saved(recorder: Any, tensor: torch.Tensor) -> _Saved:
    storage = tensor.untyped_storage()
    known = recorder.values.of(tensor)
    return _Saved(
        storage._cdata,
        storage.nbytes() // tensor.element_size(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device,
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
        None if known is None else known.detach().clone(),
    )


def _loaded(recorder: Any, saved: _Saved, map_location: Any, storages: Dict[Any, Any]) -> Any:
    device = _device(saved.device, map_location)
    if device.type == "cpu" and saved.values is not None:
        made = saved.values.clone()
    else:
        key = (saved.storage, saved.dtype)
        with torch.no_grad():
            if key not in storages:
                if device.type == "cpu":
                    with recorder.fake:
                        storages[key] = torch.empty(saved.elements, dtype=saved.dtype, device=device)
                else:
                    storages[key] = torch.empty(saved.elements, dtype=saved.dtype, device=device)
            made = storages[key].as_strided(saved.size, saved.stride, saved.offset)
        if saved.values is not None:
            recorder.values.set(made, saved.values)
    if saved.is_parameter:
        return torch.nn.Parameter(made, saved.requires_grad)
    return made.requires_grad_(True) if saved.requires_grad else made


def _device(device: torch.device, map_location: Any) -> torch.device:
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return torch.device(map_location.get(str(device), device))
    if callable(map_location):  # Such as `lambda storage, location: storage`, which stays on the host.
        return torch.device("cpu")
    return torch.device(map_location)
