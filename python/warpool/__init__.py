"""Warpool for Python: finds and loads the shared object libwarpool_torch.so.

`warpool.torch` makes Warpool PyTorch's allocator, `python -m warpool` is the command `warpool`; this module needs
neither PyTorch nor a GPU.
"""

from ._native import Error, library_path
from ._version import __version__

__all__ = ["Error", "__version__", "library_path"]
