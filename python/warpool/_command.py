"""The commands `python -m warpool.torch build` and `python -m warpool.torch status`."""

import argparse
import importlib
import json
import sys
from typing import Any, Dict, List, Optional

from . import _backend, _native
from ._native import Error


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m warpool.torch", description="Warpool as PyTorch's allocator.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "build": "compile the backend for the installed PyTorch ahead of its first use",
        "status": "tell which backend `enable()` would use, and why",
    }
    for name, help in helps.items():
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    try:
        status = _status(build=chosen.command == "build")
    except ImportError as error:
        return _failed(chosen.json, f"PyTorch cannot be imported: {error}")
    except Error as error:
        return _failed(chosen.json, f"error: {error}")
    if chosen.json:
        print(json.dumps(status))
        return 0
    print(f"PyTorch   {status['torch']}, CUDA {status['cuda']}")
    print(f"library   {status['library']} ({status['version']})")
    print(f"backend   {status['backend']}: {status['why']}")
    if status["ready"]:
        print("enable()  uses this backend")
    else:
        print("enable()  would build it first; `python -m warpool.torch build` does so now")
    return 0


def _status(build: bool) -> Dict[str, Any]:
    """What `enable()` would use; a backend that is ready was loaded."""
    torch = importlib.import_module("torch")
    found = _backend.get(torch, may_build=build)
    if found.ready:
        _backend.check(found.path, torch)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "library": _native.library_path(),
        "version": _native.version(),
        "backend": str(found.path),
        "why": found.why,
        "ready": found.ready,
    }


def _failed(as_json: bool, text: str) -> int:
    if as_json:
        print(json.dumps({"error": text}))
    else:
        print(text, file=sys.stderr)
    return 1
