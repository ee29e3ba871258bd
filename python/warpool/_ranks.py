"""Many recordings of one job: `summarize` where each is, `merge` for the report over all.

A part is a small JSON object. It can be pickled, saved and sent: any engine can map and reduce with these functions.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union

from . import _html, _library
from ._answers import Answer
from ._inputs import Recording, Size, count_option, recording_input, size_option, text_list
from ._library import Input, Progress
from ._records import Record, Records

Recordings = Union[Sequence[Recording], Recording]

# As the command's (crates/cli/src/files.rs).
_ENDINGS = (".pickle", ".pkl", ".csv", ".zip", ".tar", ".tgz", ".txz", ".tbz2", ".tzst")
_COMPRESSIONS = (".xz", ".gz", ".zst", ".bz2")


class Part(Record):
    """What a report needs of some recordings: `warpool.summarize`. `warpool.merge` takes any number of them."""

    __slots__ = ()

    ranks: Records
    """A summary for each device: `file`, `rank`, `world`, `host`, and `figures` or `error`."""

    def __repr__(self) -> str:
        return f"<Part: {', '.join(str(each.file) for each in self.ranks)}>"

    def to_json(self) -> str:
        """The part as the command writes it."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))

    def save(self, path: "Union[str, os.PathLike[str]]") -> Path:
        """Writes the part to a file, all or nothing, and returns its path."""
        to = Path(path)
        draft = to.with_name(f"{to.name}.{os.getpid()}.draft")
        try:
            draft.write_text(f"{self.to_json()}\n", encoding="utf-8")
            os.replace(draft, to)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return to


class Ranks(Answer):
    """The report over many recordings: `warpool.merge`, and `warpool.explain` of several."""

    __slots__ = ("_tables_of_answer",)
    _TABLE = "ranks"

    ranks: Records
    """All in natural order: `name`, `rank`, `verdict`, `peak_needed_bytes`, `margin_bytes`, `error` and more."""
    groups: Records
    """Equal ranks: `first`, `names`, and `difference` from the largest group."""
    limiting: Sequence[str]
    """Names, those that limit the job first: those that ran out of memory by time, then the others by margin."""
    more: Optional[Record]
    """The rank that would run out first with a little more: `name`, `percent`, `would_run_out` and more."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer["object"], answer["headline"], answer["sentences"])
        self._tables_of_answer = answer["tables"]

    def _tables(self) -> List[str]:
        def shown(found: Mapping[str, Any]) -> str:
            columns = [name.lstrip(">") for name in found["columns"]]
            numbers = [name.startswith(">") for name in found["columns"]]
            return _html.table(found["title"], columns, [list(zip(row, numbers)) for row in found["rows"]])

        return [shown(each) for each in self._tables_of_answer]


def summarize(
    recording: Recording,
    *,
    rank: Optional[int] = None,
    world: Optional[int] = None,
    host: Optional[str] = None,
    file: "Union[str, os.PathLike[str], None]" = None,
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    at: Union[str, int, None] = None,
    frameworks: Union[str, Iterable[str]] = (),
    all_frames: bool = False,
    errors: bool = True,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Part:
    """Summarizes a recording where it is, for `warpool.merge`.

    >>> part = warpool.summarize("rank3.pickle")
    >>> report = warpool.merge(part, *others)

    Args:
        recording: As for `explain`.
        rank: The rank, where neither the recording nor the file's name tells.
        world: How many ranks the job has.
        host: The machine.
        file: The name in the report; the path of the recording by default.
        gpu, capacity, at, frameworks, all_frames: As for `explain`.
        errors: Whether a recording that cannot be read is an error; otherwise it is a part that says so.
        memory_limit, progress: As for `explain`.

    Raises:
        As `explain`.
    """
    options = {
        **_options(gpu, capacity, at, frameworks, all_frames, memory_limit),
        "rank": count_option("rank", rank),
        "world": count_option("world", world),
        "host": host,
        "file": None if file is None else os.fspath(file),
        "rows": not errors,
    }
    answer = _library.answer("summarize", options, [recording_input(recording)], progress)
    return Part(answer.json["part"])


def merge(*parts: Union[Part, Mapping[str, Any], str, "os.PathLike[str]", bytes]) -> Ranks:
    """The report over parts, the same as `explain` of all their recordings in one place.

    >>> report = warpool.merge("part0.json", "part1.json")
    >>> print(report)
    >>> report.limiting[0], report.to_pandas()

    Args:
        parts: What `summarize` returned, or the path or content of a file that it or the command wrote. Their order
            makes no difference, nor does one that comes twice.

    Raises:
        InputError: Something is not a part.
        OSError: A file cannot be read.
    """
    if not parts:
        raise TypeError("merge() needs a part")
    return Ranks(_library.answer("merge", {}, [_part_input(part) for part in parts]).json)


def explain_ranks(
    recordings: Recordings,
    *,
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    at: Union[str, int, None] = None,
    frameworks: Union[str, Iterable[str]] = (),
    all_frames: bool = False,
    jobs: Optional[int] = None,
    memory: Optional[Size] = None,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Ranks:
    """The report over many recordings: who ran out of memory first, who would next, and in what the others differ.

    >>> report = warpool.explain_ranks("snapshots/")
    >>> report.limiting[:3], report.groups[0].names

    Args:
        recordings: A folder, or a list of recordings as for `explain`. One that cannot be read is a row of the report.
        gpu, capacity, at, frameworks, all_frames: As for `explain`.
        jobs: How many are read at once; one for each core by default.
        memory: The memory for all that are read at once (1 GiB for each job).
        memory_limit: The most memory of this machine that one recording may take.
        progress: As for `explain`, of the first recording.

    Raises:
        OptionError: An option has a value that it cannot have.
        OSError: The folder cannot be read.
    """
    options = {
        **_options(gpu, capacity, at, frameworks, all_frames, memory_limit),
        "jobs": count_option("jobs", jobs),
        "memory": size_option("memory", memory),
    }
    found = _listed(recordings)
    if not found:
        raise _library.InputError("there are no recordings")
    return Ranks(_library.answer("explain_ranks", options, [recording_input(each) for each in found], progress).json)


def _listed(recordings: Recordings) -> "List[Any]":
    if isinstance(recordings, (str, os.PathLike)):
        path = Path(os.fsdecode(recordings))
        if path.is_dir():
            return [each for each in sorted(path.iterdir()) if each.is_file() and _is_recording(each.name.lower())]
        return [recordings]
    if isinstance(recordings, (list, tuple)):
        return list(recordings)
    return [recordings]


def _is_recording(name: str) -> bool:
    for ending in _COMPRESSIONS:
        if name.endswith(ending):
            name = name[: -len(ending)]
            break
    return name.endswith(_ENDINGS) and not name.startswith(".")


def _part_input(part: object) -> Input:
    if isinstance(part, Part):
        return Input(part.to_json().encode(), False)
    if isinstance(part, Mapping):
        return Input(json.dumps(dict(part)).encode(), False)
    if isinstance(part, (str, os.PathLike, bytes)):
        return recording_input(part)
    raise TypeError(f"a part is what summarize() returned, a path or bytes, not {type(part).__name__}")


def _options(
    gpu: Optional[str],
    capacity: Optional[Size],
    at: Union[str, int, None],
    frameworks: Union[str, Iterable[str]],
    all_frames: bool,
    memory_limit: Optional[Size],
) -> Dict[str, Any]:
    return {
        "gpu": gpu,
        "capacity": size_option("capacity", capacity),
        "at": None if at is None else str(at),
        "frameworks": text_list("frameworks", frameworks),
        "all_frames": bool(all_frames),
        "memory_limit": size_option("memory_limit", memory_limit),
    }


def gather(group: Any, recording: Optional[Recording], **options: Any) -> Optional[Ranks]:
    """`warpool.torch.gather_report`: the report on the first rank of the group, None on the others."""
    import socket

    import torch
    import torch.distributed as dist

    # Named as in the whole job; within the group they count from 0.
    rank, world = dist.get_rank(), dist.get_world_size()
    options = {**options, "rank": rank, "world": world, "host": socket.gethostname(), "file": f"rank{rank}"}
    given: Any = torch.cuda.memory._snapshot() if recording is None else recording
    try:
        part = summarize(given, errors=False, **options)
    except Exception as error:
        # The others wait for this rank: it sends that it has no answer, and then raises.
        part = _failed(options, error)
        _gathered(dist, group, part)
        raise
    parts = _gathered(dist, group, part)
    return None if parts is None else merge(*parts)


def _failed(options: Mapping[str, Any], error: Exception) -> Part:
    row = {name: options[name] for name in ("file", "rank", "world", "host")}
    rows = [{**row, "error": f"{type(error).__name__}: {error}"}]
    return Part({"schema_version": 1, "kind": "warpool summaries", "ranks": rows})


def _gathered(dist: Any, group: Any, part: Part) -> Optional[List[bytes]]:
    """The parts of all ranks, on the first of the group."""
    to: Optional[List[Any]] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.gather_object(part.to_json().encode(), to, dst=first, group=group)
    return to
