"""Calls of ATen operators as plain data: what a rule of `operators.py` reads, and what `calibrate.py` writes down.

A call is read from real tensors, from fake ones, or from JSON; only metadata are read, never values. As JSON, a tensor
is `["T", dtype, shape, strides or 0 if contiguous, where]`, where is "" for a CUDA device, "c" for the CPU, "p" for
pinned memory, "s" for sparse; a list of tensors is `["L", ...]`, a list of other values `["l", ...]`, and what is
neither a number nor a string is `["k", kind, text]`.
"""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

BYTES = {
    **{"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8},
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1},
    **{"quint8": 1, "qint8": 1, "qint32": 4, "float4_e2m1fn_x2": 1},
}


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others on a GPU. One with a kernel of its own is not, as silu_backward."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if not func._can_decompose() or not has_kernel(name, "CompositeImplicitAutograd"):
        return False
    # Builds without CUDA have no kernels for it.
    return not has_kernel(name, "CUDA") and not has_kernel(name, "CPU") and name != "aten::_fused_rms_norm"


class Array(NamedTuple):
    """A tensor's metadata."""

    dtype: str
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    where: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return BYTES[self.dtype]

    @property
    def numel(self) -> int:
        """Elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense copy."""
        return self.numel * self.itemsize

    @property
    def extent(self) -> int:
        """Bytes of the smallest storage that holds it."""
        if self.numel == 0:
            return 0
        return (sum((size - 1) * step for size, step in zip(self.shape, self.stride)) + 1) * self.itemsize

    @property
    def dim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def cuda(self) -> bool:
        """On a CUDA device."""
        return self.where == ""

    @property
    def floating(self) -> bool:
        """A floating point dtype."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def contiguous(self) -> bool:
        """Row-major, without gaps; sizes of one do not matter."""
        return self._in_order(range(self.dim))

    @property
    def channels_last(self) -> bool:
        """Contiguous in memory format channels_last or channels_last_3d."""
        if self.dim not in (4, 5):
            return False
        return self._in_order([0, *range(2, self.dim), 1])

    @property
    def dense(self) -> bool:
        """Without gaps or overlaps, in any order of the dimensions."""
        return self._in_order(sorted(range(self.dim), key=lambda it: (-self.stride[it], -self.shape[it])))

    def _in_order(self, order: Any) -> bool:
        if self.numel == 0:
            return True
        step = 1
        for it in reversed(list(order)):
            if self.shape[it] != 1:
                if self.stride[it] != step:
                    return False
                step *= self.shape[it]
        return True

    def json(self) -> List[Any]:
        """As JSON."""
        strides = 0 if self.stride == contiguous_strides(self.shape) else list(self.stride)
        return ["T", self.dtype, list(self.shape), strides, self.where]


class Other(NamedTuple):
    """An argument that is not data: a dtype, a memory format, a generator."""

    kind: str
    text: str


class Call(NamedTuple):
    """A call of an operator: its name with the overload, and all arguments by the names of the schema."""

    name: str
    arguments: Dict[str, Any]
    outputs: List[Array]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def arrays(self) -> Iterator[Tuple[str, Array]]:
        """All tensors among the arguments."""
        for name, value in self.arguments.items():
            if isinstance(value, Array):
                yield name, value
            elif isinstance(value, list):
                for number, it in enumerate(value):
                    if isinstance(it, Array):
                        yield f"{name}[{number}]", it


def product(values: Sequence[int]) -> int:
    """Their product."""
    result = 1
    for value in values:
        result *= value
    return result


def contiguous_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    """As PyTorch computes them for a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def array(tensor: Any) -> Array:
    """The metadata of a tensor, real or fake."""
    dtype = str(tensor.dtype)[6:]
    shape = tuple(int(it) for it in tensor.shape)
    if "strided" not in str(tensor.layout):
        return Array(dtype, shape, contiguous_strides(shape), "s")
    where = "" if tensor.device.type in ("cuda", "meta") else "c"
    # A fake tensor is not asked: that would call an operator, and no rule needs the answer.
    if where == "c" and not hasattr(tensor, "fake_mode") and _pinned(tensor):
        where = "p"
    return Array(dtype, shape, tuple(int(it) for it in tensor.stride()), where)


def _pinned(tensor: Any) -> bool:
    try:
        return bool(tensor.is_pinned())
    except (RuntimeError, NotImplementedError):
        return False


def plain(value: Any) -> Any:
    """An argument as a rule reads it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "untyped_storage") and hasattr(value, "dtype"):
        return array(value)
    if isinstance(value, (list, tuple)):
        return [plain(it) for it in value]
    kind = type(value).__name__
    if kind in ("dtype", "device", "layout", "memory_format", "Generator"):
        return Other(kind, "" if kind == "Generator" else str(value).replace("torch.", ""))
    if isinstance(value, int) or kind == "SymInt":
        return int(value)
    if isinstance(value, float) or kind == "SymFloat":
        return float(value)
    if isinstance(value, complex):
        return Other("complex", str(value))
    return Other(kind, "")


def call(func: Any, args: Sequence[Any], kwargs: Dict[str, Any], outputs: Sequence[Any]) -> Call:
    """A call of an operator; `outputs` are its new tensors."""
    return Call(str(func), arguments(func, args, kwargs), [array(it) for it in outputs])


def arguments(func: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """By the names that the schema gives them; defaults are left out."""
    schema = func._schema.arguments
    found = {argument.name: plain(value) for argument, value in zip(schema, args)}
    found.update((name, plain(value)) for name, value in (kwargs or {}).items())
    return found


def to_json(value: Any) -> Any:
    """As JSON."""
    if isinstance(value, Array):
        return value.json()
    if isinstance(value, Other):
        return ["k", *value]
    if isinstance(value, list):
        return ["l", *(to_json(it) for it in value)]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return ["k", "float", str(value)]
    return value


def from_json(value: Any) -> Any:
    """What `to_json` wrote."""
    if not isinstance(value, list):
        return value
    tag, *rest = value
    if tag == "T":
        dtype, shape, strides, where = rest
        shape = tuple(shape)
        return Array(dtype, shape, tuple(strides) if strides else contiguous_strides(shape), where)
    if tag == "l":
        return [from_json(it) for it in rest]
    if rest[0] == "float":
        return float(rest[1])
    return Other(*rest)


def flat(tree: Any) -> List[Any]:
    """The tensors in what an operator takes or returns."""
    if tree is None:
        return []
    if isinstance(tree, (list, tuple)):
        return [it for value in tree for it in flat(value)]
    if isinstance(tree, dict):
        return [it for value in tree.values() for it in flat(value)]
    return [tree] if hasattr(tree, "untyped_storage") else []


def storage(tensor: Any) -> Optional[int]:
    """Which memory it has: an address, or an identity of a fake tensor's; None if it has none."""
    try:
        memory = tensor.untyped_storage()
        # The address of a fake tensor's memory must not be read: PyTorch ends the process in some threads.
        return int(memory._cdata if hasattr(tensor, "fake_mode") else memory.data_ptr()) or None
    except (RuntimeError, NotImplementedError):
        return None
