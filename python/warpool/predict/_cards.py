"""What a program can ask a card beside its memory: name, compute capability, multiprocessors.

NVIDIA's published figures; the memory is in the shared object's table (`warpool replay --gpu list`).
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from .. import _library


class Card(NamedTuple):
    """A card."""

    key: Optional[str]
    name: str
    bytes: int
    capability: Tuple[int, int]
    multiprocessors: int


# By key: compute capability and multiprocessors.
_FIGURES: Dict[str, Tuple[Tuple[int, int], int]] = {
    "rtx4060": ((8, 9), 24),
    "rtx3080-10gb": ((8, 6), 68),
    "rtx2080ti": ((7, 5), 68),
    "gtx1080ti": ((6, 1), 28),
    "rtx3060-12gb": ((8, 6), 28),
    "rtx4070": ((8, 9), 46),
    "t4": ((7, 5), 40),
    "v100-16gb": ((7, 0), 80),
    "rtx4080": ((8, 9), 76),
    "rtx5080": ((12, 0), 84),
    "rtx4060ti-16gb": ((8, 9), 34),
    "rtx4070ti-super": ((8, 9), 66),
    "rtx5060ti-16gb": ((12, 0), 36),
    "p100": ((6, 0), 56),
    "a10": ((8, 6), 72),
    "l4": ((8, 9), 58),
    "rtx4090": ((8, 9), 128),
    "rtx3090": ((8, 6), 82),
    "a5000": ((8, 6), 64),
    "rtx5090": ((12, 0), 170),
    "v100-32gb": ((7, 0), 80),
    "a100-40gb": ((8, 0), 108),
    "l40s": ((8, 9), 142),
    "l40": ((8, 9), 142),
    "a40": ((8, 6), 84),
    "a6000": ((8, 6), 84),
    "rtx6000-ada": ((8, 9), 142),
    "h100-80gb": ((9, 0), 132),
    "a100-80gb": ((8, 0), 108),
    "h800": ((9, 0), 132),
    "a800-80gb": ((8, 0), 108),
    "h100-nvl": ((9, 0), 132),
    "h20": ((9, 0), 78),
    "rtx-pro-6000": ((12, 0), 188),
    "gh200": ((9, 0), 132),
    "h200": ((9, 0), 132),
    "b200": ((10, 0), 148),
    "gb200": ((10, 0), 148),
    "b300": ((10, 3), 148),
}


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find(name: str) -> Card:
    """The card of that name: its key, or the beginning of one key only."""
    cards = _library.answer("cards", {}, []).json["cards"]
    wanted = _letters(name)
    exact = [card for card in cards if _letters(card["key"]) == wanted]
    found = exact or [card for card in cards if wanted and _letters(card["key"]).startswith(wanted)]
    if len(found) != 1:
        choices = ", ".join(card["key"] for card in found or cards)
        what = "may be one of" if found else "is not in the table: give capacity in its place, or one of"
        raise _library.OptionError(f"gpu: '{name}' {what} {choices}")
    return _card(found[0])


def of_capacity(size: int) -> Card:
    """A card without a name: it computes as an H200 does."""
    return Card(None, f"a card of {size / 2**30:.1f} GiB", size, *_FIGURES["h200"])


def _card(row: Dict[str, Any]) -> Card:
    return Card(row["key"], row["name"], row["bytes"], *_FIGURES.get(row["key"], _FIGURES["h200"]))
