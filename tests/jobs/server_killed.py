"""Rank 1 is killed in the middle of training by a parameter server; the others go on without it.

The argument: how many ranks have shards. One that shares no memory takes its shard with it.
"""

import os
import signal
import sys
import time

import numpy as np

import ringdl
import ringdl.numpy
from ringdl.policies import ParameterServer
from tests.ranks.support import until


def main() -> None:
    comm = ringdl.init()
    assert comm.size == 3
    others = comm.group([0, 2])
    optimizer = ringdl.numpy.DistributedOptimizer(
        ringdl.numpy.SGD(1.0), policy=ParameterServer(int(sys.argv[1]), staleness=2)
    )
    count = 300_000
    its = [np.zeros(count, np.float32)]
    for step in range(30):
        if comm.rank == 1 and step == 10:
            print(f"ends at {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step(its, [-np.ones(count, np.float32)])
    assert others is not None
    others.barrier()
    optimizer.step(its, [np.zeros(count, np.float32)])
    assert until(lambda: bool((its[0] == its[0][0]).all()))
    assert (its[0] == 70).all(), its[0]  # 30 of each that is left, and 10 of rank 1
    others.barrier()  # one may have the other's shard
    print("has gone on", flush=True)


if __name__ == "__main__":
    main()
