"""A program runs on tensors without memory, and what it would ask of the CUDA allocator is logged.

`Recorder` is a dispatch mode above PyTorch's `FakeTensorMode`. Operators on CUDA tensors are given to that mode, which
knows the results' shapes and layouts; every storage that is new is logged as an allocation, and its death as a free: a
weak reference to the storage, so C++ decides as on a GPU. Operators on small tensors of the host run for real.

- Tensors of the host above `HOST_BYTES`, and all parameters, have no memory either: a model of any size can be made.
- Values: a small CUDA tensor that follows from known values alone (inputs, masks, lengths, constants) keeps its values
  in a twin on the host (`_values.py`). For others see `_assume.py`.
"""

import contextlib
import sys
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _assume, _outside, _values, calls, operators
from ._shapes import Shapes
from ._log import Block, Log
from ._recurrent import SHAPES

aten = torch.ops.aten
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_DEVICE = torch.ops.prim.device.default
_NO_DEVICE: Any = getattr(torch, "AcceleratorError", RuntimeError)

# Larger tensors of the host have no memory.
HOST_BYTES = 1 << 20

# An operator is tried on the host if its arguments are not larger.
_TRIED_BYTES = 1 << 30

# Change a tensor in place, but not only its elements.
_CHANGES_SHAPE = frozenset(
    "resize_ resize_as_ resize_output_ set_ transpose_ t_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ detach_ "
    "rename_ requires_grad_ retain_grad_ _resize_output_ sparse_resize_ copy_sparse_to_sparse_".split()
)
_RESIZES = frozenset(("resize_", "resize_as_", "_resize_output_", "set_"))
# Views, whose schema does not say so.
_VIEWS = frozenset("_unsafe_view _reshape_alias lift_fresh".split())
_FACTORIES = frozenset(
    "empty zeros ones full rand randn randint arange linspace logspace eye randperm empty_strided scalar_tensor "
    "tril_indices triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window fft_fftfreq "
    "fft_rfftfreq normal".split()
)


# In these nodes of autograd an operator works in place, but for tensors of other classes than PyTorch's own and under
# modes such as this one (FunctionsManual.cpp, `areAnyTensorSubclassLike`): its result takes over the first argument's
# memory, which dies then.
_IN_PLACE_IN = {
    "scatter_add": frozenset(["GatherBackward0"]),
    "index_put": frozenset(["IndexBackward0"]),
    "index_add": frozenset(["IndexSelectBackward0"]),
    "put": frozenset(["TakeBackward0"]),
    "scatter": frozenset(f"{it}Backward{n}" for it in "Max Min Median Kthvalue Mode Topk Sort".split() for n in "01"),
    "sub": frozenset(["BinaryCrossEntropyWithLogitsBackward0"]),
    "mul": frozenset(["BinaryCrossEntropyWithLogitsBackward0"]),
}

# A program that catches what ends it is let go on for this many operators.
_SWALLOWED = 1000


class Ended(BaseException):
    """The prediction has ended, though the program has caught what ended it."""


class _Kind:
    """What is known about an operator from its schema."""

    __slots__ = (
        *("changes", "composite", "factory", "in_place", "library", "name", "native", "returns_none", "views"),
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.split("::")[1]
        self.native = (f"at::_ops::{self.name}::call",)
        self.library = _outside.library(self.name)
        arguments = schema.arguments
        self.written = tuple(
            (number, argument.name)
            for number, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.returns_none = not schema.returns
        # Elements of existing tensors change, and nothing else: there is nothing to find out.
        returns_written = all(value.alias_info is not None and value.alias_info.is_write for value in schema.returns)
        self.in_place = (
            bool(self.written)
            and returns_written
            and self.name not in _CHANGES_SHAPE
            and self.name.endswith("_")
            and self.written[0][0] == 0
        )
        self.changes = bool(self.written)
        # Seen here only in inference mode; elsewhere autograd has taken it apart before.
        self.composite = calls.is_composite(func)
        self.factory = self.name in _FACTORIES
        self.views = not self.changes and (
            self.name in _VIEWS or any(value.alias_info is not None for value in schema.returns)
        )


class _Death(weakref.ref):
    """Calls back when a storage dies."""

    __slots__ = ("block", "key")


class Recorder(TorchDispatchMode):
    """Logs what a program asks of the allocator, while it is entered."""

    # Those operators are refused by `_dispatch`.
    supports_higher_order_operators = True

    def __init__(self, fake: FakeTensorMode, log: Log, table: Any, assumptions: "_assume.Assumptions") -> None:
        super().__init__()
        self.fake = fake
        self.log = log
        self.table = table
        self.assumptions = assumptions
        self.values = _values.Values(self)
        self.streams = Streams()
        self.live: Dict[int, _Death] = {}
        self.unmodelled: Dict[str, List[int]] = {}
        # Operators unlike any that was measured: how many calls, and the most that one of them was taken to ask for.
        self.guessed: Dict[str, List[int]] = {}
        self.operators: Dict[str, int] = {}
        self.kept: Dict[Any, Block] = {}
        self.outside = _outside.Outside()
        self.host_bytes = 0
        self.on_operator: Optional[Callable[[], None]] = None
        # What ends the program; raised again at each operator, since the program may catch it.
        self.ending: Optional[BaseException] = None
        self.ended_again = 0
        self.on_end: List[Callable[[], None]] = []
        self.on_swallowed: Optional[Callable[[], None]] = None
        self._kinds: Dict[Any, _Kind] = {}
        self._special = _special_operators(self)
        self._shapes = Shapes(fake)
        # How many GPUs the program sees.
        self.devices = 1
        # Held for each operator, once the program has started a thread.
        self._lock: Optional[Any] = None

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Logs what the calling thread does, which the program has started."""
        if self._lock is None:
            self._lock = threading.RLock()
        _python_dispatch._push_mode(self)
        try:
            yield
        finally:
            _python_dispatch._pop_mode()

    # Every operator.

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._lock is None:
            return self._dispatched(func, types, args, kwargs)
        with self._lock:
            return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self.ending is not None:
            self._end_again()
        for each in types:
            # A tensor of tensors, such as fully_shard's DTensor: its operators on what it holds are seen here.
            if each is not FakeTensor and each.__torch_dispatch__ is not _NO_DISPATCH:
                return NotImplemented
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            if isinstance(func, torch._ops.HigherOrderOperator):
                raise _assume.PredictionError(
                    f"{self.assumptions.given()[1]}: {func.name()} is not predicted: without torch.compile its memory "
                    "would be another. Use scaled_dot_product_attention in its place for the prediction"
                )
            kind = self._kinds[func] = _Kind(func)
        if kind.composite:
            with self:
                return func.decompose(*args, **kwargs)
        fakes, reals = _tensors(args, kwargs)
        device = kwargs.get("device")
        to_cuda = device is not None and torch.device(device).type == "cuda"
        if not fakes and not to_cuda:
            return self._on_host(func, kind, args, kwargs, reals)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        special = self._special.get(kind.name)
        if special is not None:
            result = special(func, kind, args, kwargs)
            if result is not NotImplemented:
                return result
        if not to_cuda and not any(each.fake_device.type == "cuda" for each in fakes):
            return self._fake_host(func, kind, types, args, kwargs)
        return self._on_device(func, kind, types, args, kwargs)

    def _end_again(self) -> None:
        """The program caught what ends it, and goes on."""
        self.ended_again += 1
        if self.ended_again >= _SWALLOWED and self.on_swallowed is not None:
            self.on_swallowed()
        raise Ended

    def _on_host(self, func: Any, kind: _Kind, args: Any, kwargs: Any, reals: Any) -> Any:
        """An operator on tensors of the host that have memory."""
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kind.factory and not reals and _is_large(kind, args, kwargs):
            return self._make(func, kind, (), args, kwargs)
        if kind.name in ("_pin_memory", "pin_memory"):
            self.host_bytes += args[0].untyped_storage().nbytes()
            return args[0].clone()
        if kind.name == "is_pinned":
            return False
        return func(*args, **kwargs)

    def _fake_host(self, func: Any, kind: _Kind, types: Any, args: Any, kwargs: Any) -> Any:
        """An operator on tensors of the host without memory."""
        if kind.name in ("_pin_memory", "pin_memory"):
            self.host_bytes += args[0].untyped_storage().nbytes()
            return self.fake.dispatch(aten.clone.default, types, (args[0],), {})
        if kind.name == "is_pinned":
            return False
        known = self.values.computed(func, kind, args, kwargs)
        if known is not None:
            return None if known is _values.DONE else known
        if kind.changes:
            self.values.forget(kind, args, kwargs)
        if kind.in_place:
            return None if kind.returns_none else args[0]
        return self._make(func, kind, types, args, kwargs)

    def _make(self, func: Any, kind: _Kind, types: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operator, without values."""
        shapes = SHAPES.get(kind.name)
        if shapes is not None:
            with self.fake:
                return shapes(args)
        try:
            return self._shapes.results(func, kind, types, args, kwargs)
        except _assume.NEEDS_VALUES as error:
            integers = [each for each in sum(_tensors(args, kwargs), []) if not each.dtype.is_floating_point]
            if integers and all(self.values.of(each) is not None for each in integers):
                return self._tried(func, kind, args, kwargs)
            raise self.assumptions.missing(f"{kind.name}: {error}") from None
        except UnsupportedOperatorException:
            return self._tried(func, kind, args, kwargs)

    def _tried(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """The results of an operator whose shapes PyTorch cannot tell: it is carried out on tensors of the host."""
        fakes, reals = _tensors(args, kwargs)
        size = sum(each.numel() * each.element_size() for each in fakes)
        owner = fakes[0].fake_device if fakes else torch.device(kwargs.get("device", "cpu"))

        def host(value: Any) -> Any:
            if isinstance(value, FakeTensor):
                known = self.values.of(value)
                return torch.zeros(tuple(value.shape), dtype=value.dtype) if known is None else known
            if isinstance(value, (list, tuple)):
                return type(value)(host(each) for each in value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        try:
            if size > _TRIED_BYTES:
                raise NotImplementedError(f"its arguments have {size} bytes")
            made = func(*(host(each) for each in args), **{name: host(each) for name, each in kwargs.items()})
        except (NotImplementedError, RuntimeError, IndexError) as error:
            line = self.assumptions.given()[1]
            raise _assume.PredictionError(
                f"{line}: PyTorch cannot tell the shapes of the results of {func} without a GPU, and it does not run "
                f"on the host ({str(error).splitlines()[0]}). Register them with torch.library.register_fake"
            ) from None
        if kind.changes:
            return args[kind.written[0][0]]
        wrap = self.values.wrapped_shape
        if isinstance(made, torch.Tensor):
            return wrap(made, owner)
        return type(made)(wrap(each, owner) if isinstance(each, torch.Tensor) else each for each in made)

    def _on_device(self, func: Any, kind: _Kind, types: Any, args: Any, kwargs: Any) -> Any:
        """An operator on CUDA tensors."""
        log = self.log
        log.operator()
        if self.on_operator is not None:
            self.on_operator()
        self.operators[kind.name] = self.operators.get(kind.name, 0) + 1
        result = self.values.computed(func, kind, args, kwargs)
        if result is _values.DONE:
            result = None
        elif result is None:
            if kind.changes:
                self.values.forget(kind, args, kwargs)
            if kind.in_place:
                result = None if kind.returns_none else args[0]
            else:
                result = self._make(func, kind, types, args, kwargs)
                self.values.assumed(kind, args, kwargs, result)
        self._log_operator(func, kind, args, kwargs, result)
        if kind.name in _RESIZES:
            storage = args[0].untyped_storage()
            self.resized(storage, storage.nbytes())
        return result

    # Memory.

    def _log_operator(self, func: Any, kind: _Kind, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [] if kind.in_place or kind.views else self._new_outputs(result)
        if kind.name in _IN_PLACE_IN and self._is_in_place(kind, args, outputs):
            self._take_over(args[0], *outputs[0])
        if not kind.views:
            self.outside.kernels = True
        if kind.library is not None:
            self.outside.use(kind.library, self._device(args, kwargs, outputs), operators.thread())
        steps = None
        if self.table is not None:
            steps = self.table.steps(func, args, kwargs, [output for output, _ in outputs])
        if steps is None:
            if not kind.views:
                count = self.unmodelled.setdefault(kind.name, [0, 0])
                count[0] += 1
                count[1] += sum(storage.nbytes() for _, storage in outputs)
            if outputs:
                stack = self._stack(kind.native)
                for output, storage in outputs:
                    self._allocated(output, storage, stack)
            return
        if not outputs and not steps.order and not steps.kept:
            return
        stack = self._stack(kind.native)
        if getattr(steps, "is_guess", False):
            most = max((step[2] for step in steps.order if step[0] == "alloc"), default=0)
            count = self.guessed.setdefault(kind.name, [0, 0])
            count[0] += 1
            count[1] = max(count[1], most)
        device = self._device(args, kwargs, outputs)
        stream = self.stream(device)
        sizes = getattr(steps, "sizes", {})
        temporaries: Dict[Any, Block] = {}
        made = set()
        try:
            for step in steps.order:
                what = step[0]
                if what == "output":
                    made.add(step[1])
                    self._allocated(*outputs[step[1]], stack, sizes.get(step[1]))
                elif what == "alloc":
                    if step[2]:
                        temporaries[step[1]] = self.log.alloc(step[2], device, stream, stack)
                elif step[1] in temporaries:
                    self.log.free(temporaries.pop(step[1]))
            for number, (output, storage) in enumerate(outputs):
                if number not in made:
                    self._allocated(output, storage, stack)
            for key, size in steps.kept:
                self.keep(key, size, device, stream)
        finally:
            # Also where memory ran out in the midst of the operator.
            for block in temporaries.values():
                self.log.free(block)

    def _is_in_place(self, kind: _Kind, args: Any, outputs: Any) -> bool:
        node = torch._C._current_autograd_node()
        if node is None or node.name() not in _IN_PLACE_IN[kind.name] or len(outputs) != 1:
            return False
        # `mul` follows `sub`, on its result; another product of the node has its own.
        block = self.block(args[0]) if isinstance(args[0], FakeTensor) else None
        return block is not None and block.bytes == outputs[0][1].nbytes()

    def _take_over(self, source: Any, tensor: Any, storage: Any) -> None:
        """The memory of a tensor becomes that of another."""
        old = self.live[source.untyped_storage()._cdata]
        self._adopted(storage, old.block)
        old.block = None

    def keep(self, key: Any, size: int, device: int, stream: int) -> None:
        """Memory that a library keeps from its first use on."""
        found = (key, device, stream)
        if found not in self.kept and size:
            stack = self._stack((f"at::cuda::{key}Workspace", f"at::_ops::{key}::call"))
            self.kept[found] = self.log.alloc(size, device, stream, stack)

    def free_kept(self) -> None:
        """The libraries' memory is freed."""
        for block in self.kept.values():
            self.log.free(block)
        self.kept.clear()

    def _new_outputs(self, result: Any) -> List[Tuple[Any, Any]]:
        """The tensors with a new storage on a device, each storage once."""
        if isinstance(result, FakeTensor):
            if result.fake_device.type != "cuda":
                return []
            if result.is_sparse:
                with in_kernel_invocation_manager(self.fake):
                    parts = (result._indices(), result._values())
                device = result.fake_device
                return self._new_outputs([FakeTensor(self.fake, part, device) for part in parts])
            storage = result.untyped_storage()
            return [] if storage._cdata in self.live else [(result, storage)]
        if not isinstance(result, (tuple, list)):
            return []
        found: Dict[int, Tuple[Any, Any]] = {}
        for each in result:
            for output, storage in self._new_outputs(each):
                found.setdefault(storage._cdata, (output, storage))
        return list(found.values())

    def _allocated(self, tensor: Any, storage: Any, stack: int, size: Optional[int] = None) -> None:
        if storage._cdata in self.live:  # It took over another's memory.
            return
        size = storage.nbytes() if size is None else size
        device = tensor.fake_device.index or 0
        if device >= self.devices:
            raise _NO_DEVICE(
                f"CUDA error: invalid device ordinal (cuda:{device}; the prediction has {self.devices}: see --gpus)"
            )
        self._adopted(storage, self.log.alloc(size, device, self.stream(device), stack) if size else None)

    def _adopted(self, storage: Any, block: Optional[Block]) -> None:
        """The block is free when the storage dies."""
        death = _Death(storage, self._died)
        death.key = storage._cdata
        death.block = block
        self.live[death.key] = death

    def adopt(self, tensor: Any, stack: Optional[int] = None) -> None:
        """Logs the storage of a tensor that was made without an operator."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            self._allocated(tensor, storage, self._stack(()) if stack is None else stack)

    def resized(self, storage: Any, size: int) -> None:
        """A storage got another size: `UntypedStorage.resize_`, as FSDP uses it."""
        death = self.live.get(storage._cdata)
        if death is None:
            return
        old = death.block
        if old is not None and old.bytes == size:
            return
        device, stream = (old.device, old.stream) if old is not None else (0, self.stream(0))
        death.block = self.log.alloc(size, device, stream, self._stack(("at::_ops::resize_::call",))) if size else None
        if old is not None:
            self.log.free(old)

    def _died(self, death: "_Death") -> None:
        if self._lock is None:
            self._free_dead(death)
        else:
            with self._lock:
                self._free_dead(death)

    def _free_dead(self, death: "_Death") -> None:
        if self.live.get(death.key) is death:
            del self.live[death.key]
            self.values.died(death.key)
        if death.block is not None:
            self.log.free(death.block)

    def block(self, tensor: Any) -> Optional[Block]:
        """The block of a tensor."""
        death = self.live.get(tensor.untyped_storage()._cdata)
        return None if death is None else death.block

    def _device(self, args: Any, kwargs: Any, outputs: Any) -> int:
        for output, _ in outputs:
            return output.fake_device.index or 0
        fakes, _ = _tensors(args, kwargs)
        for each in fakes:
            if each.fake_device.type == "cuda":
                return each.fake_device.index or 0
        return self.streams.device

    # Streams and stacks.

    def stream(self, device: int) -> int:
        """The number of the current stream."""
        streams = self.streams
        if not streams.switched:
            return 0
        node = torch._C._current_autograd_node()
        if node is not None:
            return streams.of_sequence(node._sequence_nr(), device)
        return streams.current(device)

    def _stack(self, native: Tuple[str, ...]) -> int:
        node = torch._C._current_autograd_node()
        if node is not None:
            native = (*native, f"torch::autograd::generated::{node.name()}::apply()")
        return self.log.stacks.number(sys._getframe(2), native)


# Set afterwards, or the class would wrap it for torch.compile, at a cost for every operator.
Recorder.__torch_dispatch__ = Recorder._dispatch  # type: ignore[method-assign]


class Streams:
    """The current device and streams of each thread. Backward work runs in the stream of its forward pass: sequence
    numbers of autograd's nodes say when in the forward pass they were made."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.switched = False
        self.count = 1
        self._sequence: List[Tuple[int, Dict[int, int]]] = []

    @property
    def device(self) -> int:
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, device: int) -> None:
        self._local.device = device

    def new(self) -> int:
        """The number of a new stream. PyTorch has 32 of each priority and gives them out in turn."""
        number = (self.count - 1) % 32 + 1
        self.count += 1
        return number

    def current(self, device: int) -> int:
        return getattr(self._local, "streams", {}).get(device, 0)

    def set(self, device: int, stream: int) -> None:
        streams = dict(getattr(self._local, "streams", {}))
        if streams.get(device, 0) == stream:
            return
        streams[device] = stream
        self._local.streams = streams
        self.switched = True
        self._sequence.append((torch._C._autograd._get_sequence_nr(), streams))

    def of_sequence(self, number: int, device: int) -> int:
        """The stream that was current when a node of autograd was made."""
        if number >= 1 << 62:  # The node that accumulates a gradient has no place in the order.
            return 0
        low, high = 0, len(self._sequence)
        while low < high:
            middle = (low + high) // 2
            if self._sequence[middle][0] <= number:
                low = middle + 1
            else:
                high = middle
        return self._sequence[low - 1][1].get(device, 0) if low else 0


def _tensors(args: Any, kwargs: Any) -> Tuple[List[Any], List[Any]]:
    """The tensors among the arguments: those without memory, and those with."""
    fakes: List[Any] = []
    reals: List[Any] = []
    for value in args:
        if isinstance(value, FakeTensor):
            fakes.append(value)
        elif isinstance(value, torch.Tensor):
            reals.append(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, FakeTensor):
                    fakes.append(each)
                elif isinstance(each, torch.Tensor):
                    reals.append(each)
    if kwargs:
        for value in kwargs.values():
            if isinstance(value, FakeTensor):
                fakes.append(value)
            elif isinstance(value, torch.Tensor):
                reals.append(value)
            elif isinstance(value, (list, tuple)):
                more = _tensors(value, None)
                fakes += more[0]
                reals += more[1]
    return fakes, reals


def _is_large(kind: Any, args: Any, kwargs: Any) -> bool:
    """Whether a factory makes a tensor of the host that is too large to have memory."""
    for value in args:
        if isinstance(value, (list, tuple)):
            count = 1
            for extent in value:
                count *= extent
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            device = kwargs.get("device")
            most = _values.TWIN_BYTES_INTEGER if _values._is_integer(kind, kwargs) else HOST_BYTES
            return count * dtype.itemsize > most and (device is None or torch.device(device).type == "cpu")
    return False


def _special_operators(recorder: Recorder) -> Dict[str, Callable[..., Any]]:
    """Operators that are not what they seem: those that read values, and copies between host and device."""
    values, assumptions, log = recorder.values, recorder.assumptions, recorder.log

    def item(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        log.synchronize()
        known = values.of(args[0])
        if known is not None:
            taint = values.taint(args[0])
            if taint == _assume.COMPARED:
                return assumptions.item(args[0], func(known))
            if taint is not None:
                assumptions.add(taint)
            return func(known)
        return assumptions.item(args[0])

    def index(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """Masks among the indices: how many elements they have decides about the shape."""
        source, indices = args[0], args[1]
        masks = [each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return NotImplemented
        log.synchronize()
        numbers: List[Any] = []
        for each in indices:
            if each is None or each.dtype not in (torch.bool, torch.uint8):
                numbers.append(each)
                continue
            known = values.of(each)
            count = assumptions.count(each.numel(), "a mask as index") if known is None else int(known.count_nonzero())
            taint = values.taint(each)
            if taint is not None:
                assumptions.add(taint)
            with recorder.fake:
                made = [torch.empty(count, dtype=torch.int64, device=each.device) for _ in range(each.dim())]
            numbers += made
        log.operator()
        recorder.operators[kind.name] = recorder.operators.get(kind.name, 0) + 1
        result = values.computed(func, kind, args, kwargs)
        if result is None:
            result = recorder.fake.dispatch(func, (), (source, numbers), {})
        recorder._log_operator(func, kind, args, kwargs, result)
        return result

    def to_copy(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        source, device = args[0], kwargs.get("device")
        source_cuda = isinstance(source, FakeTensor) and source.fake_device.type == "cuda"
        device = source.device if device is None else torch.device(device)
        if device.type != "cuda" and source_cuda:
            if not kwargs.get("non_blocking"):
                log.synchronize()
            known = values.of(source)
            if known is not None and not values.is_large(known):
                return func(known, **{**kwargs, "device": device, "pin_memory": None, "non_blocking": False})
            return NotImplemented
        return NotImplemented

    def pin(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        recorder.host_bytes += args[0].untyped_storage().nbytes()
        known = values.of(args[0])
        return args[0] if known is None else known.clone()

    def record_stream(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        return None

    def data_dependent(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """An operator whose result has a shape that depends on values."""
        log.synchronize()
        made = values.computed(func, kind, args, kwargs)
        taint = values.taint(args[0])
        if taint is not None:
            assumptions.add(taint)
        if made is None:
            made = assumptions.shape(recorder, kind, args, kwargs)
        log.operator()
        recorder.operators[kind.name] = recorder.operators.get(kind.name, 0) + 1
        recorder._log_operator(func, kind, args, kwargs, made)
        return made

    def equal(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        log.synchronize()
        known = [values.of(each) for each in args[:2]]
        if not any(each is None for each in known):
            return func(*known, *args[2:], **kwargs)
        if args[0].dtype.is_floating_point:
            return assumptions.same(kind.name)
        return assumptions.truth(f"{kind.name}()")

    def uses_cudnn_for_ctc(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        log_probs, targets, blank = args[0], args[1], kwargs.get("blank", args[4] if len(args) > 4 else 0)
        on_host = not isinstance(targets, FakeTensor) or targets.fake_device.type == "cpu"
        plain = log_probs.dtype == torch.float32 and targets.dtype == torch.int32 and targets.dim() == 1
        if not (on_host and plain and blank == 0 and torch.backends.cudnn.enabled and targets.is_contiguous()):
            return False
        steps, lengths = log_probs.size(0), zip(args[2], args[3])
        return all(source == steps and target < 256 and target <= source for source, target in lengths)

    def grouped_product(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """PyTorch's shape function refuses single precision, which its kernel takes."""
        first, second = args[0], args[1]
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        if first.dtype == torch.bfloat16:
            return NotImplemented
        rows, columns = first.size(-2), second.size(-1)
        groups = second.size(0) if second.dim() == 3 else first.size(0) if first.dim() == 3 else offsets.numel()
        shape = (rows, columns) if first.dim() != second.dim() else (groups, rows, columns)
        # Rows begin at multiples of 16 bytes.
        unit = 16 // first.element_size()
        padded = -(-columns // unit) * unit
        stride = (padded, 1) if len(shape) == 2 else (rows * padded, padded, 1)
        log.operator()
        recorder.operators[kind.name] = recorder.operators.get(kind.name, 0) + 1
        with recorder.fake:
            made = torch.empty_strided(
                shape, stride, dtype=kwargs.get("out_dtype") or first.dtype, device=first.device
            )
        recorder._log_operator(func, kind, args, kwargs, made)
        return made

    def unscale(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """A scaler's gradients are finite: what it found stays what it was, 0."""
        for gradient in args[0]:
            values.forget_one(gradient)
        log.operator()
        recorder.operators[kind.name] = recorder.operators.get(kind.name, 0) + 1
        recorder._log_operator(func, kind, args, kwargs, None)
        return None

    def pack(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """The sizes of batches stay on the host, where the lengths are."""
        source, lengths, batch_first = args
        if values.of(lengths) is None:
            raise assumptions.missing("lengths of sequences are read")
        extents = tuple(source.shape[:2])
        _, sizes = func(torch.empty(*extents, 1), values.of(lengths), batch_first)
        shape = (int(values.of(lengths).sum()), *source.shape[2:])
        log.operator()
        recorder.operators[kind.name] = recorder.operators.get(kind.name, 0) + 1
        with recorder.fake:
            data = torch.empty(shape, dtype=source.dtype, device=source.device)
        recorder._log_operator(func, kind, args, kwargs, data)
        return data, sizes

    special = {
        "_pack_padded_sequence": pack,
        "_amp_foreach_non_finite_check_and_unscale_": unscale,
        "_use_miopen_ctc_loss": lambda *_: False,
        "_use_cudnn_ctc_loss": uses_cudnn_for_ctc,
        "_grouped_mm": grouped_product,
        "_local_scalar_dense": item,
        "_to_copy": to_copy,
        "_pin_memory": pin,
        "index": index,
        "record_stream": record_stream,
        "equal": equal,
        "allclose": equal,
    }
    for name in _assume.DATA_DEPENDENT:
        special[name] = data_dependent
    return special
