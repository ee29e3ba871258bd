"""The backend: a shared object, compiled against PyTorch, that implements PyTorch's allocator classes over Warpool.

The wheel carries ready ones by minor version of PyTorch. For others one is compiled from `cpp/` with the headers that
PyTorch ships, into a cache folder. It has no Python in it, so one serves every Python.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

from . import _native
from ._native import Error
from ._version import __version__

_PACKAGE = Path(__file__).resolve().parent
_SOURCES = _PACKAGE / "cpp"
_READY = _PACKAGE / "backends"

# The versions of PyTorch that `cpp/` is written for.
_OLDEST, _NEWEST = (2, 9), (2, 15)

_FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--no-as-needed")
_LIBRARIES = ("c10", "c10_cuda", "torch_cpu")


class Unavailable(Error):
    """A backend cannot be built. The text says what is missing."""


@dataclass(frozen=True)
class Found:
    """Where the backend is, or would be built."""

    path: Path
    ready: bool
    why: str


def version(torch: Any) -> Tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def get(torch: Any, may_build: bool = True) -> Found:
    """The backend for this PyTorch. One that is not ready is built, or if it may not be, what that needs is looked for.
    Raises `Error` with what to do if it cannot be built."""
    try:
        found = _find(torch)
        if found.ready:
            return found
        if not may_build:
            command(torch)
            return found
        _build(torch, found.path)
        return _find(torch)
    except Unavailable as error:
        ready = ", ".join(_dotted(each) for each in _ready_versions())
        ready = f"ready backends for PyTorch {ready}" if ready else "no ready backends"
        raise Unavailable(
            f"there is no backend for PyTorch {torch.__version__}, and none can be built: {error}. Then call enable() "
            f"again, or run `python -m warpool.torch build` first. This package has {ready}"
        ) from error


def _ready_versions() -> List[Tuple[int, int]]:
    """The versions of PyTorch that the package has backends for."""
    names = (re.fullmatch(r"libwarpool_backend-(\d+)\.(\d+)\.so", path.name) for path in _READY.glob("*"))
    return sorted((int(name[1]), int(name[2])) for name in names if name)


def _find(torch: Any) -> Found:
    """WARPOOL_BACKEND, else the wheel's backend, else that of the cache folder, which may have to be built."""
    named = os.environ.get("WARPOOL_BACKEND")
    if named:
        if not Path(named).is_file():
            raise Error(f"WARPOOL_BACKEND is {named}, which is not a file")
        return Found(Path(named).resolve(), True, "WARPOOL_BACKEND names it")
    found = version(torch)
    name = f"libwarpool_backend-{found[0]}.{found[1]}"
    packaged = _READY / f"{name}.so"
    if packaged.is_file():
        return Found(packaged, True, "it is in the installed package")
    if not _OLDEST <= found <= _NEWEST:
        raise Unavailable(f"it is written for {_dotted(_OLDEST)} to {_dotted(_NEWEST)}: install one of these versions")
    cached = cache_folder() / f"{name}-{_key(torch)}.so"
    if cached.is_file():
        return Found(cached, True, "it was built before")
    return Found(cached, False, f"it is not built yet for PyTorch {torch.__version__}")


def cache_folder() -> Path:
    """Where backends are built: WARPOOL_CACHE, else `warpool` in the user's cache folder."""
    named = os.environ.get("WARPOOL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warpool"


def _build(torch: Any, path: Path) -> None:
    """Compiles the backend to `path`. Processes that start at once wait for one of them; a killed one leaves nothing
    that is used."""
    compiler, compile_command = command(torch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if path.is_file():
                return
            print(
                f"warpool: compiling the backend for PyTorch {torch.__version__} with {compiler}, once (about a "
                f"minute), to {path}",
                file=sys.stderr,
                flush=True,
            )
            with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
                made = Path(folder) / path.name
                _compile([*compile_command, "-o", str(made)])
                os.chmod(made, 0o755)
                os.replace(made, path)
    except OSError as error:
        raise Error(
            f"the backend cannot be built in {path.parent}: {error}. Set WARPOOL_CACHE to a folder that can be "
            "written, or build it ahead with `python -m warpool.torch build`"
        ) from error


def install(path: Path, torch: Any) -> None:
    """Loads the backend and makes it PyTorch's allocator. Raises `Error` if PyTorch does not accept it; then nothing
    has changed."""
    backend = _load(path, torch)
    if backend.warpool_backend_install() != 0:
        raise Error(backend.warpool_backend_error().decode(errors="replace"))


def check(path: Path, torch: Any) -> None:
    """Loads the backend and checks its version, without installing it."""
    _load(path, torch)


def _load(path: Path, torch: Any) -> ctypes.CDLL:
    # The backend's references to Warpool's functions are resolved among global symbols.
    _native.library()
    ctypes.CDLL(_native.library_path(), mode=ctypes.RTLD_GLOBAL)
    try:
        backend = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        for name in ("warpool_backend_error", "warpool_backend_torch_version", "warpool_backend_interface"):
            getattr(backend, name).restype = ctypes.c_char_p
        built_for = backend.warpool_backend_torch_version().decode()
        interface = backend.warpool_backend_interface().decode()
    except (OSError, AttributeError) as error:
        raise Error(f"{path} is not a backend for PyTorch {torch.__version__}: {error}. Remove it") from error
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise Error(f"{path} was built for PyTorch {built_for}, and this is {torch.__version__}: remove it")
    if interface != _native.version():
        raise Error(f"{path} was built for Warpool {interface}, and this is {_native.version()}: remove it")
    return backend


def command(torch: Any) -> Tuple[str, List[str]]:
    """The compiler, and its command without the output. Raises `Unavailable` if something is missing."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        raise Unavailable(f"there is no C++ compiler ({compiler}): install one, or set CXX")
    root = Path(torch.__file__).resolve().parent
    if not (root / "include" / "c10").is_dir() or not (root / "lib" / "libc10_cuda.so").is_file():
        raise Unavailable(f"PyTorch's headers and libraries are not in {root}: install its wheel")
    sources = [source for source in _sources() if source.suffix == ".cpp"]
    includes = [root / "include", *_cuda_includes(root)]
    parts = [*compiler.split(), *_FLAGS, _standard(torch), f"-I{_SOURCES}"]
    parts.append(f'-DWARPOOL_VERSION="{__version__}"')
    parts += [part for folder in includes for part in ("-isystem", str(folder))]
    parts += [str(source) for source in sources]
    parts += [f"-L{root / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
    return compiler, parts


def _standard(torch: Any) -> str:
    """The C++ standard that PyTorch's headers need."""
    return "-std=c++20" if version(torch) >= (2, 14) else "-std=c++17"


def _cuda_includes(root: Path) -> List[Path]:
    """The folders with CUDA's headers: those of the packages that PyTorch depends on, or of a toolkit."""
    site = root.parent
    candidates = [*sorted(site.glob("nvidia/*/include"))]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    candidates += [Path(home) / "include" for home in homes if home]
    found = [folder for folder in candidates if (folder / "cuda_runtime_api.h").is_file()]
    runtime = _having(found, "crt/host_defines.h") or _having(candidates, "crt/host_defines.h")
    if not found or runtime is None:
        missing = "cuda_runtime_api.h" if not found else "crt/host_defines.h"
        raise Unavailable(
            f"CUDA's header {missing} is neither in the nvidia packages beside PyTorch nor in CUDA_HOME: install "
            "nvidia-cuda-runtime and nvidia-cuda-crt (CUDA 13), nvidia-cuda-runtime-cu12 and nvidia-cuda-nvcc-cu12 "
            "(CUDA 12), or a CUDA toolkit"
        )
    return [found[0], *([runtime] if runtime != found[0] else [])]


def _having(folders: List[Path], name: str) -> Optional[Path]:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _compile(command: List[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if "error" in line] or done.stdout.splitlines()
        raise Unavailable("it does not compile; another compiler may (CXX): " + "\n".join(lines[:5]))


def _key(torch: Any) -> str:
    """Tells backends of other sources, of other builds of PyTorch and of other flags apart."""
    digest = hashlib.sha256()
    for part in (torch.__version__, __version__, os.environ.get("CXX", ""), *_FLAGS, *_LIBRARIES):
        digest.update(part.encode() + b"\0")
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> List[Path]:
    """The sources of the backend with their headers. Raises `Unavailable` if some are missing."""
    found = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    # In the repository the header of the C interface is a link to where it is generated.
    missing = [path for path in (*found, _SOURCES / "warpool_torch.h") if not path.is_file()]
    if not found or missing:
        what = f"{missing[0].name} is missing" if found else "there are none"
        raise Unavailable(
            f"the sources of the backend in {_SOURCES} are not complete: {what}. Install the wheel, or copy the folder "
            "with what its links point to (cp -rL)"
        )
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of that file. A process that is killed lets go of it."""
    # Not on Windows, where there are no backends.
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _dotted(version: Tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
