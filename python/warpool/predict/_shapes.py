"""Shapes and layouts of operators' results: from `FakeTensorMode`, and from a cache where the same was asked before.

PyTorch's own cache takes several times as long per operator: it serves symbolic shapes and constants too.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_EMPTY: Dict[str, Any] = {}


class Shapes:
    """The results of operators on tensors without memory."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._made: Dict[Any, Optional[Tuple[Any, Any]]] = {}

    def results(self, func: Any, kind: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The results, as tensors without memory."""
        key = None
        if not kind.changes and not kind.views:
            key = _key(func, args, kwargs)
            if key is not None:
                found = self._made.get(key, False)
                if found:
                    make, made = found
                    return make([self._tensor(each) for each in made]) if make is not None else self._tensor(made)
                if found is None:
                    key = None
        elif kind.views and not kwargs:
            return self._view(func, types, args)
        result = self._fake.dispatch(func, types, args, kwargs)
        if key is not None:
            self._made[key] = _described(result, args)
        return result

    def _view(self, func: Any, types: Any, args: Any) -> Any:
        """A view: PyTorch's operator on the tensors of its meta device that are in ours."""
        source = args[0]
        if (
            not isinstance(source, FakeTensor)
            or source.is_sparse
            or any(isinstance(each, torch.Tensor) for each in args[1:])
        ):
            return self._fake.dispatch(func, types, args, _EMPTY)
        with in_kernel_invocation_manager(self._fake):
            made = func(*args)
        device = source.fake_device
        if isinstance(made, torch.Tensor):
            return made if made is source else FakeTensor(self._fake, made, device)
        if isinstance(made, (list, tuple)):
            return [FakeTensor(self._fake, each, device) for each in made]
        return made

    def _tensor(self, described: Any) -> Any:
        if not isinstance(described, tuple):
            return described
        shape, stride, dtype, device = described
        with in_kernel_invocation_manager(self._fake):
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._fake, made, device)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the results depend on; `None` if that is not known."""
    parts: List[Any] = [func, torch.is_inference_mode_enabled()]
    try:
        for value in args:
            parts.append(_part(value))
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                parts.append(_part(value))
        key = tuple(parts)
        hash(key)
    except _Unknown:
        return None
    except TypeError:
        return None
    return key


class _Unknown(Exception):
    """An argument that is not compared."""


def _part(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.is_sparse or value.is_conj() or value.is_neg() or value.is_quantized:
            raise _Unknown
        return (tuple(value.shape), value.stride(), value.dtype, value.fake_device)
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_sparse:
            raise _Unknown
        return ("host", value.dtype)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_part(each) for each in value))
    if isinstance(value, torch.Generator):
        raise _Unknown
    # 1, 1.0 and True are equal, and give results of different types.
    return (type(value), value)


def _described(result: Any, args: Any) -> Optional[Tuple[Any, Any]]:
    """A result, so that it can be made again; `None` if it cannot."""
    if isinstance(result, FakeTensor):
        described = _tensor_described(result)
        if described is None or result.untyped_storage()._cdata in _storages(args):
            return None
        return None, described
    if type(result) not in (list, tuple):
        return None
    parts = []
    for each in result:
        if isinstance(each, FakeTensor):
            described = _tensor_described(each)
            if described is None:
                return None
            parts.append(described)
        elif each is None or isinstance(each, (bool, int, float)):
            parts.append(each)
        else:
            return None
    storages = [each.untyped_storage()._cdata for each in result if isinstance(each, FakeTensor)]
    used = _storages(args)
    if len(set(storages)) != len(storages) or used.intersection(storages):
        return None
    return type(result), parts


def _storages(args: Any) -> "set[int]":
    return {
        each.untyped_storage()._cdata
        for value in args
        for each in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(each, FakeTensor) and not each.is_sparse
    }


def _tensor_described(tensor: Any) -> Any:
    if tensor.is_sparse or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._base is not None:
        return None
    if tensor.layout != torch.strided or tensor.storage_offset():
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    if tensor.untyped_storage().nbytes() != extent * tensor.element_size():
        return None
    return shape, stride, tensor.dtype, tensor.fake_device
