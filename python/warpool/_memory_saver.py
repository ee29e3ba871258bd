"""The calls of torch_memory_saver over Warpool's tags: the public object is `warpool.torch.memory_saver`.

A region is a tag's scope, a pause a sleep, a resume a wake; nothing is decided here. torch_memory_saver decides where a
region begins whether its contents are kept, Warpool where a tag falls asleep: so a tag with regions of both kinds is
two of Warpool's. `install` gives the object to programs that import torch_memory_saver.
"""

import contextlib
import importlib
import sys
import threading
import types
from typing import Any, Dict, Iterator, List, Optional, Sequence

from . import _native, _sleep
from ._sleep import SleepReport

_DEFAULT = "default"
_PACKAGE = "torch_memory_saver"

# What is added to the names of tags whose contents are kept.
_KEPT = "+backup"

# Warpool's tags that regions made: how they sleep, and the name that the regions gave. There is one for the process, as
# there is one allocator.
_made: Dict[str, "_Made"] = {}


class _Made:
    def __init__(self, tag: str, keep: str) -> None:
        self.tag = tag
        self.keep = keep


class _Scope:
    """A region that is open."""

    def __init__(self, name: str, device: int) -> None:
        self._name, self._device = name, device
        self._tag: Any = None

    def begin(self) -> None:
        self._tag = _sleep.tag(self._name, self._device)
        self._tag.__enter__()

    def end(self) -> None:
        tag, self._tag = self._tag, None
        if tag is not None:
            tag.__exit__(None, None, None)


class _Open(threading.local):
    """The open regions of a thread, the newest last."""

    def __init__(self) -> None:
        self.scopes: List[_Scope] = []


_open = _Open()


def sleep_as(host: Sequence[str], discard: Sequence[str]) -> SleepReport:
    """Puts tags to sleep, some with their contents and some without: all of them, or none.

    A call of `sleep` treats its tags alike. Those with contents go first, since only they can lack pinned memory.
    """
    awake = {info.tag for info in _sleep.tags() if not info.asleep}
    first = _sleep.sleep(host, "host")
    try:
        second = _sleep.sleep(discard, "discard")
    except _native.Error:
        _sleep.wake([name for name in host if name in awake])
        raise
    return SleepReport(*map(sum, zip(first, second)))


def check_enabled(what: str) -> None:
    """Raises if memory of PyTorch does not come from Warpool."""
    if not importlib.import_module("warpool.torch").enabled():
        raise RuntimeError(
            f"{what} needs Warpool as PyTorch's allocator: call warpool.torch.enable() right after `import torch`, in "
            "each process"
        )


class MemorySaver:
    """`torch_memory_saver` on Warpool: memory of a region can be paused and resumed, at the same addresses.

    Differences to the package of that name are listed in docs/sleep.md. Instances share everything.
    """

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Optional[str] = None,
    ) -> Iterator[None]:
        """Memory that the calling thread allocates on the current device in this scope can be paused.

        With `enable_cpu_backup` its contents are kept in pinned memory, else they are dropped, and zero after resuming.
        Regions may be nested: the newest counts.
        """
        check_enabled("a region of memory_saver")
        if enable_disk_backup:
            raise NotImplementedError("Warpool keeps no contents on disk: use enable_cpu_backup, or save them yourself")
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend is for regions with enable_cpu_backup=True")
        if cpu_backup_backend not in (None, "pinned"):
            raise NotImplementedError(
                f"cpu_backup_backend is {cpu_backup_backend!r}: Warpool keeps contents in pinned memory, so leave it "
                "out or say 'pinned'"
            )
        scope = _Scope(_name(tag, enable_cpu_backup), importlib.import_module("torch").cuda.current_device())
        scope.begin()
        _open.scopes.append(scope)
        try:
            yield
        finally:
            _open.scopes.remove(scope)
            scope.end()

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Optional[str] = None,
    ) -> Iterator[None]:
        """`torch.cuda.graph`, whose memory can be paused. Graphs that share a pool share the tag of the first."""
        graph = importlib.import_module("torch").cuda.graph
        with self.region(tag, enable_cpu_backup, cpu_backup_backend=cpu_backup_backend):
            with graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
                yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Within a region: what the calling thread allocates in this scope belongs to none."""
        suspended, _open.scopes = _open.scopes, []
        if not suspended:
            raise RuntimeError("memory_saver.disable() is for use within a region of the same thread")
        for scope in reversed(suspended):
            scope.end()
        try:
            yield
        finally:
            _open.scopes = suspended
            for scope in suspended:
                scope.begin()

    def pause(self, tag: Optional[str] = None) -> SleepReport:
        """Gives the GPU memory of a tag's regions to the driver, or of all regions; a tag without any has none.

        Raises `Error` if it cannot be done; then nothing has changed. What is paused already stays so.
        """
        names = _names(tag)
        kept = [name for name in names if _made[name].keep == "host"]
        return sleep_as(kept, [name for name in names if name not in kept])

    def resume(self, tag: Optional[str] = None) -> SleepReport:
        """Takes it back, with the contents that were kept.

        Raises `Error` if it cannot be done, for example if the GPU is full: then all of it is paused as before, and a
        later call may succeed.
        """
        return _sleep.wake(_names(tag))

    @property
    def enabled(self) -> bool:
        """Whether regions work here."""
        return importlib.import_module("warpool.torch").enabled()

    @property
    def hook_mode(self) -> str:
        """Always "warpool". It may be set to anything, since there is one way here."""
        return "warpool"

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None: ...

    @property
    def retain_cpu_backup(self) -> bool:
        """Always true: pinned memory that held contents stays in the cache of pinned memory."""
        return True

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        if not value:
            raise NotImplementedError(
                "pinned memory that held contents stays in the cache of pinned memory, where pin_memory and the next "
                "pause use it; `pinned_cap_mb` in the settings limits it"
            )

    @property
    def memory_margin_bytes(self) -> int:
        raise NotImplementedError(_NO_MARGIN)

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if value:
            raise NotImplementedError(_NO_MARGIN)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Not here: it raises NotImplementedError."""
        raise NotImplementedError(
            "contents of paused memory cannot be read: resume it first, or copy it before pausing"
        )

    def set_disk_backup_dir(self, path: str) -> None:
        """Not here: it raises NotImplementedError."""
        raise NotImplementedError("Warpool keeps no contents on disk")

    def install(self) -> None:
        """Makes `import torch_memory_saver` give this object in the process, whether that package is installed or not.

        Call it after `enable`, in each process, before anything imports torch_memory_saver; RuntimeError if that has
        been done already.
        """
        check_enabled("memory_saver.install()")
        present = sys.modules.get(_PACKAGE)
        if present is None:
            sys.modules[_PACKAGE] = _stand_in(self)
        elif getattr(present, _PACKAGE, None) is not self:
            raise RuntimeError(
                f"too late: {_PACKAGE} is imported already. Call warpool.torch.memory_saver.install() before"
            )


_NO_MARGIN = (
    "memory_margin_bytes is not supported: limit what Warpool reserves of each device by "
    'warpool.torch.set_settings("memory_cap_mb:N")'
)

memory_saver = MemorySaver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Nothing has to be preloaded: a process that is started calls `warpool.torch.enable()` itself."""
    yield


def _stand_in(saver: MemorySaver) -> types.ModuleType:
    """The module `torch_memory_saver`."""
    module = types.ModuleType(_PACKAGE, "Warpool in place of torch_memory_saver: warpool.torch.memory_saver.")
    setattr(module, _PACKAGE, saver)
    module.TorchMemorySaver = MemorySaver  # type: ignore[attr-defined]
    module.configure_subprocess = configure_subprocess  # type: ignore[attr-defined]
    return module


def _name(tag: str, kept: bool) -> str:
    """Warpool's tag for regions of one kind, which is known from now on."""
    name = tag + _KEPT if kept else tag
    made = _made.setdefault(name, _Made(tag, "host" if kept else "discard"))
    if made.tag != tag:
        raise ValueError(f"regions of the tags {tag!r} and {made.tag!r} would share the name {name!r}: rename one")
    return name


def _names(tag: Optional[str]) -> List[str]:
    known = {info.tag for info in _sleep.tags()}
    return [name for name, made in list(_made.items()) if (not tag or tag == made.tag) and name in known]
