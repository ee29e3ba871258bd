"""Programs that put memory to sleep, as far as their calls go: written from public interfaces, no code of theirs.

`Engine` calls as an inference engine with torch_memory_saver does: it imports the package by name. `vllm()` makes the
modules of vLLM that a sleep backend meets, and `Worker` calls as its worker does.
"""

import contextlib
import importlib
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence


class Engine:
    """Weights, a cache and graphs, each with its tag, which a trainer in the same process takes away and gives back."""

    def __init__(self, malloc: Callable[[int], int]) -> None:
        self._package = importlib.import_module("torch_memory_saver")
        self._saver = self._package.torch_memory_saver
        self._saver.hook_mode = "preload"
        assert self._saver.enabled
        self._malloc = malloc
        self.pointers: Dict[str, int] = {}

    def load(self, weights: int, cache: int, *, keep_weights: bool = True) -> None:
        with self._saver.region(tag="weights", enable_cpu_backup=keep_weights):
            self.pointers["weights"] = self._malloc(weights)
        with self._saver.region(tag="kv_cache"):
            self.pointers["cache"] = self._malloc(cache)

    def capture(self, graph: Any, size: int) -> None:
        options = {"pool": (0, 1), "stream": None, "capture_error_mode": "thread_local"}
        with self._saver.cuda_graph(cuda_graph=graph, tag="cuda_graph", **options):
            self.pointers["graph"] = self._malloc(size)

    def load_a_helper(self, size: int) -> None:
        """Within the region of the weights, but none of them."""
        with self._saver.region(tag="weights", enable_cpu_backup=True):
            with self._saver.disable():
                self.pointers["helper"] = self._malloc(size)
            self.pointers["more weights"] = self._malloc(size)

    def release_memory_occupation(self, tags: Sequence[str] = ("kv_cache", "weights", "cuda_graph")) -> None:
        for tag in tags:
            self._saver.pause(tag)

    def resume_memory_occupation(self, tags: Sequence[str] = ("cuda_graph", "weights", "kv_cache")) -> None:
        for tag in tags:
            self._saver.resume(tag)

    def start_process(self, start: Callable[[], None]) -> None:
        with self._package.configure_subprocess():
            start()


def vllm() -> Any:
    """Puts modules of vLLM in place, and returns that of the sleep backends."""
    backends = types.ModuleType("vllm.device_allocator.sleep_mode_backend")
    cumem = types.ModuleType("vllm.device_allocator.cumem")
    package, allocators = types.ModuleType("vllm"), types.ModuleType("vllm.device_allocator")

    class Factory:
        made: Dict[str, Callable[[], Any]] = {}

        @classmethod
        def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
            if name in cls.made:
                raise ValueError(f"{name} is there already")
            cls.made[name] = lambda: getattr(importlib.import_module(module_path), class_name)

        @classmethod
        def get_backend_class(cls, name: str) -> Any:
            return cls.made[name]()

    class CuMemAllocator:
        instance: Any = None

        @staticmethod
        def get_instance() -> Any:
            if CuMemAllocator.instance is None:
                CuMemAllocator.instance = CuMemAllocator()
            return CuMemAllocator.instance

    class CuMemBackend:
        def suspend(self, level: int = 1) -> None:
            kept = ("runtime", "cudagraph")
            CuMemAllocator.get_instance().sleep(offload_tags=("weights", *kept) if level == 1 else kept)

        def resume(self, tags: Optional[List[str]] = None) -> None:
            CuMemAllocator.get_instance().wake_up(tags)

        def discard(self, tags: Sequence[str]) -> None:
            CuMemAllocator.get_instance().discard(tags)

    backends.SleepModeBackendFactory, backends.CuMemBackend = Factory, CuMemBackend  # type: ignore[attr-defined]
    cumem.CuMemAllocator = CuMemAllocator  # type: ignore[attr-defined]
    for module in (package, allocators, backends, cumem):
        sys.modules[module.__name__] = module
    return backends


class Worker:
    """A worker of vLLM: one model, with scratch memory and state beside weights and cache."""

    def __init__(self, backend: str, malloc: Callable[[int], int]) -> None:
        self._backend_name, self._malloc = backend, malloc
        self._backend: Any = None

    @property
    def backend(self) -> Any:
        """Made at the first sleep."""
        if self._backend is None:
            factory = importlib.import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
            self._backend = factory.get_backend_class(self._backend_name)()
        return self._backend

    @property
    def allocator(self) -> Any:
        return importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()

    @contextlib.contextmanager
    def pool(self, tag: str) -> Iterator[None]:
        if tag == "weights":
            assert self.allocator.get_current_usage() == 0
        with self.allocator.use_memory_pool(tag=tag):
            yield

    def load(self, **sizes: int) -> Dict[str, int]:
        pointers = {}
        for tag, size in sizes.items():
            with self.pool(tag):
                pointers[tag] = self._malloc(size)
        return pointers

    def capture(self, size: int) -> Any:
        with self.allocator.cudagraph_pool() as pool:
            self._malloc(size)
        return pool

    def sleep(self, level: int = 1) -> None:
        self.backend.suspend(level)

    def wake_up(self, tags: Optional[List[str]] = None) -> None:
        self.backend.resume(tags)

    def shutdown(self) -> None:
        self.allocator.release_pools()
