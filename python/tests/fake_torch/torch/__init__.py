"""A PyTorch of a few names: what `warpool.torch` touches, shaped as in PyTorch 2.11, with a native allocator that owns nothing.

`allocate` and `release` stand for tensors: they go through whatever allocator is current, as PyTorch's do.
"""

from . import _C, backends, cuda, version

__version__ = "2.11.0+fake"


class UntypedStorage:
    """A storage that can be shared, natively."""

    def _share_cuda_(self) -> str:
        return "a handle"

    @classmethod
    def _new_shared_cuda(cls, *_arguments: object) -> "UntypedStorage":
        return cls()


def allocate(size: int) -> int:
    """Memory of the current allocator, as `torch.empty(…, device="cuda")` would take it."""
    cuda.init()
    return _C.current.malloc(size)


def release(ptr: int, size: int) -> None:
    """Gives it back."""
    _C.current.free(ptr, size)


from . import accelerator  # noqa: E402
