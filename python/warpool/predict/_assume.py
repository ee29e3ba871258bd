"""Values that a prediction does not have: what is assumed in their place, and what the program's author has to say.

A float that is read (`loss.item()`) is 1.0, gradients and losses are finite, indices of `topk`, `argmax`, `sort` and
`multinomial` are spread evenly. Each assumption that the program's control flow or a shape depends on is listed in the
report. In lines of installed packages, a filter whose mask follows from activations keeps all elements, and such a
truth is false. Other values must be given with `assume`; without, the prediction ends with an error that names the
line.
"""

import linecache
import math
import operator
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from .._native import Error

NEEDS_VALUES: Tuple[type, ...] = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)

# The shape of their results depends on values.
DATA_DEPENDENT = frozenset(
    "nonzero nonzero_numpy masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive "
    "bincount argwhere nms".split()
)


# The taint of a truth that compares a float without a value.
COMPARED = "floats that are compared are 1.0"

# Told of each error in a prediction: a program may catch it, and the prediction must not go on.
on_error: Optional[Callable[["PredictionError"], None]] = None


class PredictionError(Error, RuntimeError):
    """A program cannot be predicted as it is; the text says what to do.

    A program that catches it ends all the same, at its next operator.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if on_error is not None:
            on_error(self)


class Rule(NamedTuple):
    """What the author says about a line."""

    where: str
    value: Any

    def holds(self, stack: "List[Tuple[str, str, int]]") -> bool:
        file, _, line = self.where.rpartition(":")
        if file and line.isdigit():
            return any(at[1].endswith(file) and at[2] == int(line) for at in stack)
        return any(at[0] == self.where for at in stack)


_rules: List[Rule] = []


def assume(where: str, value: Union[bool, int, float]) -> None:
    """Says what a value is that a prediction does not have.

    >>> warpool.predict.assume("model.py:120", 37)      # `.item()` there gives 37; `nonzero` finds 37
    >>> warpool.predict.assume("model.py:121", 0.5)     # `nonzero`, or a mask as index, keeps half of the elements
    >>> warpool.predict.assume("route", 64)             # the same for all lines of the function `route`

    Args:
        where: A line as FILE:LINE, where the end of a path suffices, or the name of a function.
        value: The value that is read; for an operator whose result's shape depends on values, how many elements it
            finds: a number, or as a float the share of all.
    """
    if not isinstance(where, str) or not where:
        raise TypeError("where is a text: FILE:LINE, or the name of a function")
    _rules.append(Rule(where, value))


class Assumptions:
    """The assumptions of a prediction, with how often each was made."""

    def __init__(self) -> None:
        self.made: Dict[str, int] = {}
        self._generator = torch.Generator().manual_seed(0)

    def add(self, text: str) -> None:
        self.made[text] = self.made.get(text, 0) + 1

    def given(self) -> Tuple[Optional[Rule], str]:
        """What was said about the current line, and that line."""
        stack = _stack()
        for rule in reversed(_rules):
            if rule.holds(stack):
                return rule, _line(stack)
        return None, _line(stack)

    def item(self, tensor: Any, compared: Any = None) -> Any:
        """A value that is read; `compared` is that of a comparison in which floats without a value are 1.0."""
        rule, line = self.given()
        if rule is not None:
            self.add(f"the value at {line} is {rule.value!r}, as given")
            if tensor.dtype == torch.bool:
                return bool(rule.value)
            return float(rule.value) if tensor.dtype.is_floating_point else int(rule.value)
        if compared is not None:
            self.add(f"the truth that is read at {line} is {bool(compared)}: {COMPARED}")
            return compared
        if tensor.dtype.is_floating_point:
            self.add(f"a value that is read at {line} is 1.0")
            return 1.0
        if tensor.dtype.is_complex:
            self.add(f"a value that is read at {line} is 1.0")
            return complex(1.0)
        inner = _innermost()
        if tensor.dtype == torch.bool and (_is_installed(line) or inner is not None):
            line = inner or line
            self.add(f"a truth value that is read at {line} is false")
            return False
        what = "a truth value" if tensor.dtype == torch.bool else "an integer"
        raise self.missing(f"{what} is read from a CUDA tensor")

    def picture(self, tensor: Any) -> torch.Tensor:
        """The elements of bytes or truths in two dimensions or more, which are for the eye or a score: zeros."""
        rule, line = self.given()
        value = 0 if rule is None else rule.value
        self.add(f"the elements that are read at {line} are {value}" + ("" if rule is None else ", as given"))
        return torch.full((), value, dtype=tensor.dtype).expand(tuple(tensor.shape))

    def same(self, what: str) -> bool:
        """Whether floats without values are the same as others."""
        rule, line = self.given()
        value = True if rule is None else bool(rule.value)
        self.add(f"{what}() at {line} is {value}" + ("" if rule is None else ", as given"))
        return value

    def truth(self, what: str) -> bool:
        rule, line = self.given()
        if rule is None:
            raise self.missing(f"{what} compares CUDA tensors")
        self.add(f"the value at {line} is {rule.value!r}, as given")
        return bool(rule.value)

    def count(self, elements: int, what: str) -> int:
        """How many of these elements are found."""
        rule, line = self.given()
        if rule is None and _is_installed(line):
            # A line of a package that the author does not write, such as a detector's filter of boxes.
            self.add(f"{what} at {line} finds all elements")
            return elements
        if rule is None:
            raise self.missing(f"the shape of {what} depends on values")
        self.add(f"{what} at {line} finds {rule.value!r} of {elements} elements, as given")
        found = round(rule.value * elements) if isinstance(rule.value, float) else int(rule.value)
        return max(0, min(found, elements))

    def shape(self, recorder: Any, kind: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape depends on values that are not known."""
        source = args[0]
        elements = source.size(0) if kind.name == "nms" else source.numel()
        count = self.count(elements, kind.name)
        with recorder.fake:
            if kind.name in ("nonzero", "argwhere"):
                # CUDA writes one row per dimension and returns the transposed matrix.
                return torch.empty((source.dim(), count), dtype=torch.int64, device=source.device).t()
            if kind.name == "masked_select":
                return torch.empty((count,), dtype=source.dtype, device=source.device)
            if kind.name in ("bincount", "nms"):
                return torch.empty((count,), dtype=torch.int64, device=source.device)
            if kind.name in ("_unique", "_unique2", "unique_consecutive"):
                values = torch.empty((count,), dtype=source.dtype, device=source.device)
                inverse = torch.empty(source.shape, dtype=torch.int64, device=source.device)
                counts = torch.empty((count,), dtype=torch.int64, device=source.device)
                return (values, inverse) if kind.name == "_unique" else (values, inverse, counts)
        raise self.missing(f"{kind.name} needs values")

    def missing(self, what: str) -> PredictionError:
        stack = _stack()
        line = _line(stack)
        source = linecache.getline(stack[0][1], stack[0][2]).strip() if stack else ""
        quoted = f" (`{source}`)" if source else ""
        place = line.rsplit("/", 1)[-1]
        return PredictionError(
            f"{line}{quoted}: {what}, and a prediction has no values there. Say what it is: "
            f'warpool.predict.assume("{place}", VALUE), or --assume {place}=VALUE; VALUE is the number or truth that '
            "is read, or how many elements are found (a float: the share of all)"
        )

    def random(self, high: int, shape: Any) -> torch.Tensor:
        return torch.randint(max(high, 1), tuple(shape), generator=self._generator)

    def ranked(self, shape: Any, dim: int, count: int) -> torch.Tensor:
        """Distinct indices along a dimension, evenly spread; for large dimensions maybe not distinct."""
        shape = list(shape)
        if math.prod(shape) <= 1 << 22:
            return torch.rand(shape, generator=self._generator).topk(count, dim).indices
        high = shape[dim]
        shape[dim] = count
        return self.random(high, shape)


def _stack() -> List[Tuple[str, str, int]]:
    """The lines of the program, innermost first, without those of PyTorch, of this package and of Python."""
    from ._patches import hidden_files

    hidden = hidden_files()
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(hidden) and not file.startswith("<"):
            found.append((frame.f_code.co_name, file, frame.f_lineno))
        frame = frame.f_back
    return found


def _innermost() -> Optional[str]:
    """The line of PyTorch that reads a value for itself; `None` if the program does."""
    frame = sys._getframe(1)
    own = __file__.rsplit("/", 1)[0]
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    if "/torch/" in file and not file.endswith("/torch/_tensor.py"):
        return f"{file}:{frame.f_lineno}"
    return None


def _is_installed(line: str) -> bool:
    """Whether a line is of an installed package."""
    return "site-packages" in line or "dist-packages" in line


def _line(stack: List[Tuple[str, str, int]]) -> str:
    return f"{stack[0][1]}:{stack[0][2]}" if stack else "a line of PyTorch"


# What is assumed of results: called with the operator's arguments and its result without values.


def _constant(value: bool, text: str = "values are finite") -> Any:
    def make(recorder: Any, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
        recorder.values.set(result, torch.full((), value), text)

    return make


def _compared(same: bool) -> Any:
    """`x == x` and `x != inf` ask whether values are finite."""

    def make(recorder: Any, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
        first, second = args[0], args[1]
        if result.dim() == 0 and first is not second and not _is_infinite(second):
            _ordered(recorder, kind, args, kwargs, result)
        elif first is second:
            recorder.values.set(result, torch.full((), same), "values are finite")
        elif isinstance(second, float) and math.isinf(second):
            recorder.values.set(result, torch.full((), not same), "values are finite")

    return make


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _ordered(recorder: Any, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
    """`loss < best`: a float without a value is 1.0, as where it is read."""
    if not isinstance(result, FakeTensor) or result.dim() != 0 or result.dtype != torch.bool:
        return
    operands = []
    for each in args[:2]:
        if isinstance(each, torch.Tensor):
            known = recorder.values.of(each)
            if known is None and not each.dtype.is_floating_point:
                return
            each = 1.0 if known is None else known.item()
        operands.append(each)
    value = getattr(operator, kind.name)(*operands)
    recorder.values.set(result, torch.full((), value), COMPARED)


def _indices(recorder: Any, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Indices along a dimension, spread evenly."""
    indices = result[1] if isinstance(result, (tuple, list)) else result
    source = args[0]
    if not isinstance(indices, FakeTensor) or indices.numel() * 8 > 4 << 20 or indices.dtype != torch.int64:
        return
    assumptions = recorder.assumptions
    text = f"indices of {kind.name} are spread evenly"
    if kind.name in ("topk", "sort", "argsort") and source.dim():
        dim = next((each for each in args[1:] if isinstance(each, int) and not isinstance(each, bool)), -1)
        if kind.name == "topk":
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        dim = kwargs.get("dim", dim)
        value = assumptions.ranked(source.shape, dim, indices.shape[dim])
    else:
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else kwargs.get("dim")
        if kind.name == "multinomial":
            dim = -1
        high = source.numel() if dim is None or not source.dim() else source.shape[dim]
        value = assumptions.random(high, indices.shape)
    recorder.values.set(indices, value, text)


MAKERS: Dict[str, Any] = {
    "isnan": _constant(False),
    "isinf": _constant(False),
    "isfinite": _constant(True),
    # torch.distributions checks its parameters by it.
    "_is_all_true": _constant(True, "what PyTorch checks of all elements holds"),
    "eq": _compared(True),
    "ne": _compared(False),
    **{name: _ordered for name in ("lt", "le", "gt", "ge")},
    **{name: _indices for name in ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "multinomial")},
}
