"""Tests of `warpool.torch.gather_report` through the job's own torch.distributed: four processes with gloo on one
machine, no GPU. It needs any PyTorch with gloo; WARPOOL_ANSWERS_LIBRARY and WARPOOL_COMMAND as in test_answers.py.

usage: python torch_ranks.py      where PyTorch cannot be imported it says so, and ends with status 0
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, List, Optional

import warpool
import warpool.torch

ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("WARPOOL_COMMAND", "")
NAMES = ["verdict.limit", "verdict.limit", "train.default", "verdict.growth"]


def work(rank: int, folder: str, results: Any) -> None:
    """One rank of a job of four: the report of all, of a group, with a damaged file, and with an error of a caller."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(NAMES))
    recording = f"{folder}/recording{rank}.pickle.xz"
    found: List[Optional[str]] = []

    def keep(report: "Optional[warpool.Ranks]") -> None:
        found.append(None if report is None else json.dumps(report.to_dict()))

    keep(warpool.torch.gather_report(recording=recording))
    # The first of the group is not the first of the job.
    group = dist.new_group([1, 2, 3])
    if rank > 0:
        keep(warpool.torch.gather_report(group, recording=recording))
    keep(warpool.torch.gather_report(recording=b"\x80\x02}q\x00" if rank == 3 else recording))
    try:
        keep(warpool.torch.gather_report(recording=recording, gpu="nosuch" if rank == 2 else None))
    except warpool.OptionError as error:
        found.append(str(error))
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


class Gather(unittest.TestCase):
    def test_report_of_a_running_job(self) -> None:
        import torch.multiprocessing as multiprocessing

        with tempfile.TemporaryDirectory() as folder:
            for rank, name in enumerate(NAMES):
                shutil.copy(ROOT / f"recordings/{name}.pickle.xz", f"{folder}/recording{rank}.pickle.xz")
            results = multiprocessing.get_context("spawn").SimpleQueue()
            spawned = multiprocessing.spawn(work, (folder, results), nprocs=len(NAMES), join=False)
            found = dict(results.get() for _ in NAMES)
            while not spawned.join():
                pass
            for rank, name in enumerate(NAMES):
                shutil.copy(ROOT / f"recordings/{name}.pickle.xz", f"{folder}/rank{rank}.pickle.xz")
                os.remove(f"{folder}/recording{rank}.pickle.xz")
            done = subprocess.run(
                [COMMAND, "explain", folder, "--ranks", "--json"], stdout=subprocess.PIPE, check=True
            )
        first = [found[0][at] and json.loads(found[0][at]) for at in range(3)]
        expected = json.loads(done.stdout)
        for row in first[0]["ranks"]:
            self.assertEqual(row.pop("world"), 4)
            self.assertTrue(row.pop("host"))
        for row in expected["ranks"]:
            del row["world"], row["host"]
        self.assertEqual(first[0], expected, "the same as of the files")
        of_group = [row["name"] for row in json.loads(found[1][1])["ranks"]]
        self.assertEqual(of_group, ["rank 1", "rank 2", "rank 3"], "on the first rank of the group")
        for rank, at in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (1, 2)):
            self.assertIsNone(found[rank][at], f"rank {rank} has no report {at}")
        [damaged] = [row for row in first[1]["ranks"] if row["error"]]
        self.assertEqual(damaged["name"], "rank 3")
        [wrong] = [row for row in first[2]["ranks"] if row["error"]]
        self.assertIn("OptionError: gpu: 'nosuch' is not in the table", wrong["error"])
        self.assertIn("nosuch", found[2][3], "the rank itself is told")


if __name__ == "__main__":
    try:
        import torch.distributed
    except ImportError as error:
        print(f"PyTorch cannot be imported ({error}): gather_report was NOT tested", file=sys.stderr)
        sys.exit(0)
    if not torch.distributed.is_gloo_available():
        print("this PyTorch has no gloo: gather_report was NOT tested", file=sys.stderr)
        sys.exit(0)
    unittest.main()
