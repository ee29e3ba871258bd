"""The module `torch` as far as `warpool.torch` uses it, and a backend for it: no PyTorch, no GPU."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import warpool

VERSION = "2.11.0"

_BACKEND = """
static int installed;
int warpool_backend_install(void) { return INSTALL_FAILS || installed++ > 0; }
const char *warpool_backend_error(void) { return "CUDA is in use already"; }
const char *warpool_backend_torch_version(void) { return TORCH; }
const char *warpool_backend_interface(void) { return INTERFACE; }
"""


def fake_torch() -> Any:
    """Makes `import torch` give a PyTorch for CUDA that has not used it."""
    cuda = types.SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False, current_device=lambda: 0)
    torch = types.SimpleNamespace(__version__=VERSION, __file__="/nowhere/torch/__init__.py", cuda=cuda)
    torch.version = types.SimpleNamespace(cuda="13.0")
    sys.modules["torch"] = torch  # type: ignore[assignment]
    return torch


def backend(folder: Path, torch: str = VERSION, interface: str = warpool.__version__, install_fails: int = 0) -> str:
    """Compiles a backend that does nothing, and returns its path."""
    source = folder / f"{torch}-{interface}-{install_fails}.c"
    source.write_text(_BACKEND)
    made = str(source.with_suffix(".so"))
    values = (f'-DTORCH="{torch}"', f'-DINTERFACE="{interface}"', f"-DINSTALL_FAILS={install_fails}")
    subprocess.run(["cc", "-shared", "-fPIC", *values, "-o", made, str(source)], check=True)
    return made
