#!/usr/bin/env python3
"""What publishing a page costs an allocation: instructions per pair of malloc and free of a thread, counted by
callgrind without a page, with one, and with one that a reader asks for all the time. The first two must be equal.

    instructions.py LIBRARY

LIBRARY is libwarpool_torch.so; the process runs on the simulated GPU. Needs valgrind and a C compiler; not part of
.ci/run. Exit status: 0 equal, 1 different.
"""

import glob
import os
import re
import struct
import subprocess
import sys
import tempfile
import time

PROGRAM = r"""
#include <stdlib.h>
#include "warpool_torch.h"

int main(int argc, char **argv) {
  long pairs = atol(argv[1]);
  void *kept = warpool_malloc(1 << 20, 0, NULL);
  for (long pair = 0; pair < pairs; pair++) {
    void *block = warpool_malloc(4096 + 512 * (pair % 7), 0, NULL);
    if (!block) return 1;
    warpool_free(block, 0, 0, NULL);
  }
  warpool_free(kept, 0, 0, NULL);
  return argc != 2;
}
"""


def instructions(program, folder, pairs, mode, backend):
    """Of the first thread, and of the one that publishes."""
    out = os.path.join(folder, "out")
    for left in glob.glob(out + "*"):
        os.remove(left)
    environment = dict(os.environ, WARPOOL_DRIVER="sim", WARPOOL_CONF=f"backend:{backend}",
                       WARPOOL_PUBLISH=str(mode != "no page"), WARPOOL_PAGES=os.path.join(folder, "pages"))
    callgrind = ["valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={out}"]
    process = subprocess.Popen([*callgrind, program, str(pairs)], env=environment, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if mode == "a page that is read":
            ask(os.path.join(folder, "pages"))
        time.sleep(0.05)
    if process.returncode != 0:
        sys.exit(f"the program ended with status {process.returncode}")
    return [counted(f"{out}-{thread:02}") for thread in (1, 2)]


def ask(pages):
    """Does what a reader does: writes the time into word 16 of each page."""
    for page in glob.glob(os.path.join(pages, "*.page")):
        with open(page, "r+b") as file:
            if os.fstat(file.fileno()).st_size > 0:
                os.pwrite(file.fileno(), struct.pack("=Q", int(time.time() * 1e6)), 16 * 8)


def counted(path):
    if not os.path.exists(path):
        return 0
    with open(path, encoding="utf-8") as file:
        return int(re.search(r"^(?:totals|summary): (\d+)", file.read(), re.M)[1])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    library = os.path.abspath(sys.argv[1])
    include = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../include")
    different = False
    with tempfile.TemporaryDirectory() as folder:
        program, source = os.path.join(folder, "pairs"), os.path.join(folder, "pairs.c")
        with open(source, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        rpath = f"-Wl,-rpath,{os.path.dirname(library)}"
        subprocess.run(["cc", "-O1", f"-I{include}", source, library, rpath, "-o", program], check=True)
        for backend in ["native", "paged"]:
            few, many = 7_000, 70_000
            per_pair, of_thread = {}, 0
            for mode in ["no page", "a page", "a page that is read"]:
                short, long = (instructions(program, folder, pairs, mode, backend) for pairs in (few, many))
                per_pair[mode], of_thread = (long[0] - short[0]) / (many - few), long[1]
            figures = ", ".join(f"{mode} {count:.3f}" for mode, count in per_pair.items())
            print(f"backend:{backend}, instructions per pair: {figures} (and {of_thread:,} in the page's thread)")
            different |= abs(per_pair["a page"] - per_pair["no page"]) > 0.05
            # A reading costs the next allocation some: it waits for a lock, and notes its highest values again.
            different |= abs(per_pair["a page that is read"] - per_pair["no page"]) > 1
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
