"""The parts of PyTorch's wheels that the backend is compiled and driven with, about 15 MB of half a gigabyte: headers,
libc10 and libc10_cuda, with CUDA's headers and runtime beside them, as in an environment where PyTorch is installed.
"""

import os
import shutil
import subprocess
import types
from pathlib import Path

import remote_wheel

_TORCH = ("torch/include/*", "torch/lib/libc10.so", "torch/lib/libc10_cuda.so")
# The headers of CUDA 13 serve every version: the backend uses what CUDA 12 has too.
_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-crt")


def get(version: str, folder: Path, machine: str = "x86_64") -> types.SimpleNamespace:
    """Those of a version of PyTorch, 2.11 or 2.11.0, for a machine (x86_64 or aarch64), in a folder of its own under
    `folder`; downloaded unless they are there. Stands for the module `torch`."""
    site = folder / ".".join(version.split(".")[:2])
    link = remote_wheel.find("torch", version, [f"cp312-cp312-manylinux_2_28_{machine}"])
    found = link.rsplit("/", 1)[-1].split("-")[1]
    if not (site / f"parts-{found}").exists():
        print(f"== downloading parts of PyTorch {found}", flush=True)
        shutil.rmtree(site, ignore_errors=True)
        remote_wheel.extract(link, _TORCH, site)
        for package in _CUDA:
            headers = remote_wheel.find(package, "13.0", [rf"py3-none-manylinux\w*_{machine}(?:\.manylinux\w*)*"])
            remote_wheel.extract(headers, ["nvidia/cu13/include/*", "nvidia/cu13/lib/libcudart.so*"], site)
        _placeholder(site / "torch" / "lib" / "libtorch_cpu.so")
        (site / f"parts-{found}").touch()
    return types.SimpleNamespace(__version__=found, __file__=str(site / "torch" / "__init__.py"))


def _placeholder(library: Path) -> None:
    """An empty library of that name: the backend is linked to it by name alone, and its symbols are found when it is
    loaded. PyTorch's has 400 MB."""
    command = [os.environ.get("CXX", "c++"), "-shared", f"-Wl,-soname,{library.name}", "-x", "c++", "/dev/null"]
    subprocess.run([*command, "-o", str(library)], check=True)
