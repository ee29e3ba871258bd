#!/usr/bin/env python3
"""What the command shows on a terminal: progress that starts at 0 % and is gone after Ctrl-C, NO_COLOR, and
tables that are not wider than the terminal. And `warpool top`, with processes that come and go.

    terminal.py WARPOOL

Runs the command in a pseudoterminal and looks at what is left on its screen.
"""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
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


class Screen:
    """A command on a terminal of its own that fills the screen: what is shown, and keys for it."""

    def __init__(self, arguments, rows=30, columns=150):
        self.rows, self.columns = rows, columns
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))
            os.environ.update(TERM="xterm")
            os.execv(arguments[0], arguments)
        self.cells = [[" "] * self.columns for _ in range(self.rows)]
        self.row, self.column, self.left_over, self.alternate = 0, 0, "", []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self):
        return "\n".join("".join(line).rstrip() for line in self.cells)

    def press(self, keys):
        os.write(self.terminal, keys.encode())

    def feed(self, written):
        """Draws what the command wrote: cursor positions and text are all that it uses, beside styles."""
        written = self.left_over + written
        # An escape sequence that is not complete yet.
        begun = re.search(r"\x1b(\[[0-9;?]*)?$", written)
        self.left_over = written[begun.start():] if begun else ""
        written = written[:begun.start()] if begun else written
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|[\r\n]|[^\x1b\r\n]", written):
            if part.startswith("\x1b["):
                numbers = [int(number) for number in re.findall(r"\d+", part)]
                if part.endswith("H"):
                    self.row, self.column = (numbers + [1, 1])[0] - 1, (numbers + [1, 1])[1] - 1
                elif part.endswith("J"):
                    self.cells = [[" "] * self.columns for _ in range(self.rows)]
                elif part in ("\x1b[?1049h", "\x1b[?1049l"):
                    self.alternate.append(part[-1])
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.row = min(self.row + 1, self.rows - 1)
            elif not part.startswith("\x1b") and self.row < self.rows and self.column < self.columns:
                self.cells[self.row][self.column] = part
                self.column += 1

    def read(self):
        """Reads what there is within a second; False at the end of the command."""
        if not select.select([self.terminal], [], [], 1)[0]:
            return True
        try:
            data = os.read(self.terminal, 1 << 16)
        except OSError:  # Its other end is closed.
            return False
        self.feed(self.decoder.decode(data))
        return bool(data)

    def shows(self, holds):
        """Whether the screen is so, at some moment within two minutes."""
        deadline = time.monotonic() + 120
        while not holds(self.text()):
            if time.monotonic() > deadline or not self.read():
                return holds(self.text())
        return True

    def end(self):
        deadline = time.monotonic() + 120
        while self.read():
            if time.monotonic() > deadline:
                os.kill(self.child, signal.SIGKILL)
        _, status = os.waitpid(self.child, 0)
        return os.waitstatus_to_exitcode(status)


def process_with_page(warpool, folder, mib, command):
    process = subprocess.Popen(
        [warpool, "__page", folder, str(mib), "--command", command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert process.stdout.readline() == "published\n"
    return process


def tell(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def line_with(text, part):
    return next((number for number, line in enumerate(text.split("\n")) if part in line), -1)


def top(warpool):
    """The screen of `warpool top`."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="warpool-top-") as parent:
        folder = os.path.join(parent, "pages")
        screen = Screen([warpool, "top", "--pages", folder, "--interval", "0.2"])
        empty = screen.shows(lambda text: "No process of this user publishes" in text)
        failed += check_screen(empty, "top: without processes it says so", screen)
        small = process_with_page(warpool, folder, 40, "small")
        large = process_with_page(warpool, folder, 90, "large\x1b]0;title\x07")
        both = screen.shows(lambda text: 0 < line_with(text, "large") < line_with(text, "small"))
        failed += check_screen(both, "top: processes come, the one with most memory first", screen)
        failed += check("\\u{1b}]0;title" in screen.text(), "top: a name cannot control the terminal")
        failed += check("Simulated H200 0000: " in screen.text(), "top: the card has a line")
        screen.press("r")
        reversed_ = screen.shows(lambda text: 0 < line_with(text, "small") < line_with(text, "large"))
        failed += check_screen(reversed_, "top: r reverses", screen)
        screen.press("rsss")
        failed += check(screen.shows(lambda text: "by rate" in text), "top: s sorts by another column")
        screen.press("ss")
        failed += check_screen(screen.shows(lambda text: "by command" in text), "top: and another", screen)
        tell(small, "oom")
        tell(small, "sleep")
        screen.press("\x1b[F")  # End
        screen.press("\r")
        detail = screen.shows(lambda text: all(part in text for part in ["weights", "last out of memory: 1024 TiB",
                                                                          "remaps per second", "allocations/s, up to"]))
        failed += check_screen(detail, "top: Enter shows one process in detail", screen)
        small.kill()
        small.wait()
        back = screen.shows(lambda text: "small" not in text and "large" in text)
        failed += check_screen(back, "top: a process that ends goes, and so does its detail", screen)
        screen.press("?")
        failed += check(screen.shows(lambda text: "reverse the order" in text), "top: ? lists the keys")
        screen.press("?")
        with open(os.path.join(folder, "1-x.page"), "w"):
            pass
        os.mkdir(os.path.join(folder, "damaged.page"))
        damaged = screen.shows(lambda text: "1 unreadable page" in text)
        failed += check_screen(damaged, "top: an unreadable page is counted", screen)
        screen.press("p")
        failed += check(screen.shows(lambda text: "paused" in text), "top: p pauses")
        screen.press("q")
        failed += check(screen.end() == 0, "top: q ends it with status 0")
        failed += check(screen.alternate == ["h", "l"], f"top: the screen is as before: {screen.alternate}")
        screen = Screen([warpool, "top", "--pages", folder])
        screen.shows(lambda text: "large" in text)
        screen.press("\x03")
        failed += check(screen.end() == 0, "top: Ctrl-C ends it with status 0")
        failed += check(screen.alternate == ["h", "l"], "top: and restores the screen")
        for rows, columns in [(1, 1), (3, 20), (200, 300)]:
            screen = Screen([warpool, "top", "--pages", folder, "--interval", "0.1"], rows, columns)
            shown = screen.shows(lambda _text, screen=screen: screen.alternate)
            screen.press("\r")
            screen.press("?")
            screen.press("q")
            failed += check(shown and screen.end() == 0, f"top: on {rows} lines of {columns} columns")
        many = [process_with_page(warpool, folder, 1, f"process {number}") for number in range(40)]
        screen = Screen([warpool, "top", "--pages", folder, "--sort", "pid"])
        failed += check(screen.shows(lambda text: "41 processes" in text), "top: more processes than lines")
        screen.press("\x1b[F")
        last = max(process.pid for process in [large, *many])
        failed += check_screen(screen.shows(lambda text: f"{last} " in text), "top: End shows the last", screen)
        for process in [large, *many]:
            process.kill()
            process.wait()
        gone = screen.shows(lambda text: "0 processes" in text)
        failed += check_screen(gone, "top: all are gone", screen)
        screen.press("q")
        failed += check(screen.end() == 0, "top: it still ends")
    return failed


def check_screen(holds, what, screen):
    return check(holds, what if holds else f"{what}:\n{screen.text()}")


def check(holds, what):
    print(f"{'ok   ' if holds else 'FAIL '} {what}")
    return 0 if holds else 1


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    warpool = os.path.abspath(sys.argv[1])
    failed = top(warpool)
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
