"""`python -m warpool`: the command `warpool` of the installed wheel."""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Iterator


def _folders() -> Iterator[Path]:
    """Where installers put a wheel's commands."""
    yield Path(sysconfig.get_path("scripts"))
    yield Path(sysconfig.get_path("scripts", scheme="posix_user"))
    site = Path(__file__).resolve().parent.parent
    # Beside the package with `pip install --target`, and with `--prefix` three folders up.
    yield site / "bin"
    yield from (parent / "bin" for parent in list(site.parents)[:3])


def main() -> int:
    """Replaces this process by the command; returns only if it is not there."""
    for folder in _folders():
        command = folder / "warpool"
        # A wheel's command is an executable; a script of an entry point would be Python, and call this again.
        if command.is_file() and command.open("rb").read(4) == b"\x7fELF":
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
