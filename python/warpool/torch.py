"""Warpool as PyTorch's CUDA allocator: `warpool.torch.enable()` before CUDA is used, and nothing else changes in the program.

Not here: the answers that PyTorch's own calls give afterwards (`_answers.py`), and what stays impossible (`_refusals.py`).
A call of `enable` that fails has changed nothing in PyTorch and can be repeated.
"""

import importlib
import os
import threading
from typing import Any, Dict, List, Optional, Tuple

from . import _answers, _native, _refusals
from ._native import Error

__all__ = ["Error", "enable", "enabled", "set_settings", "settings"]

# PyTorch's setter, and our function for it.
_HOOKS = {
    "set_init_fn": "warpool_init",
    "set_reset_fn": "warpool_reset",
    "set_memory_fraction_fn": "warpool_memory_fraction",
    "set_base_alloc_fn": "warpool_base_alloc",
    "set_record_stream_fn": "warpool_record_stream",
    "set_begin_allocate_to_pool": "warpool_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "warpool_end_allocate_to_pool",
    "set_release_pool": "warpool_release_pool",
}

_enabling = threading.Lock()
# PyTorch keeps the functions, we keep the object: both must outlive every tensor.
_allocator: Optional[Any] = None


def enable(conf: Optional[str] = None) -> None:
    """Makes Warpool the allocator of every CUDA tensor of this process.

    To be called once, before CUDA is used: right after `import torch` is best. `conf` has the form of PYTORCH_CUDA_ALLOC_CONF and comes
    before the environment's WARPOOL_CONF and PYTORCH_CUDA_ALLOC_CONF; if Warpool works in this process already, as after a call of
    `settings` or `set_settings`, it changes the settings in force as `set_settings` does, and does not replace them. Raises RuntimeError when it is too late, already done, or
    when PyTorch has no CUDA; ImportError when there is no PyTorch; `Error` when the settings are wrong or the driver cannot be opened.
    """
    global _allocator
    with _enabling:
        if _allocator is not None:
            raise RuntimeError(
                "warpool.torch.enable() has been called before: Warpool is PyTorch's allocator in this process already. "
                "Settings are changed by warpool.torch.set_settings()"
            )
        torch = _torch_before_cuda()
        _start(conf)
        if _native.driver() != "cuda" and torch.cuda.is_available():
            raise RuntimeError(
                f"the driver is {_native.driver()!r}, whose addresses no GPU knows, and PyTorch has a GPU here: unset WARPOOL_DRIVER"
            )
        allocator, changes = _build(torch), _changes(torch)
        _refusals.switch_benchmark_off(torch)
        # From here on there is no way back, and nothing that could fail.
        try:
            torch.cuda.memory.change_current_allocator(allocator)
        except RuntimeError as error:
            raise RuntimeError(
                f"PyTorch did not accept another allocator ({_first_line(error)}): its own has been used, or another one was put in place "
                "before. Call warpool.torch.enable() right after `import torch`, and nothing else that changes the allocator"
            ) from error
        _allocator = allocator
        for owner, name, value in changes:
            setattr(owner, name, value)


def enabled() -> bool:
    """Whether Warpool is PyTorch's allocator in this process."""
    return _allocator is not None


def settings() -> str:
    """The settings in force, in the form of PYTORCH_CUDA_ALLOC_CONF."""
    return _native.settings()


def set_settings(conf: str) -> None:
    """Changes settings while the program runs; what is wrong is an `Error`, and then nothing has changed."""
    _native.set_settings(conf)


def _torch_before_cuda() -> Any:
    """PyTorch, if it has CUDA and has not used it yet."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("PyTorch is not installed here, and warpool.torch stands under it: install torch with CUDA first") from error
    if getattr(torch.version, "cuda", None) is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError(
            f"this PyTorch ({torch.__version__}) was built without CUDA, so there is no CUDA allocator to exchange: "
            "install a build of torch for CUDA (Linux)"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "too late: CUDA is in use in this process already, and its memory belongs to PyTorch's own allocator. Call "
            "warpool.torch.enable() right after `import torch`, before the first CUDA tensor or stream; in a notebook, restart the kernel first"
        )
    return torch


def _start(conf: Optional[str]) -> None:
    """Opens the driver with these settings, or with the environment's."""
    if conf is not None and _native.driver():
        _native.set_settings(conf)
        return
    # The shared object reads its environment when it starts, and only then.
    before = os.environ.get("WARPOOL_CONF")
    if conf is not None:
        os.environ["WARPOOL_CONF"] = conf
    try:
        _native.start()
    finally:
        if conf is not None and before is not None:
            os.environ["WARPOOL_CONF"] = before
        elif conf is not None:
            del os.environ["WARPOOL_CONF"]


def _build(torch: Any) -> Any:
    """PyTorch's object around our functions, with every hook that this PyTorch has."""
    addresses: Dict[str, int] = {setter: _native.address(name) for setter, name in _HOOKS.items()}
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_native.library_path(), "warpool_malloc", "warpool_free")
    for setter, value in addresses.items():
        getattr(allocator.allocator(), setter)(value)
    return allocator


def _changes(torch: Any) -> List[Tuple[Any, str, Any]]:
    """Our answers and refusals, as (owner, name, value), for where PyTorch's Python code looks for its bindings."""
    answers = {**_answers.BINDINGS, **_refusals.BINDINGS}
    settings_name = "_accelerator_setAllocatorSettings"
    answers[settings_name] = _answers.set_allocator_settings(getattr(torch._C, settings_name, None))
    # A binding that this PyTorch does not have is called by nobody.
    bindings = [(torch._C, name, answer) for name, answer in answers.items() if hasattr(torch._C, name)]
    return bindings + _refusals.elsewhere(torch)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
