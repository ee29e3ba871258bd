"""Predicts the programs of `predict_programs.py`, without a GPU, and compares with what they took.

`predict_truth.jsonl` has what `predict_truth.py` measured on an H200. `python predict_compare.py [--only NAME]
[--out predicted.jsonl]`; `--programs stranger_programs` for those of that file.

`--verdicts FILE` writes what `predict_truth.py --verdict` tries on a GPU.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
TRUTH = str(HERE / "predict_truth.jsonl")
STEPS = 3
SETTINGS = {"native": "", "expandable": "expandable_segments:True"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", default=TRUTH, help="the file that predict_truth.py wrote (that of an H200)")
    parser.add_argument("--programs", default="predict_programs", help="the file of the programs (predict_programs)")
    parser.add_argument("--only", action="append", help="this program only; may be repeated")
    parser.add_argument("--out", help="write the predictions here, one object per line")
    parser.add_argument("--verdicts", help="write the predicted needs here, for predict_truth.py --verdict")
    parser.add_argument("--snapshots", help="write the snapshots into this folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return child(chosen.child, chosen.programs, chosen.snapshots)

    truth: Dict[Any, Dict[str, Any]] = {}
    for line in Path(chosen.truth).read_text().splitlines():
        row = json.loads(line)
        if "allocated" in row:
            truth[row["program"], row["mode"]] = row
    found, errors, verdicts, off = [], [], [], []
    for name in chosen.only or importlib.import_module(chosen.programs).PROGRAMS:
        command = [sys.executable, __file__, "--child", name, "--programs", chosen.programs]
        command += ["--snapshots", chosen.snapshots] if chosen.snapshots else []
        ended = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("@")]
        row = json.loads(lines[-1][1:]) if lines else {"error": ended.stderr.strip().splitlines()[-1:]}
        row["program"] = name
        found.append(row)
        if "error" in row:
            print(f"{name:30} DOES NOT RUN: {row['error']}", flush=True)
            continue
        text = f"{name:30} {row['seconds']:5.1f} s {row['megabytes']:5} MB host"
        for mode in SETTINGS:
            needs = row[mode]
            text += f" | {mode} {needs['allocated'] / 2**20:9.1f} {needs['reserved'] / 2**20:9.1f} MiB"
            verdicts.append({"program": name, "setting": mode, "bytes": needs["capped"]})
            real = truth.get((name, mode))
            if real:
                ratios = [needs[key] / real[key] - 1 for key in ("allocated", "reserved")]
                errors += [(abs(ratio), name, mode) for ratio in ratios]
                text += f" ({ratios[0]:+.2%} {ratios[1]:+.2%})"
        real = truth.get((name, "native"), {}).get("outside")
        text += f" | outside {row['outside'] / 2**20:.1f} MiB"
        if real:
            off.append(row["outside"] - real)
            text += f" ({off[-1] / 2**20:+.1f} MiB)"
        guessed = sum(each["count"] for each in row["guessed"])
        print(
            f"{text} | unmodelled {row['unmodelled_share']:.1%}, {guessed} guesses, "
            f"{len(row['assumptions'])} assumptions",
            flush=True,
        )
    if errors:
        shares = [error for error, _, _ in errors]
        worst = max(errors)
        print(f"error: median {statistics.median(shares):.2%}, worst {worst[0]:.2%} ({worst[1]}, {worst[2]})")
    if off:
        print(f"outside the allocator: {min(off) / 2**20:+.1f} to {max(off) / 2**20:+.1f} MiB")
    if chosen.out:
        Path(chosen.out).write_text("".join(json.dumps(row) + "\n" for row in found))
    if chosen.verdicts:
        Path(chosen.verdicts).write_text(json.dumps(verdicts))
    return 0


def child(name: str, programs: str, snapshots: Any) -> int:
    """Predicts one program."""
    os.environ["TQDM_DISABLE"] = "1"
    import random
    import resource

    import torch

    import warpool.predict

    random.seed(0)
    torch.manual_seed(0)
    start = time.perf_counter()
    path = f"{snapshots}/{name}.pickle" if snapshots else None
    with warpool.predict.recording(path, gpu="h200") as run:
        step = importlib.import_module(programs).PROGRAMS[name]()
        torch.cuda.synchronize()
        for _ in range(STEPS):
            step()
            torch.cuda.synchronize()
    report = run.report.to_dict()
    row: Dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    row["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for mode, settings in SETTINGS.items():
        needs = next(each for each in report["settings"] if each["settings"] == settings)
        row[mode] = {
            "allocated": needs["peak_allocated_bytes"],
            "reserved": needs["peak_reserved_bytes"],
            "capped": needs["smallest_device_bytes"] - report["context_bytes"],
        }
    row["outside"] = report["context_bytes"]
    for key in ("assumptions", "unmodelled", "unmodelled_share", "guessed", "remarks", "operators", "seconds_recorded"):
        row[key] = report[key]
    sys.stdout.flush()
    print("@" + json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
