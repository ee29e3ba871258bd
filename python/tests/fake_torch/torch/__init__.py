"""A minimal fake of PyTorch: the names that `warpool.torch` uses, as in PyTorch 2.11, with an empty native allocator.

`allocate` and `release` take the place of tensors: they use the current allocator, as PyTorch's tensors do.
"""

from . import _C, backends, cuda, version

__version__ = "2.11.0+fake"


class UntypedStorage:
    """A storage that can be shared."""

    def _share_cuda_(self) -> str:
        return "a handle"

    @classmethod
    def _new_shared_cuda(cls, *_arguments: object) -> "UntypedStorage":
        return cls()


def allocate(size: int) -> int:
    """Allocates from the current allocator, as `torch.empty(…, device="cuda")` does."""
    cuda.init()
    return _C.current.malloc(size)


def release(ptr: int, size: int) -> None:
    """Frees memory."""
    _C.current.free(ptr, size)


from . import accelerator  # noqa: E402
