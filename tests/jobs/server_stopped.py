"""Rank 0, the only one with a shard, is stopped for a while: others wait, and keep nothing."""

import os
import signal
import threading
import time

import numpy as np

import ringdl
import ringdl.numpy
from ringdl import policies
from ringdl.policies import ParameterServer

STOPPED = 3.0
COUNT = 2_000_000
STEPS = 40


def resident() -> int:
    """This process' memory, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    comm = ringdl.init()
    server = int(comm.allgather(np.array([os.getpid()]))[0])
    optimizer = ringdl.numpy.DistributedOptimizer(ringdl.numpy.SGD(1.0), policy=ParameterServer(1))
    its, gradient = [np.zeros(COUNT, np.float32)], [-np.ones(COUNT, np.float32)]
    for _ in range(3):
        optimizer.step(its, gradient)
    comm.barrier()
    before = resident()
    if comm.rank == comm.size - 1:
        threading.Timer(STOPPED, os.kill, (server, signal.SIGCONT)).start()
        os.kill(server, signal.SIGSTOP)
    longest, most = 0.0, 0
    stop = threading.Event()

    def sample() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, resident())

    samples = threading.Thread(target=sample)
    samples.start()
    for _ in range(STEPS):
        begin = time.monotonic()
        optimizer.step(its, gradient)
        longest = max(longest, time.monotonic() - begin)
    stop.set()
    samples.join()
    policies.synchronize(optimizer)
    assert (its[0] == comm.size * (STEPS + 3)).all(), its[0]
    grown = (most - before) / 2**20
    print(f"rank {comm.rank}: waited {longest:.1f} s, has {grown:.1f} MiB more", flush=True)
    assert longest > STOPPED - 1 or comm.rank == 0, longest
    assert grown < 8, f"{grown} MiB"  # pushes are of 8 MB each


if __name__ == "__main__":
    main()
