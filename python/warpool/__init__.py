"""Warpool for Python: the shared object libwarpool_torch.so, found and loaded.

Not here: PyTorch. `warpool.torch` puts Warpool under it; this module, and what it imports, needs neither PyTorch nor a GPU.
"""

from ._native import Error, library_path

__all__ = ["Error", "__version__", "library_path"]

# The shared object must be of this version; the loader checks it.
__version__ = "0.1.0"
