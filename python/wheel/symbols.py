"""Checks that the compiled files of a wheel load on every system of its tag.

usage: symbols.py WHEEL [--reference FOLDER] [--unstripped]

Linux (manylinux_2_28, as PyTorch's wheels): a file needs symbols by version (GLIBC_2.14), and a system has those up to
its own; manylinux_2_28 has glibc 2.28. The backends are in C++: they may need no newer libstdc++ than PyTorch's own
libraries of that version of PyTorch, which are in `FOLDER/2.11/torch/lib`, and load only beside them. Nothing else in
the wheel needs libstdc++. macOS: a file says which macOS it needs at least. Windows: it needs only libraries of the
system. Each file is for the wheel's processor.
"""

import argparse
import re
import sys
import zipfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Set, Tuple

import lief

Version = Tuple[int, ...]

_GLIBC: Version = (2, 28)
_LINUX = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
_BESIDE_PYTORCH = {"libstdc++.so.6", "libc10.so", "libc10_cuda.so", "libtorch_cpu.so"}
_MACOS = {f"/usr/lib/{name}.dylib" for name in ("libSystem.B", "libiconv.2", "libcharset.1")}
# Of Windows 10, without a runtime that has to be installed.
_WINDOWS = {"kernel32.dll", "ntdll.dll", "userenv.dll", "ws2_32.dll", "advapi32.dll", "bcryptprimitives.dll"}
_WINDOWS |= {"msvcrt.dll", "user32.dll", "shell32.dll", "bcrypt.dll", "ole32.dll", "synchronization.dll"}


class Kind(NamedTuple):
    """What a wheel's tag says."""

    tag: str
    machine: object
    check: Callable[..., List[str]]
    files: Tuple[str, ...]
    """Compiled files that the wheel must have; `{}` stands for name and version, as in warpool-0.1.0."""


def elf_violations(name: str, binary: lief.ELF.Binary, kind: Kind, reference: Path) -> List[str]:
    """What is wrong with a file for Linux."""
    limits: Dict[str, Version] = {"GLIBC": _GLIBC, "GCC": (8, 0)}
    loader = "ld-linux-aarch64.so.1" if binary.header.machine_type == lief.ELF.ARCH.AARCH64 else "ld-linux-x86-64.so.2"
    libraries = {*_LINUX, loader}
    backend = re.fullmatch(r"warpool/backends/libwarpool_backend-([0-9.]+)\.so", name)
    if backend:
        libraries |= _BESIDE_PYTORCH
        limits.update(newest_of_pytorch(reference / backend[1] / "torch" / "lib"))
    found = []
    for symbol, version in sorted(needed_versions(binary)):
        if symbol not in limits or version > limits[symbol]:
            limit = dotted(limits[symbol]) if symbol in limits else "none"
            found.append(f"{name} needs {symbol}_{dotted(version)}, and the newest allowed is {limit}")
    return found + [f"{name} is linked to {library}" for library in binary.libraries if library not in libraries]


def needed_versions(binary: lief.ELF.Binary) -> Set[Tuple[str, Version]]:
    """What a file needs, as ("GLIBC", (2, 14)), or a name of another form as it is."""
    found = set()
    for needed in binary.symbols_version_requirement:
        for version in needed.get_auxiliary_symbols():
            form = re.fullmatch(r"([A-Z]+)_([0-9.]+)", str(version.name))
            found.add((form[1], parsed(form[2])) if form else (str(version.name), ()))
    return found


def newest_of_pytorch(folder: Path) -> Dict[str, Version]:
    """The newest versions of libstdc++'s symbols that PyTorch's own libraries need."""
    newest: Dict[str, Version] = {}
    for path in (folder / "libc10.so", folder / "libc10_cuda.so"):
        library = lief.ELF.parse(str(path))
        if library is None:
            raise FileNotFoundError(f"{path} is not PyTorch's library")
        for symbol, version in needed_versions(library):
            if symbol in ("GLIBCXX", "CXXABI"):
                newest[symbol] = max(newest.get(symbol, ()), version)
    return newest


def macho_violations(name: str, binary: lief.MachO.Binary, kind: Kind, _: Path) -> List[str]:
    """What is wrong with a file for macOS."""
    limit = parsed(".".join(kind.tag.split("_")[1:3]))
    oldest = [command.minos for command in [binary.build_version] if command]
    oldest += [command.version for command in [binary.version_min] if command]
    found = [] if oldest else [f"{name} does not say which macOS it needs"]
    for version in oldest:
        if tuple(version[:2]) > limit:
            found.append(f"{name} needs macOS {dotted(tuple(version))}, and the tag says {dotted(limit)}")
    # A shared object's list begins with its own name.
    allowed = {*_MACOS, f"@rpath/{Path(name).name}"}
    return found + [f"{name} is linked to {each.name}" for each in binary.libraries if each.name not in allowed]


def pe_violations(name: str, binary: lief.PE.Binary, _: Kind, __: Path) -> List[str]:
    """What is wrong with a file for Windows."""
    linked = [library.name.lower() for library in binary.imports]
    allowed = ("api-ms-win-", *_WINDOWS)
    return [f"{name} is linked to {each}" for each in linked if not each.startswith(allowed)]


_COMMAND = "{}.data/scripts/warpool"
_LINUX_LIBRARIES = ("torch", "inject", "answers")
_LINUX_FILES = (*(f"warpool/libwarpool_{name}.so" for name in _LINUX_LIBRARIES), _COMMAND)
_MACOS_FILES = ("warpool/libwarpool_answers.dylib", _COMMAND)
_KINDS = (
    Kind("manylinux_2_28_x86_64", lief.ELF.ARCH.X86_64, elf_violations, _LINUX_FILES),
    Kind("manylinux_2_28_aarch64", lief.ELF.ARCH.AARCH64, elf_violations, _LINUX_FILES),
    Kind("macosx_11_0_arm64", lief.MachO.Header.CPU_TYPE.ARM64, macho_violations, _MACOS_FILES),
    Kind("macosx_10_12_x86_64", lief.MachO.Header.CPU_TYPE.X86_64, macho_violations, _MACOS_FILES),
    Kind(
        "win_amd64",
        lief.PE.Header.MACHINE_TYPES.AMD64,
        pe_violations,
        ("warpool/warpool_answers.dll", f"{_COMMAND}.exe"),
    ),
)


def machine_of(binary: lief.Binary) -> object:
    """The processor that a file is for."""
    header = binary.header
    if isinstance(binary, lief.ELF.Binary):
        return header.machine_type
    return header.cpu_type if isinstance(binary, lief.MachO.Binary) else header.machine


def is_stripped(binary: lief.Binary) -> bool:
    """Whether a file has no debug information, and an ELF file no symbol table other than the dynamic one."""
    if any(section.name.startswith((".debug_", "__debug_")) for section in binary.sections):
        return False
    return not (isinstance(binary, lief.ELF.Binary) and binary.has_section(".symtab"))


def parse(content: bytes) -> "lief.Binary | None":
    """A compiled file; None if it is none."""
    if content[:4] == b"\x7fELF":
        return lief.ELF.parse(list(content))
    if content[:2] == b"MZ":
        return lief.PE.parse(list(content))
    if content[:4] in (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):
        fat = lief.MachO.parse(list(content))
        return None if fat is None else fat.at(0)
    return None


def parsed(version: str) -> Version:
    return tuple(int(part) for part in version.split("."))


def dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--reference", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--unstripped", action="store_true", help="files may have symbols and debug information")
    arguments = parser.parse_args()
    wheel = arguments.wheel.name
    kind = next((kind for kind in _KINDS if wheel.endswith(f"-{kind.tag}.whl")), None)
    if kind is None:
        print(f"{wheel} has none of the tags {', '.join(kind.tag for kind in _KINDS)}", file=sys.stderr)
        return 1
    found: List[str] = []
    compiled: List[str] = []
    with zipfile.ZipFile(arguments.wheel) as archive:
        for name in archive.namelist():
            binary = parse(archive.read(name))
            if binary is None:
                continue
            compiled.append(name)
            if machine_of(binary) != kind.machine:
                found.append(f"{name} is for {machine_of(binary)}, and the tag says {kind.tag}")
                continue
            if not arguments.unstripped and not is_stripped(binary):
                found.append(f"{name} is not stripped")
            found += kind.check(name, binary, kind, arguments.reference)
    for expected in kind.files:
        name = expected.format("-".join(wheel.split("-")[:2]))
        if name not in compiled:
            found.append(f"{wheel} has no {name}")
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{wheel}: {len(compiled)} compiled files, all fit {kind.tag}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
