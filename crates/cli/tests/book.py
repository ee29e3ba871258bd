#!/usr/bin/env python3
"""Runs the commands and examples of the book: every code block of README.md, docs/ and the READMEs of folders.

    book.py WARPOOL [--slow] [--list] [PAGE...]

* `sh`: each command is run, in a folder that has what the repository has, and recordings named as in the text
  (`oom.pickle`, FILE). It must end with status 0, or the one that its comment says: `# exit status 1`.
* `text` after such a block, or below a comment `<!-- COMMAND -->`, is what the command writes, with `[...]` for what is
  left out. White space does not count.
* `python` is run with the package of this repository. An expression whose comment begins with a literal
  (`found.verdict   # 'fragmentation'`) must have that value.
* `rust` is compiled and run by `cargo test` (`no_run`: only compiled): the library must include the page.
* `c`: the blocks of a page are compiled, as one file. `toml` is parsed.

A block that cannot run here says so behind its language, and is counted: `gpu` needs a GPU, `torch` needs PyTorch,
`slow` takes minutes (`--slow` runs it), `live` needs a terminal or a process that runs meanwhile, `published` needs
published crates. Of these, syntax is checked, and whether the options of `warpool` and the files that they name exist.
`--list` names them, and the commands that took longest.

Needs Python 3.9. Exit status: 0, 1 if a block fails, 2 on wrong usage.
"""

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARKS = {
    "gpu": "needs a GPU",
    "torch": "needs PyTorch",
    "slow": "takes minutes",
    "live": "needs a terminal, or a process that runs meanwhile; terminal.py has both",
    "published": "needs published crates; scripts/publish runs it from a registry of its own",
}
LANGUAGES = {"sh", "text", "python", "rust", "c", "toml"}
# The names of recordings in the text.
RECORDINGS = {
    "oom.pickle": "oom_limit.default.pickle.xz",
    "train.pickle": "train.default.pickle.xz",
    "snapshot.pickle": "mempool.native.pickle.xz",
    "snapshot.pickle.xz": "mempool.native.pickle.xz",
    "rank0.pickle": "streams.default.pickle.xz",
    "rank1.pickle": "streams.expandable_cap.pickle.xz",
    "rank3.pickle": "resnet_train.native.pickle.xz",
    "rank7.pickle": "train.default.pickle.xz",
    "before.pickle": "resnet_train.native.pickle.xz",
    "after.pickle": "resnet_train.expandable.pickle.xz",
    "FILE": "train.default.pickle.xz",
    "FILE...": "train.default.pickle.xz",
}
# Whoever changes the allocator's settings outside must not change the answers.
NOT_INHERITED = ("WARPOOL_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "COLUMNS")
SECONDS_MAX = 300
SLOW_SECONDS_MAX = 4000


class Block:
    """A code block: where it is, its language and marks, its text, and a command in a comment above it."""

    def __init__(self, page, line, info, text, command):
        self.page, self.line, self.text, self.command = page, line, text, command
        self.language, *self.marks = [part.strip() for part in info.split(",")]

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(page):
    """The code blocks of a page."""
    found, lines, at, command = [], (ROOT / page).read_text().splitlines(), 0, None
    while at < len(lines):
        line = lines[at]
        if opened := re.match(r"( *)(```+)(.*)$", line):
            indent, fence, info = opened.groups()
            first = at + 1
            at = first
            while at < len(lines) and lines[at].strip() != fence:
                at += 1
            if at == len(lines):
                raise SystemExit(f"{page}:{first}: the block has no end")
            text = "\n".join(line.removeprefix(indent) for line in lines[first:at])
            found.append(Block(page, first, info, text, command))
        comment = re.fullmatch(r"<!-- (warpool .*) -->", line.strip())
        command = comment.group(1) if comment else None
        at += 1
    return found


def pages():
    """The pages that git tracks, or would."""
    patterns = ["README.md", "docs/*.md", "docs/**/*.md", "*/README.md", "CONTRIBUTING.md"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(page for page in set(listed.stdout.split()) if (ROOT / page).is_file())


class Runner:
    """Runs commands in a folder like the repository, each distinct one once."""

    def __init__(self, warpool, folder, is_slow):
        self.folder, self.warpool, self.is_slow = folder / "checkout", warpool, is_slow
        self.folder.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in (".git", "target"):
                (self.folder / entry.name).symlink_to(entry)
        for name, recording in RECORDINGS.items():
            (self.folder / name).symlink_to(ROOT / "recordings" / recording)
        for ranks in ("snapshots", "job/node0"):
            (self.folder / ranks).mkdir(parents=True)
            for rank in range(2):
                (self.folder / ranks / f"rank{rank}.pickle").symlink_to(ROOT / "recordings/train.default.pickle.xz")
        (self.folder / "parts").mkdir()
        for part in ("parts/0.json", "part-0.json"):
            command = [warpool, "summarize", "-q", self.folder / "rank0.pickle", "-o", self.folder / part]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self.environment["SLURM_PROCID"] = "3"
        commands = folder / "commands"
        commands.mkdir()
        (commands / "warpool").symlink_to(warpool)
        # The text says how to run it from a checkout; it is built already.
        cargo = commands / "cargo"
        built = shlex.quote(str(warpool.parent))
        cargo.write_text(
            "#!/bin/sh\ncase \"$*\" in\n"
            '  "run --release -- "*) shift 3; exec warpool "$@" ;;\n'
            f'  "run --release -p warpool-examples --bin "*) exec {built}/"$6" ;;\n'
            'esac\necho "book.py does not run cargo $*: mark the block as slow" >&2\nexit 101\n'
        )
        cargo.chmod(0o755)
        if is_slow:
            # Slow commands are the real ones; `warpool` is still this one.
            cargo.unlink()
        self.environment["PATH"] = f"{commands}{os.pathsep}{self.environment['PATH']}"
        if not is_slow:  # Completions go below it; cargo has its own things there.
            self.environment["HOME"] = str(folder / "home")
        for name in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
            (folder / "home" / name).mkdir(parents=True)
        self.environment["PYTHONPATH"] = str(ROOT / "python")
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.environment.setdefault("WARPOOL_ANSWERS_LIBRARY", str(warpool.parent / "libwarpool_answers.so"))

    def shell(self, command):
        """The status, output and messages of a command."""
        seconds = SLOW_SECONDS_MAX if self.is_slow else SECONDS_MAX
        return self.finish(["bash", "-o", "pipefail", "-c", command], seconds, None)

    def python(self, program):
        return self.finish([sys.executable, "-"], SECONDS_MAX, program)

    def finish(self, command, seconds, text):
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=seconds,
                input=text if text is not None else "",
            )
        except subprocess.TimeoutExpired:
            return None, "", f"it takes longer than {seconds} s"
        return done.returncode, done.stdout, done.stderr


def commands(block):
    """The commands of a block, with the status that each should have."""
    found, open_lines = [], ""
    for line in block.text.splitlines():
        open_lines += line + "\n"
        # A line that is to go on: a backslash, an open quote or bracket, a pipe.
        if not is_complete(open_lines):
            continue
        command, open_lines = open_lines.strip(), ""
        if command and not command.startswith("#"):
            expected = re.search(r"#.*\bexit status (\d+)", command)
            found.append((command, int(expected.group(1)) if expected else 0))
    if open_lines.strip():
        found.append((open_lines.strip(), 0))
    return found


def is_complete(text):
    if text.rstrip().endswith(("\\", "|")):
        return False
    return subprocess.run(["bash", "-n", "-c", text], capture_output=True).returncode == 0


def normalized(text):
    return " ".join(text.split())


def missing_part(shown, output):
    """The first part of a shown output that the output does not have there; None if it has all."""
    at, output = 0, normalized(output)
    for part in filter(None, (normalized(part) for part in shown.split("[...]"))):
        found = output.find(part, at)
        if found < 0:
            return part
        at = found + len(part)
    return None


def checked_program(text):
    """A Python program that compares expressions with the literals in their comments."""
    tree = ast.parse(text)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(text).readline) if token.type == tokenize.COMMENT
    }
    lines = text.splitlines()
    for node in tree.body:
        literal = re.match(r"'[^']*'|-?\d[\d_.]*|True|False|None", comments.get(node.end_lineno, ""))
        if isinstance(node, ast.Expr) and literal:
            source = ast.get_source_segment(text, node)
            check = f"_v = ({source}); assert _v == ({literal.group()}), (%r, _v)" % source
            lines[node.lineno - 1:node.end_lineno] = [check] + [""] * (node.end_lineno - node.lineno)
    return "\n".join(lines) + "\n"


def without_comment(command):
    return re.sub(r"\s#.*", "", command).strip()


class Book:
    """Checks blocks and counts what was done with them."""

    def __init__(self, runner, warpool):
        self.runner, self.warpool = runner, warpool
        self.failures, self.counts, self.marked = [], Counter(), []
        self.outputs, self.helps, self.seconds = {}, {}, {}

    def fail(self, block, why):
        self.failures.append(f"{block}: {why}")

    def check(self, found, is_slow):
        runnable = [block for block in found if not self.set_aside(block, is_slow)]
        for block in found:
            if block.language not in LANGUAGES or set(block.marks) - set(MARKS) - {"no_run"}:
                self.fail(block, f"unknown language or mark: {block.language!r}, {block.marks}")
        self.run_shell(runnable)
        self.compare_outputs(found, runnable)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.run_python, [block for block in runnable if block.language == "python"]))
        self.rust([block for block in runnable if block.language == "rust"])
        self.compile_c([block for block in runnable if block.language == "c"])
        for block in runnable:
            if block.language == "toml":
                self.parse_toml(block)

    def parse_toml(self, block):
        try:
            import tomllib
        except ImportError:
            self.counts["toml blocks NOT parsed: Python is older than 3.11"] += 1
            return
        self.counts["toml blocks parsed"] += 1
        try:
            tomllib.loads(block.text)
        except tomllib.TOMLDecodeError as error:
            self.fail(block, error)

    def set_aside(self, block, is_slow):
        """Whether a block does not run here. It is counted, and what can be checked of it is."""
        if is_slow and block.language in ("sh", "python"):
            # The others were run without `--slow`.
            return block.marks != ["slow"]
        if not block.marks or block.language == "rust":
            return False
        self.marked.append(block)
        for mark in block.marks:
            self.counts[f"marked {mark}: {MARKS.get(mark, '?')}"] += 1
        if block.language == "python":
            try:
                compile(block.text, str(block), "exec")
            except SyntaxError as error:
                self.fail(block, error)
        elif block.language == "sh":
            for command, _ in commands(block):
                self.look_at(block, command)
        return True

    def look_at(self, block, command):
        """The syntax of a command that is not run, the options of `warpool` in it, and the files of the repository."""
        if subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode != 0:
            self.fail(block, f"bash cannot parse {command}")
        for part in re.split(r"[|;]|&&", without_comment(command)):
            words = part.split()
            if words[:1] == ["warpool"]:
                self.options(block, words[1:])
            for word in words:
                if re.match(r"(python|scripts|crates|recordings)/", word) and not (ROOT / word).exists():
                    self.fail(block, f"{word} does not exist")

    def options(self, block, words):
        names = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        for depth in (2, 1):
            key = tuple(names[:depth])
            if key not in self.helps:
                done = subprocess.run([self.warpool, *key, "--help"], capture_output=True, text=True)
                self.helps[key] = done.stdout if done.returncode == 0 else None
            if self.helps[key] is not None:
                break
        if self.helps[key] is None:
            self.fail(block, f"warpool has no command {' '.join(names)}")
            return
        for word in words:
            if word.startswith("--") and not re.search(rf"{word.split('=')[0]}\b", self.helps[key]):
                self.fail(block, f"warpool {' '.join(key)} has no option {word}")

    def run_shell(self, runnable):
        wanted = {}
        for block in runnable:
            if block.language == "sh":
                self.counts["shell blocks run"] += 1
                for command, status in commands(block):
                    wanted.setdefault(without_comment(command), []).append((block, status))
            elif block.language == "text" and block.command:
                wanted.setdefault(block.command, []).append((block, 0))
        self.counts["commands"] = len(wanted)

        def run(command):
            started = time.monotonic()
            self.outputs[command] = self.runner.shell(command)
            self.seconds[command] = time.monotonic() - started

        with ThreadPoolExecutor(1 if self.runner.is_slow else os.cpu_count()) as pool:
            list(pool.map(run, wanted))
        for command, uses in wanted.items():
            status, _, messages = self.outputs[command]
            for block, expected in uses:
                if status != expected:
                    self.fail(block, f"{command}\nexit status {status}, not {expected}\n{messages[-2000:]}")

    def compare_outputs(self, found, runnable):
        """Compares each `text` block with what the command before it wrote."""
        before = None
        for block in found:
            if block.language != "text":
                before = block
                continue
            if block.command:
                output = self.outputs.get(block.command, (0, "", ""))[1]
            elif before is not None and before.page == block.page and before.language == "sh" and before in runnable:
                output = "\n".join(self.outputs[without_comment(command)][1] for command, _ in commands(before))
            elif before is not None and before.page == block.page and before.language == "rust":
                self.counts["outputs of Rust examples, not compared"] += 1
                continue
            elif self.runner.is_slow:
                continue
            elif before is not None and before.page == block.page and {"torch", "gpu", "live"} & set(before.marks):
                self.counts["outputs of what cannot run here, not compared"] += 1
                continue
            else:
                self.fail(block, "no command gives this text: put <!-- warpool ... --> above it")
                continue
            self.counts["outputs compared"] += 1
            part = missing_part(block.text, output)
            if part is not None:
                self.fail(block, f"the output does not have, in this order:\n{part}\nbut is\n{output[:6000]}")

    def run_python(self, block):
        self.counts["Python blocks run"] += 1
        try:
            program = checked_program(block.text)
        except (SyntaxError, tokenize.TokenError) as error:
            self.fail(block, error)
            return
        status, _, messages = self.runner.python(program)
        if status != 0:
            self.fail(block, messages[-2000:])

    def rust(self, found):
        for block in found:
            self.counts["Rust blocks compiled by cargo test"] += 1
            of_crate = re.fullmatch(r"(crates/[a-z]+)/README.md", block.page)
            library = f"{of_crate.group(1)}/src/lib.rs" if of_crate else "crates/warpool/src/lib.rs"
            included = "../README.md" if of_crate else f"../../../{block.page}"
            if f'include_str!("{included}")' not in (ROOT / library).read_text():
                self.fail(block, f"{library} does not include the page, so nothing compiles it")

    def compile_c(self, found):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        by_page = {}
        for block in found:
            by_page.setdefault(block.page, []).append(block)
        for of_page in by_page.values():
            if compiler is None:
                self.counts["C blocks NOT compiled: no compiler"] += len(of_page)
                continue
            self.counts["C blocks compiled"] += len(of_page)
            lines = [f'#line {block.line + 1} "{block.page}"\n{block.text}' for block in of_page]
            source = "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n" + "\n".join(lines) + "\n"
            options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-"]
            done = subprocess.run([compiler, *options], input=source, capture_output=True, text=True)
            if done.returncode != 0:
                self.fail(of_page[0], done.stderr)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("warpool", type=Path)
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--slow", action="store_true", help="run the blocks that are marked as slow, and no others")
    parser.add_argument("--list", action="store_true", help="name the blocks that are not run, and slow commands")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warpool-book-") as folder:
        warpool = arguments.warpool.resolve(strict=True)
        book = Book(Runner(warpool, Path(folder), arguments.slow), warpool)
        found = [block for page in arguments.pages or pages() for block in blocks(page)]
        book.check(found, arguments.slow)
    print(f"{len(found)} blocks in {len({block.page for block in found})} pages")
    for name, count in sorted(book.counts.items()):
        print(f"  {count:3} {name}")
    if arguments.list:
        for block in book.marked:
            print(f"  {block}: {block.language}, {', '.join(MARKS[mark] for mark in block.marks)}")
        for command in sorted(book.seconds, key=book.seconds.get, reverse=True)[:5]:
            print(f"  {book.seconds[command]:5.1f} s: {command}")
    for failure in book.failures:
        print(f"\n{failure}", file=sys.stderr)
    return 1 if book.failures else 0


if __name__ == "__main__":
    sys.exit(main())
