"""Warpool for Python: finds and loads the shared object libwarpool_torch.so.

`warpool.torch` makes Warpool PyTorch's allocator; this module needs neither PyTorch nor a GPU.
"""

from ._native import Error, library_path

__all__ = ["Error", "__version__", "library_path"]

# The shared object must have this version; the loader checks it.
__version__ = "0.1.0"
