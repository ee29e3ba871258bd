#!/usr/bin/env python3
"""What publishing a page costs an allocation: instructions per pair of malloc and free of a thread, counted by
callgrind with `WARPOOL_PUBLISH=True` and `False`. They must be equal.

    instructions.py LIBRARY

LIBRARY is libwarpool_torch.so. The process runs on the simulated GPU, with a page that a reader asks for, so that the
thread of the page works meanwhile; its instructions are counted apart. Needs valgrind and a C compiler; not part of
.ci/run. Exit status: 0 equal, 1 different.
"""

import glob
import os
import re
import subprocess
import sys
import tempfile

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


def instructions(program, folder, pairs, publish, backend):
    """Of the first thread."""
    out = os.path.join(folder, "out")
    for left in glob.glob(out + "*"):
        os.remove(left)
    environment = dict(os.environ, WARPOOL_DRIVER="sim", WARPOOL_PUBLISH=publish, WARPOOL_CONF=f"backend:{backend}",
                       WARPOOL_PAGES=os.path.join(folder, "pages"))
    callgrind = ["valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={out}"]
    subprocess.run([*callgrind, program, str(pairs)], env=environment, check=True, capture_output=True)
    with open(out + "-01", encoding="utf-8") as file:
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
            per_pair = {}
            for publish in ["False", "True"]:
                counted = [instructions(program, folder, pairs, publish, backend) for pairs in (few, many)]
                per_pair[publish] = (counted[1] - counted[0]) / (many - few)
            print(f"backend:{backend}: {per_pair['False']:.3f} instructions per pair without a page, "
                  f"{per_pair['True']:.3f} with one")
            # A spin lock that the other thread holds costs some; of 63,000 pairs, that is at most a few.
            different |= abs(per_pair["True"] - per_pair["False"]) > 0.05
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
