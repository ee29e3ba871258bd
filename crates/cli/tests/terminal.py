#!/usr/bin/env python3
"""What the command shows on a terminal: progress that starts at 0 % and is gone after Ctrl-C, NO_COLOR, and
tables that are not wider than the terminal.

    terminal.py WARPOOL

Runs the command in a pseudoterminal and looks at what is left on its screen.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

RECORDINGS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../recordings")
FILE = os.path.join(RECORDINGS, "oom_stacks.fraction_6gib.pickle.xz")


def run(arguments, interrupt=False, columns=100, **environment):
    """The status of a command and all that it wrote to its terminal. With `interrupt`, Ctrl-C comes with progress."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.environ.update(TERM="xterm", COLUMNS="100", LINES="40")
        os.environ.pop("NO_COLOR", None)
        os.environ.update(environment)
        os.execv(arguments[0], arguments)
    written, deadline, was_sent = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # Its other end is closed.
            break
        if not data:
            break
        written += data
        if interrupt and not was_sent and b"%" in written:
            was_sent = True
            os.write(terminal, b"\x03")  # Ctrl-C, as it is typed.
    else:
        os.kill(child, signal.SIGKILL)
        sys.exit(f"{arguments} does not end")
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), written.decode(errors="replace")


def screen(written):
    """The lines that are left: a small terminal that knows what progress bars use."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            while len(lines) <= row:
                lines.append("")
        elif part.startswith("\x1b["):
            count = int(re.sub(r"\D", "", part) or 1)
            if part.endswith("A"):
                row = max(0, row - count)
            elif part.endswith("B"):
                row += count
                while len(lines) <= row:
                    lines.append("")
            elif part.endswith("K"):
                lines[row] = "" if part == "\x1b[2K" else lines[row][:column]
            elif part.endswith("J"):
                lines[row:] = [lines[row][:column]]
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part):]
            column += len(part)
    return lines


def check(holds, what):
    print(f"{'ok   ' if holds else 'FAIL '} {what}")
    return 0 if holds else 1


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    warpool = os.path.abspath(sys.argv[1])
    failed = 0
    status, written = run([warpool, "explain", FILE, "--no-fits"])
    percents = [int(percent) for percent in re.findall(r"(\d+)%  ", written)]
    failed += check(status == 0 and percents, f"progress is shown on a terminal: {percents[:8]}")
    failed += check(percents[:1] == [0], "and starts at 0 %")
    phases = dict(reversed(re.findall(r"(reading|replaying) +\S* +(\d+)%  ", written)))
    failed += check(len(phases) == 2 and "100" not in phases.values(), f"and no phase starts at 100 %: {phases}")
    # The parts of the answer have percentages too, but no bar and no name of a phase.
    left = [line for line in screen(written) if re.match(r"(reading|replaying) ", line)]
    failed += check(not left, f"and is gone at the end: {left}")
    failed += check("\x1b[1m" in written, "headings stand out on a terminal")

    status, written = run([warpool, "explain", FILE, "--no-fits"], NO_COLOR="1")
    failed += check(status == 0 and not re.search(r"\x1b\[[0-9;]*m", written), "NO_COLOR: no colours, nothing bold")
    status, written = run([warpool, "-q", "explain", FILE, "--no-fits"])
    failed += check(status == 0 and not re.search(r"\d+%  \S+\.pickle", written), "-q: no progress")

    for columns in (60, 80, 120, 160):
        arguments = ["-q", "replay", FILE, FILE.replace("oom_stacks.fraction_6gib", "mempool.native")]
        status, written = run([warpool, *arguments], columns=columns, COLUMNS="300")
        lines = written.replace("\r", "").split("\n")
        widest = max(lines, key=len)
        failed += check(status == 0 and len(widest) <= columns, f"{columns} columns: {len(widest)} wide: {widest!r}")
        broken = [line for line in lines if re.search(r"^\s*[KMGT]iB|\d\.$", line)]
        failed += check(not broken, f"{columns} columns: no size is broken: {broken}")

    for arguments in [["explain", FILE], ["tune", FILE]]:
        status, written = run([warpool, *arguments], interrupt=True)
        left = [line for line in screen(written) if line.strip() and line.strip() != "^C"]
        failed += check(status == 130, f"{arguments[0]}: Ctrl-C ends it with status 130: {status}")
        failed += check(not left, f"{arguments[0]}: Ctrl-C leaves nothing behind: {left}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
