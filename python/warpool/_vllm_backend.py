"""The class that vLLM makes for `--sleep-mode-backend warpool`: see `_vllm.py`. Importing it imports vLLM.

What is kept at which level is vLLM's choice, and changes from version to version: so this is vLLM's own backend, which
meets Warpool's allocator in place of vLLM's.
"""

from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from . import _vllm
from ._memory_saver import check_enabled


class WarpoolBackend(CuMemBackend):
    """Suspends and resumes what vLLM allocated, by tag."""

    def __init__(self) -> None:
        super().__init__()
        check_enabled("vLLM's sleep backend 'warpool'")
        if not _vllm.is_in_use():
            raise RuntimeError(
                "vLLM's sleep backend 'warpool': vLLM has allocated by its own allocator in this process. Call "
                "warpool.torch.enable() before vLLM loads its plugins, or set WARPOOL_CONF"
            )

    def state(self) -> Any:
        """Suspended as long as anything sleeps: also if only weights were resumed, or a call has failed."""
        return "SUSPENDED" if _vllm.allocator.is_asleep() else "RUNNING"
