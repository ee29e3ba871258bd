"""HTML for notebooks. Names, paths and sentences come from recordings, so everything is escaped here, and pages with
scripts are shown in a sandbox, where they reach neither the notebook nor the network."""

from html import escape
from typing import Any, Iterable, List, Mapping, Sequence, Tuple

SHOWN_BYTES_MAX = 5_000_000
"""Larger pages are not put into a notebook, which would keep a copy of each."""

_ROWS_MAX = 20
_COLUMNS_MAX = 8
_CELL_LETTERS_MAX = 200
_NUMBER = ' style="text-align:right;white-space:nowrap"'
_TEXT = ' style="text-align:left;overflow-wrap:anywhere"'


def size_text(bytes_count: int) -> str:
    """In the largest binary unit that is not larger, with one decimal, as the command writes it."""
    for name, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes_count >= unit:
            whole, rest = divmod(bytes_count, unit)
            return f"{bytes_count / unit:.1f} {name}" if rest else f"{whole} {name}"
    return f"{bytes_count} B"


def summary(title: str, sentences: Iterable[str], tables: Iterable[str]) -> str:
    """A headline, paragraphs, and tables that are HTML already."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return f"<div><h4>{escape(title)}</h4>{paragraphs}{''.join(tables)}</div>"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Tuple[str, bool]]]) -> str:
    """A table of cells, each a text and whether it is a number."""
    head = "".join(f"<th{_TEXT}>{escape(column)}</th>" for column in columns)
    cells = ("".join(f"<td{_NUMBER if number else _TEXT}>{escape(text)}</td>" for text, number in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    caption = f"<p><b>{escape(title)}</b></p>" if title else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def records_table(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A table of objects: those of their values that fit a cell, and the first rows."""
    if not records:
        return ""
    shown = records[:_ROWS_MAX]
    columns: List[str] = []
    for record in shown:
        columns += [key for key in record if key not in columns and _fits_cell(record[key])]
    columns = columns[:_COLUMNS_MAX]
    rows = [[_cell(column, record.get(column)) for column in columns] for record in shown]
    left_out = len(records) - len(shown)
    note = f"<p>{left_out} further rows are not shown.</p>" if left_out else ""
    return table(title, columns, rows) + note


def sizes_table(title: str, sizes: Mapping[str, Any]) -> str:
    """A table of names and bytes, without those that are 0."""
    rows = [[(name, False), (size_text(size), True)] for name, size in sizes.items() if isinstance(size, int) and size]
    return table(title, ("", "bytes"), rows) if rows else ""


def page(html: str, height: int) -> str:
    """A page of scripts in a frame without rights: it has an origin of its own, and no network."""
    style = f"width:100%;height:{height}px;border:1px solid #8884"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(html, quote=True)}"></iframe>'


def _fits_cell(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _cell(column: str, value: Any) -> Tuple[str, bool]:
    if value is None:
        return "", False
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, int):
        return (size_text(value) if value >= 0 and "bytes" in column else f"{value:,}"), True
    if isinstance(value, float):
        return f"{value:.3f}", True
    text = str(value)
    return (text if len(text) <= _CELL_LETTERS_MAX else f"{text[:_CELL_LETTERS_MAX]}…"), False
