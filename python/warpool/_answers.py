"""What the functions return: objects over the JSON of the command (docs/json.md), with tables and HTML for notebooks.

An attribute is a key of that JSON. Those that are declared here have types for editors and type checkers; all others
work as well.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from . import _html
from ._records import Record, Records

if TYPE_CHECKING:
    import pandas

_Device = TypeVar("_Device", bound="DeviceAnswer")
_PAGE_START = b"<!doctype html>\n<!-- warpool report"


class Answer(Record):
    """An answer: its keys are attributes, its lists tables. `print` shows it in words, a notebook as a page."""

    __slots__ = ("headline", "sentences")

    headline: str
    """The answer in a few words."""
    sentences: Tuple[str, ...]
    """The answer in a few sentences."""

    _TABLE = ""

    def __init__(self, data: Mapping[str, Any], headline: str, sentences: Iterable[str] = ()) -> None:
        super().__init__(data)
        self.headline = headline
        self.sentences = tuple(sentences)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.sentences])

    def to_pandas(self, table: Optional[str] = None) -> "pandas.DataFrame":
        """One of its tables as a DataFrame, by the name of its attribute; without a name the most important one."""
        name = table or self._TABLE
        found = getattr(self, name, None)
        if not isinstance(found, Records):
            names = [key for key in self if isinstance(self[key], Records)]
            raise ValueError(
                f"{name!r} is not a table of {type(self).__name__}: there are {', '.join(names) or 'none'}"
            )
        return found.to_pandas()

    def _tables(self) -> List[str]:
        """Tables for the notebook."""
        return []

    def _repr_html_(self) -> str:
        return _html.summary(self.headline, self.sentences, self._tables())


class DeviceAnswer(Answer):
    """What is told about one device of a recording, beside those about the others."""

    __slots__ = ("devices",)

    devices: "Tuple[Any, ...]"
    """The answers about all devices, by number, this one among them."""

    def _repr_html_(self) -> str:
        if len(self.devices) == 1:
            return super()._repr_html_()
        rows = [[(str(each.device), True), (each.headline, False)] for each in self.devices]
        others = _html.table("All devices (.devices)", ("GPU", ""), rows)
        return _html.summary(f"GPU {self.device}: {self.headline}", self.sentences, [*self._tables(), others])


class Explanation(DeviceAnswer):
    """Why a recorded program ran out of memory: `warpool.explain`."""

    __slots__ = ()
    _TABLE = "holders"

    devices: "Tuple[Explanation, ...]"
    device: int
    """The device's number."""
    verdict: str
    """Why: `fragmentation`, `live_exceeds_device`, `other_stream_or_pool`, `limit`, `outside`, `growth`, `fitted` or
    `unknown`."""
    evidence: Sequence[str]
    """The numbers behind the verdict, in sentences."""
    moment: Record
    """The moment that is explained: `kind`, `event`, `time_us`, `bytes_requested`, `reserved_bytes` and more."""
    parts: Record
    """Where the device's memory was then, in bytes by name."""
    account: Optional[Record]
    """Whose memory it was outside the allocator, in recordings by Warpool that know: `rows` and more."""
    holders: Records
    """Who held memory, the largest first, by call stack: `name`, `line`, `path`, `bytes`, `count`."""
    fits: Records
    """Changes that were replayed, those that fit first: `change`, `set`, `variable`, `fits` and more."""
    growth: Optional[Record]
    """What grew from iteration to iteration, if anything did."""
    remarks: Sequence[str]
    """Remarks, in sentences."""
    device_bytes_total: int
    """The memory of the device."""
    device_assumed: bool
    """Whether that is an assumption."""

    def _tables(self) -> List[str]:
        tables = [_html.sizes_table("Where the device's memory was", self.parts)]
        if isinstance(self.get("account"), Record):
            tables.append(_html.records_table("Whose it was, when the recording was written", self.account.rows))
        for key, title in (
            ("categories", "What held memory"),
            ("holders", "Who held memory"),
            ("advice", "What to do"),
            ("fits", "What was tried"),
        ):
            found = self.get(key)
            if isinstance(found, Records):
                tables.append(_html.records_table(title, found))
        return tables


class Replay(DeviceAnswer):
    """A recorded program on the simulated GPU: `warpool.replay`."""

    __slots__ = ()
    _TABLE = "rounds"

    devices: "Tuple[Replay, ...]"
    device: int
    """The device's number."""
    outcome: str
    """`completed`, `out_of_memory`, or `no_history`, for a snapshot of which nothing can be replayed."""
    peak_live_bytes: int
    """The most that the program had allocated."""
    peak_reserved_bytes: int
    """The most that the allocator had from the driver, in the worst order of addresses."""
    orders: Record
    """The result over the orders of addresses: `run`, `fit`, `peak_reserved_bytes_least` and more."""
    control: Optional[Record]
    """The same for the recorded program in the same orders, where they matter."""
    rounds: Records
    """The runs of the program one after another, if several were asked for."""
    in_force: Record
    """What it was replayed with: `settings`, `allocator`, `device_bytes_total` and more."""
    fidelity: Record
    """Whether the recorded settings reproduce the recording: `exact` and more."""
    oom: Optional[Record]
    """Where it ran out of memory: `event`, `message`, `bytes_requested` and more."""
    warnings: Sequence[str]
    """Warnings, in sentences."""

    @property
    def fits(self) -> Optional[bool]:
        """Whether nothing ran out of memory, in any order of addresses and any round; None without a history."""
        if self.outcome == "no_history":
            return None
        in_orders = self.outcome == "completed" and self.orders.fit == self.orders.run and not self.get("ooms")
        return in_orders and all(round.ooms == 0 for round in self.rounds)

    def _tables(self) -> List[str]:
        sizes = {name: self[name] for name in self if name.endswith("_bytes")}
        conditions = [{"": name, "value": value} for name, value in self.get("in_force", {}).items()]
        return [
            _html.sizes_table("Memory", sizes),
            _html.records_table("One round after another", self.get("rounds", ())),
            _html.records_table("In force", conditions),
        ]


class Tuning(Answer):
    """The settings that serve recorded programs best: `warpool.tune`."""

    __slots__ = ()
    _TABLE = "candidates"

    candidates: Records
    """What was replayed, the best first: `name`, `set`, `variable`, `fits`, `peak_reserved_bytes` and more."""
    recommendation: str
    """What to set, in a sentence."""
    exact: bool
    """Whether replays reproduce all recordings; otherwise the figures are estimates."""

    @property
    def best(self) -> Optional[Record]:
        """The best candidate that fits and can be set, which may be the recorded settings; None if nothing fits."""
        fitting = (found for found in self.candidates if found.fits and not found.lower_bound)
        return next(fitting, None)

    def _tables(self) -> List[str]:
        left_out = ("schema_version", "rank", "name", "files", "devices")
        shown = [{key: row[key] for key in row if key not in left_out} for row in self.candidates]
        return [_html.records_table("Settings, the best first", shown)]


class Difference(DeviceAnswer):
    """What two recordings hold at their moments: `warpool.diff`."""

    __slots__ = ("page",)
    _TABLE = "changes"

    devices: "Tuple[Difference, ...]"
    page: "Optional[Page]"
    """The page that compares them, for the browser; None if it was not asked for."""
    before: Record
    """The first recording: `file`, `device`, `moment`, `event`, `allocated_bytes`, `reserved_bytes`."""
    after: Record
    """The second."""
    changes: Records
    """What changed, the most first: `kind`, `name`, `line`, `bytes_before`, `bytes_after` and more."""

    @property
    def device(self) -> int:
        """The device's number in the first recording."""
        number: int = self.before.device
        return number

    @property
    def html(self) -> str:
        """The page as HTML."""
        return self._page().html

    def save(self, path: "Union[str, os.PathLike[str]]") -> Path:
        """Writes the page to a file: see `Page.save`."""
        return self._page().save(path)

    def _page(self) -> "Page":
        if self.page is None:
            raise ValueError("no page was asked for: call diff with page=True")
        return self.page

    def _tables(self) -> List[str]:
        found = self.get("changes")
        changed = [change for change in found if change.get("kind") != "same"] if isinstance(found, Records) else []
        return [_html.records_table("What changed", changed)]

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.page is None else self.page._repr_html_()


class Page(Answer):
    """A page for the browser: `warpool.view`. It is one HTML file with everything in it, and needs no network."""

    __slots__ = ("height", "html")

    html: str
    """The page."""
    height: int
    """How high it is in a notebook, in pixels."""

    def __init__(self, data: Mapping[str, Any], title: str, html: str) -> None:
        super().__init__(data, title)
        self.html = html
        self.height = 900

    def __repr__(self) -> str:
        return f"<Page: {self.headline}, {_html.size_text(len(self.html))}>"

    def save(self, path: "Union[str, os.PathLike[str]]") -> Path:
        """Writes the page to a file, all or nothing, and returns its path. A page that is there is replaced; any other
        file is a FileExistsError."""
        to = Path(path)
        if to.is_file() and not _is_page(to):
            raise FileExistsError(f"{to} exists and is not a report of warpool: remove it, or name another file")
        draft = to.with_name(f"{to.name}.{os.getpid()}.part")
        try:
            with draft.open("w", encoding="utf-8", newline="") as file:
                file.write(self.html)
            os.replace(draft, to)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return to

    def _repr_html_(self) -> str:
        if len(self.html) <= _html.SHOWN_BYTES_MAX:
            return _html.page(self.html, self.height)
        too_large = (
            f"The page has {_html.size_text(len(self.html))}, too much for a notebook: save it with .save(path)."
        )
        return _html.summary(self.headline, [*self.sentences, too_large], self._tables())


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(len(_PAGE_START))
    # An empty file has nothing to lose.
    return start in (b"", _PAGE_START)


def with_devices(devices: Sequence[_Device]) -> "Tuple[_Device, ...]":
    """Makes each know all."""
    found = tuple(devices)
    for device in found:
        device.devices = found
    return found


def explanations(answer: Dict[str, Any]) -> Tuple[Explanation, ...]:
    """The explanations of an answer, by device."""
    return with_devices(
        [Explanation(each["object"], each["headline"], each["sentences"]) for each in answer["devices"]]
    )


def replays(answer: Dict[str, Any]) -> Tuple[Replay, ...]:
    """The replays of an answer, by device."""
    return with_devices([Replay(each["object"], *_replay_words(each["object"])) for each in answer["devices"]])


def _replay_words(found: Mapping[str, Any]) -> Tuple[str, List[str]]:
    """A replay in a few words, and in sentences."""
    if found["outcome"] == "no_history":
        reserved, allocated = (_html.size_text(found[name]) for name in ("reserved_bytes", "allocated_bytes"))
        sentence = "The snapshot has no history, so nothing can be replayed."
        return f"no history: {reserved} reserved, {allocated} of it allocated", [sentence]
    reserved, live = (_html.size_text(found[name]) for name in ("peak_reserved_bytes", "peak_live_bytes"))
    headline = f"{found['outcome'].replace('_', ' ')}: {reserved} reserved for {live} live"
    orders, fidelity = found["orders"], found["fidelity"]
    sentences = []
    if orders["run"] > 1:
        least, most = (_html.size_text(orders[f"peak_reserved_bytes_{which}"]) for which in ("least", "most"))
        sentences.append(
            f"It fits in {orders['fit']} of {orders['run']} address orders, and reserves {least} to {most}."
        )
    if found["oom"]:
        sentences.append(found["oom"]["message"])
    if fidelity["checked"] and not fidelity["exact"]:
        sentences.append("With the recorded settings the recording is not reproduced: the figures are estimates.")
    return headline, [*sentences, *found["warnings"]]


def differences(answer: Dict[str, Any], page: Optional[Page]) -> Tuple[Difference, ...]:
    """The differences of an answer, by device."""
    found = [Difference(each["object"], each["headline"], each["sentences"]) for each in answer["devices"]]
    for difference in found:
        difference.page = page
    return with_devices(found)
