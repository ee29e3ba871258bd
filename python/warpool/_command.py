"""The commands `python -m warpool.torch build` and `python -m warpool.torch status`."""

import argparse
import importlib
import sys
from typing import List, Optional

from . import _backend, _native
from ._native import Error


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m warpool.torch", description="Warpool as PyTorch's allocator.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the backend for the installed PyTorch ahead of its first use")
    commands.add_parser("status", help="tell which backend `enable()` would use, and why")
    command = parser.parse_args(arguments).command
    try:
        torch = importlib.import_module("torch")
        found = _backend.find(torch)
        if command == "build" and not found.ready:
            _backend.build(torch, found.path)
            found = _backend.find(torch)
        print(f"PyTorch   {torch.__version__}, CUDA {torch.version.cuda}")
        print(f"library   {_native.library_path()} ({_native.version()})")
        print(f"backend   {found.path}: {found.why}")
        if found.ready:
            _backend.check(found.path, torch)
            print("enable()  uses this backend")
        else:
            print("enable()  would build it first; `python -m warpool.torch build` does so now")
        return 0
    except ImportError as error:
        print(f"PyTorch cannot be imported: {error}", file=sys.stderr)
    except _backend.Unavailable as error:
        print(f"no backend: {error}\nenable() would use PyTorch's pluggable interface", file=sys.stderr)
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
    return 1
