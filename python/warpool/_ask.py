"""The functions `explain`, `replay`, `tune`, `diff` and `view`: the commands of the same names, in this process.

Options are those of the command; sizes are bytes or texts such as "79.1GiB". Each releases the GIL while it works, may
be called from several threads at once, and can be interrupted with Ctrl-C.
"""

from typing import Any, Dict, Iterable, Optional, Sequence, TypeVar, Union

from . import _answers, _library
from ._answers import Difference, Explanation, Page, Replay, Tuning
from ._inputs import (
    Recording,
    Settings,
    Size,
    count_option,
    recording_input,
    settings_list,
    size_option,
    text_list,
)
from ._library import OptionError, Progress

_Found = TypeVar("_Found", Explanation, Replay, Difference)


def explain(
    recording: Recording,
    *,
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    at: Union[str, int, None] = None,
    frameworks: Union[str, Iterable[str]] = (),
    all_frames: bool = False,
    fits: bool = True,
    orders: Optional[int] = None,
    device: Optional[int] = None,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Explanation:
    """Explains why a recorded program ran out of memory, and what would have fitted.

    >>> found = warpool.explain("oom.pickle", capacity="79.1GiB")
    >>> print(found)
    >>> found.verdict, found.holders[0].line, found.to_pandas("fits")

    Args:
        recording: A path, the content of a file, a binary file, or what `torch.cuda.memory._snapshot()` returns.
        gpu: A card, such as "a100-80gb": the one that the program ran out of memory on, or one on which it may fit.
        capacity: Its memory instead, where the card has no name.
        at: The moment: "allocated" (most allocated), "reserved" (most reserved), "oom", the number of an event, or a
            time after the first event such as "1.5s". Without it, the last out-of-memory event, or else "allocated".
        frameworks: Packages or parts of paths whose code is not your own, beside torch and its companions.
        all_frames: Name the innermost line, whoever's code it is.
        fits: Whether to find out what would have fitted, which takes replays.
        orders: In how many orders of addresses a change is replayed, where addresses can matter (8).
        device: The number of the device to explain. Without it, it is the one that ran out of memory, or else the one
            with the most reserved; `.devices` has all.
        memory_limit: The most memory of this machine that it may take.
        progress: Called now and then with what is being done, how much of it is done, and of how much.

    Raises:
        InputError: The recording cannot be read, or there is nothing in it to explain.
        OptionError: An option has a value that it cannot have.
        OSError: The file cannot be opened or read; FileNotFoundError if it is not there.
    """
    options = {
        **_device_memory(gpu, capacity),
        **_frames(frameworks, all_frames),
        "at": None if at is None else str(at),
        "no_fits": not fits,
        "orders": count_option("orders", orders),
        "memory_limit": size_option("memory_limit", memory_limit),
    }
    answer = _library.answer("explain", options, [recording_input(recording)], progress)
    found = _answers.explanations(answer.json)
    if device is not None:
        return _of_device(found, device)
    # The first of equals.
    return max(found, key=lambda each: (each.get("ooms", 0) > 0, each.moment.get("reserved_bytes", 0)))


def replay(
    recording: Recording,
    *,
    settings: Optional[Settings] = None,
    set: Settings = (),
    allocator: Optional[str] = None,
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    orders: Optional[int] = None,
    rounds: Optional[int] = None,
    device: Optional[int] = None,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Replay:
    """Replays a recorded program with the real allocators on a simulated GPU, as recorded or with other conditions.

    >>> found = warpool.replay("train.pickle", set={"expandable_segments": True}, capacity="24GiB")
    >>> found.fits, found.peak_reserved_bytes, found.orders.fit

    Args:
        recording: As for `explain`.
        settings: Settings in place of the recorded ones, as in PYTORCH_CUDA_ALLOC_CONF or as a dictionary.
        set: Settings to change, while the others stay as recorded.
        allocator: "caching" (PyTorch's), "driver-pool" (the driver's own) or "paged" (Warpool's own).
        gpu: The card to replay it on, such as "a100-80gb".
        capacity: Its memory instead.
        orders: In how many orders of addresses it is replayed, where addresses can matter (16).
        rounds: How many times the program is run, one after another on the same device.
        device: The number of the device to tell about. Without it, it is one that ran out of memory, or else the one
            with the most reserved; `.devices` has all.
        memory_limit, progress: As for `explain`.

    Raises:
        As `explain`.
    """
    options = {
        **_device_memory(gpu, capacity),
        "settings": None if settings is None else ",".join(settings_list("settings", settings)),
        "set": settings_list("set", set),
        "allocator": allocator,
        "orders": count_option("orders", orders),
        "rounds": count_option("rounds", rounds),
        "memory_limit": size_option("memory_limit", memory_limit),
    }
    answer = _library.answer("replay", options, [recording_input(recording)], progress)
    found = _answers.replays(answer.json)
    if device is not None:
        return _of_device(found, device)
    return max(found, key=lambda each: (each.fits is False, each.get("peak_reserved_bytes", 0)))


def tune(
    *recordings: Recording,
    candidates: Iterable[Settings] = (),
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    orders: Optional[int] = None,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Tuning:
    """Finds the settings that serve recorded programs best, by replays; with several recordings one setting for all.

    >>> found = warpool.tune("train.pickle")
    >>> print(found.recommendation, found.best.set)
    >>> found.to_pandas()

    Args:
        recordings: One or more, as for `explain`.
        candidates: Further settings to try, beside those that can have an effect.
        gpu, capacity: The device, as for `replay`.
        orders: In how many orders of addresses a candidate is replayed, where addresses can matter (4).
        memory_limit, progress: As for `explain`.

    Raises:
        As `explain`.
    """
    if not recordings:
        raise TypeError("tune() needs a recording")
    if isinstance(candidates, str):
        raise TypeError("candidates is a list of settings, not a text")
    options = {
        **_device_memory(gpu, capacity),
        "candidates": [",".join(settings_list("candidates", each)) for each in candidates],
        "orders": count_option("orders", orders),
        "memory_limit": size_option("memory_limit", memory_limit),
    }
    answer = _library.answer("tune", options, [recording_input(each) for each in recordings], progress)
    return Tuning(answer.json, answer.json["recommendation"])


def diff(
    before: Recording,
    after: Recording,
    *,
    at: Union[str, int, None] = None,
    frameworks: Union[str, Iterable[str]] = (),
    all_frames: bool = False,
    page: bool = True,
    device: Optional[int] = None,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Difference:
    """Compares two recordings: what is new, gone, grown or shrunk at equal moments, by call stack.

    >>> found = warpool.diff("before.pickle", "after.pickle")
    >>> found.changes[0].name, found.to_pandas(), found.save("report.html")

    Args:
        before: The first recording, as for `explain`.
        after: The second.
        at: The moment of both, as for `explain`; without it the most allocated.
        frameworks: Packages or parts of paths whose code is not your own.
        all_frames: Name the innermost line, whoever's code it is.
        page: Whether to make the page that compares them, which takes longer.
        device: The number of the device to compare, in the first recording. Without it, it is the one that changed
            most; `.devices` has all.
        memory_limit: The most memory of this machine that one recording may take.
        progress: As for `explain`.

    Raises:
        As `explain`.
    """
    options = {
        **_frames(frameworks, all_frames),
        "at": None if at is None else str(at),
        "page": bool(page),
        "memory_limit": size_option("memory_limit", memory_limit),
    }
    answer = _library.answer("diff", options, [recording_input(before), recording_input(after)], progress)
    made = Page({"page_bytes": len(answer.page)}, answer.json["title"], answer.page) if answer.page else None
    found = _answers.differences(answer.json, made)
    if device is not None:
        return _of_device(found, device)
    return max(
        found, key=lambda each: abs(each.after.get("allocated_bytes", 0) - each.before.get("allocated_bytes", 0))
    )


def view(
    recording: Recording,
    *,
    device: Optional[int] = None,
    gpu: Optional[str] = None,
    capacity: Optional[Size] = None,
    frameworks: Union[str, Iterable[str]] = (),
    all_frames: bool = False,
    fits: bool = True,
    memory_limit: Optional[Size] = None,
    progress: Optional[Progress] = None,
) -> Page:
    """A page for the browser: memory over time, and who holds it at any moment. A notebook shows it.

    >>> warpool.view("oom.pickle").save("report.html")

    Args:
        recording: As for `explain`.
        device: Only this device; without it all, with a choice.
        gpu, capacity, frameworks, all_frames, fits, memory_limit, progress: As for `explain`.

    Raises:
        As `explain`.
    """
    options = {
        **_device_memory(gpu, capacity),
        **_frames(frameworks, all_frames),
        "no_fits": not fits,
        "device": count_option("device", device),
        "memory_limit": size_option("memory_limit", memory_limit),
    }
    answer = _library.answer("view", options, [recording_input(recording)], progress)
    return Page(answer.json["object"], answer.json["title"], answer.page)


def _device_memory(gpu: Optional[str], capacity: Optional[Size]) -> Dict[str, Any]:
    return {"gpu": gpu, "capacity": size_option("capacity", capacity)}


def _frames(frameworks: Union[str, Iterable[str]], all_frames: bool) -> Dict[str, Any]:
    return {"frameworks": text_list("frameworks", frameworks), "all_frames": bool(all_frames)}


def _of_device(found: Sequence[_Found], device: int) -> _Found:
    """The answer about one device."""
    for each in found:
        if each.device == device:
            return each
    numbers = ", ".join(str(each.device) for each in found)
    raise OptionError(f"there is no device {device} in the recording, only {numbers}")
