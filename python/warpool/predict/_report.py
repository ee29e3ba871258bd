"""The report of a prediction: what a program needs, where it fits, who holds the memory, and what was assumed.

Numbers are the library's: the log is placed by the allocators on the simulated GPU, and the snapshot that this gives is
explained as any other. This module needs no PyTorch.
"""

import json
import time
from typing import Any, Dict, List, Optional, Tuple

from .. import _ask, _library
from .._library import Input
from . import _outside

SCHEMA_VERSION = 1

_NAMES = {
    "": "native (PyTorch's default)",
    "expandable_segments:True": "expandable segments",
    "backend:paged": "paged (Warpool)",
}
_ROWS = 10


def size_text(size: float) -> str:
    """A size for people."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:.1f} {name}".replace(".0 ", " ")
    return f"{sign}{size:.0f} B"


class Report:
    """What a program needs. `print` shows it in words; `to_dict()` has it for programs, `to_json()` as text."""

    def __init__(self, data: Dict[str, Any]) -> None:
        self._data = data

    @classmethod
    def of(cls, run: Any, path: str, recorded_seconds: float) -> "Report":
        """Places the log of a run and writes its snapshot."""
        log, recorder, card = run.log, run.recorder, run.card
        start = time.perf_counter()
        context, parts = recorder.outside.bytes, recorder.outside.parts()
        table = json.dumps({"frames": log.stacks.frames, "stacks": log.stacks.stacks}).encode()
        options = {"capacity": card.bytes, "context": context, "settings": run.settings, "out": path}
        inputs = [Input(log.steps(), False), Input(table, False)]
        answer = _library.answer("predict", options, inputs).json
        holders, categories = _held(path)
        placed_seconds = time.perf_counter() - start
        operators = sum(recorder.operators.values())
        unmodelled_bytes = sum(count[1] for count in recorder.unmodelled.values())
        device = answer["device"]
        oom = device["out_of_memory"]
        if oom is not None:
            oom = {**oom, "line": _line(log.stacks, oom["stack"])}
            del oom["stack"]
        first = answer["settings"][0]
        data = {
            "schema_version": SCHEMA_VERSION,
            "gpu": card.key,
            "gpu_name": card.name,
            "device_bytes": card.bytes,
            "context_bytes": context,
            "context": parts,
            "context_origin": _outside.ORIGIN,
            "snapshot": run.path,
            "steps": run.steps_made,
            "peak_allocated_bytes": first["peak_allocated_bytes"],
            "peak_reserved_bytes": first["peak_reserved_bytes"],
            "fits": device["fits"],
            "margin_bytes": card.bytes - first["smallest_device_bytes"],
            "out_of_memory": oom,
            "settings": answer["settings"],
            "cards": answer["cards"],
            "holders": holders,
            "categories": categories,
            "assumptions": [{"text": text, "count": count} for text, count in recorder.assumptions.made.items()],
            "remarks": sorted(recorder.remarks) + _full(device["fits"], run),
            "stream_waits": log.waits_for_streams,
            "table": None if recorder.table is None else getattr(recorder.table, "measured_on", "operators"),
            "operators": operators,
            "unmodelled": [
                {"operator": name, "count": count, "output_bytes": size}
                for name, (count, size) in sorted(recorder.unmodelled.items(), key=lambda each: -each[1][1])
            ],
            "unmodelled_share": sum(count[0] for count in recorder.unmodelled.values()) / max(operators, 1),
            "unmodelled_output_bytes": unmodelled_bytes,
            "guessed": [
                {"operator": name, "count": count, "bytes_max": size}
                for name, (count, size) in sorted(recorder.guessed.items(), key=lambda each: -each[1][1])
            ],
            "allocations": log.allocations,
            "pinned_host_bytes": recorder.host_bytes,
            "seconds_recorded": round(recorded_seconds, 3),
            "seconds_placed": round(placed_seconds, 3),
        }
        return cls(data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._data[name]
        except KeyError:
            raise AttributeError(f"a report has no {name}: there are {', '.join(self._data)}") from None

    def __dir__(self) -> List[str]:
        return sorted({*super().__dir__(), *self._data})

    def to_dict(self) -> Dict[str, Any]:
        """Everything, as `--json` has it (docs/predict.md)."""
        return json.loads(self.to_json())

    def to_json(self) -> str:
        """The same as a line of text."""
        return json.dumps(self._data)

    @property
    def smallest_card(self) -> Optional[str]:
        """The card with the least memory on which it fits with the first settings, by its name."""
        return self._smallest(0)

    def fits_on(self, card: str, settings: str = "") -> bool:
        """Whether it fits on a card of the table, by its key, with settings that were compared."""
        number = [row["settings"] for row in self._data["settings"]].index(settings)
        return next(row["fits"][number] for row in self._data["cards"] if row["key"] == card)

    def _smallest(self, number: int) -> Optional[str]:
        fitting = [card for card in self._data["cards"] if card["fits"][number]]
        return min(fitting, key=lambda card: card["bytes"])["name"] if fitting else None

    def __repr__(self) -> str:
        return f"<Report: {self.headline}>"

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        data = self._data
        where = f"{data['gpu_name']} ({size_text(data['device_bytes'])})"
        needs = size_text(data["device_bytes"] - data["margin_bytes"])
        if data["fits"]:
            return f"It fits on {where}: it needs {needs}, and {size_text(data['margin_bytes'])} are left."
        missing = size_text(-data["margin_bytes"])
        return f"It does not fit on {where}: it needs {needs}, {missing} more than there are."

    def __str__(self) -> str:
        data = self._data
        lines = [self.headline]
        oom = data["out_of_memory"]
        if oom is not None:
            share = 100 * oom["step"] / max(oom["steps"], 1)
            lines += [
                f"It would have run out of memory at {oom['line']}, after {share:.0f} % of its requests: "
                f"{size_text(oom['requested_bytes'])} were requested, {size_text(oom['allocated_bytes'])} were "
                f"allocated and {size_text(oom['reserved_bytes'])} reserved.",
            ]
        lines += [
            "",
            f"Peak allocated {size_text(data['peak_allocated_bytes'])}, peak reserved "
            f"{size_text(data['peak_reserved_bytes'])}; outside the allocator {size_text(data['context_bytes'])}:",
            ", ".join(f"{part['name']} {size_text(part['bytes'])}" for part in data["context"])
            + f" ({data['context_origin']}).",
            "",
        ]
        name = data["gpu_name"]
        rows = [["settings", "allocated", "reserved", "needs in all", f"fits on {name}", "smallest card"]]
        for number, row in enumerate(data["settings"]):
            rows.append(
                [
                    _NAMES.get(row["settings"], row["settings"]),
                    size_text(row["peak_allocated_bytes"]),
                    size_text(row["peak_reserved_bytes"]),
                    size_text(row["smallest_device_bytes"]),
                    "yes" if row["fits"] else "no",
                    self._smallest(number) or "none in the table",
                ]
            )
        lines += table("What it needs", rows)
        rows = [
            ["memory", "native, expandable, paged" if len(data["settings"]) == 3 else "each of the settings", "cards"]
        ]
        for text, fits, names in _card_groups(data["cards"]):
            rows.append([text, ", ".join("yes" if each else "no" for each in fits), names])
        lines += table("Where it fits", rows)
        if data["categories"]:
            rows = [["kind", "bytes"]] + [[row["name"], size_text(row["bytes"])] for row in data["categories"]]
            lines += table("What holds memory when most is allocated", rows)
        if data["holders"]:
            rows = [["bytes", "count", "who"]]
            rows += [[size_text(row["bytes"]), str(row["count"]), row["name"]] for row in data["holders"]]
            lines += table("Who holds it", rows)
        lines += self._assumed()
        lines.append(
            f"{data['operators']} operators and {data['allocations']} allocations in {data['steps']} steps, recorded "
            f"in {data['seconds_recorded']:.1f} s and placed in {data['seconds_placed']:.1f} s."
        )
        if data["snapshot"]:
            lines.append(f"The snapshot is {data['snapshot']}: `warpool explain`, `view` and `tune` read it.")
        return "\n".join(lines)

    def _assumed(self) -> List[str]:
        data = self._data
        lines = []
        if data["assumptions"]:
            lines.append("Assumed")
            for row in data["assumptions"][:_ROWS]:
                times = "" if row["count"] == 1 else f" ({row['count']} times)"
                lines.append(f"  {row['text']}{times}")
            more = len(data["assumptions"]) - _ROWS
            if more > 0:
                lines.append(f"  and {more} more, in to_dict()")
            lines.append("")
        if data["stream_waits"]:
            lines += [
                f"  {data['stream_waits']} blocks were freed while other streams used them: their work is taken to end "
                "1,024 operators later, or when the program waits",
                "",
            ]
        lines += [f"  {remark}" for remark in data["remarks"]] + ([""] if data["remarks"] else [])
        if data["table"] is None:
            lines += ["No table of what operators allocate inside is installed: only their results were counted.", ""]
        elif data["unmodelled"]:
            share = 100 * data["unmodelled_share"]
            names = ", ".join(f"{row['operator']} ({row['count']})" for row in data["unmodelled"][:_ROWS])
            more = len(data["unmodelled"]) - _ROWS
            names += f" and {more} more" if more > 0 else ""
            lines += [
                f"Not in the table of what operators allocate inside, {share:.1f} % of the operators, of which only "
                f"the results were counted: {names}.",
                "",
            ]
        else:
            lines += ["All operators are in the table of what operators allocate inside (0 % are not).", ""]
        if data["guessed"]:
            names = ", ".join(f"{row['operator']} ({row['count']})" for row in data["guessed"])
            lines[-1:] = [
                f"Unlike any convolution that was measured: {names}. The workspaces that cuDNN takes for them are "
                f"guesses, of up to {size_text(data['guessed'][0]['bytes_max'])}: the peaks may be off by more than "
                "5 %.",
                "",
            ]
        if data["table"] is not None:
            lines[-1:] = [f"The table was measured on {data['table']}.", ""]
        return lines


def _full(fits: bool, run: Any) -> List[str]:
    """That the program went on though memory had run out, in which a real one may do something else."""
    if fits or getattr(run, "out_of_memory", "") != "continue":
        return []
    return [
        "The program went on where memory ran out: code that catches torch.OutOfMemoryError was not entered. With "
        '--oom raise (out_of_memory="raise" in Python) it is'
    ]


def _held(path: str) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """Who holds memory when most is allocated, and what kinds of it."""
    try:
        found = _ask.explain(path, at="allocated", fits=False)
    except _library.InputError:  # A program without allocations.
        return [], []
    holders = [
        {"name": row["line"] or row["name"], "bytes": row["bytes"], "count": row["count"]}
        for row in (found.to_dict()["holders"])[:_ROWS]
    ]
    kinds = found.to_dict().get("categories") or []
    if isinstance(kinds, dict):
        kinds = [{"name": name, "bytes": size} for name, size in kinds.items()]
    categories = [
        {"name": row.get("name") or row.get("category"), "bytes": row["bytes"]} for row in kinds if row["bytes"]
    ]
    return holders, categories


def _line(stacks: Any, number: int) -> str:
    """The program's own line of a stack."""
    frames = [stacks.frames[frame] for frame in stacks.stacks[number]]
    python = [frame for frame in frames if frame[1] != "??"]
    own = [frame for frame in python if "/torch/" not in frame[1] and not frame[1].startswith("<")]
    for name, file, line in own[:1] or python[-1:]:
        return f"{name} ({file}:{line})"
    return frames[-1][0] if frames else "a line that is not known"


def _card_groups(cards: List[Dict[str, Any]]) -> List[Tuple[str, List[bool], str]]:
    """Cards on which the same settings fit, in rows from the smallest to the largest."""
    groups: List[List[Dict[str, Any]]] = []
    for card in sorted(cards, key=lambda card: card["bytes"]):
        if not groups or groups[-1][-1]["fits"] != card["fits"]:
            groups.append([])
        groups[-1].append(card)
    found = []
    for members in groups:
        least, most = (round(members[at]["bytes"] / 2**30) for at in (0, -1))
        memory = f"{least} GiB" if least == most else f"{least} to {most} GiB"
        names = [card["name"] for card in members]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        found.append((memory, list(members[0]["fits"]), shown))
    return found


def table(title: str, rows: List[List[str]]) -> List[str]:
    """A table as lines, the first row of which has the names of the columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [title]
    for row in rows:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return [*lines, ""]
