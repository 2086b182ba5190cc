"""Arrays and buckets of ranks that may share little memory, or none.

Arguments: MiB that files may have, and so what the last rank shares.
"""

import resource
import sys

from mpi4py import MPI

import ringdl

if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

ringdl.init()
comm = ringdl.get_communicator()
for count in (1 << 20, 30 << 20):  # of the larger ones there is no room
    array = ringdl.empty(count)
    array[...] = 1
    assert (ringdl.allreduce_(array, ringdl.Sum) == comm.size).all()
    assert (ringdl.allgather(array[:100_000]) == comm.size).all()
    del array
specs = [("large", (30 << 20,), "float32"), ("small", (1000,), "float32")]
buckets = ringdl.Buckets(specs)
for view in buckets.views():
    view[...] = comm.rank
for i in range(2):
    buckets.ready(i)
assert buckets.wait() == [True, True]
assert all((view == (comm.size - 1) / 2).all() for view in buckets.views())
hosts = len(set(comm.memory_hosts()))
sys.stdout.write(f"rank {comm.rank}: {hosts} hosts\n")  # in one write
