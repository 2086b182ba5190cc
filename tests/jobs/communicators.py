"""init() with parts of MPI's world: each half averages for itself, and both can be given back.

With the argument "raise", rank 1 ends by an exception while its own half waits for it, after the
communicator that init() was given has been freed.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

import ringdl


def halves(world: MPI.Intracomm) -> None:
    number = world.Get_rank() % 2
    half = world.Split(number, key=world.Get_rank())
    ringdl.init(half)
    ranks = list(range(number, world.Get_size(), 2))
    assert (ringdl.rank(), ringdl.size()) == (half.Get_rank(), len(ranks))
    for step in range(3 + number):  # the halves are independent of each other
        total = ringdl.allreduce(np.full(100, world.Get_rank() + step), op=ringdl.Sum)
        assert (total == sum(ranks) + step * len(ranks)).all()
    buckets = ringdl.Buckets([("w", (10 + number,), "float32")])
    buckets.views()[0][:] = world.Get_rank()
    buckets.ready(0)
    assert buckets.wait() == [True]
    assert np.allclose(buckets.views()[0], np.mean(ranks))
    ringdl.shutdown()


def between(world: MPI.Intracomm) -> None:
    number = world.Get_rank() % 2
    half = world.Split(number)
    bridge = half.Create_intercomm(0, world, 1 - number)
    try:
        ringdl.init(bridge)
    except ringdl.UsageError as error:
        sys.stdout.write(f"refused: {error}\n")
    else:
        raise AssertionError("an intercommunicator was taken")
    assert not ringdl.is_initialized()


def raise_after_free(world: MPI.Intracomm) -> None:
    ringdl.init(MPI.COMM_SELF)
    ringdl.shutdown()
    copy = world.Dup()
    ringdl.init(copy)
    copy.Free()  # ringdl has made a duplicate
    if ringdl.rank() == 1:
        time.sleep(0.3)
        print(f"ends at {time.monotonic()}", flush=True)
        raise ValueError("the data are gone")
    ringdl.barrier()


def main() -> None:
    halves(MPI.COMM_WORLD)
    between(MPI.COMM_WORLD)
    ringdl.init()
    assert ringdl.size() == MPI.COMM_WORLD.Get_size()
    assert ringdl.allreduce(np.ones(3), op=ringdl.Sum)[0] == ringdl.size()
    sys.stdout.write("the halves are right\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["raise"]:
        raise_after_free(MPI.COMM_WORLD)
    else:
        main()
