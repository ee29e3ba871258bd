"""Checks that the ELF files of a wheel load where PyTorch's wheels do: on every system of their tag, manylinux_2_28.

usage: symbols.py WHEEL [--reference FOLDER] [--unstripped]

A file needs symbols by version (GLIBC_2.14), and a system has those up to its own. manylinux_2_28 has glibc 2.28.
The backends are in C++: they may need no newer libstdc++ than PyTorch's own libraries of that version of PyTorch, which
are in `FOLDER/2.11/torch/lib`, and load only beside them. Nothing else in the wheel needs libstdc++.
"""

import argparse
import io
import re
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, List, Tuple

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

Version = Tuple[int, ...]

_LIMITS: Dict[str, Version] = {"GLIBC": (2, 28), "GCC": (8, 0)}
_SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
_SYSTEM.add("ld-linux-x86-64.so.2")
_BESIDE_PYTORCH = {"libstdc++.so.6", "libc10.so", "libc10_cuda.so", "libtorch_cpu.so"}


def needed_versions(file: BinaryIO) -> Iterator[Tuple[str, Version]]:
    """What a file needs, as ("GLIBC", (2, 14)), or a name of another form as it is."""
    for section in ELFFile(file).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    form = re.fullmatch(r"([A-Z]+)_([0-9.]+)", version.name)
                    if form:
                        yield form[1], tuple(int(part) for part in form[2].split("."))
                    else:
                        yield version.name, ()


def needed_libraries(file: BinaryIO) -> List[str]:
    """The shared objects that a file is linked to."""
    sections = (section for section in ELFFile(file).iter_sections() if isinstance(section, DynamicSection))
    return [tag.needed for section in sections for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def is_stripped(file: BinaryIO) -> bool:
    """Whether a file has neither a symbol table, other than the dynamic one, nor debug information."""
    names = [section.name for section in ELFFile(file).iter_sections()]
    return ".symtab" not in names and not any(name.startswith(".debug_") for name in names)


def violations(name: str, content: bytes, reference: Path, unstripped: bool) -> List[str]:
    """What is wrong with one file of the wheel."""
    limits, libraries = dict(_LIMITS), set(_SYSTEM)
    backend = re.fullmatch(r"warpool/backends/libwarpool_backend-([0-9.]+)\.so", name)
    if backend:
        libraries |= _BESIDE_PYTORCH
        limits.update(newest_of_pytorch(reference / backend[1] / "torch" / "lib"))
    file = io.BytesIO(content)
    found = [] if unstripped or is_stripped(file) else [f"{name} is not stripped"]
    for symbol, version in sorted(set(needed_versions(file))):
        if symbol not in limits or version > limits[symbol]:
            limit = dotted(limits[symbol]) if symbol in limits else "none"
            found.append(f"{name} needs {symbol}_{dotted(version)}, and the newest allowed is {limit}")
    found += [f"{name} is linked to {library}" for library in needed_libraries(file) if library not in libraries]
    return found


def newest_of_pytorch(folder: Path) -> Dict[str, Version]:
    """The newest versions of libstdc++'s symbols that PyTorch's own libraries need."""
    newest: Dict[str, Version] = {}
    for path in (folder / "libc10.so", folder / "libc10_cuda.so"):
        with path.open("rb") as file:
            for symbol, version in needed_versions(file):
                if symbol in ("GLIBCXX", "CXXABI"):
                    newest[symbol] = max(newest.get(symbol, ()), version)
    return newest


def _name(wheel: Path) -> str:
    """Name and version, as in warpool-0.1.0-py3-none-any.whl."""
    return "-".join(wheel.name.split("-")[:2])


def dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--reference", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--unstripped", action="store_true", help="files may have symbols and debug information")
    arguments = parser.parse_args()
    found: List[str] = []
    compiled: List[str] = []
    with zipfile.ZipFile(arguments.wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            if content.startswith(b"\x7fELF"):
                compiled.append(name)
                found += violations(name, content, arguments.reference, arguments.unstripped)
    if "manylinux_2_28" not in arguments.wheel.name:
        found.append(f"{arguments.wheel.name} does not have the tag manylinux_2_28")
    libraries = ("warpool/libwarpool_torch.so", "warpool/libwarpool_answers.so")
    for expected in (*libraries, f"{_name(arguments.wheel)}.data/scripts/warpool"):
        if expected not in compiled:
            found.append(f"{arguments.wheel.name} has no {expected}")
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{arguments.wheel.name}: {len(compiled)} compiled files, all fit manylinux_2_28")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
