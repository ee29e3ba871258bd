#!/usr/bin/env python3
"""The report over many ranks, with the recordings read by a Ray cluster: on_ray.py RECORDING...

Each recording is summarized by a task, where the cluster has room; only some ten kilobytes of it travel. Files must be
readable by the workers (a shared file system). The report is that of `warpool explain RECORDING...`.
"""

import sys

import ray

import warpool


@ray.remote(num_cpus=1, memory=2 << 30)
def summarized(file: str) -> warpool.Part:
    # A damaged file is a row of the report, not the end of the job.
    return warpool.summarize(file, errors=False)


def report(files: "list[str]") -> warpool.Ranks:
    return warpool.merge(*ray.get([summarized.remote(file) for file in files]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ray.init(log_to_driver=False)
    print(report(sys.argv[1:]))
