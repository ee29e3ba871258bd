"""The memory functions for any accelerator."""

from typing import Any, Dict

from .. import _C


def memory_stats(device: int = 0) -> Dict[str, Any]:
    if not _C._accelerator_isAllocatorInitialized():
        return {}
    return _C._accelerator_getDeviceStats(device)
