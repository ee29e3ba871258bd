"""Warpool's tags as vLLM's sleep mode: a plugin of vLLM (entry point `vllm.general_plugins`), named `warpool`.

vLLM allocates weights and the cache in scopes of its sleep allocator, and lets a backend that is chosen by name put
them to sleep. `register` adds the backend `warpool` (`_vllm_backend.py`), and where Warpool is PyTorch's allocator it
makes `SleepAllocator` vLLM's sleep allocator, which therefore works with vLLM's own backend too. Nothing here imports
vLLM before it calls `register`.
"""

import contextlib
import gc
import importlib
import logging
import os
from typing import Any, Iterator, List, Optional, Sequence, Union

from . import _sleep
from ._memory_saver import check_enabled, sleep_as
from ._native import Error

NAME = "warpool"
_DEFAULT = "default"
_GRAPHS = "cudagraph"

# What vLLM wakes by name; other tags wake with any of them.
_MAY_SLEEP_ON = ("weights", "kv_cache")

_log = logging.getLogger("warpool.vllm")


class SleepAllocator:
    """What vLLM calls of its `CuMemAllocator`, on tags."""

    def __init__(self) -> None:
        self._names: List[str] = []
        self._graph_pool: Any = None

    @contextlib.contextmanager
    def use_memory_pool(self, tag: Optional[str] = None) -> Iterator[None]:
        """Memory that the calling thread allocates on the current device in this scope carries the tag."""
        name = _DEFAULT if tag is None else tag
        check_enabled("Warpool's sleep allocator")
        with _sleep.tag(name):
            if name not in self._names:
                self._names.append(name)
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """A pool for graphs that are captured in this scope; its memory carries a tag."""
        with self.use_memory_pool(_GRAPHS):
            if self._graph_pool is None:
                self._graph_pool = importlib.import_module("torch").cuda.graph_pool_handle()
            yield self._graph_pool

    def sleep(self, offload_tags: Union[None, str, Sequence[str]] = None) -> None:
        """Puts all that is awake to sleep; contents of these tags are kept, those of the others dropped."""
        kept = _several((_DEFAULT,) if offload_tags is None else offload_tags)
        awake = self._in_state(asleep=False)
        sleep_as([name for name in awake if name in kept], [name for name in awake if name not in kept])
        self._return_cached()

    def discard(self, tags: Union[str, Sequence[str]]) -> None:
        """Puts tags to sleep without their contents; what sleeps already keeps what it has."""
        chosen = _several(tags)
        sleep_as([], [name for name in self._in_state(asleep=False) if name in chosen])
        self._return_cached()

    def wake_up(self, tags: Optional[Sequence[str]] = None) -> None:
        """Wakes everything, but of weights and cache only what is named, if tags are: all of it or none."""
        asleep = self._in_state(asleep=True)
        _sleep.wake([name for name in asleep if tags is None or name in tags or name not in _MAY_SLEEP_ON])

    def get_current_usage(self) -> int:
        """Bytes of the memory that was allocated, asleep or not."""
        return sum(info.bytes for info in _sleep.tags() if info.tag in self._names)

    def is_asleep(self) -> bool:
        """Whether any of it sleeps."""
        return bool(self._in_state(asleep=True))

    def release_pools(self) -> None:
        """Nothing to do: no Python object owns memory."""

    close = release_pools

    def _in_state(self, asleep: bool) -> List[str]:
        found = {info.tag for info in _sleep.tags() if info.asleep == asleep}
        return [name for name in self._names if name in found]

    def _return_cached(self) -> None:
        """To the driver, memory without a tag that is cached; what sleeps has gone already."""
        gc.collect()
        importlib.import_module("torch").cuda.empty_cache()


def _several(tags: Union[str, Sequence[str]]) -> Sequence[str]:
    return (tags,) if isinstance(tags, str) else tags


allocator = SleepAllocator()


def register() -> None:
    """Called by vLLM in each of its processes, maybe several times. It raises nothing, or vLLM would not start."""
    try:
        _register_backend()
    except ImportError as error:
        _log.debug("this vLLM has no sleep backends: %s", error)
    try:
        if _enable():
            _replace_allocator()
    except (Error, ImportError, RuntimeError) as error:
        _log.error("Warpool is not vLLM's sleep allocator in this process: %s", error)


def _register_backend() -> None:
    factory = importlib.import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
    with contextlib.suppress(ValueError):  # It is there since an earlier call.
        factory.register_backend(NAME, f"{__package__}._vllm_backend", "WarpoolBackend")


def _enable() -> bool:
    """Whether Warpool is PyTorch's allocator; where WARPOOL_CONF is set it is made so."""
    warpool_torch = importlib.import_module("warpool.torch")
    if warpool_torch.enabled():
        return True
    if "WARPOOL_CONF" not in os.environ:
        return False
    # The driver is open afterwards, and a forked process could not use the GPU.
    if os.environ.get("VLLM_WORKER_MULTIPROCESSING_METHOD") != "spawn":
        raise RuntimeError("WARPOOL_CONF is set, but vLLM would fork: set VLLM_WORKER_MULTIPROCESSING_METHOD=spawn")
    warpool_torch.enable()
    return True


def is_in_use() -> bool:
    """Whether vLLM allocates by tags in this process."""
    return importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.instance is allocator


def _replace_allocator() -> None:
    """vLLM's allocator is a singleton, which is made at its first use: here it is there before."""
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    present: Any = cumem.CuMemAllocator.instance
    if present is None:
        cumem.CuMemAllocator.instance = allocator
    elif present is not allocator:
        raise RuntimeError("vLLM has made its own already, before Warpool was enabled")
