"""Tests of several processes on one GPU, on the simulated one. Each process has a simulation of its own, so that they
do not see each other's memory, but what is guaranteed they do. WARPOOL_LIBRARY is the path of the shared object."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
GUARANTEED = "backend:paged,share:True,share_guaranteed:1GiB"

# Says when it has joined, and stays until its input ends.
STAYS = "from warpool import _native; _native.start(); print('ready', flush=True); input()"

# Takes most of the card, and says what came of it.
TAKES = """
from memory import malloc
import warpool
from warpool import _native
try:
    malloc(1 << 30)
    print("allocated")
except warpool.Error as error:
    print(error)
"""


class Sharing(unittest.TestCase):
    def setUp(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)

    def start(self, program: str, conf: str) -> "subprocess.Popen[str]":
        pages = str(Path(self._folder.name) / "pages")
        environment = {**os.environ, "WARPOOL_DRIVER": "sim", "WARPOOL_SIM": "memory_mb:2048", "WARPOOL_PAGES": pages}
        environment.update(WARPOOL_CONF=conf, PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def stay(self, conf: str) -> "subprocess.Popen[str]":
        process = self.start(STAYS, conf)
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), "ready\n")
        self.addCleanup(process.communicate, "\n")
        return process

    def take(self, conf: str) -> "tuple[str, str]":
        out, warnings = self.start(TAKES, conf).communicate(timeout=60)
        return out, warnings

    def test_what_another_process_is_guaranteed_is_not_taken(self) -> None:
        other = self.stay(GUARANTEED)
        out, _ = self.take("backend:paged,share:True")
        self.assertIn("other processes that share the GPU, or guaranteed to them", out)
        self.assertEqual(self.take("backend:paged")[0], "allocated\n", "the control: without sharing it is there")
        # It died: nothing of it is left.
        other.kill()
        other.wait()
        self.assertEqual(self.take("backend:paged,share:True")[0], "allocated\n")

    def test_a_limit_holds(self) -> None:
        out, _ = self.take("backend:paged,share:True,share_limit:512MiB")
        self.assertIn("512.00 MiB allowed", out)

    def test_what_cannot_be_shared_is_used_alone_with_a_warning(self) -> None:
        self.stay(GUARANTEED)
        out, warnings = self.take("backend:paged,share:True,share_guaranteed:1500MiB")
        self.assertIn("share:True has no effect: with this process, ", warnings)
        self.assertEqual(out, "allocated\n")

    def test_a_folder_that_others_can_access_is_not_used(self) -> None:
        pages = Path(self._folder.name) / "pages"
        pages.mkdir(mode=0o755)
        pages.chmod(0o755)
        out, warnings = self.take("backend:paged,share:True")
        self.assertIn("share:True has no effect: ", warnings)
        self.assertIn("other users can access it (chmod 700)", warnings)
        self.assertEqual(out, "allocated\n")


if __name__ == "__main__":
    unittest.main()
