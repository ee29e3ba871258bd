"""Workspaces of cuDNN's convolutions, from the nearest measured ones.

cuDNN chooses an algorithm by heuristics that are not public, and the workspace follows from the algorithm. Most
workspaces are copies of input, output and weights in the layout channels_last, with channels padded to 16 bytes: which
of the three are copied is taken from the nearest measured convolution of the same kind, and the bytes are computed for
the convolution asked about. A gradient of the weights has sums of slices beside all three, one for each multiprocessor:
these are as large as for the nearest. Other workspaces keep their ratio to the bytes of all three. This holds without
`torch.backends.cudnn.benchmark`, which tries all algorithms with their workspaces.
"""

import math
from collections.abc import Sequence
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .calls import Array, Call, product

FORWARD, INPUT, WEIGHT = "forward", "gradient of the input", "gradient of the weight"
# Offsets that cuDNN adds for alignment are below.
SMALL = 2048
# Sums of slices are not larger.
SLICES = 32 << 20
# Each measured convolution was predicted from the nearest other one: up to this distance the same parts were copied for
# nine of ten, beyond it for six of ten.
LIKE = 5.0


class Problem(NamedTuple):
    """One use of cuDNN. A transposed convolution forward is the gradient of the input of another."""

    kind: str
    input: Array
    weight: Array
    output: Array
    stride: Tuple[int, ...]
    padding: Tuple[int, ...]
    dilation: Tuple[int, ...]
    groups: int
    last: bool

    @property
    def category(self) -> str:
        """Within which neighbours are looked for."""
        per_group = self.weight.shape[1]
        grouped = "1" if self.groups == 1 else "depthwise" if per_group == 1 else "groups"
        kernel = "1x1" if product(self.weight.shape[2:]) == 1 else "k"
        half = "16" if self.weight.itemsize == 2 else self.weight.dtype
        layout = "last" if self.last else "first"
        return f"{self.kind} {half} {self.input.dim - 2}d {layout} {grouped} {kernel}"

    @property
    def point(self) -> List[int]:
        """Numbers that distance is measured on."""
        inner = self.weight.shape[2:]
        return [
            *(self.input.shape[0], self.input.shape[1], self.output.shape[1]),
            *(product(self.input.shape[2:]), product(self.output.shape[2:]), product(inner)),
            *(self.stride[0], self.dilation[0], self.groups, int(self.weight.dtype == "bfloat16")),
        ]

    def parts(self, padded: bool) -> Tuple[int, int, int]:
        """Bytes of input, output and weights as channels_last; `padded`: channels to a multiple of 16 bytes."""
        unit = max(1, 16 // self.weight.itemsize) if padded else 1
        up = lambda n: -(-n // unit) * unit

        def bytes_of(it: Array) -> int:
            return it.shape[0] * up(it.shape[1]) * product(it.shape[2:]) * self.weight.itemsize

        weight = self.weight
        size = weight.nbytes
        if self.groups == 1:
            size = up(weight.shape[0]) * up(weight.shape[1]) * product(weight.shape[2:]) * weight.itemsize
        return bytes_of(self.input), bytes_of(self.output), size


_WEIGHTS = (0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 2.0, 2.0, 1.0, 0.3)


def distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Between two points, in logarithms; few channels, or not a multiple of 8, need padding or another algorithm."""
    result = 0.0
    for weight, one, other in zip(_WEIGHTS, first, second):
        if one != other:
            result += weight * abs(math.log2(max(one, 0.5)) - math.log2(max(other, 0.5)))
    for place in (1, 2):
        result += 8 * (_alignment(first[place]) != _alignment(second[place]))
    return result


def _alignment(channels: int) -> int:
    return (3 if channels % 8 == 0 else 2 if channels % 4 == 0 else channels % 2) + (10 if channels < 8 else 0)


def label(problem: Problem, size: int) -> List[Any]:
    """A workspace as [which parts, padded, rest], or [ratio to all parts]."""
    if size < SMALL:
        return [0, 0, size]
    for padded in (0, 1):
        parts = problem.parts(bool(padded))
        for mask in (7, 5, 6, 3, 1, 2, 4):
            rest = size - sum(part for place, part in enumerate(parts) if mask >> place & 1)
            if 0 <= rest < 1024:
                return [mask, padded, rest]
    # An output in float32, or one part of half the bytes that is written with twice.
    for mask in (7, 5, 6, 3, 1, 2, 4):
        for doubled in (0, 1, 2):
            parts = problem.parts(True)
            rest = size - sum(part for place, part in enumerate(parts) if mask >> place & 1) - parts[doubled]
            if 0 <= rest < 1024:
                return [mask, 2 + doubled, rest]
    for padded in (0, 1):
        slices = size - sum(problem.parts(bool(padded)))
        if 0 <= slices <= SLICES:
            return [7, padded, int(float(f"{slices:.3g}"))]
    return [float(f"{size / max(1, sum(problem.parts(False))):.3g}")]


def bytes_of(problem: Problem, found: Sequence[Any]) -> int:
    """The workspace of a problem by a label."""
    if len(found) == 1:
        return int(found[0] * sum(problem.parts(False)))
    mask, padded, rest = found
    parts = problem.parts(padded > 0)
    size = sum(part for place, part in enumerate(parts) if mask >> place & 1) + rest
    return size + (parts[padded - 2] if padded > 1 else 0)


def workspace(rule: Dict[str, Any], problem: Problem) -> int:
    """From the nearest measured problem of the category."""
    known = rule["near"].get(problem.category)
    if not known:
        return 0
    point = problem.point
    best = min(known, key=lambda it: distance(point, it[0]))
    return bytes_of(problem, rule["labels"][best[1]])


def is_guess(rule: Dict[str, Any], call: Call) -> bool:
    """Whether a convolution is so unlike all that were measured that cuDNN may well choose another algorithm."""
    if not call.outputs or call["input"].numel == 0:
        return False
    of_category = [(problem, rule["near"].get(problem.category, ())) for problem in problems(call)]
    return any(all(distance(problem.point, it[0]) > LIKE for it in known) for problem, known in of_category)


# Calls.


def _is_last(call: Call) -> bool:
    return any(it.channels_last and not it.contiguous for it in (call["input"], call["weight"]))


def _copy(value: Array, last: bool) -> int:
    """Bytes of a copy in the memory format, if one is needed."""
    if last and value.dim in (4, 5):
        return 0 if value.channels_last else value.nbytes
    return 0 if value.contiguous else value.nbytes


def problems(call: Call) -> List[Problem]:
    """In the order in which cuDNN is called."""
    backward = "backward" in call.name
    last = _is_last(call)
    weight, source = call["weight"], call["input"]
    output = call["grad_output"] if backward else call.outputs[0]
    transposed = bool(call["transposed"])
    first, second = (output, source) if transposed else (source, output)
    spread = [tuple(call[name]) for name in ("stride", "padding", "dilation")]
    of = lambda kind: Problem(kind, first, weight, second, *spread, call["groups"], last)
    if not backward:
        return [of(INPUT if transposed else FORWARD)]
    mask = call["output_mask"]
    found = [of(FORWARD if transposed else INPUT)] if mask[0] else []
    return found + ([of(WEIGHT)] if mask[1] else [])


def events(call: Call, rule: Dict[str, Any], machine: Any) -> List[Tuple[Any, ...]]:
    """What a convolution asks for."""
    from . import formulas

    if not call.outputs or call["input"].numel == 0:
        return []
    last = _is_last(call)
    asked: List[Tuple[Any, ...]] = []
    if "backward" not in call.name:
        copied, weight = _copy(call["input"], last), _copy(call["weight"], last)
        asked += [("alloc", "input", copied)] if copied else []
        asked += [("output", 0)]
        asked += [("alloc", "weight", weight)] if weight else []
        asked += _use(rule, problems(call)[0], "workspace")
        asked += [("free", "weight")] if weight else []
        return asked + ([("free", "input")] if copied else [])
    names = [("grad_output", call["grad_output"]), ("input", call["input"])]
    copies = [(name, _copy(it, last)) for name, it in names]
    copies = [it for it in copies if it[1]]
    asked += [("alloc", name, size) for name, size in copies]
    output = 0
    for problem in problems(call):
        asked.append(("output", output))
        output += 1
        weight = _copy(call["weight"], last) if problem.kind != WEIGHT else 0
        asked += [("alloc", "weight", weight)] if weight else []
        asked += _use(rule, problem, f"workspace {output}")
        asked += [("free", "weight")] if weight else []
    asked += [("free", name) for name, _ in reversed(copies)]
    if call["output_mask"][2]:
        asked.append(("output", output))
        grad = call["grad_output"]
        outer = [0, *range(2, grad.dim)]
        asked += formulas.reduced(grad, outer, machine, 4, 8 if grad.itemsize == 2 else 4)
    return asked


def _use(rule: Dict[str, Any], problem: Problem, name: str) -> List[Tuple[Any, ...]]:
    size = workspace(rule, problem)
    return [("alloc", name, size), ("free", name)] if size else []


# Fitting.


def fit(measured: Sequence[Any], known: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """The rule, of samples of convolutions forward and backward; added to one that is known."""
    known = known or {"near": {}, "labels": []}
    labels: Dict[str, int] = {repr(it): number for number, it in enumerate(known["labels"])}
    near: Dict[str, List[Any]] = {category: list(points) for category, points in known["near"].items()}
    seen = {(category, tuple(point)) for category, points in near.items() for point, _ in points}
    for it in measured:
        for problem, size in found(it):
            key = (problem.category, tuple(problem.point))
            if key in seen:
                continue
            seen.add(key)
            made = label(problem, size)
            number = labels.setdefault(repr(made), len(labels))
            near.setdefault(problem.category, []).append([problem.point, number])
    return {"near": near, "labels": [eval(it) for it in labels]}


def found(sample: Any) -> List[Tuple[Problem, int]]:
    """The workspaces that were measured."""
    call, sizes = sample.call, {}
    if not call.outputs or not isinstance(call["weight"], Array) or call["input"].numel == 0:
        return []
    listed = problems(call)
    last = _is_last(call)
    copied = [_copy(call[name], last) for name in ("grad_output", "input", "weight") if call[name] is not None]
    # Those between the outputs, that end before the next one begins; not copies in another layout.
    current = None
    alive: Dict[Any, Tuple[Any, int]] = {}
    largest: Dict[int, int] = {}
    for event in sample.events:
        if event[0] == "output":
            current = event[1]
        elif event[0] == "alloc":
            alive[event[1]] = (current, event[2])
        else:
            begun, size = alive.pop(event[1])
            if begun == current and begun is not None and size not in copied and begun < len(listed):
                largest[begun] = max(largest.get(begun, 0), size)
    return [(problem, largest.get(place, 0)) for place, problem in enumerate(listed)]
