"""A script with init() at its top, which multiprocessing imports in each child.

The fork server imports it as a module, too, as it imports the script itself from Python 3.14 on.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable

import numpy as np

import ringdl

communicator = ringdl.init()
IS_RANK_0 = ringdl.rank() == 0  # scripts ask at their top


def is_refused(call: Callable[[], object], parent: int) -> bool:
    try:
        call()
    except ringdl.UsageError as error:
        return f"called in a child process of rank {ringdl.rank()} (process {parent})" in str(error)
    return False


def answer(parent: int) -> tuple[object, ...]:
    """What a worker of a DataLoader gets."""
    place = (ringdl.rank(), ringdl.size(), ringdl.local_rank(), ringdl.local_size())
    calls = {
        "barrier": ringdl.barrier,
        "allreduce": lambda: ringdl.allreduce(np.ones(3)),
        "allreduce_": lambda: ringdl.allreduce_(np.ones(3)),
        "object": lambda: ringdl.broadcast_object("x"),
        "method": lambda: communicator.allgather(np.ones(3)),
        "buckets": lambda: ringdl.Buckets([("w", (3,), "float32")]),
        "split": lambda: communicator.split(0),
    }
    accepted = [name for name, call in calls.items() if not is_refused(call, parent)]
    hosts = (ringdl.host_rank(), ringdl.host_count(), communicator.rank)
    again = ringdl.init() is communicator
    ringdl.shutdown()
    return place, hosts, IS_RANK_0, again, accepted, "mpi4py.MPI" in sys.modules


def main() -> None:
    rank, size = ringdl.rank(), ringdl.size()
    multiprocessing.set_forkserver_preload(["imported"])
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answered = pool.apply(answer, [os.getpid()])
        expected = ((rank, size, rank, size), (0, 1, rank), rank == 0, True, [], False)
        assert answered == expected, f"{method}: {answered}, not {expected}"
    total = ringdl.allreduce(np.ones(3), op=ringdl.Sum)
    sys.stdout.write(f"children answer, ranks add up to {total.tolist()}\n")


if __name__ == "__main__":
    main()
