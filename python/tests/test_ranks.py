"""Tests of `warpool.summarize`, `merge` and `explain_ranks`, and of the examples on Slurm and Ray. WARPOOL_COMMAND is
the command, whose answers must be the same. Ray's example runs where `ray` is installed, or WARPOOL_RAY_PYTHON has
it."""

import importlib.util
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Dict, List

import warpool

ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("WARPOOL_COMMAND", "")
RANKS = {"rank0": "verdict.limit", "rank2": "verdict.limit", "rank10": "verdict.growth", "rank3": "train.default"}


class Many(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name) / "job"
        cls.folder.mkdir()
        for rank, name in RANKS.items():
            shutil.copy(ROOT / f"recordings/{name}.pickle.xz", cls.folder / f"{rank}.pickle.xz")
        (cls.folder / "rank4.pickle").write_bytes(b"\x80\x02}q\x00")

    def files(self) -> List[Path]:
        return sorted(self.folder.iterdir())

    def command(self, *arguments: object, json_too: bool = True) -> str:
        more = ["--json"] if json_too else []
        done = subprocess.run([COMMAND, *map(str, arguments), *more], stdout=subprocess.PIPE, check=False, text=True)
        self.assertEqual(done.returncode, 2, "one recording is damaged")
        return done.stdout

    def expected(self) -> Dict[str, Any]:
        found: Dict[str, Any] = json.loads(self.command("explain", self.folder, "--ranks"))
        return found

    def test_report_is_that_of_the_command(self) -> None:
        expected = self.expected()
        for found in (warpool.explain_ranks(self.folder), warpool.explain_ranks(self.files(), jobs=1)):
            self.assertEqual(found.to_dict(), expected)
            self.assertEqual(found.headline, expected["headline"])
        self.assertEqual([row.name for row in found.ranks], ["rank 0", "rank 2", "rank 3", "rank 4", "rank 10"])
        self.assertEqual(found.limiting[-1], "rank 3")
        self.assertIn("rank 10 differs from rank 0", str(found))
        self.assertIn("<table>", found._repr_html_())

    def test_parts_merge_in_any_order(self) -> None:
        expected = self.expected()
        parts: List[Any] = [warpool.summarize(file, errors=False) for file in self.files()]
        part_file = parts[0].save(self.folder.parent / "part.json")
        parts += [parts[2], part_file, pickle.loads(pickle.dumps(parts[3])), parts[1].to_json().encode()]
        for seed in range(5):
            random.Random(seed).shuffle(parts)
            self.assertEqual(warpool.merge(*parts).to_dict(), expected)

    def test_identity_and_errors(self) -> None:
        content = (ROOT / "recordings/verdict.limit.pickle.xz").read_bytes()
        part = warpool.summarize(content, rank=7, world=64, host="gpu3", file="seven")
        row = part.ranks[0]
        self.assertEqual((row.file, row.rank, row.world, row.host), ("seven", 7, 64, "gpu3"))
        self.assertEqual(warpool.merge(part).ranks[0].name, "rank 7")
        with self.assertRaises(warpool.InputError):
            warpool.summarize(self.folder / "rank4.pickle")
        with self.assertRaises(FileNotFoundError):
            warpool.summarize("missing.pickle")
        missing = warpool.summarize("missing.pickle", errors=False).ranks[0]
        self.assertIn("No such file", missing.error)
        with self.assertRaisesRegex(warpool.InputError, "is not a part"):
            warpool.merge(content)
        with self.assertRaisesRegex(warpool.OptionError, "is not in the table"):
            warpool.explain_ranks([content], gpu="nosuch")

    def test_slurm_array(self) -> None:
        """The script as Slurm runs it: once for each task, with Slurm's variables. No Slurm is needed for that."""
        folder = self.folder.parent
        (folder / "files.txt").write_text("".join(f"{file}\n" for file in self.files()))
        expected = self.command("explain", self.folder, json_too=False)
        for tasks in (range(0, 2), range(1, 8)):
            parts = folder / f"parts{len(tasks)}"
            statuses = []
            for task in tasks:
                environment = {
                    **os.environ,
                    "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}",
                    "SLURM_ARRAY_TASK_ID": str(task),
                    "SLURM_ARRAY_TASK_MIN": str(tasks[0]),
                    "SLURM_ARRAY_TASK_COUNT": str(len(tasks)),
                    "SLURM_CPUS_PER_TASK": "1",
                }
                script = [str(ROOT / "examples/ranks/slurm_array.sh"), str(folder / "files.txt"), str(parts)]
                done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
                self.assertIn(done.returncode, (0, 2), done.stderr)
                statuses.append(done.returncode)
            self.assertEqual(statuses.count(2), 1, "the task with the damaged recording")
            self.assertEqual(len(list(parts.iterdir())), min(len(tasks), len(self.files())))
            self.assertEqual(self.command("merge", parts, json_too=False), expected)

    def test_ray(self) -> None:
        python = os.environ.get("WARPOOL_RAY_PYTHON") or sys.executable
        if python == sys.executable and importlib.util.find_spec("ray") is None:
            message = "ray is not installed (pip install ray, or WARPOOL_RAY_PYTHON): its example was NOT run"
            print(message, file=sys.stderr)
            self.skipTest(message)
        example = [python, str(ROOT / "examples/ranks/on_ray.py"), *map(str, self.files())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(example, env=environment, capture_output=True, text=True, check=False, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        expected = self.expected()
        self.assertEqual(done.stdout.strip().splitlines(), [expected["headline"], *expected["sentences"]])


if __name__ == "__main__":
    unittest.main()
