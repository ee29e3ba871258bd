"""Values of tensors without memory, where they are known: twins on the host.

A tensor whose elements follow from known values alone (what came from the host, constants, ranges, random integers) has
a twin: a storage of the host of the same layout. An operator on such tensors is carried out on the twins as well. So
masks, lengths, routing tables and indices have the values that they would have on a GPU; activations, parameters and
losses have none. Twins are small: larger tensors have none.
"""

import weakref
from typing import Any, Dict, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import _assume

# A twin has at most this many bytes. Integers and truths, which decide about shapes, may have more.
TWIN_BYTES = 4 << 20
TWIN_BYTES_INTEGER = 64 << 20


def limit(dtype: torch.dtype) -> int:
    """The most bytes of a twin of this type."""
    return TWIN_BYTES if dtype.is_floating_point or dtype.is_complex else TWIN_BYTES_INTEGER


# An operator that returns nothing has been carried out on twins.
DONE = object()

_UNKNOWN = frozenset("empty empty_like empty_strided new_empty new_empty_strided _efficientzerotensor".split())


class Values:
    """The twins, by storage."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._twins: Dict[int, Any] = {}

    def of(self, tensor: Any) -> Optional[torch.Tensor]:
        """The values of a tensor; `None` if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        twin = None if tensor.is_sparse else self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None:
            return None
        return torch.empty(0, dtype=tensor.dtype).set_(
            twin[0], tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
        )

    def taint(self, tensor: Any) -> Optional[str]:
        """The assumption that the values of a tensor follow from, if they follow from one."""
        if not isinstance(tensor, FakeTensor):
            return None
        twin = None if tensor.is_sparse else self._twins.get(tensor.untyped_storage()._cdata)
        return None if twin is None else twin[2]

    def set(self, tensor: Any, value: torch.Tensor, taint: Optional[str] = None) -> None:
        """Gives a tensor a twin with these values."""
        if tensor.is_sparse or value.is_sparse:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size > limit(tensor.dtype):
            return
        twin = torch.UntypedStorage(size)
        view = torch.empty(0, dtype=tensor.dtype).set_(
            twin, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
        )
        view.copy_(value)
        self._put(storage, twin, taint)

    def _put(self, storage: Any, twin: Any, taint: Optional[str]) -> None:
        key = storage._cdata
        # Storages of the host are not logged: their death is seen here.
        self._twins[key] = (twin, weakref.ref(storage, lambda _, key=key: self._twins.pop(key, None)), taint)

    def died(self, key: int) -> None:
        self._twins.pop(key, None)

    def forget(self, kind: Any, args: Any, kwargs: Any) -> None:
        """Elements change to what is not known."""
        if not self._twins:
            return
        for number, name in kind.written:
            value = args[number] if number < len(args) else kwargs.get(name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                self.forget_one(each)

    def forget_one(self, tensor: Any) -> None:
        """A tensor's elements change to what is not known."""
        if isinstance(tensor, FakeTensor) and not tensor.is_sparse:
            self._twins.pop(tensor.untyped_storage()._cdata, None)

    def is_large(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() > limit(tensor.dtype)

    def computed(self, func: Any, kind: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator with its values; `None` if an argument is not known, or it is too large."""
        if kind.name in _UNKNOWN:
            return None
        counts = [0, 0]
        failed = False
        taint: Optional[str] = None

        def known(value: Any) -> Any:
            nonlocal failed, taint
            if isinstance(value, torch.Tensor):
                found = self.of(value)
                if found is None:
                    failed = True
                else:
                    counts[0] += 1
                    counts[1] += found.numel() * found.element_size()
                    taint = taint or self.taint(value)
                return found
            if isinstance(value, (list, tuple)):
                return type(value)([known(each) for each in value]) if type(value) in (list, tuple) else value
            return value

        host_args = []
        for value in args:
            host_args.append(known(value))
            if failed:
                return None
        host_kwargs = {}
        for name, value in kwargs.items():
            host_kwargs[name] = known(value)
            if failed:
                return None
        if not counts[0] and not kind.factory:
            return None
        if not counts[0] and _extent(args, kwargs) > (TWIN_BYTES_INTEGER if _is_integer(kind, kwargs) else TWIN_BYTES):
            return None
        if counts[1] > 4 * TWIN_BYTES_INTEGER:
            return None
        device = kwargs.get("device")
        fakes = [each for each in _flat(args, kwargs) if isinstance(each, FakeTensor)]
        if device is None and fakes:
            owner = next((each.fake_device for each in fakes if each.fake_device.type == "cuda"), fakes[0].fake_device)
        else:
            owner = torch.device(device if device is not None else "cpu")
        if owner.type == "cuda" and owner.index is None:
            owner = torch.device("cuda", self._recorder.streams.device)
        if "device" in host_kwargs:
            host_kwargs["device"] = "cpu"
        for name in ("generator", "pin_memory", "non_blocking"):
            if host_kwargs.get(name) is not None:
                host_kwargs[name] = None if name != "non_blocking" else False
        try:
            made = func(*host_args, **host_kwargs)
        except (NotImplementedError, RuntimeError):
            return None
        if kind.changes:
            if taint is not None:
                self._tainted(kind, args, kwargs, taint)
            if kind.returns_none:
                return DONE
            return self._written(kind, args, kwargs, made)
        return self._wrapped(made, owner, func, args, kwargs, kind, taint)

    def _tainted(self, kind: Any, args: Any, kwargs: Any, taint: str) -> None:
        number, name = kind.written[0]
        value = args[number] if number < len(args) else kwargs.get(name)
        if isinstance(value, FakeTensor):
            key = value.untyped_storage()._cdata
            twin = self._twins.get(key)
            if twin is not None:
                self._twins[key] = (*twin[:2], taint)

    def _written(self, kind: Any, args: Any, kwargs: Any, made: Any) -> Any:
        """The twins have changed; the results are the arguments that were written."""
        number, name = kind.written[0]
        if (kind.in_place or len(kind.written) == 1) and not isinstance(made, (list, tuple)):
            return args[number] if number < len(args) else kwargs[name]
        return None

    def _wrapped(
        self, made: Any, owner: Any, func: Any, args: Any, kwargs: Any, kind: Any, taint: Optional[str]
    ) -> Any:
        """Results without memory, with their twins."""
        if kind.views:
            # A view of a known tensor: its storage has a twin already.
            return self._recorder.fake.dispatch(func, (), args, kwargs)
        if isinstance(made, (list, tuple)):
            if not all(isinstance(each, torch.Tensor) for each in made):
                return None
            return type(made)(self._wrap(each, owner, taint) for each in made) if type(made) in (list, tuple) else None
        if not isinstance(made, torch.Tensor):
            return made
        return self._wrap(made, owner, taint)

    def _wrap(self, made: torch.Tensor, owner: Any, taint: Optional[str]) -> Any:
        with self._recorder.fake:
            fake = torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=owner)
        self.set(fake, made, taint)
        return fake

    def wrapped_shape(self, made: torch.Tensor, owner: Any) -> Any:
        """A tensor without memory of the same shape and layout."""
        with self._recorder.fake:
            return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=owner)

    def assumed(self, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Values that are assumed of a result that has none."""
        maker = _assume.MAKERS.get(kind.name)
        if maker is not None:
            maker(self._recorder, kind, args, kwargs, result)


def _is_integer(kind: Any, kwargs: Any) -> bool:
    """Whether a factory makes integers or truths."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return kind.name in ("randint", "randperm", "arange", "tril_indices", "triu_indices")
    return not (dtype.is_floating_point or dtype.is_complex)


def _extent(args: Any, kwargs: Any) -> int:
    """About how many bytes a factory makes."""
    for value in args:
        if isinstance(value, (list, tuple)):
            count = 8
            for extent in value:
                count *= extent
            return count
    largest = 1
    for value in args:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            largest = max(largest, abs(int(value)) if abs(value) < 1 << 62 else 1 << 62)
    return largest * 8


def _flat(args: Any, kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
