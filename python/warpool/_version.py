"""The version of the package, of the shared object and of the backends: they belong together."""

__version__ = "0.1.0"
