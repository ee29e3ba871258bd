"""Fits the rules of `operators.py` to raw measurements of `calibrate measure`.

An operator gets the first of these that fits: its outputs only, if it never asked for more; a formula of `formulas.py`,
with constants chosen among those that the formula names; a decision tree whose leaves say which events happen and how
large each is, as an exact multiple of a feature where there is one. Every fourth call, by a hash of its arguments, is
held out: errors are those of rules that never saw them; the written rule is then fitted to all.
"""

import collections
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import calls, convolutions, formulas, operators
from .calls import Array, Call

CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
# More calls of an operator add nothing to a tree.
MOST = 150
DEPTH = 6
# No tree is grown from fewer calls.
FEW = 5
# More events than this in a call are one temporary, as large as the most that there was at once.
LONG = 60
# What is written.
DIGITS = 4


class Sample(NamedTuple):
    """A measured call: its outputs are the new ones on the GPU; events as in `Steps.order`."""

    call: Call
    events: List[Tuple[Any, ...]]
    kept: List[int]
    sizes: Dict[int, int]
    held_out: bool


def sample(name: str, arguments: Dict[str, Any], outputs: Sequence[Any], events: Sequence[Any]) -> Sample:
    """From a line of raw measurements."""
    made = {it[1] for it in events if it[0] == "o"}
    numbers: Dict[int, int] = {}
    arrays = []
    for number, value in enumerate(outputs):
        if isinstance(value, list):
            value = calls.from_json(value)
        # One that has elements but no memory of its own is a view of another output.
        if isinstance(value, Array) and value.cuda and (number in made or not value.numel):
            numbers[number] = len(arrays)
            arrays.append(value)
    order: List[Tuple[Any, ...]] = []
    kept, sizes = [], {}
    for event in events:
        if event[0] == "o":
            order.append(("output", numbers[event[1]]))
            if event[2] != arrays[numbers[event[1]]].nbytes:
                sizes[numbers[event[1]]] = event[2]
        elif event[0] == "a":
            order.append(("alloc", event[1], event[2]))
        elif event[0] == "f":
            order.append(("free", event[1]))
        elif event[0] == "k":
            kept.append(event[1])
    empty = [it for it in range(len(arrays)) if ("output", it) not in order]
    order += [("output", it) for it in empty]
    arguments = {key: calls.from_json(value) for key, value in arguments.items()}
    call = Call(name, arguments, arrays)
    digest = hashlib.md5(repr((name, arguments, arrays)).encode()).digest()
    return Sample(call, order, kept, sizes, digest[0] % 4 == 0)


def samples(lines: Iterator[Dict[str, Any]]) -> Dict[str, List[Sample]]:
    """By operator, each call once for each way it went, in the order of the measurement."""
    found: Dict[str, List[Sample]] = collections.defaultdict(list)
    seen = set()
    for line in lines:
        # With cuDNN's benchmark, a convolution asks for the workspaces of all algorithms.
        if "op" not in line or line["f"] == "convolutions_benchmark":
            continue
        key = json.dumps([line["op"], line["in"], line["out"], [it for it in line["ev"] if it[0] in "oaf"]])
        if key in seen or any(it[0] == "r" for it in line["ev"]):
            continue
        seen.add(key)
        found[line["op"]].append(sample(line["op"], line["in"], line["out"], line["ev"]))
    return found


def pattern(events: Sequence[Tuple[Any, ...]]) -> str:
    """Events without sizes."""
    return " ".join(f"{it[0][0]}{it[1]}" for it in events)


def sizes_of(events: Sequence[Tuple[Any, ...]]) -> List[int]:
    """Sizes of the temporaries, in order."""
    return [it[2] for it in events if it[0] == "alloc"]


def peak(events: Sequence[Tuple[Any, ...]], outputs: Sequence[Array]) -> int:
    """The most bytes at once, with outputs."""
    now = most = 0
    live: Dict[Any, int] = {}
    for event in events:
        if event[0] == "output":
            now += outputs[event[1]].nbytes if event[1] < len(outputs) else 0
        elif event[0] == "alloc":
            live[event[1]] = event[2]
            now += event[2]
        else:
            now -= live.pop(event[1], 0)
        most = max(most, now)
    return most


def wrong(rule: Dict[str, Any], measured: Sequence[Sample], machine: formulas.Machine) -> Tuple[float, int]:
    """How far the peak within the call is off, as a part of all bytes that the calls take; and how many are off."""
    off = total = 0
    bad = 0
    for it in measured:
        found = operators._complete(operators.events_of(rule, it.call, machine), it.call.outputs)
        real = peak(it.events, it.call.outputs)
        here = abs(peak(found, it.call.outputs) - real)
        # The allocator rounds to 512 bytes.
        if here >= 512:
            bad += 1
        off += here
        total += real
    return (off / total if total else 0.0), bad


# Trees.


def features(measured: Sequence[Sample]) -> Tuple[List[str], List[str]]:
    """Names of the properties that can tell calls of an operator apart: texts, and numbers."""
    texts: Dict[str, None] = {}
    numbers: Dict[str, None] = {}
    for it in measured[:400]:
        paths = []
        for name, value in it.call.arguments.items():
            paths.append(name)
            if isinstance(value, list):
                numbers[f"length:{name}"] = None
                paths += [f"{name}:{place}" for place in range(min(3, len(value)))]
        paths += [f"#:{place}" for place in range(min(4, len(it.call.outputs)))]
        for path in paths:
            value = operators._value(it.call, path.split(":"))
            if isinstance(value, Array):
                for kind in ("dtype", "layout"):
                    texts[f"{kind}:{path}"] = None
                for kind in ("numel", "bytes", "dims", "itemsize"):
                    numbers[f"{kind}:{path}"] = None
                if value.dim:
                    numbers[f"size:{path}:-1"] = numbers[f"size:{path}:0"] = None
                if value.dim > 2:
                    numbers[f"area:{path}"] = None
                for place in range(1, min(5, value.dim)):
                    numbers[f"size:{path}:{place}"] = None
            elif operators._number(value) is not None:
                numbers[f"number:{path}"] = None
                texts[f"layout:{path}"] = None
            else:
                texts[f"layout:{path}"] = texts[f"text:{path}"] = None
        if "dim" in it.call.arguments:
            numbers["size:dim:size"] = None
    numbers["in:"] = numbers["out:"] = None
    return list(texts), list(numbers)


_MULTIPLES = (1, 2, 4, 8, 3, 12, 16, 24, 32, 6, 5, 10, 20, 40)


def expressions(measured: Sequence[Sample], numbers: Sequence[str]) -> List[List[Any]]:
    """For each call, for each of its temporaries, an expression of its size: as few different ones as possible."""
    tables = [{name: operators.feature(it.call, name) for name in numbers} for it in measured]
    slots: Dict[Tuple[str, int], List[Tuple[int, int]]] = collections.defaultdict(list)
    for number, it in enumerate(measured):
        for place, size in enumerate(sizes_of(it.events)):
            slots[(pattern(it.events), place)].append((number, size))
    result: List[Dict[int, Any]] = [{} for _ in measured]
    for (_, place), cases in slots.items():
        candidates: Dict[Any, set] = collections.defaultdict(set)
        for number, size in cases:
            candidates[size].add(number)
            if not size:
                continue
            for name, value in tables[number].items():
                if not isinstance(value, int) or value <= 0:
                    continue
                for multiple in _MULTIPLES:
                    if value * multiple == size:
                        candidates[(multiple, name)].add(number)
        left = {number for number, _ in cases}
        while left and candidates:
            # A multiple of a feature says more than a constant.
            best = max(candidates, key=lambda it: (len(candidates[it] & left), not isinstance(it, int)))
            covered = candidates[best] & left
            if len(covered) < 2 and len(left) > 1:
                break
            for number in covered:
                result[number][place] = best if isinstance(best, int) else list(best)
            left -= covered
        if left:
            of = {number: size for number, size in cases if number in left}
            fitted = _ratio(of, tables, numbers)
            for number in left:
                result[number][place] = fitted
    return [[it[place] for place in sorted(it)] for it in result]


def _ratio(sizes: Dict[int, int], tables: Sequence[Dict[str, Any]], numbers: Sequence[str]) -> Any:
    """The feature to which sizes are most nearly proportional."""
    best: Tuple[float, Any] = (float("inf"), int(sorted(sizes.values())[len(sizes) // 2]))
    for name in numbers:
        ratios = sorted(
            size / tables[number][name]
            for number, size in sizes.items()
            if isinstance(tables[number][name], (int, float)) and tables[number][name] > 0
        )
        if len(ratios) < len(sizes):
            continue
        middle = ratios[len(ratios) // 2]
        if middle <= 0:
            continue
        error = sum(abs(size - middle * tables[number][name]) for number, size in sizes.items())
        if error < best[0]:
            best = (error, [float(f"{middle:.{DIGITS}g}"), name])
    constant = best[1] if isinstance(best[1], int) else int(sorted(sizes.values())[len(sizes) // 2])
    if sum(abs(size - constant) for size in sizes.values()) <= best[0]:
        return constant
    return best[1]


def tree(measured: Sequence[Sample]) -> Any:
    """A decision tree; see `operators.tree_events`."""
    measured = measured[:MOST]
    texts, numbers = features(measured)
    labels = [json.dumps([pattern(it.events), made]) for it, made in zip(measured, expressions(measured, numbers))]
    columns: Dict[str, List[Any]] = {
        name: [operators.feature(it.call, name) for it in measured] for name in [*texts, *numbers]
    }
    # One of those that always agree.
    different = {repr(values): name for name, values in reversed(columns.items()) if len(set(map(repr, values))) > 1}
    columns = {name: columns[name] for name in reversed(different.values())}
    weights = [1] * len(measured)
    return _split(list(range(len(measured))), labels, columns, set(texts), weights, DEPTH)


def _impurity(counts: Dict[str, int], total: int) -> float:
    return total - sum(it * it for it in counts.values()) / total if total else 0.0


def _split(rows: List[int], labels: Sequence[str], columns: Any, texts: Any, weights: Any, depth: int) -> Any:
    counts = collections.Counter(labels[it] for it in rows)
    if len(counts) == 1 or depth == 0 or len(rows) < 3:
        return json.loads(counts.most_common(1)[0][0])
    whole = _impurity(counts, len(rows))
    best: Tuple[float, Any] = (1e-9, None)
    for name, values in columns.items():
        if name in texts:
            for value in {values[it] for it in rows}:
                yes = collections.Counter(labels[it] for it in rows if values[it] == value)
                n = sum(yes.values())
                if n == len(rows):
                    continue
                gain = whole - _impurity(yes, n) - _impurity(counts - yes, len(rows) - n)
                if gain > best[0] * 1.0001:
                    best = (gain, (name, value))
            continue
        known = sorted((values[it], labels[it]) for it in rows if isinstance(values[it], (int, float)))
        # Sums of squares of the counts on both sides, kept up to date.
        yes, no = collections.Counter(), collections.Counter(counts)
        yes_squares, no_squares = 0, sum(it * it for it in counts.values())
        for place in range(len(known) - 1):
            moved = known[place][1]
            yes_squares += 2 * yes[moved] + 1
            no_squares -= 2 * no[moved] - 1
            yes[moved] += 1
            no[moved] -= 1
            low, high = known[place][0], known[place + 1][0]
            if low == high:
                continue
            here, there = place + 1, len(rows) - place - 1
            gain = whole - (here - yes_squares / here) - (there - no_squares / there)
            if gain > best[0] * 1.0001:
                # Between sizes, in the middle of their logarithms.
                between = int((low * high) ** 0.5) if low > 0 and high > low + 1 else low
                best = (gain, (name, between))
    if best[1] is None:
        return json.loads(counts.most_common(1)[0][0])
    name, value = best[1]
    if name in texts:
        yes = [it for it in rows if columns[name][it] == value]
    else:
        yes = [it for it in rows if isinstance(columns[name][it], (int, float)) and columns[name][it] <= value]
    chosen = set(yes)
    no = [it for it in rows if it not in chosen]
    if not yes or not no:
        return json.loads(counts.most_common(1)[0][0])
    sides = (_split(side, labels, columns, texts, weights, depth - 1) for side in (yes, no))
    first, second = sides
    return first if first == second else [name, value, first, second]


# All together.


def fit(lines: Iterator[Dict[str, Any]], only: Optional[Sequence[str]] = None) -> Tuple[Dict[str, Any], List[Any]]:
    """The table, and a row for each operator: name, rule, calls, error, calls that are off by 512 bytes or more."""
    header: Dict[str, Any] = {}

    def seen() -> Iterator[Dict[str, Any]]:
        for line in lines:
            if "format" in line:
                header.update(line)
            yield line

    measured = samples(seen())
    properties = header.get("properties", {})
    about = {
        "format": 1,
        "torch": header["torch"],
        "cuda": header["cuda"],
        "cudnn": header.get("cudnn"),
        "card": header.get("card"),
        "multiprocessors": properties["multi_processor_count"],
        "threads": properties["max_threads_per_multi_processor"],
        "how": "python -m warpool.predict.calibrate measure, then fit: see docs/design/operators.md",
    }
    machine = formulas.Machine(about["multiprocessors"], about["threads"])
    outputs, rules, rows = [], {}, []
    for name in sorted(measured):
        if only and name not in only:
            continue
        found = measured[name]
        if name not in formulas.OPERATORS and all(not sizes_of(it.events) for it in found):
            # In the order in which they are made, if that is always the order in which they are returned.
            if all([e[1] for e in it.events] == sorted(e[1] for e in it.events) for it in found):
                outputs.append(name)
                continue
        if name not in formulas.OPERATORS and name not in CONVOLUTIONS and len(found) < FEW:
            continue
        rule, kind, error, bad, tried = _rule(name, found, machine)
        rule["measured"] = len(found)
        if error >= 0.0005:
            rule["error"] = round(error, 4)
        rules[name] = rule
        rows.append((name, kind, len(found), error, bad, tried))
    return {**about, "outputs": outputs, "operators": rules}, rows


def _short(it: Sample) -> Sample:
    """One temporary in place of many, with the same peak."""
    outputs: List[Tuple[Any, ...]] = [("output", number) for number in range(len(it.call.outputs))]
    size = peak(it.events, it.call.outputs) - sum(array.nbytes for array in it.call.outputs)
    return it._replace(events=outputs + ([("alloc", 0, size), ("free", 0)] if size > 0 else []))


def _rule(name: str, found: List[Sample], machine: formulas.Machine) -> Tuple[Dict[str, Any], str, float, int, int]:
    seen = [it for it in found if not it.held_out] or found
    tried = [it for it in found if it.held_out] or found
    fitted = formulas.OPERATORS.get(name)
    if fitted is not None:
        rule = fitted(seen, machine, wrong)
        error, bad = wrong(rule, tried, machine)
        return fitted(found, machine, wrong), "formula", error, bad, len(tried)
    if name in CONVOLUTIONS:
        error, bad = wrong(convolutions.fit(seen), tried, machine)
        return convolutions.fit(found), "nearest", error, bad, len(tried)
    if max(len(it.events) for it in found) > LONG:
        seen, found = [_short(it) for it in seen], [_short(it) for it in found]
    error, bad = wrong({"tree": tree(seen)}, tried, machine)
    return {"tree": tree(found)}, "tree", error, bad, len(tried)
