"""`torch.cuda` for a machine without one: devices, streams, events and statistics, answered from the log."""

from typing import Any, Dict, List, Optional

import torch

from . import _cards
from ._log import OPERATOR_US


class FakeStream:
    """A stream. Work in it takes no time; what is allocated while it is current belongs to it."""

    _recorder: Any = None

    def __init__(self, device: Any = None, priority: int = 0, number: Optional[int] = None, **_: Any) -> None:
        recorder = self._recorder
        index = _index(device) if device is not None else recorder.streams.device
        self.device = torch.device("cuda", index)
        self.device_index = index
        self.device_type = 1
        self.priority = priority
        self.stream_id = recorder.streams.new() if number is None else number
        recorder.outside.streams |= number is None
        self.cuda_stream = self.stream_id

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, FakeStream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<predicted CUDA stream {self.stream_id} of {self.device}>"

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._recorder.log.synchronize()

    def __enter__(self) -> "FakeStream":
        streams = self._recorder.streams
        self._before = getattr(self, "_before", [])
        self._before.append((streams.device, streams.current(self.device_index)))
        streams.device = self.device_index
        streams.set(self.device_index, self.stream_id)
        return self

    def __exit__(self, *_: Any) -> None:
        streams = self._recorder.streams
        device, stream = self._before.pop()
        streams.set(self.device_index, stream)
        streams.device = device


class FakeEvent:
    """An event; its time is that of the log."""

    _recorder: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self._operators: Optional[int] = None

    def record(self, stream: Any = None) -> None:
        self._operators = self._recorder.log.operators

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._recorder.log.synchronize()

    def elapsed_time(self, end: "FakeEvent") -> float:
        return ((end._operators or 0) - (self._operators or 0)) * OPERATOR_US / 1000


class FakeGenerator(torch.Generator):
    """A generator: one of the host, which says that it is of a device."""

    _device: Any = None

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, "cpu")
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device if self._device is not None else torch.device("cpu")


class Properties:
    """What `torch.cuda.get_device_properties` returns."""

    def __init__(self, card: _cards.Card) -> None:
        self.name = card.name
        self.major, self.minor = card.capability
        self.total_memory = card.bytes
        self.multi_processor_count = card.multiprocessors
        self.is_integrated = self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = 2048 if card.capability[0] in (8, 9, 10) else 1536
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.shared_memory_per_multiprocessor = 233472 if card.capability[0] >= 9 else 167936
        self.shared_memory_per_block_optin = self.shared_memory_per_multiprocessor - 1024
        self.L2_cache_size = 50 << 20
        self.gcnArchName = self.name
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.pci_bus_id = self.pci_device_id = self.pci_domain_id = 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count})"
        )


def _index(device: Any, current: int = 0) -> int:
    if device is None:
        return current
    if isinstance(device, int):
        return current if device < 0 else device
    if isinstance(device, (FakeStream,)):
        return device.device_index
    device = torch.device(device)
    return current if device.index is None else device.index


def functions(recorder: Any, card: _cards.Card, devices: int) -> Dict[str, Any]:
    """The functions of `torch.cuda` and `torch.cuda.memory`, by name."""
    log, streams = recorder.log, recorder.streams
    seeds: List[int] = [0]
    FakeStream._recorder = FakeEvent._recorder = recorder
    state = torch.zeros(16, dtype=torch.uint8)

    def index(device: Any = None) -> int:
        found = _index(device, streams.device)
        if not 0 <= found < devices:
            raise (
                torch.AcceleratorError("CUDA error: invalid device ordinal")
                if hasattr(torch, "AcceleratorError")
                else RuntimeError("CUDA error: invalid device ordinal")
            )
        return found

    def set_device(device: Any) -> None:
        if _index(device, -1) >= 0:
            streams.device = index(device)

    def exchange(device: int) -> int:
        before = streams.device
        if device >= 0:
            streams.device = device
        return before

    class DeviceContext:
        def __init__(self, device: Any) -> None:
            self.idx = (
                _index(device, streams.device)
                if not isinstance(device, torch.Tensor)
                else (device.device.index if device.is_cuda else streams.device)
            )

        def __enter__(self) -> None:
            self.prev_idx = exchange(self.idx)

        def __exit__(self, *_: Any) -> bool:
            streams.device = self.prev_idx
            return False

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.stream.__enter__()

        def __exit__(self, *_: Any) -> None:
            if self.stream is not None:
                self.stream.__exit__()

    def set_stream(stream: Any) -> None:
        if stream is not None:
            streams.set(stream.device_index, stream.stream_id)

    def allocated(device: Any = None) -> int:
        return log.allocated.get(index(device), 0)

    def peak(device: Any = None) -> int:
        return log.peak.get(index(device), 0)

    def reset_peak(device: Any = None) -> None:
        log.peak[index(device)] = allocated(device)

    def reserved(device: Any = None) -> int:
        # Segments are known when the log is placed; large ones are multiples of 2 MiB.
        return -(-log.cached.get(index(device), 0) // (2 << 20)) * (2 << 20)

    def peak_reserved(device: Any = None) -> int:
        return max(-(-peak(device) // (2 << 20)) * (2 << 20), reserved(device))

    def free_and_total(device: Any = None) -> Any:
        return max(card.bytes - recorder.outside.bytes - reserved(device), 0), card.bytes

    def stats(device: Any = None) -> Dict[str, Any]:
        from collections import OrderedDict

        found: Dict[str, Any] = OrderedDict()
        values = {
            "allocated_bytes": (allocated(device), peak(device)),
            "active_bytes": (allocated(device), peak(device)),
            "reserved_bytes": (reserved(device), peak_reserved(device)),
            "requested_bytes": (log.requested.get(index(device), 0), peak(device)),
            "inactive_split_bytes": (0, 0),
            "allocation": (log.allocations, log.allocations),
            "segment": (0, 0),
            "active": (0, 0),
            "inactive_split": (0, 0),
        }
        for name, (current, most) in values.items():
            for pool in ("all", "large_pool", "small_pool"):
                for what, value in (("current", current), ("peak", most), ("allocated", most), ("freed", 0)):
                    found[f"{name}.{pool}.{what}"] = value if pool == "all" else 0
        found.update(num_alloc_retries=0, num_ooms=0, num_sync_all_streams=0, num_device_alloc=0, num_device_free=0)
        found.update(max_split_size=-1)
        return found

    def synchronize(device: Any = None) -> None:
        log.synchronize()

    def empty_cache() -> None:
        for device in range(devices):
            log.empty_cache(device)

    def set_fraction(fraction: float, device: Any = None) -> None:
        log.limit(index(device), fraction)

    def seed_all(seed: int) -> None:
        seeds[0] = int(seed)

    def current_stream(device: Any = None) -> FakeStream:
        at = index(device)
        return FakeStream(at, number=streams.current(at))

    def nothing(*_: Any, **__: Any) -> None: ...

    # Classes, since programs use them in annotations.
    class Graph:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise recorder.assumptions_error(
                f"{recorder.assumptions.given()[1]}: CUDA graphs are not predicted: run the program without them; what "
                "they capture has pools of its own"
            )

    class MemPool:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise recorder.assumptions_error(
                f"{recorder.assumptions.given()[1]}: torch.cuda.MemPool is not predicted: run the program without it; "
                "a pool has segments of its own"
            )

    found: Dict[str, Any] = {
        "MemPool": MemPool,
        "use_mem_pool": MemPool,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": lambda callable, **_: None,
        "device_count": lambda: devices,
        "current_device": lambda: streams.device,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "device": DeviceContext,
        "device_of": DeviceContext,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: Properties(card),
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "can_device_access_peer": lambda device, peer: True,
        "synchronize": synchronize,
        "ipc_collect": nothing,
        "current_blas_handle": lambda: 0,
        "Stream": FakeStream,
        "ExternalStream": FakeStream,
        "Event": FakeEvent,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: FakeStream(index(device), number=0),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability[0] >= 8,
        "is_tf32_supported": lambda: card.capability[0] >= 8,
        "is_current_stream_capturing": lambda: False,
        "graph": Graph,
        "CUDAGraph": Graph,
        "make_graphed_callables": Graph,
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "seed": nothing,
        "seed_all": nothing,
        "initial_seed": lambda: seeds[0],
        "get_rng_state": lambda device="cuda": state.clone(),
        "get_rng_state_all": lambda: [state.clone() for _ in range(devices)],
        "set_rng_state": nothing,
        "set_rng_state_all": nothing,
        "utilization": lambda device=None: 0,
        "memory_usage": lambda device=None: 0,
        "_sleep": nothing,
        "default_generators": tuple(torch.Generator() for _ in range(devices)),
    }
    memory: Dict[str, Any] = {
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": reserved,
        "memory_cached": reserved,
        "max_memory_reserved": peak_reserved,
        "max_memory_cached": peak_reserved,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak,
        "reset_accumulated_memory_stats": nothing,
        "memory_stats": stats,
        "memory_stats_as_nested_dict": lambda device=None: {},
        "memory_summary": lambda device=None, abbreviated=False: "predicted: see the report",
        "memory_snapshot": lambda *_, **__: [],
        "mem_get_info": free_and_total,
        "empty_cache": empty_cache,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "list_gpu_processes": lambda device=None: "",
        "host_memory_stats": lambda: {},
        "get_allocator_backend": lambda: "native",
        "_record_memory_history": nothing,
        "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
        "_dump_snapshot": nothing,
        "_set_allocator_settings": nothing,
        "_set_memory_metadata": nothing,
    }
    return {"cuda": found, "memory": memory, "index": index}
