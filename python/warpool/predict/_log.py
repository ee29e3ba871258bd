"""What a program asks of the allocator, in order: the log that is placed afterwards. No tensors here.

Events are five numbers each (crates/trace/src/requests/file.rs reads them). Time is counted in operators, ten
microseconds each, so that the same program gives the same log.
"""

import sys
from array import array
from collections import deque
from types import CodeType, FrameType
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

ALLOC, FREE, FREE_IN_USE, COMPLETE, SYNCHRONIZE, EMPTY_CACHE, LIMIT = range(7)
OPERATOR_US = 10

# Work of another stream is taken to be done after this many operators, if the program does not wait for it earlier:
# a stream's queue holds about as many launches before the host has to wait.
LAUNCHES_AHEAD = 1024


class Block:
    """An allocation that is logged: its number, size and place."""

    __slots__ = ("bytes", "device", "number", "stream", "streams_used")

    def __init__(self, number: int, size: int, device: int, stream: int) -> None:
        self.number = number
        self.bytes = size
        self.device = device
        self.stream = stream
        self.streams_used: Optional[set] = None


class Log:
    """The events of a program, with the stacks of its allocations and what is allocated at the moment."""

    def __init__(self, hidden: Tuple[str, ...], outermost: "set[CodeType]") -> None:
        self._events = array("q")
        # What was freed since the last event, at one time: numbers of blocks.
        self._freed: List[int] = []
        self._freed_at = 0
        self.stacks = Stacks(hidden, outermost)
        self.operators = 0
        self.allocations = 0
        self.allocated: Dict[int, int] = {}
        self.peak: Dict[int, int] = {}
        self.requested: Dict[int, int] = {}
        # The most that was allocated since the cache was emptied: about what is reserved.
        self.cached: Dict[int, int] = {}
        self.streams = 1
        self._in_use: Deque[Tuple[int, Block]] = deque()
        self.waits_for_streams = 0
        # The most bytes allocated on a device, and what makes the error beyond them; None: the program goes on.
        self.most: Optional[int] = None
        self.full: Optional[Callable[[int, int], BaseException]] = None
        self.refused: Optional[Tuple[int, int, int, int]] = None

    @property
    def events(self) -> "array[int]":
        """All events so far."""
        if self._freed:
            self._write_frees()
        return self._events

    def alloc(self, size: int, device: int, stream: int, stack: int) -> Block:
        rounded = (size + 511) & -512
        allocated = self.allocated.get(device, 0) + rounded
        if self.most is not None and allocated > self.most and self.full is not None:
            self.refused = (size, device, stream, stack)
            raise self.full(size, device)
        block = Block(self.allocations, size, device, stream)
        self.allocations += 1
        if stream >= self.streams:
            self.streams = stream + 1
        self.events.extend(
            (ALLOC | device << 8 | stream << 16, block.number, size, stack, self.operators * OPERATOR_US)
        )
        self.allocated[device] = allocated
        self.requested[device] = self.requested.get(device, 0) + size
        if allocated > self.peak.get(device, 0):
            self.peak[device] = allocated
        if allocated > self.cached.get(device, 0):
            self.cached[device] = allocated
        return block

    def end_refused(self) -> None:
        """The program ended where memory ran out: its last request is part of what it needs."""
        if self.refused is not None:
            self.most = None
            self.alloc(*self.refused)

    def free(self, block: Block) -> None:
        now = self.operators * OPERATOR_US
        if block.streams_used is not None:
            self.events.extend((FREE_IN_USE, block.number, 0, 0, now))
            self.waits_for_streams += 1
            self._in_use.append((self.operators + LAUNCHES_AHEAD, block))
        else:
            if now != self._freed_at:
                self._write_frees()
                self._freed_at = now
            self._freed.append(block.number)
        self.allocated[block.device] -= (block.bytes + 511) & -512
        self.requested[block.device] -= block.bytes

    def _write_frees(self) -> None:
        """What is freed together is freed in order, though C++ may free it in the order of a hash table: so the same
        program gives the same log, and the allocator's state afterwards is the same in any order."""
        # The collector may free more meanwhile.
        freed, self._freed = self._freed, []
        for number in sorted(freed):
            self._events.extend((FREE, number, 0, 0, self._freed_at))

    def operator(self) -> None:
        """An operator was launched."""
        self.operators += 1
        while self._in_use and self._in_use[0][0] <= self.operators:
            self._in_use.popleft()
            self._event(COMPLETE, 0, 0)

    def use(self, block: Block, stream: int) -> None:
        """Work of another stream uses it."""
        if stream != block.stream:
            if block.streams_used is None:
                block.streams_used = set()
            block.streams_used.add(stream)

    def synchronize(self) -> None:
        """The host waits for all work."""
        if self._in_use:
            self._in_use.clear()
            self._event(SYNCHRONIZE, 0, 0)

    def empty_cache(self, device: int) -> None:
        self.synchronize()
        self.cached[device] = self.allocated.get(device, 0)
        self._event(EMPTY_CACHE, device, 0)

    def limit(self, device: int, fraction: float) -> None:
        self._event(LIMIT, device, round(fraction * 1_000_000))

    def _event(self, kind: int, device: int, argument: int) -> None:
        self.events.extend((kind | device << 8, 0, argument, 0, self.operators * OPERATOR_US))

    def steps(self) -> bytes:
        """The events as the library reads them."""
        if sys.byteorder == "big":
            swapped = array("q", self.events)
            swapped.byteswap()
            return swapped.tobytes()
        return self.events.tobytes()


class Stacks:
    """Call stacks, each with a number. It is looked up by code objects and instructions; lines are found once."""

    def __init__(self, hidden: Tuple[str, ...], outermost: "set[CodeType]") -> None:
        self._hidden = hidden
        self._outermost = outermost
        self._numbers: Dict[Any, int] = {}
        self._kept: Dict[int, CodeType] = {}
        self._skipped: Dict[int, bool] = {}
        self._lines: Dict[Tuple[int, int], int] = {}
        self._frame_numbers: Dict[Tuple[str, str, int], int] = {}
        self.frames: List[Tuple[str, str, int]] = []
        self.stacks: List[List[int]] = []

    def number(self, frame: Optional[FrameType], native: Tuple[str, ...]) -> int:
        """The number of the stack from this frame on, with functions of compiled code inside of it."""
        key: List[Any] = [native]
        at = frame
        while at is not None:
            key.append(id(at.f_code))
            key.append(at.f_lasti)
            at = at.f_back
        found = self._numbers.get(tuple(key))
        if found is None:
            found = self._numbers[tuple(key)] = self._add(frame, native)
        return found

    def _add(self, frame: Optional[FrameType], native: Tuple[str, ...]) -> int:
        stack = [self._frame(name, "??", 0) for name in native]
        while frame is not None:
            code = frame.f_code
            if code in self._outermost:
                # Keep the code alive: its id is part of the key.
                self._kept[id(code)] = code
                break
            self._kept[id(code)] = code
            if not code.co_filename.startswith(self._hidden):
                stack.append(self._frame(code.co_name, code.co_filename, frame.f_lineno or 0))
            frame = frame.f_back
        self.stacks.append(stack)
        return len(self.stacks) - 1

    def _frame(self, name: str, filename: str, line: int) -> int:
        key = (name, filename, line)
        number = self._frame_numbers.get(key)
        if number is None:
            number = self._frame_numbers[key] = len(self.frames)
            self.frames.append(key)
        return number
