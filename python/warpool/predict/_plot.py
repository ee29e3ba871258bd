"""A sweep as a picture: memory over the values, and cards as lines. SVG, without a library."""

from html import escape
from typing import Any, Dict, List, Tuple

_COLOURS = ("#2f6fde", "#c4532d", "#2a8f5b", "#8a4fbf", "#7a6a2b", "#555555")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 820, 460, 70, 190, 30, 60


def svg(name: str, reports: List[Tuple[str, Dict[str, Any]]]) -> str:
    """The picture as a document."""
    settings = [row["settings"] or "native" for row in reports[0][1]["settings"]]
    needs = [[row["smallest_device_bytes"] for row in report["settings"]] for _, report in reports]
    most = max(max(row) for row in needs) * 1.15
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(at: int) -> float:
        return _LEFT + (width * (at + 0.5) / len(reports))

    def y(size: float) -> float:
        return _TOP + height * (1 - size / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<line x1="{_LEFT}" y1="{y(0)}" x2="{_LEFT + width}" y2="{y(0)}" stroke="#333"/>',
    ]
    shown: List[float] = []
    for card in sorted(reports[0][1]["cards"], key=lambda card: card["bytes"]):
        at = y(card["bytes"])
        if card["bytes"] > most or any(abs(at - other) < 14 for other in shown):
            continue
        shown.append(at)
        parts.append(
            f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + width}" y2="{at:.1f}" stroke="#bbb" '
            'stroke-dasharray="4 4"/>'
            f'<text x="{_LEFT + width + 6}" y="{at + 4:.1f}" fill="#666">{escape(card["name"])}, '
            f"{card['bytes'] / 2**30:.0f} GiB</text>"
        )
    for number, setting in enumerate(settings):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(at):.1f},{y(row[number]):.1f}" for at, row in enumerate(needs))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for at, row in enumerate(needs):
            title = f"{name}={reports[at][0]}, {setting}: {row[number] / 2**30:.2f} GiB"
            parts.append(
                f'<circle cx="{x(at):.1f}" cy="{y(row[number]):.1f}" r="4" fill="{colour}"><title>{escape(title)}'
                "</title></circle>"
            )
        parts.append(f'<text x="{_LEFT + 10}" y="{_TOP + 14 + 16 * number}" fill="{colour}">{escape(setting)}</text>')
    for at, (value, _) in enumerate(reports):
        parts.append(f'<text x="{x(at):.1f}" y="{y(0) + 18}" text-anchor="middle">{escape(value)}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 16}" text-anchor="middle">{escape(name)}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        size = most * share
        parts.append(f'<text x="{_LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{size / 2**30:.1f} GiB</text>')
    return "\n".join([*parts, "</svg>", ""])
