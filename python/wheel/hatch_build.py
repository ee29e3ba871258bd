"""Adds the compiled files to the wheel: the shared objects, the command `warpool`, and backends for PyTorch.

`scripts/wheel` compiles them ahead and names their folder in WARPOOL_WHEEL_FILES. Without it (`pip install ./python`)
they are compiled here by cargo, for this machine and without backends: `enable()` builds the one that it needs.
"""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARIES = ("libwarpool_torch.so", "libwarpool_answers.so")


class CompiledFiles(BuildHookInterface):
    """The hook that hatchling calls before it packs a wheel."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        if self.target_name != "wheel":
            raise RuntimeError("only wheels are built here: the Rust sources are outside of this folder")
        if version == "editable":
            raise RuntimeError("there is no editable install: set PYTHONPATH to this folder, and WARPOOL_LIBRARY")
        workspace = Path(self.root).parent
        self._check_version(workspace)
        named = os.environ.get("WARPOOL_WHEEL_FILES")
        if named:
            files, platform = Path(named), os.environ["WARPOOL_WHEEL_PLATFORM"]
        else:
            files = _cargo_build(workspace)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["shared_scripts"][str(files / "warpool")] = "warpool"
        for library in _LIBRARIES:
            build_data["force_include"][str(files / library)] = f"warpool/{library}"
        for backend in sorted((files / "backends").glob("*.so")) if named else ():
            build_data["force_include"][str(backend)] = f"warpool/backends/{backend.name}"

    def _check_version(self, workspace: Path) -> None:
        found = re.search(r'^version = "([^"]+)"', (workspace / "Cargo.toml").read_text(), re.MULTILINE)
        if found is None or found[1] != self.metadata.version:
            raise RuntimeError(f"warpool/_version.py has version {self.metadata.version}, Cargo.toml another: {found}")


def _cargo_build(workspace: Path) -> Path:
    """Compiles for this machine; returns the folder of the results."""
    packages = ("warpool-torch", "warpool-python", "warpool-cli")
    command = ["cargo", "build", "--release", *(part for name in packages for part in ("--package", name))]
    subprocess.run(command, cwd=workspace, check=True)
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=workspace, check=True, stdout=subprocess.PIPE
    )
    return Path(json.loads(metadata.stdout)["target_directory"]) / "release"
