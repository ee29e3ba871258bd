"""The same program with several values: which is the last that fits on each card. This module needs no PyTorch."""

import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from ._report import Report, size_text, table


class Sweep:
    """The reports of a sweep, by value. `print` shows what each needs, and the last that fits on each card."""

    def __init__(self, name: str, reports: Dict[Any, Report]) -> None:
        self.name = name
        self.reports = reports

    def largest(self, card: str, settings: Optional[str] = None) -> Any:
        """The last value that fits on a card, by its key, or `None`; with the first settings if they are not given."""
        fitting = [
            value
            for value, report in self.reports.items()
            if report.fits_on(card, report.settings[0]["settings"] if settings is None else settings)
        ]
        return fitting[-1] if fitting else None

    def plot(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Draws it, as SVG."""
        from ._plot import svg

        Path(path).write_text(svg(self.name, self._rows()), encoding="utf-8")

    def _rows(self) -> List[Tuple[str, Dict[str, Any]]]:
        return [(str(value), report.to_dict()) for value, report in self.reports.items()]

    def __str__(self) -> str:
        return "\n".join(sweep_lines(self.name, self._rows()))


def sweep_lines(name: str, reports: List[Tuple[str, Dict[str, Any]]]) -> List[str]:
    """The largest value that fits on each card, and what each value needs."""
    settings = reports[0][1]["settings"]
    rows = [[name, *(f"{row['settings'] or 'native'}" for row in settings), reports[0][1]["gpu_name"]]]
    for value, report in reports:
        rows.append(
            [
                value,
                *(size_text(row["smallest_device_bytes"]) for row in report["settings"]),
                "fits" if report["fits"] else "does not fit",
            ]
        )
    lines = table("Memory of the smallest device, by settings", rows)
    rows = [["memory", *(row["settings"] or "native" for row in settings), "cards"]]
    groups: Dict[Any, List[str]] = {}
    for number, card in enumerate(reports[0][1]["cards"]):
        largest = []
        for at in range(len(settings)):
            fitting = [value for value, report in reports if report["cards"][number]["fits"][at]]
            largest.append(fitting[-1] if fitting else "none")
        groups.setdefault((round(card["bytes"] / 2**30), tuple(largest)), []).append(card["name"])
    for (size, largest_of), names in sorted(groups.items(), key=lambda each: each[0][0]):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rows.append([f"{size} GiB", *largest_of, shown])
    return lines + table(f"The last {name} of the sweep that fits", rows)
