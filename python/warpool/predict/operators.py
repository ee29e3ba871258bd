"""What operators ask the allocator for while they run, beside their outputs.

`Table.steps` answers for one call from its metadata. What it knows comes from a file of rules that `calibrate fit` made
of measurements (`tables/*.json`), for the PyTorch version and the card that the file names:
- operators that never ask for more than their outputs;
- a formula of `formulas.py`, derived from PyTorch's source, with constants that were fitted;
- a decision tree of exact expressions (`"tree"`), found by `fit.py`;
- the nearest measured calls (`convolutions.py`), for workspaces that a library chooses, as cuDNN does for convolutions.

An operator that is not in the file has no steps (`None`), unless PyTorch tags it as pointwise.
"""

import functools
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import calls, convolutions, formulas
from .calls import Array, Call

Step = Tuple[Any, ...]
TABLES = Path(__file__).parent / "tables"


class Steps(NamedTuple):
    """What the allocator is asked for by one call."""

    # ("output", i), ("alloc", name, bytes), ("free", name), in order.
    order: List[Step]
    # (key, bytes) of what a library keeps, for each stream, from its first use on: after all in `order`.
    kept: List[Tuple[str, int]] = []
    # Bytes of outputs whose storage is larger than their elements.
    sizes: Dict[int, int] = {}
    # Nothing like it was measured.
    is_guess: bool = False


class Table:
    """The rules for a card."""

    def __init__(self, rules: Dict[str, Any]) -> None:
        self.rules = rules
        self.machine = formulas.Machine(rules["multiprocessors"], rules["threads"])
        self.capability: Tuple[int, int] = tuple(rules.get("capability", (9, 0)))  # type: ignore[assignment]
        self.only_outputs = frozenset(rules["outputs"])
        self.operators: Dict[str, Any] = {**formulas.DERIVED, **rules["operators"]}
        for name, same in _SAME.items():
            if same in self.operators:
                self.operators.setdefault(name, self.operators[same])
        self._known: Dict[Any, Optional[Steps]] = {}
        self._pointwise: Dict[Any, bool] = {}

    @classmethod
    def load(cls, card: Optional[str] = None) -> "Table":
        """The table of this card, or else the one that there is; `measured_on` says which."""
        names = sorted(TABLES.glob("*.json"))
        chosen = [path for path in names if path.stem == card] or names
        return _load(cls, str(chosen[0]), _figures(card))

    @property
    def measured_on(self) -> str:
        """For which card and versions the rules hold."""
        rules = self.rules
        return f"{rules['card']}, PyTorch {rules['torch']}, CUDA {rules['cuda']}, cuDNN {rules['cudnn']}"

    def error(self, name: str) -> Optional[float]:
        """The part of the bytes that the rule got wrong on calls which it was not fitted to; None: not in the table."""
        if name in self.only_outputs:
            return 0.0
        rule = self.operators.get(name)
        return None if rule is None else rule.get("error", 0.0)

    def steps(self, func: Any, args: Sequence[Any], kwargs: Dict[str, Any], outputs: Sequence[Any]) -> Optional[Steps]:
        """What the call asks for; None if there is no rule. `outputs` are the new tensors on the GPU."""
        name = str(func)
        rule = self.operators.get(name)
        if rule is None:
            if name not in self.only_outputs:
                return _outputs_only(len(outputs)) if self._is_harmless(func, name) else None
            if _base(name) not in _PRODUCTS:
                return _outputs_only(len(outputs))
        made = calls.call(func, args, kwargs, outputs)
        key = (name, _frozen(made.arguments), tuple(made.outputs))
        try:
            found = self._known[key]
        except KeyError:
            found = self._known[key] = self.of(made)
        if found is None or not found.kept:
            return found
        name_of_thread = thread()
        return found._replace(kept=[(f"{what} {name_of_thread}", size) for what, size in found.kept])

    def of(self, call: Call) -> Optional[Steps]:
        """The same for a call as plain data; the keys of `kept` do not name the thread."""
        rule = self.operators.get(call.name)
        if rule is None:
            if call.name not in self.only_outputs:
                return None
            return _outputs_only(len(call.outputs))._replace(kept=kept(call, self.capability))
        events = events_of(rule, call, self.machine)
        is_guess = "near" in rule and convolutions.is_guess(rule, call)
        return Steps(_complete(events, call.outputs), kept(call, self.capability), sizes(call), is_guess)

    def _is_harmless(self, func: Any, name: str) -> bool:
        found = self._pointwise.get(func)
        if found is None:
            found = self._pointwise[func] = self._variant(name) or _tagged_pointwise(func)
        return found

    def _variant(self, name: str) -> bool:
        """In place, with `out` or with a generator, of an operator that asks for its outputs only."""
        parts = name.split(".")
        if len(parts) != 3:
            return False
        space, base, overload = parts
        if base.endswith("_"):
            return f"{space}.{base[:-1]}.{overload}" in self.only_outputs
        if overload.endswith("generator"):
            return f"{space}.{base}.{overload[:-10] or 'default'}" in self.only_outputs
        return overload == "out" and f"{space}.{base}.default" in self.only_outputs


# Operators that were not measured, and others that run the same kernel on the same arguments.
_SAME = {
    "aten.native_batch_norm.default": "aten._native_batch_norm_legit.default",
    "aten._is_all_true.default": "aten.all.default",
    "aten._is_any_true.default": "aten.any.default",
}

# Threads that a multiprocessor holds, by compute capability, where it is not 2048 (CUDA programming guide).
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}


@functools.lru_cache(None)
def _load(cls: Any, path: str, figures: Any) -> Table:
    rules = json.loads(Path(path).read_text())
    if figures is not None:
        rules["capability"], rules["multiprocessors"] = figures
        rules["threads"] = _THREADS.get(figures[0], 2048)
    return cls(rules)


def _figures(card: Optional[str]) -> Any:
    """Compute capability and multiprocessors of a card: sizes of grids follow from them."""
    try:
        from ._cards import _FIGURES
    except ImportError:
        return None
    return _FIGURES.get(card)


@functools.lru_cache(None)
def _outputs_only(count: int) -> Steps:
    return Steps([("output", it) for it in range(count)])


def _tagged_pointwise(func: Any) -> bool:
    return any(str(it) in ("pointwise", "Tag.pointwise") for it in getattr(func, "tags", ()))


def thread() -> str:
    """The thread of the GPU: autograd runs backward passes in its own."""
    import torch

    if torch._C._current_autograd_node() is not None:
        return "thread of autograd"
    return "thread" if threading.current_thread() is threading.main_thread() else f"thread {threading.get_ident()}"


def _base(name: str) -> str:
    """The operator's name without its namespace and overload."""
    return name.split(".", 2)[1]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _frozen(it)) for name, it in value.items())
    if isinstance(value, list):
        return tuple(_frozen(it) for it in value)
    # 1, 1.0 and True are equal, but not the same argument.
    return (value, type(value)) if isinstance(value, (int, float)) else value


def _complete(events: Sequence[Step], outputs: Sequence[Array]) -> List[Step]:
    """Each output once; what a rule leaves out comes last."""
    order, left = [], dict.fromkeys(range(len(outputs)))
    for event in events:
        if event[0] == "output":
            if event[1] not in left:
                continue
            del left[event[1]]
        order.append(event)
    return order + [("output", it) for it in left]


# What libraries keep.

_PRODUCTS = frozenset("mm addmm bmm baddbmm addbmm mv addmv dot vdot addmm_ addmv_ baddbmm_ _addmm_activation".split())
# cuBLAS: for each handle (one per thread) and stream, 32 MiB from Hopper on; before, what CublasHandlePool.cpp says.
# cuBLASLt: 1 MiB, for a product with a bias.
CUBLAS, CUBLAS_BEFORE, CUBLASLT = 32 << 20, (2 * 4096 + 16 * 8) << 10, 1 << 20


def kept(call: Call, capability: Tuple[int, int] = (9, 0)) -> List[Tuple[str, int]]:
    """What a call makes a library keep, if it is the first."""
    base = _base(call.name)
    if base not in _PRODUCTS:
        return []
    added = call["self"]
    found = [("cublas", CUBLAS if capability >= (9, 0) else CUBLAS_BEFORE)]
    if base == "addmm" and isinstance(added, Array) and added.dim == 1:
        found.append(("cublaslt", CUBLASLT))
    return found


# The loss of each element is computed into the result, which is then made smaller and keeps its memory.
_REDUCED_LATER = frozenset(["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])


def sizes(call: Call) -> Dict[int, int]:
    """Bytes of outputs whose memory is larger than their elements."""
    if _base(call.name) not in _REDUCED_LATER or not call.outputs or call["reduction"] == 0:
        return {}
    size = call["self"].numel * call.outputs[0].itemsize
    return {0: size} if size > call.outputs[0].nbytes else {}


# Rules as data.


def events_of(rule: Dict[str, Any], call: Call, machine: "formulas.Machine") -> List[Step]:
    """The events of a call by a rule."""
    if "formula" in rule:
        return formulas.FORMULAS[rule["formula"]](call, rule, machine)
    if "near" in rule:
        return convolutions.events(call, rule, machine)
    return tree_events(rule["tree"], call)


def tree_events(node: Any, call: Call) -> List[Step]:
    """Walks a decision tree: [feature, value, yes, no]; a leaf is [pattern, expressions]."""
    while len(node) == 4:
        name, value, yes, no = node
        found = feature(call, name)
        if isinstance(value, str):
            node = yes if found == value else no
        else:
            node = yes if isinstance(found, (int, float)) and found <= value else no
    pattern, expressions = node
    sizes = iter(expressions)
    events: List[Step] = []
    for word in pattern.split():
        what, number = word[0], int(word[1:])
        if what == "o":
            events.append(("output", number))
        elif what == "a":
            events.append(("alloc", number, evaluate(next(sizes), call)))
        else:
            events.append(("free", number))
    return events


def evaluate(expression: Any, call: Call) -> int:
    """A number, or [factor, feature]."""
    if isinstance(expression, int):
        return expression
    factor, name = expression
    found = feature(call, name)
    return int(round(factor * found)) if isinstance(found, (int, float)) else 0


def feature(call: Call, name: str) -> Any:
    """A property of a call: a string, a number, or None."""
    kind, _, rest = name.partition(":")
    if kind == "in":
        return sum(it.nbytes for _, it in call.arrays())
    if kind == "out":
        return sum(it.nbytes for it in call.outputs)
    value = _value(call, rest.split(":"))
    return _READ[kind](value)


def _value(call: Call, path: Sequence[str]) -> Any:
    if path[0] == "#":
        number = int(path[1])
        return call.outputs[number] if number < len(call.outputs) else None
    value = call.arguments.get(path[0])
    if path[0] == "dim" and len(path) > 1 and path[1] == "size":
        tensor = next((it for _, it in call.arrays()), None)
        if isinstance(value, int) and tensor is not None and tensor.dim:
            return tensor.shape[value]
        return None
    for part in path[1:]:
        if isinstance(value, list):
            value = value[int(part)] if -len(value) <= int(part) < len(value) else None
        elif isinstance(value, Array):
            place = int(part)
            value = value.shape[place] if -value.dim <= place < value.dim else None
        else:
            return None
    return value


def _layout(value: Any) -> str:
    if isinstance(value, Array):
        if value.numel == 0:
            return "empty"
        kind = "contiguous" if value.contiguous else "channels" if value.channels_last else ""
        return (kind or ("dense" if value.dense else "strided")) + value.where
    if value is None:
        return "none"
    return "list" if isinstance(value, list) else "value"


def _text(value: Any) -> str:
    if isinstance(value, Array):
        return "array"
    if isinstance(value, calls.Other):
        return value.text
    if isinstance(value, list):
        return f"list of {len(value)}"
    return str(value) if value is None or isinstance(value, (bool, str)) else "number"


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_READ: Dict[str, Callable[[Any], Any]] = {
    "dtype": lambda it: it.dtype if isinstance(it, Array) else "",
    "layout": _layout,
    "text": _text,
    "number": _number,
    "numel": lambda it: it.numel if isinstance(it, Array) else None,
    "bytes": lambda it: it.nbytes if isinstance(it, Array) else None,
    "dims": lambda it: it.dim if isinstance(it, Array) else None,
    "length": lambda it: len(it) if isinstance(it, list) else None,
    "itemsize": lambda it: it.itemsize if isinstance(it, Array) else None,
    "area": lambda it: it.shape[0] * it.shape[1] if isinstance(it, Array) and it.dim > 1 else None,
    # Of the rows along `dim`.
    "size": _number,
}
