"""`python -m warpool`: the command `warpool` of the installed wheel, and `predict`."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Iterator


def _folders() -> Iterator[Path]:
    """Where installers put a wheel's commands."""
    yield Path(sysconfig.get_path("scripts"))
    yield Path(sysconfig.get_path("scripts", scheme="nt_user" if sys.platform == "win32" else "posix_user"))
    site = Path(__file__).resolve().parent.parent
    # Beside the package with `pip install --target`, and with `--prefix` three folders up.
    yield site / "bin"
    yield from (parent / "bin" for parent in list(site.parents)[:3])


def main() -> int:
    """Runs the command in place of this process; on Windows, beside it. `predict` is Python's own."""
    if sys.argv[1:2] == ["predict"]:
        from .predict._command import main as predict

        return predict(sys.argv[2:])
    for folder in _folders():
        command = folder / ("warpool.exe" if sys.platform == "win32" else "warpool")
        # A wheel's command is an executable; a script of an entry point would be Python, and call this again.
        if not command.is_file() or command.open("rb").read(2) == b"#!":
            continue
        packaged = Path(__file__).resolve().parent / "libwarpool_inject.so"
        if packaged.is_file():
            # Where the command would not look, as after `pip install --target`.
            os.environ.setdefault("WARPOOL_INJECT_LIBRARY", str(packaged))
        if sys.platform == "win32":
            # There, exec would return to the shell before the command has ended.
            return subprocess.call([str(command), *sys.argv[1:]])
        os.execv(command, [str(command), *sys.argv[1:]])
    looked = ", ".join(str(folder) for folder in _folders())
    print(
        f"the command `warpool` is not installed with this package (looked in {looked}): install the wheel with pip, "
        "or the command alone with `cargo install --path crates/cli`",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
