"""Runs scenarios in processes of their own, and reports what they find."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

HERE = Path(__file__).resolve().parent
# PyTorch's own allocator, without and with expandable segments: they are the control of the checks.
CONTROLS = ("native", "expandable")


class Report:
    """Prints results as they arrive, and counts them."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.failed, self.passed = as_json, 0, 0

    def check(self, allocator: str, scenario: str, name: str, ok: bool, detail: str = "") -> None:
        """Reports a check. With PyTorch's own allocator it is a control: a failure says something about the check."""
        control = allocator in CONTROLS
        if not control:
            self.failed, self.passed = self.failed + (not ok), self.passed + ok
        word = "ok" if ok else "FAILED"
        self._line("control " + word if control else word, allocator, scenario, name, detail)

    def note(self, allocator: str, scenario: str, name: str, detail: str) -> None:
        """Reports a value that cannot fail."""
        self._line("note", allocator, scenario, name, detail)

    def _line(self, verdict: str, allocator: str, scenario: str, name: str, detail: str) -> None:
        if self.as_json:
            keys = ("verdict", "allocator", "scenario", "name", "detail")
            print(json.dumps(dict(zip(keys, (verdict, allocator, scenario, name, detail)))), flush=True)
        else:
            tail = f": {detail}" if detail else ""
            print(f"{verdict:<14} {allocator:<14} {scenario}: {name}{tail}", flush=True)


def child(
    report: Report, scenario: str, allocator: str, title: str = "", **environment: Optional[str]
) -> List[Dict[str, Any]]:
    """Runs a scenario, reports its checks, and returns its data. A variable that is None is not set there."""
    command = [sys.executable, str(HERE / "child.py"), scenario, allocator]
    title = title or scenario
    # Without a fixed workspace cuBLAS is not deterministic.
    named = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
    env = {name: value for name, value in named.items() if value is not None}
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        report.check(allocator, title, "the process ends", False, "not within 300 s")
        return []
    found, failed = [], 0
    for line in ended.stdout.splitlines():
        if not line.startswith("@"):
            continue
        message = json.loads(line[1:])
        kind = message.pop("kind")
        if kind == "data":
            found.append(message)
        elif kind == "note":
            report.note(allocator, title, message["name"], message["detail"])
        else:
            failed += not message["ok"]
            report.check(allocator, title, message["name"], message["ok"], message["detail"])
    if ended.returncode != 0:
        failed += 1
        report.check(allocator, title, "the process exits with 0", False, f"exit status {ended.returncode}")
    if failed:
        print(ended.stdout[-2000:] + ended.stderr[-4000:], file=sys.stderr, flush=True)
    return found
