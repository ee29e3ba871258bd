"""`torch.save`, `torch.load` and safetensors, of what is saved in a prediction: its structure is kept, and its tensors
without their memory.

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


def patch(patches: Any, recorder: Any) -> None:
    """Replaces the functions; `patches.undo()` puts them back."""
    paths: Dict[str, _File] = {}
    save, load = _functions(recorder, paths, torch.load)
    patches.set(torch, "save", save)
    patches.set(torch, "load", load)
    try:
        import safetensors.torch as module
    except ImportError:
        return

    # Programs import `save_file` by name: what it calls is replaced.
    def flattened(original: Any) -> Any:
        def flatten(tensors: Any, *rest: Any) -> Any:
            if any(isinstance(each, FakeTensor) for each in tensors.values()):
                return _Flat(dict(tensors))
            return original(tensors, *rest)

        return flatten

    def written(original: Any) -> Any:
        def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            if not isinstance(tensors, _Flat):
                return original(tensors, filename, metadata=metadata)
            save(tensors.tensors, filename)
            return None

        return serialize_file

    def serialized(original: Any) -> Any:
        def serialize(tensors: Any, metadata: Any = None) -> bytes:
            if not isinstance(tensors, _Flat):
                return original(tensors, metadata=metadata)
            written = io.BytesIO()
            save(tensors.tensors, written)
            return written.getvalue()

        return serialize

    def opened(original: Any) -> Any:
        def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            if os.path.realpath(filename) not in paths:
                return original(filename, framework=framework, device=device, **options)
            return _Opened(load(filename, map_location=device))

        return safe_open

    for name, wrap in (
        ("_flatten", flattened),
        ("_flatten_as_ptr", flattened),
        ("serialize_file", written),
        ("serialize", serialized),
        ("safe_open", opened),
    ):
        if hasattr(module, name):
            patches.set(module, name, wrap(getattr(module, name)))


class _Flat(NamedTuple):
    """Tensors on their way into a file of safetensors."""

    tensors: Dict[str, Any]


class _Opened:
    """A file of safetensors that was saved in this prediction."""

    def __init__(self, tensors: Dict[str, Any]) -> None:
        self._tensors = tensors
        self.keys = self.offset_keys = lambda: list(tensors)
        self.metadata = dict

    def get_tensors(self) -> Dict[str, Any]:
        """Its tensors."""
        return self._tensors

    def get_tensor(self, name: str) -> Any:
        """One of its tensors."""
        return self._tensors[name]

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *_: Any) -> None: ...


def _functions(recorder: Any, paths: Dict[str, _File], original: Any) -> Any:
    """`torch.save` and `torch.load`."""
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
            recorder.remarks.add("what was saved was not written; loaded in the same run, it is what was saved")
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
