"""Warpool as PyTorch's CUDA allocator: call `warpool.torch.enable()` before CUDA is used.

It implements PyTorch's own allocator classes (`_backend.py`), so PyTorch's functions reach it with nothing replaced. A
call of `enable` that fails has changed nothing in PyTorch and can be repeated.

`python -m warpool.torch build` compiles the backend ahead, `python -m warpool.torch status` tells what would be used.
"""

import importlib
import os
import sys
import threading
from typing import Any, Dict, Optional

from . import _backend, _native, _recorder
from ._account import Account, AccountRow, account
from ._elastic import Elastic, ElasticInfo, elastic, headroom
from ._memory_saver import memory_saver
from ._native import Error
from ._recorder import record_now
from ._sleep import SleepReport, TagInfo, prepare_sleep, sleep, tag, tags, wake
from ._stable import stable_pool

__all__ = [
    "Account",
    "AccountRow",
    "Elastic",
    "ElasticInfo",
    "Error",
    "SleepReport",
    "TagInfo",
    "account",
    "elastic",
    "enable",
    "enabled",
    "gather_report",
    "headroom",
    "memory_saver",
    "page_stats",
    "prepare_sleep",
    "record_now",
    "set_settings",
    "settings",
    "sleep",
    "stable_pool",
    "tag",
    "tags",
    "wake",
]

# The backend if the settings name none. The shared object uses PyTorch's placement where a GPU cannot map pages.
_DEFAULT_BACKEND = "paged"

_enable_lock = threading.Lock()


def _forget_lock() -> None:
    """In a forked child: another thread may have held the lock."""
    global _enable_lock
    _enable_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)

_enabled = False


def enable(
    conf: Optional[str] = None,
    *,
    record: Optional[str] = None,
    record_dir: "Optional[_recorder.FolderOrFile]" = None,
) -> None:
    """Makes Warpool the allocator of all CUDA tensors of this process.

    Call it once, before CUDA is used; right after `import torch` is best. `conf` has the format of
    PYTORCH_CUDA_ALLOC_CONF and replaces the environment's WARPOOL_CONF; either is applied on top of the environment's
    PYTORCH_CUDA_ALLOC_CONF. If Warpool is already started in this process, as after a call of `settings` or
    `set_settings`, `conf` is applied on top of the settings in effect, as by `set_settings`.

    `backend` in the settings chooses the allocator: `paged`, the default, is Warpool's own, which reserves little more
    than is allocated; `native` places memory as PyTorch does, `expandable` is the same with expandable segments.

    `record="oom"` keeps the last events of the allocator with call stacks, and writes them when memory runs out, with
    what `warpool.explain` says about them; the exception's text ends with the lines that matter. It is the same as
    `record:oom` in `conf`, which can also say what else has a recording written (docs/recording.md). Recordings go to
    `record_dir`, else to WARPOOL_RECORD_DIR, else to `warpool-records` in the current folder.

    The first call for a version of PyTorch that the package has no backend for compiles one, into a cache folder.

    Raises RuntimeError if CUDA is in use already, if it was called before, or if PyTorch has no CUDA; ImportError if
    PyTorch is not installed; `Error` if the settings are invalid, the driver cannot be opened, there is no backend and
    none can be built, or the cache folder cannot be written.
    """
    global _enabled
    with _enable_lock:
        if _enabled:
            raise RuntimeError(
                "warpool.torch.enable() has been called before: Warpool is PyTorch's allocator already. "
                "Use warpool.torch.set_settings() to change settings"
            )
        torch = _torch_before_cuda()
        _start(_recorder.conf_with(conf, record))
        if record_dir is not None:
            _recorder.set_folder(record_dir)
        if _native.driver() != "cuda" and torch.cuda.is_available():
            raise RuntimeError(
                f"the driver is {_native.driver()!r}, whose memory the GPU cannot access, and PyTorch has a GPU here: "
                "unset WARPOOL_DRIVER"
            )
        _install(torch)
        _recorder.show_stacks()
        _enabled = True


def enabled() -> bool:
    """Whether Warpool is PyTorch's allocator in this process."""
    return _enabled


def settings() -> str:
    """The settings in effect, in the format of PYTORCH_CUDA_ALLOC_CONF."""
    return _native.settings()


def set_settings(conf: str) -> None:
    """Changes settings at run time. Raises `Error` if anything in `conf` is wrong; then nothing has changed."""
    _native.set_settings(conf)


def page_stats(device: Optional[int] = None) -> Dict[str, int]:
    """What the memory pages of a device are used for, with `backend:paged`; the device is the current one by default.

    - `pages`, `reserved_bytes`: how many there are, and their size.
    - `elastic_bytes`: bytes of committed elastic memory, in slots of 2 MiB; they are among `active_bytes`.
    - `active_bytes`, `free_mapped_bytes`, `spare_bytes`: bytes of tensors (and of freed ones that other streams may
      still use), bytes that are free where they are mapped, bytes of pages that belong to no address.
    - `bytes_mapped_twice`: bytes of addresses at which pages are still mapped that belong to other addresses by now.
    - `pages_created`, `pages_released`, `pages_taken`, `pages_taken_back`, `pages_mapped`, `pages_unmapped`: how often
      each was done; `torch.cuda.reset_accumulated_memory_stats` sets them to 0.

    Raises `Error` with another backend.
    """
    if device is None:
        device = importlib.import_module("torch").cuda.current_device()
    return _native.page_stats(device)


def gather_report(group: Any = None, recording: Any = None, **options: Any) -> Any:
    """The report over all ranks of a running job: `warpool.Ranks` on the first rank of the group, None on the others.

    Every rank of `group` (the whole job by default) calls it, as a collective of `torch.distributed`. Each summarizes
    its memory history, and sends some ten kilobytes to the first. Where NCCL is the group's backend that goes through
    the GPU: give a group of gloo where its memory is short. Call `torch.cuda.memory._record_memory_history()` before
    the model is made.

    `recording` is what to summarize in place of `torch.cuda.memory._snapshot()`: a path, for example. Further options
    are those of `warpool.summarize`. A rank whose recording cannot be read is a row of the report.
    """
    from . import _ranks

    return _ranks.gather(group, recording, **options)


def _torch_before_cuda() -> Any:
    """The module `torch`, if it has CUDA and has not used it yet."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("PyTorch is not installed, and warpool.torch needs it: install torch with CUDA") from error
    if getattr(torch.version, "cuda", None) is None:
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) was built without CUDA, so it has no CUDA allocator to replace: "
            "install a build of torch for CUDA (Linux)"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "too late: CUDA is in use in this process already, and its memory belongs to PyTorch's own allocator. Call "
            "warpool.torch.enable() right after `import torch`, before the first CUDA tensor or stream; in a notebook, "
            "restart the kernel first"
        )
    return torch


def _start(conf: Optional[str]) -> None:
    """Opens the driver with these settings, or with the environment's."""
    if conf is not None and _native.driver():
        _native.set_settings(conf)
        return
    # The shared object reads the environment when it starts, and only then.
    before = os.environ.get("WARPOOL_CONF")
    if conf is not None:
        os.environ["WARPOOL_CONF"] = conf
    try:
        _native.start(_DEFAULT_BACKEND)
    finally:
        if conf is not None and before is not None:
            os.environ["WARPOOL_CONF"] = before
        elif conf is not None:
            del os.environ["WARPOOL_CONF"]


def _install(torch: Any) -> None:
    """Installs the backend for this PyTorch, which is built if need be."""
    found = _backend.get(torch)
    try:
        _backend.install(found.path, torch)
    except Error as error:
        raise RuntimeError(
            f"PyTorch did not accept another allocator: {error}. Call warpool.torch.enable() right after `import "
            "torch`, and nothing else that replaces the allocator"
        ) from error


if __name__ == "__main__":
    from ._command import main

    sys.exit(main())
