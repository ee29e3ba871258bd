"""Temporaries of operators by formulas that follow PyTorch's source (2.11), where sizes follow from launch grids."""

from collections.abc import Iterator, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from .calls import Array, Call, contiguous_strides, product

Event = Tuple[Any, ...]


class Machine(NamedTuple):
    """What grids follow from."""

    multiprocessors: int
    threads: int


FORMULAS: Dict[str, Callable[[Call, Dict[str, Any], Machine], List[Event]]] = {}
# Operators that a formula is for, with choices of its constants.
OPERATORS: Dict[str, Tuple[str, List[Dict[str, Any]]]] = {}
# Rules that follow from PyTorch's source alone, for operators that were not measured.
DERIVED: Dict[str, Dict[str, Any]] = {}


def formula(name: str) -> Callable[[Any], Any]:
    """Registers a formula."""

    def register(made: Any) -> Any:
        FORMULAS[name] = made
        return made

    return register


def temporary(name: str, size: int) -> List[Event]:
    """One that is freed at once."""
    return [("alloc", name, size), ("free", name)] if size else []


# Reductions: aten/src/ATen/native/cuda/Reduce.cuh over a TensorIterator.

_INT_MAX = 2**31 - 1


class _Iterator:
    """What TensorIterator makes of an input and an output: dimensions in order of strides, merged where possible."""

    def __init__(self, shape: List[int], strides: List[List[int]], itemsizes: List[int]) -> None:
        self.shape = shape
        # Of the output, then of the input, in bytes.
        self.strides = strides
        self.itemsizes = itemsizes

    @classmethod
    def of(cls, array: Array, dims: Sequence[int], output_itemsize: int) -> "_Iterator":
        """Reduces an array over dimensions."""
        chosen = {it % array.dim for it in dims} if array.dim else set()
        kept = [size for place, size in enumerate(array.shape) if place not in chosen]
        steps = iter(contiguous_strides(kept))
        output = [0 if place in chosen else next(steps) * output_itemsize for place in range(array.dim)]
        source = [it * array.itemsize for it in array.stride]
        made = cls(list(array.shape), [output, source], [output_itemsize, array.itemsize])
        made._reorder()
        made._coalesce()
        return made

    def _reorder(self) -> None:
        order = list(range(len(self.shape)))[::-1]
        for place in range(1, len(order)):
            one = place
            for zero in range(place - 1, -1, -1):
                compared = self._compare(order[zero], order[one])
                if compared > 0:
                    order[zero], order[one] = order[one], order[zero]
                    one = zero
                elif compared < 0:
                    break
        self.shape = [self.shape[it] for it in order]
        self.strides = [[of[it] for it in order] for of in self.strides]

    def _compare(self, zero: int, one: int) -> int:
        for number, strides in enumerate(self.strides):
            first, second = strides[zero], strides[one]
            if number == 0 and (first == 0) != (second == 0):
                return 1 if second == 0 else -1
            if first == 0 or second == 0:
                continue
            if first != second:
                return -1 if first < second else 1
            if self.shape[zero] > self.shape[one]:
                return 1
        return 0

    def _coalesce(self) -> None:
        shape: List[int] = []
        strides: List[List[int]] = [[] for _ in self.strides]
        for place, size in enumerate(self.shape):
            steps = [of[place] for of in self.strides]
            last = shape[-1] if shape else 0
            if shape and (last == 1 or size == 1 or all(last * of[-1] == step for of, step in zip(strides, steps))):
                if last == 1:
                    for of, step in zip(strides, steps):
                        of[-1] = step
                shape[-1] = last * size
                continue
            shape.append(size)
            for of, step in zip(strides, steps):
                of.append(step)
        self.shape, self.strides = shape, strides

    @property
    def small(self) -> bool:
        """Offsets fit 32 bits."""
        if product(self.shape) > _INT_MAX:
            return False
        return all(1 + sum((n - 1) * step for n, step in zip(self.shape, of)) <= _INT_MAX for of in self.strides)

    def parts(self) -> Iterator["_Iterator"]:
        """Parts with offsets of 32 bits."""
        if self.small:
            yield self
            return
        extents = [max((size - 1) * of[place] for of in self.strides) for place, size in enumerate(self.shape)]
        divisible = [it for it, size in enumerate(self.shape) if size > 1]
        place = max(divisible, key=lambda it: (extents[it], it))
        half = self.shape[place] // 2
        for size in (half, self.shape[place] - half):
            shape = [*self.shape[:place], size, *self.shape[place + 1 :]]
            yield from _Iterator(shape, self.strides, self.itemsizes).parts()


def _power(value: int) -> int:
    """The largest power of two that is not above."""
    return 1 << max(0, value.bit_length() - 1)


def _up(value: int, by: int) -> int:
    return -(-value // by)


def _grid(it: _Iterator, machine: Machine, accumulated: int, vector: int) -> Tuple[int, int]:
    """Bytes of the staging buffer and of the semaphores of one launch."""
    shape, (output, source), itemsize = it.shape, it.strides, it.itemsizes[1]
    reduced = sum(1 for step in output if step == 0)
    outputs = product([size for size, step in zip(shape, output) if step])
    inputs = product(shape) // max(1, outputs)
    fastest = reduced == len(shape) or source[0] < source[reduced]
    width, height = (inputs, outputs) if fastest else (outputs, inputs)
    step = source[0] if fastest else source[reduced]
    vectorized = 1
    if step == itemsize:
        if fastest and width >= 128 and reduced == 1:
            width //= vector
        elif not fastest:
            vectorized = 4
            others = [of // itemsize for place, of in enumerate(source) if place != reduced]
            for size in (shape[reduced], *others):
                while size % vectorized:
                    vectorized //= 2
            width //= vectorized
    most = 512 // vectorized
    first = _power(width) if width < most else most
    second = _power(height) if height < most else most
    block_width = min(first, 32)
    block_height = min(second, most // block_width)
    block_width = min(first, most // block_height)
    threads = block_width * block_height
    step_input = block_width if fastest else 1
    step_output = 1 if fastest else block_width
    if _up(inputs, step_input) < min(block_height * 16, 256):
        return 0, 0
    step_input *= block_height
    grid = _up(outputs // vectorized, step_output)
    target = machine.multiprocessors * (machine.threads // threads)
    values = _up(inputs, step_input)
    if values < 256 or grid > target:
        return 0, 0
    blocks = max(min(_up(target, grid), _up(values, 16)), _up(values, 256))
    if blocks <= 1:
        return 0, 0
    size = accumulated * outputs * blocks
    if not fastest:
        size *= block_width * vectorized
    return size, 4 * grid


def reduced(
    array: Array,
    dims: Sequence[int],
    machine: Machine,
    accumulated: int,
    vector: int,
    output_itemsize: int = 0,
    name: str = "",
) -> List[Event]:
    """Buffers of a reduction; all dimensions if none is given."""
    if array.numel == 0:
        return []
    dims = list(dims) or list(range(array.dim))
    whole = _Iterator.of(array, dims, output_itemsize or array.itemsize)
    if not whole.shape:
        return []
    events: List[Event] = []
    buffered = not whole.small and array.itemsize == 2 and (output_itemsize or array.itemsize) == 2
    if buffered:
        elements = max([1] + [size * step // whole.itemsizes[0] for size, step in zip(whole.shape, whole.strides[0])])
        events.append(("alloc", f"accumulated{name}", elements * accumulated))
    for number, part in enumerate(whole.parts()):
        size, semaphores = _grid(part, machine, accumulated, vector)
        if size:
            one, two = f"staged{name} {number}", f"semaphores{name} {number}"
            events += [("alloc", one, size), ("alloc", two, semaphores), ("free", two), ("free", one)]
    if buffered:
        events.append(("free", f"accumulated{name}"))
    return events


def preserved(array: Array, dtype: str) -> Array:
    """A copy in another dtype, as `to()` makes it."""
    if array.dense:
        return array._replace(dtype=dtype)
    return array._replace(dtype=dtype, stride=contiguous_strides(array.shape))


def _dims(call: Call) -> List[int]:
    value = call["dim"] if "dim" in call.arguments else call["dims"]
    return [value] if isinstance(value, int) else list(value or [])


@formula("reduction")
def reduction(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """The outputs; a copy in the output's dtype if the operator makes one; the buffers."""
    array = call["self"]
    if not isinstance(array, Array) or not call.outputs:
        return []
    outputs: List[Event] = [("output", it) for it in range(len(call.outputs))]
    dtype = call.outputs[0].dtype
    events = list(outputs)
    copied = 0
    if rule["cast"] and dtype != array.dtype and not (array.itemsize == 2 and array.floating and dtype == "float32"):
        array = preserved(array, dtype)
        copied = array.nbytes
        events.append(("alloc", "copy", copied))
    if call["dim"] is None:
        # Those that flatten their argument.
        if ("arg" in call.name or "aminmax" in call.name) and not array.contiguous:
            array = Array(array.dtype, (array.numel,), (1,))
            copied = array.nbytes
            events.append(("alloc", "copy", copied))
    accumulated, vector = rule["by"].get(array.dtype, rule["by"].get("other", [array.itemsize, 4]))
    itemsize = call.outputs[0].itemsize
    events += reduced(array, _dims(call), machine, accumulated, vector, itemsize)
    return events + ([("free", "copy")] if copied else [])


# Bytes of an accumulator, and elements that a thread reads at once.
_CHOICES = [(size, vector) for vector in (4, 8, 2, 16, 1) for size in (4, 8, 16, 1, 2, 12, 24, 32)]


def _fit_reduction(cast: bool) -> Any:
    def fit(found: Sequence[Any], machine: Machine, wrong: Any) -> Dict[str, Any]:
        rule: Dict[str, Any] = {"formula": "reduction", "cast": cast, "by": {}}
        dtypes = sorted(
            {it.call["self"].dtype for it in found} | {it.call.outputs[0].dtype for it in found if it.call.outputs}
        )
        for dtype in dtypes:
            of = [it for it in found if it.call["self"].dtype == dtype]
            of += [it for it in found if cast and it.call.outputs and it.call.outputs[0].dtype == dtype]
            if not of:
                continue
            # Those that allocated show the constants best.
            of.sort(key=lambda it: len(it.events), reverse=True)
            best = None
            for accumulated, vector in _CHOICES:
                rule["by"][dtype] = [accumulated, vector]
                error = wrong(rule, of[:120], machine)
                score = (error[1], error[0])
                if best is None or score < best[0]:
                    best = (score, [accumulated, vector])
                if error[0] == 0:
                    break
            rule["by"][dtype] = best[1]
        return rule

    return fit


for _name in "sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int nansum.default".split():
    OPERATORS[f"aten.{_name}"] = _fit_reduction(True)
for _name in (
    "amax.default amin.default aminmax.default max.dim min.dim max.default min.default any.default "
    "any.dim any.dims all.default all.dim all.dims argmax.default argmin.default "
    "linalg_vector_norm.default var.correction std.correction var_mean.correction std_mean.correction "
    "norm.ScalarOpt_dim"
).split():
    OPERATORS[f"aten.{_name}"] = _fit_reduction(False)


# Normalization over the last dimensions: layer_norm_kernel.cu.


def _copies(call: Call, names: Sequence[str]) -> Tuple[List[Event], List[Event]]:
    """Contiguous copies of arguments before an operator, and their ends after it."""
    made: List[Event] = []
    for name in names:
        value = call[name]
        if isinstance(value, Array) and not value.contiguous:
            made.append(("alloc", name, value.nbytes))
    return made, [("free", it[1]) for it in reversed(made)]


def _made(call: Call) -> List[Event]:
    return [("output", it) for it in range(len(call.outputs))]


@formula("layer_norm")
def layer_norm(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Copies of what is not contiguous."""
    before, after = _copies(call, ("input", "weight", "bias"))
    return before + _made(call) + after


@formula("layer_norm_backward")
def layer_norm_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """For many rows, partial sums of blocks of 32 rows, which an ordinary reduction adds up."""
    before, after = _copies(call, ("grad_out", "input", "weight"))
    columns = product(call["normalized_shape"])
    array = call["input"]
    rows = array.numel // max(1, columns)
    wanted = call["output_mask"]
    first = int(bool(wanted[0]))
    events = before + [("output", 0)][: len(call.outputs) * first]
    weights = [it for it in range(first, len(call.outputs))]
    if rows > 64 * 1024 and columns // 32 < machine.multiprocessors // 2 and weights:
        dtype = call.outputs[weights[0]]
        blocks = _up(rows, 32)
        partial = Array(dtype.dtype, (blocks, columns), (columns, 1))
        events += [("alloc", f"sum {it}", dtype.nbytes) for it in weights]
        events += [("alloc", f"blocks {it}", partial.nbytes) for it in weights]
        for it in weights:
            events.append(("output", it))
            events += reduced(partial, [0], machine, 4, 8 if partial.itemsize == 2 else 4, name=f" {it}")
            events.append(("free", f"sum {it}"))
        events += [("free", f"blocks {it}") for it in reversed(weights)]
    else:
        events += [("output", it) for it in weights]
    return events + after


def _plain(name: str) -> Any:
    return lambda found, machine, wrong: {"formula": name}


OPERATORS["aten.native_layer_norm.default"] = _plain("layer_norm")
OPERATORS["aten._fused_rms_norm.default"] = _plain("layer_norm")
OPERATORS["aten.native_layer_norm_backward.default"] = _plain("layer_norm_backward")
OPERATORS["aten._fused_rms_norm_backward.default"] = _plain("layer_norm_backward")


# Attention.


@formula("cudnn_attention_backward")
def cudnn_attention_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """cuDNN's workspace: the gradient of the query in float32, sums of rows, and gradients of keys and values for each
    head of the query if heads share them."""
    query, key, value = call["query"], call["key"], call["value"]
    size = query.numel * 4 + query.numel // max(1, query.shape[-1]) * 4 + 256
    if key.shape[1] != query.shape[1]:
        size += (key.nbytes + value.nbytes) // max(1, key.shape[1]) * query.shape[1]
    return _made(call) + temporary("workspace", size if query.numel else 0)


@formula("flash_attention_backward")
def flash_attention_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """flash_api.cpp: sums of rows, the gradient of the query in float32; expanded gradients where heads are shared."""
    query, key, value = call["query"], call["key"], call["value"]
    if not query.numel:
        return _made(call)
    batch, heads, rows, width = query.shape
    rounded = _up(rows, 128) * 128
    wide = _up(width, 32) * 32 if width <= 128 else _up(width, 64) * 64
    events: List[Event] = [("alloc", "sums", batch * heads * rounded * 4)]
    events.append(("alloc", "query", batch * rounded * heads * wide * 4))
    if key.shape[1] != heads:
        events += [(("alloc", f"expanded {n}", it.nbytes // it.shape[1] * heads)) for n, it in enumerate((key, value))]
    return _made(call) + events + [("free", it[1]) for it in reversed(events)]


OPERATORS["aten._scaled_dot_product_cudnn_attention_backward.default"] = _plain("cudnn_attention_backward")
OPERATORS["aten._scaled_dot_product_flash_attention_backward.default"] = _plain("flash_attention_backward")


# Sorting by cub, and gradients of embeddings, which sort the indices.


def radix(count: int, key: int, value: int, bits: int = 64) -> int:
    """Temporary storage of cub's radix sort of pairs: a second copy of both, counters for each tile and each byte of
    the keys that is sorted by. The tiles' sizes are those that the measured sizes show."""
    if count <= _SINGLE_TILE.get((key, value), 3000):
        return 1
    tile = _TILES.get((key, value), 5376)
    round_up = lambda n: _up(n, 256) * 256
    passes = min(key, _up(bits, 8))
    copies = round_up(count * key) + round_up(count * value) if passes > 1 else 0
    return copies + passes * 2048 + 511 + _up(count, tile) * 1024


# By bytes of keys and values.
_TILES = {(1, 8): 3456, (8, 8): 4608, (4, 8): 5376, (2, 8): 5632, (4, 4): 6528}
_SINGLE_TILE = {(8, 8): 2560, (4, 4): 4608}


@formula("embedding_backward")
def embedding_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """EmbeddingBackwardKernel.cu: sorted indices, segments of equal ones, partial sums of at most ten rows."""
    indices, weights = call["indices"], call["num_weights"]
    output = call.outputs[0] if call.outputs else None
    grad = call["grad_output"] if "grad_output" in call.arguments else call["grad"]
    bag = "offsets" in call.arguments
    if output is None or call["sparse"] or call["mode"] == 2 or grad.where == "s":
        return _made(call)
    before, after = _copies(call, ("grad_output", "grad", "indices"))
    count, item = indices.numel, indices.itemsize
    if not bag and count <= 3072 and not call["scale_grad_by_freq"]:
        return before + _made(call) + after
    if not count:
        return _made(call)
    events = before + [("alloc", "sorted", count * item), ("alloc", "original", count * item)]
    events += [("alloc", "range", count * item), ("alloc", "sort", radix(count, item, item))]
    events += [("free", "sort"), ("free", "range")]
    ends: List[Event] = [("free", "original"), ("free", "sorted")]
    if call["scale_grad_by_freq"]:
        events.append(("alloc", "counts", count * item))
        ends.insert(0, ("free", "counts"))
    events.append(("output", 0))
    segments = min(count, weights)
    parts = count // 10 + segments
    held: List[Event] = [("alloc", "unique", count * item), ("alloc", "unique count", item)]
    held_more: List[Event] = [("alloc", "segments", segments * item), ("alloc", "partial counts", segments * item)]
    held_more.append(("alloc", "parts count", item))
    held_more.append(("alloc", "parts", parts * item))
    # Where thresholds lie between measured calls: 512 and 1000 weights; 21 and 68 indices for each.
    few = weights <= 768 and count >= 40 * weights
    width = output.shape[-1]
    if few:
        held_more.append(("alloc", "parts again", parts * item))
        if output.itemsize == 2:
            held_more.append(("alloc", "sum", weights * width * 4))
    else:
        held_more.append(("alloc", "sums of parts", parts * width * 4))
    scan = temporary("scan", 1279)
    events += [*held, ("alloc", "unique sort", count * item), *scan, ("free", "unique sort")]
    events += held_more[:2] + scan + held_more[2:]
    events += [("free", it[1]) for it in reversed(held + held_more)]
    return events + ends + after


OPERATORS["aten.embedding_dense_backward.default"] = _plain("embedding_backward")
OPERATORS["aten._embedding_bag_backward.default"] = _plain("embedding_backward")


@formula("softmax_backward")
def softmax_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """SoftMax.cu: the product of gradient and output."""
    grad = call["grad_output"]
    return _made(call) + (temporary("product", grad.nbytes) if grad.numel else [])


@formula("safe_softmax")
def safe_softmax(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Which elements are minus infinity, in which rows all are."""
    array = call["self"]
    if not array.numel:
        return _made(call)
    events: List[Event] = [("alloc", "masked", array.numel), ("alloc", "rows", array.numel // array.shape[call["dim"]])]
    return _made(call) + events + temporary("zero", 4) + [("free", "rows"), ("free", "masked")]


OPERATORS["aten._softmax_backward_data.default"] = _plain("softmax_backward")
OPERATORS["aten._safe_softmax.default"] = _plain("safe_softmax")


@formula("efficient_attention_backward")
def efficient_attention_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """mem_eff_attention/kernel_backward.h: accumulated gradients of the query in tiles, each with a counter."""
    query = call["query"]
    if not query.numel:
        return _made(call)
    batch, heads, rows, width = query.shape
    sums = batch * heads * rows * 4
    events: List[Event] = _made(call)
    half = query.itemsize == 2
    held = ["sums"]
    if half:
        events.append(("alloc", "sums", sums))
    else:
        events += [("alloc", "product", query.numel * 4), ("alloc", "sums", sums)]
        if heads > 1 and rows > 1:
            events += [("alloc", "sums in order", sums), ("free", "sums")]
            held = ["sums in order"]
        events.append(("free", "product"))
    if width <= 64:
        size = _up(rows, 64) * (64 * 64 * 4 + 16)
    elif half and width <= 128:
        size = _up(rows, 128) * (128 * 128 * 4 + 16)
    else:
        size = _up(rows, 128) * _up(width, 64) * (128 * 64 * 4 + 16) + (half << 17)
    events.append(("alloc", "workspace", batch * heads * size))
    return events + [("free", held[0]), ("free", "workspace")]


@formula("efficient_attention")
def efficient_attention(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Values with more than 128 elements in half precision are accumulated in float32."""
    query, value = call["query"], call["value"]
    size = query.numel // max(1, query.shape[-1]) * value.shape[-1] * 4
    return _made(call) + (temporary("sums", size) if query.itemsize == 2 and value.shape[-1] > 128 else [])


OPERATORS["aten._scaled_dot_product_efficient_attention_backward.default"] = _plain("efficient_attention_backward")
OPERATORS["aten._scaled_dot_product_efficient_attention.default"] = _plain("efficient_attention")


@formula("sort")
def sort(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Sort.cu: a bitonic sort of rows up to 4096, cub's radix sort of one row, or of many with their numbers."""
    array = call["self"]
    if not array.numel or not array.dim:
        return _made(call)
    dim = call["dim"]
    dim = (-1 if dim is None else dim) % array.dim
    size, count, item = array.shape[dim], array.numel, array.itemsize
    if size <= 4096:
        return _made(call) + temporary("order", size * 8)
    if count == size:
        events: List[Event] = [("alloc", "order", size * 8), *temporary("sort", radix(size, item, 8))]
        return _made(call) + events + [("free", "order")]
    held: List[Event] = []
    if array.stride[dim] != 1:
        held += [("alloc", "values", count * item), ("alloc", "sorted values", count * item)]
        held.append(("alloc", "indices", count * 8))
    held += [("alloc", "order", count * 8), ("alloc", "sorted order", count * 8)]
    events = held + [("alloc", "keys", count * item), *temporary("sort", radix(count, item, 8)), ("free", "keys")]
    events += temporary("rows", 4607 + _up(count, 5632) * 1024)
    return _made(call) + events + [("free", it[1]) for it in reversed(held)]


OPERATORS["aten.sort.default"] = _plain("sort")
OPERATORS["aten.sort.stable"] = _plain("sort")


@formula("index_put")
def index_put(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Indexing.cu: with `accumulate`, indices are sorted; otherwise masks become indices."""
    indices = [it for it in call["indices"] if isinstance(it, Array)]
    values = call["values"]
    masks = [it for it in indices if it.dtype in ("bool", "uint8") and it.cuda and it.numel]
    if masks:
        if len(indices) == 1 and values.numel == 1 and not call["accumulate"]:
            # Becomes masked_fill.
            return _made(call)
        # The number of true elements is not known: half of them.
        inside = [("alloc", f"indices {number}", it.numel * 4 * it.dim) for number, it in enumerate(masks)]
        return _made(call) + inside + [("free", it[1]) for it in reversed(inside)]
    if not call["accumulate"]:
        return _made(call) + (temporary("value", values.itemsize) if not values.cuda and not values.dim else [])
    dims = max([it.dim for it in indices] + [0])
    shape = [
        max(it.shape[place - dims + it.dim] if place >= dims - it.dim else 1 for it in indices) for place in range(dims)
    ]
    count = product(shape)
    if not count or call["self"].numel == 0:
        return _made(call)
    order: List[Event] = [("alloc", "linear", count * 8), ("alloc", "linear index", count * 8), ("free", "linear")]
    held: List[Event] = [] if values.contiguous else [("alloc", "values", values.nbytes)]
    held += [("alloc", name, count * 8) for name in ("sorted", "order", "range")]
    target = call["self"]
    last = max(place for place, it in enumerate(call["indices"]) if isinstance(it, Array))
    largest = (target.numel - 1) // max(1, product(target.shape[last + 1 :]))
    size = radix(count, 8, 8, max(1, largest.bit_length()))
    order += [*held, *temporary("sort", size), *(("free", it[1]) for it in reversed(held))]
    return _made(call) + order + [("free", "linear index")]


for _name in ("index_put.default", "index_put_.default", "_index_put_impl_.default", "_unsafe_index_put.default"):
    OPERATORS[f"aten.{_name}"] = _plain("index_put")


@formula("copy")
def copy(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Copy.cu: between host and GPU, elements may be cast and brought in order in a temporary on the GPU."""
    made = call.name.endswith("_to_copy.default")
    source = call["self"] if made else call["src"]
    target = (call.outputs[0] if call.outputs else None) if made else call["self"]
    late = bool(call["non_blocking"])
    if not isinstance(source, Array) or "s" in source.where or not source.numel:
        return _made(call)
    if target is None:
        # The result is on the host, where it has the same order if there are no gaps.
        device, dtype = call["device"], call["dtype"]
        if device is None or not device.text.startswith("cpu") or not source.cuda:
            return _made(call)
        target = preserved(source, dtype.text if dtype is not None else source.dtype)._replace(where="c")
    if source.cuda == target.cuda:
        return _made(call)
    same = source.dtype == target.dtype
    if same and (source.shape, source.stride) == (target.shape, target.stride) and source.dense:
        return _made(call)
    if same and source.contiguous and target.contiguous:
        return _made(call)
    if target.cuda:
        # Elements are cast on the host, or late ones on the GPU.
        if late:
            size = 0 if target.contiguous and same else target.numel * source.itemsize
        else:
            size = 0 if target.contiguous else target.nbytes
        return _made(call) + temporary("in order", size)
    events: List[Event] = []
    if late and not same:
        events += [("alloc", "cast", target.nbytes)]
    if not source.contiguous:
        events += [("alloc", "in order", target.nbytes if late else source.nbytes)]
    return events + [("free", it[1]) for it in reversed(events)]


OPERATORS["aten._to_copy.default"] = _plain("copy")
OPERATORS["aten.copy_.default"] = _plain("copy")


@formula("foreach_norm")
def foreach_norm(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """ForeachReduceOp.cu: a partial result for each chunk of 65536 elements of the largest tensor, for all tensors."""
    listed = [it for it in call["self"] if isinstance(it, Array)]
    if not listed:
        return _made(call)
    chunks = max(_up(it.numel, 65536) for it in listed)
    wide = max(4, listed[0].itemsize if rule.get("wide") is None else rule["wide"])
    return [("alloc", "partial", len(listed) * chunks * wide), *_made(call), ("free", "partial")]


OPERATORS["aten._foreach_norm.Scalar"] = _plain("foreach_norm")


@formula("topk")
def topk(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """TensorTopK.cu: counts of each block, when rows are cut into blocks of 256 threads."""
    array = call["self"]
    if not array.numel or not array.dim:
        return _made(call)
    dim = call["dim"]
    size = array.shape[-1 if dim is None else dim]
    rows = array.numel // size
    # Rows up to the first number are cut from this size on.
    for most, least in ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 62, 400)):
        if rows <= most:
            break
    if size < least:
        return _made(call)
    each = max(4, min(64, _up(array.numel, machine.multiprocessors * 6 * 256))) * 256
    blocks = _up(size, each) * rows
    bits = 16 if array.itemsize == 8 else 8
    sizes = (rows * array.itemsize, rows * 8, rows * bits, blocks * 512, rows * 1024, blocks * 4, blocks * 4)
    held: List[Event] = [("alloc", f"topk {number}", it) for number, it in enumerate(sizes)]
    scans = temporary("scan", 1279) * 2
    return _made(call) + held + scans + [("free", it[1]) for it in reversed(held)]


@formula("logsumexp")
def logsumexp(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """ReduceOps.cpp: the largest elements, the exponents of all differences, their sum."""
    array = call["self"]
    if not array.numel or not call.outputs or not array.floating:
        return _made(call)
    size, item, dims = call.outputs[0].nbytes, array.itemsize, _dims(call)
    accumulated = max(4, item)
    vector = 8 if item == 2 else 4
    events: List[Event] = [("alloc", "largest", size), *reduced(array, dims, machine, item, 4, name=" amax")]
    events += [("alloc", "absolute", size), *temporary("infinite", size // item), ("free", "absolute")]
    events += [("alloc", "exponents", preserved(array, array.dtype).nbytes), ("output", 0)]
    events += reduced(preserved(array, array.dtype), dims, machine, accumulated, vector, name=" sum")
    return events + [("free", "exponents"), ("free", "largest")]


@formula("embedding")
def embedding(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Indices in order."""
    before, after = _copies(call, ("indices",))
    return before + _made(call) + after


OPERATORS["aten.topk.default"] = _plain("topk")
OPERATORS["aten.logsumexp.default"] = _plain("logsumexp")
OPERATORS["aten.embedding.default"] = _plain("embedding")


@formula("index")
def index(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Masks become indices, as many as the output shows; indices of different shapes are brought to one."""
    indices = [it for it in call["indices"] if isinstance(it, Array)]
    array = call["self"]
    if not call.outputs or not array.numel:
        return _made(call)
    masks = [it for it in indices if it.dtype in ("bool", "uint8") and it.cuda]
    held: List[Event] = []
    if masks:
        rest = max(1, array.numel // max(1, masks[0].numel))
        held.append(("alloc", "count", 4))
        counted = call.outputs[0].numel // rest * 8 * masks[0].dim
        held += [
            *temporary("scan", 21503),
            ("alloc", "indices", counted),
            *temporary("scan", 1279 + 512),
            ("free", "count"),
        ]
        return held + _made(call) + [("free", "indices")]
    dims = max([it.dim for it in indices] + [0])
    sizes = [
        [it.shape[place - dims + it.dim] if place >= dims - it.dim else 1 for place in range(dims)] for it in indices
    ]
    shape = tuple(max(of) for of in zip(*sizes))
    for number, it in enumerate(indices):
        if it.shape != shape or it.dtype == "int32":
            held.append(("alloc", f"index {number}", product(shape) * 8))
    return held + _made(call) + [("free", it[1]) for it in reversed(held)]


OPERATORS["aten.index.Tensor"] = _plain("index")
OPERATORS["aten._unsafe_index.Tensor"] = _plain("index")


@formula("upsample_backward")
def upsample_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """UpSampleBilinear2d.cu: only many channels are computed in channels_last."""
    grad = call["grad_output"]
    if not call.outputs or grad.contiguous or grad.channels_last and grad.shape[1] >= 16:
        return _made(call)
    held: List[Event] = [] if call.outputs[0].contiguous else [("alloc", "gradient", call.outputs[0].nbytes)]
    held.append(("alloc", "in order", grad.nbytes))
    return _made(call) + held + [("free", it[1]) for it in reversed(held)]


OPERATORS["aten.upsample_bilinear2d_backward.default"] = _plain("upsample_backward")


@formula("upsample_nearest")
def upsample_nearest(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """UpSampleNearest*.cu: a copy of an argument that is neither contiguous nor, in two dimensions, channels_last."""
    name = "grad_output" if "backward" in call.name else "self"
    if call.outputs and call[name].dim == 4 and call[name].channels_last and call.outputs[0].channels_last:
        return _made(call)
    before, after = _copies(call, (name,))
    return _made(call) + before + after


for _name in ("1d", "2d", "3d"):
    for _kind in ("upsample_nearest", "_upsample_nearest_exact"):
        for _pass in ("", "_backward"):
            DERIVED[f"aten.{_kind}{_name}{_pass}.default"] = {"formula": "upsample_nearest"}


@formula("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Loss.cpp: the logarithms of the sigmoids, with the weights of positives; the losses; their mean or sum."""
    array, target, positive = call["self"], call["target"], call["pos_weight"]
    losses = array if array.itemsize >= target.itemsize else target
    events: List[Event] = [("alloc", "sigmoids", array.nbytes)]
    if positive is not None:
        events += [("alloc", "weight", positive.nbytes), ("alloc", "weights", losses.nbytes)]
        events += [("free", "weight"), ("free", "weights")]
    if call["reduction"] == 0:
        return [*events, *_made(call), ("free", "sigmoids")]
    events += [("alloc", "losses", losses.nbytes), *_made(call)]
    vector = 8 if losses.itemsize == 2 else 4
    events += reduced(losses, [], machine, max(4, losses.itemsize), vector)
    return [*events, ("free", "losses"), ("free", "sigmoids")]


OPERATORS["aten.binary_cross_entropy_with_logits.default"] = _plain("binary_cross_entropy_with_logits")


# Recurrent layers: cuDNN's workspace is not public. It has 8 MiB for each layer and direction, the weights once, and
# multiples of the sizes, which were found in measurements of cuDNN 9.19 on an H200. They are exact for an LSTM or a GRU
# of 256 states or more whose input is not wider than that. Others are close, but for plain RNNs: up to a third off, and
# in bfloat16 half.

# By mode (0 and 1: RNN, 2: LSTM, 3: GRU) and directions, in states of one sequence (the hidden size): for each step of
# each sequence; for each sequence, layer and direction, packed; and more of these if padded.
_RNN_STATES = {
    **{(1, 1): (1, 1, 2), (1, 2): (6, 3, 2), (2, 1): (4, 6, 4), (2, 2): (12, 8, 4), (3, 1): (3, 3, 2)},
    (3, 2): (10, 5, 2),
}
# A training of packed sequences has, for each step, this many widths more, less this many states.
_RNN_WIDTHS = {(1, 1): (1, 0), (1, 2): (4, 2), (2, 1): (1, 4), (2, 2): (4, 10), (3, 1): (1, 2), (3, 2): (4, 6)}
# Padded sequences take other kernels, with four more copies of the gates, up to this hidden size. From 256 (RNN: 512)
# on they were measured not to.
_RNN_SMALL = {1: 256, 2: 128, 3: 128}


def _rnn_workspace(call: Call) -> int:
    source, hidden, layers, mode = call["input"], call["hidden_size"], call["num_layers"], max(1, call["mode"])
    directions, train, sizes = (2 if call["bidirectional"] else 1), call["train"], call["batch_sizes"]
    width = source.shape[-1]
    rows = source.numel // max(1, width)
    batch = sizes[0] if sizes else source.shape[0 if call["batch_first"] else 1]
    weights = sum(it.nbytes for name, it in call.arrays() if name.startswith("weight[") and it.dim > 1)
    each, once, padded = _RNN_STATES[mode, directions]
    if not sizes:
        once += padded
    states = rows * each * hidden + batch * layers * directions * hidden * once
    more = hidden if train and call["dropout"] and layers > 1 and directions == 1 else 0
    lengths = 256
    wide = max(width, hidden)
    if sizes and train:
        widths, less = _RNN_WIDTHS[mode, directions]
        more = max(more, widths * wide - less * hidden)
    if not sizes:
        lengths += _up(batch * 8, 32) * 32
        states += rows * (width + directions * hidden)
        small = hidden <= _RNN_SMALL[mode]
        if small:
            states += 4 * {2: 4, 3: 3}.get(mode, 1) * rows * hidden
        if train:
            more = max(more, _rnn_gradients(mode, directions, width, hidden, small))
    return (8 << 20) * layers * directions + weights + (states + rows * more) * source.itemsize + lengths


def _rnn_gradients(mode: int, directions: int, width: int, hidden: int, small: bool) -> int:
    """Elements that a training of padded sequences takes in addition, for each step."""
    wide = max(width, hidden)
    if mode == 1:
        if directions == 2:
            return 5 * wide + 5 * hidden
        return 2 * wide + 6 * hidden if small else width + hidden
    if width > hidden:
        return directions * width * (mode - 1)
    if mode == 2:
        return 0
    return width if directions == 1 else max(0, 2 * width - hidden)


def _rnn_copies(call: Call, names: Sequence[str]) -> Tuple[List[Event], List[Event]]:
    """Copies of arguments that are not contiguous, with the steps first."""
    made: List[Event] = []
    for name in names:
        value = call[name]
        if isinstance(value, Array) and value.dim == 3 and call["batch_first"]:
            shape, stride = ((of[1], of[0], of[2]) for of in (value.shape, value.stride))
            value = value._replace(shape=shape, stride=stride)
        if isinstance(value, Array) and not value.contiguous:
            made.append(("alloc", name, value.nbytes))
    return made, [("free", it[1]) for it in reversed(made)]


@formula("cudnn_rnn")
def cudnn_rnn(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """The reserve is made while there is the workspace."""
    size = _rnn_workspace(call)
    before, after = _rnn_copies(call, ("input",))
    made = _made(call)
    reserve = [it for it in made if call.outputs[it[1]].dtype == "uint8"]
    others = [it for it in made if it not in reserve]
    return [*before, *others, ("alloc", "workspace", size), *reserve, ("free", "workspace"), *after]


@formula("cudnn_rnn_backward")
def cudnn_rnn_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """The same workspace once for the gradients of the input and states, and once for those of the weights."""
    size = _rnn_workspace(call)
    count = 3 if call["cx"] is not None else 2
    made = _made(call)
    states = [
        ("alloc", name, call[of].nbytes)
        for name, of in (("grad_hy", "hx"), ("grad_cy", "cx"))
        if call[name] is None and call[of] is not None
    ]
    before, after = _rnn_copies(call, ("input", "grad_output", "output"))
    again, last = _rnn_copies(call, ("input", "output"))
    return [
        *states,
        *before,
        *made[:count],
        *temporary("workspace", size),
        *after,
        *again,
        *made[count:],
        *temporary("workspace of weights", size),
        *last,
        *[("free", it[1]) for it in reversed(states)],
    ]


OPERATORS["aten._cudnn_rnn.default"] = _plain("cudnn_rnn")
OPERATORS["aten._cudnn_rnn_backward.default"] = _plain("cudnn_rnn_backward")


# The CTC loss: LossCTC.cu.


@formula("ctc_loss")
def ctc_loss(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """Lengths and offsets of the sequences are copied to the GPU."""
    batch = call["log_probs"].shape[1]
    lengths = [("alloc", name, batch * 8) for name in ("targets", "inputs", "offsets")]
    return [*lengths, ("output", 1), ("output", 0), ("free", "inputs"), ("free", "targets"), ("free", "offsets")]


@formula("ctc_loss_backward")
def ctc_loss_backward(call: Call, rule: Dict[str, Any], machine: Machine) -> List[Event]:
    """The sums over paths from the end; for a large problem, sums over the blanks by ordinary operators."""
    probabilities, alpha = call["log_probs"], call["log_alpha"]
    steps, batch, labels = probabilities.shape
    lengths = [("alloc", name, batch * 8) for name in ("targets", "inputs", "offsets")]
    ends: List[Event] = [("free", "beta"), ("free", "inputs"), ("free", "targets"), ("free", "offsets")]
    events = [*lengths, ("alloc", "beta", alpha.nbytes)]
    if 2 * steps + 24 * batch // 10 + 2 * labels // 10 <= 450:
        return [*events, ("output", 0), *ends]
    each = batch * steps * probabilities.itemsize
    blanks = each * (alpha.shape[2] // 2 + 1)
    sums = [
        ("alloc", "blanks", blanks),
        ("alloc", "logsumexp", each),
        ("alloc", "maxima", each),
        *temporary("infinite", batch * steps),
        ("free", "maxima"),
        ("alloc", "exponentials", blanks),
        ("alloc", "sums", each),
        ("free", "exponentials"),
        ("free", "logsumexp"),
        ("free", "sums"),
        ("free", "blanks"),
    ]
    if not call["zero_infinity"]:
        return [*events, ("output", 0), *sums, *ends]
    # The result is a choice between the gradient and 0.
    chosen = [("alloc", "infinite", batch), ("alloc", "zero", probabilities.itemsize), ("output", 0)]
    freed = [("free", "gradient"), ("free", "zero"), ("free", "infinite")]
    return [*events, ("alloc", "gradient", probabilities.nbytes), *sums, *chosen, *freed, *ends]


for _name in ("default", "Tensor"):
    OPERATORS[f"aten._ctc_loss.{_name}"] = _plain("ctc_loss")
    OPERATORS[f"aten._ctc_loss_backward.{_name}"] = _plain("ctc_loss_backward")
