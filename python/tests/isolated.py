"""`@isolated`: runs a test in its own process, since a process has one Warpool and one PyTorch allocator."""

import functools
import os
import sys
import traceback
from typing import Any, Callable


def isolated(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Runs the test in a forked child, before anything is loaded; fails if the child fails or is killed."""

    @functools.wraps(test)
    def run(self: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                test(self)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        message = "the child failed, see above" if code > 0 else f"the child was killed by signal {-code}"
        self.assertEqual(code, 0, message)

    return run
