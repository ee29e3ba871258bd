"""Adds what is compiled to the wheel, and the Rust sources to the source distribution.

A wheel has the command `warpool`, the shared objects, and on Linux backends for PyTorch. `scripts/wheel` compiles them
ahead and names their folder in WARPOOL_WHEEL_FILES. Without it (`pip install ./python`, or of the source distribution)
they are compiled here by cargo, for this machine and without backends: `enable()` builds the one that it needs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Dict, List

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What cargo needs of the repository. In the source distribution it is in a folder `rust`.
_SOURCES = ("Cargo.toml", "Cargo.lock", "LICENSE-APACHE", "LICENSE-MIT", "crates", "examples", "recordings")
_ENDINGS = (".so", ".dylib", ".dll")


class CompiledFiles(BuildHookInterface):
    """The hook that hatchling calls before it packs a distribution."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        if version == "editable":
            raise RuntimeError("there is no editable install: set PYTHONPATH to this folder, and WARPOOL_LIBRARY")
        root = Path(self.root)
        workspace = root / "rust" if (root / "rust" / "Cargo.toml").is_file() else root.parent
        self._check_version(workspace)
        if self.target_name == "sdist":
            for name in _SOURCES:
                build_data["force_include"][str(workspace / name)] = f"rust/{name}"
            # In the repository it is a link to where it is generated.
            header = "warpool/cpp/warpool_torch.h"
            build_data["force_include"][str((root / header).resolve())] = header
            return
        named = os.environ.get("WARPOOL_WHEEL_FILES")
        if named:
            files, platform = Path(named), os.environ["WARPOOL_WHEEL_PLATFORM"]
            libraries = sorted(path for path in files.iterdir() if path.suffix in _ENDINGS)
        else:
            files = _cargo_build(workspace)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            libraries = [files / _library(name) for name in _libraries()]
        command = next(path for path in (files / "warpool.exe", files / "warpool") if path.is_file())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["shared_scripts"][str(command)] = command.name
        for library in libraries:
            build_data["force_include"][str(library)] = f"warpool/{library.name}"
        for backend in sorted((files / "backends").glob("*.so")) if named else ():
            build_data["force_include"][str(backend)] = f"warpool/backends/{backend.name}"

    def _check_version(self, workspace: Path) -> None:
        found = re.search(r'^version = "([^"]+)"', (workspace / "Cargo.toml").read_text(), re.MULTILINE)
        if found is None or found[1] != self.metadata.version:
            raise RuntimeError(f"warpool/_version.py has version {self.metadata.version}, Cargo.toml another: {found}")


def _libraries() -> List[str]:
    """The shared objects that this system can have: PyTorch's allocator, and what counts for it, are for Linux."""
    return ["warpool_answers", *(["warpool_torch", "warpool_inject"] if sys.platform.startswith("linux") else [])]


def _library(name: str) -> str:
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def _cargo_build(workspace: Path) -> Path:
    """Compiles for this machine; returns the folder of the results."""
    if shutil.which("cargo") is None:
        raise RuntimeError(
            "cargo is not installed: this package has no wheel for this system, and building it needs a Rust "
            "toolchain (https://rustup.rs)"
        )
    packages = ["--package", "warpool-python", "--package", "warpool-cli"]
    if "warpool_torch" in _libraries():
        packages += ["--package", "warpool-torch", "--package", "warpool-inject"]
    subprocess.run(["cargo", "build", "--release", "--locked", *packages], cwd=workspace, check=True)
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=workspace, check=True, stdout=subprocess.PIPE
    )
    return Path(json.loads(metadata.stdout)["target_directory"]) / "release"
