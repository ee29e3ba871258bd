"""What the caching allocator does within each operator, on a real GPU.

`Watch` notes at which event of the allocator each operator begins and ends, as a dispatch mode below autograd sees it;
`found()` then reads the allocator's history once. The number of events so far is the number of allocations and frees
that the statistics count, which works in every thread and needs no synchronization.

The events of an operator: `["o", i, bytes]` output i, `["a", n, bytes]` a temporary, `["f", n]` its end, `["r", name,
bytes]` the new memory of an argument, `["k", bytes]` memory that outlives the operator and is neither, `["x", bytes]`
the end of memory that was there before. One on another stream than the current one has its number at the end.
"""

import json
import os
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import calls

MAX_ENTRIES = 4_000_000


class Entry(NamedTuple):
    """One operator: its name, its arguments, its outputs (a number says which argument's memory it shares), events."""

    name: str
    arguments: Dict[str, Any]
    outputs: List[Any]
    events: List[List[Any]]
    # 0 the thread that began the watch, 1 the first other one (autograd's).
    thread: int
    # Numbered as they are met; 0 is the default stream.
    stream: int

    def key(self) -> str:
        """The same for the same call with the same events."""
        return json.dumps(self[:4], separators=(",", ":"))


class _Seen(NamedTuple):
    name: str
    arguments: Dict[str, Any]
    outputs: List[Any]
    # Addresses of the outputs' and, after the operator, of the arguments' memory.
    output_at: Dict[int, int]
    argument_at: Dict[int, str]
    begin: int
    end: int
    thread: int
    stream: int


def position() -> int:
    """How many blocks were allocated and freed so far."""
    counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
    return counts["allocated"] + counts["freed"]


class Watch(TorchDispatchMode):
    """Notes the operators; without `gpu` no events are read, which tests the programs on a machine without one."""

    def __init__(self, gpu: bool = True) -> None:
        super().__init__()
        self.gpu = gpu
        self.process = os.getpid()
        self.seen: List[_Seen] = []
        self.threads: Dict[int, int] = {threading.get_ident(): 0}
        self.streams: Dict[int, int] = {0: 0}
        self._composite: Dict[Any, bool] = {}
        self._base = 0
        if gpu:
            # Without call stacks an entry costs less than a microsecond.
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_ENTRIES, clear_history=True)
            self._base = position()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or os.getpid() != self.process:
            # A question about a tensor's device, where an exception would end the process; or a worker of a loader.
            return func(*args, **kwargs)
        # Under inference_mode, operators that are made of others arrive here as a whole.
        composite = self._composite.get(func)
        if composite is None:
            composite = self._composite[func] = calls.is_composite(func)
        if composite:
            with self:
                return func.decompose(*args, **kwargs)
        arguments = calls.arguments(func, args, kwargs)
        begin = self._position()
        before = {calls.storage(it): number for number, it in enumerate(calls.flat([args, kwargs]))}
        result = func(*args, **kwargs)
        end = self._position()
        outputs: List[Any] = []
        output_at: Dict[int, int] = {}
        for number, it in enumerate(calls.flat(result)):
            at = calls.storage(it)
            if at in before and at is not None:
                outputs.append(before[at])
                continue
            outputs.append(calls.to_json(calls.array(it)))
            if at is not None:
                output_at.setdefault(at, number)
        argument_at = {calls.storage(it): str(number) for number, it in enumerate(calls.flat([args, kwargs]))}
        json_arguments = {name: calls.to_json(value) for name, value in arguments.items()}
        seen = (output_at, argument_at, begin, end, self._thread(), self._stream())
        self.seen.append(_Seen(str(func), json_arguments, outputs, *seen))
        return result

    def _position(self) -> int:
        return position() - self._base if self.gpu else 0

    def _thread(self) -> int:
        return self.threads.setdefault(threading.get_ident(), len(self.threads))

    def _stream(self) -> int:
        if not self.gpu:
            return 0
        return self.streams.setdefault(torch.cuda.current_stream().cuda_stream, len(self.streams))

    def found(self) -> Iterator[Tuple[Optional[Entry], List[Tuple[str, int]]]]:
        """The operators in order, each with the allocator's events (action, bytes) since the one before; at the end
        those after the last, without an operator. Clears the history."""
        trace: List[Any] = []
        if self.gpu:
            torch.cuda.synchronize()
            # Before the history is read: Python may free tensors while it makes a list of it.
            expected = position() - self._base
            trace = torch._C._cuda_memorySnapshot(None)["device_traces"][torch.cuda.current_device()]
            trace = [it for it in trace if it["action"] in ("alloc", "free_requested")]
            if len(trace) < expected:
                raise RuntimeError(f"the history has {len(trace)} events, the statistics counted {expected}")
        done = 0
        for seen in self.seen:
            between = [(it["action"][0], it["size"]) for it in trace[done : seen.begin]]
            done = max(done, seen.end)
            events = self._events(seen, trace[seen.begin : seen.end])
            fields = (seen.name, seen.arguments, seen.outputs, events, seen.thread, seen.stream)
            yield Entry(*fields), between
        yield None, [(it["action"][0], it["size"]) for it in trace[done:]]
        self.clear()

    def clear(self) -> None:
        """Forgets all operators and events so far."""
        self.seen.clear()
        if self.gpu:
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_ENTRIES, clear_history=True)
            self._base = position()

    def _events(self, seen: _Seen, trace: Sequence[Any]) -> List[List[Any]]:
        events: List[List[Any]] = []
        live: Dict[int, int] = {}
        temporaries = 0
        for it in trace:
            stream = self.streams.setdefault(it["stream"], len(self.streams))
            other = [] if stream == seen.stream else [stream]
            if it["action"] == "alloc":
                live[it["addr"]] = len(events)
                events.append(["a", temporaries, it["size"], *other])
                temporaries += 1
            elif it["addr"] in live:
                events.append(["f", events[live.pop(it["addr"])][1]])
            else:
                events.append(["x", it["size"]])
        for at, index in live.items():
            rest = events[index][2:]
            if at in seen.output_at:
                events[index] = ["o", seen.output_at[at], *rest]
            elif at in seen.argument_at:
                events[index] = ["r", seen.argument_at[at], *rest]
            else:
                events[index] = ["k", *rest]
        return events
