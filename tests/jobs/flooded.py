"""Rank 0 looks for messages only after hundreds of them have arrived."""

import mpi4py

mpi4py.rc.thread_level = "funneled"  # nobody looks between two calls

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import ringdl  # noqa: E402

WORKS = 300

ringdl.init()
comm = ringdl.get_communicator()


def submit() -> list[ringdl.Work]:
    return [
        ringdl.allreduce_async(np.array([float(number)]), op=ringdl.Sum, name=f"work {number}")
        for number in range(WORKS)
    ]


works = [] if comm.rank == 0 else submit()
MPI.COMM_WORLD.Barrier()
works = works or submit()
for number, work in enumerate(works):
    assert work.wait(timeout=20)[0] == number * comm.size
print("none was lost", flush=True)
