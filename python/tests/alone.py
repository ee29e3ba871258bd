"""`@alone`: a test in a process of its own, because Warpool and PyTorch's allocator are there once per process."""

import functools
import os
import sys
import traceback
from typing import Any, Callable


def alone(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """The test runs in a child that was forked before anything was loaded; it fails here if the child fails or dies."""

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
        self.assertEqual(code, 0, "the child failed, see above" if code > 0 else f"the child died of signal {-code}")

    return run
