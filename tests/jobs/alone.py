"""Without a launcher: everything works on one rank, and MPI stays unloaded.

With the argument "--without-mpi4py" not even mpi4py can be imported.
"""

import sys

if "--without-mpi4py" in sys.argv:
    sys.modules["mpi4py"] = None  # importing it raises ImportError

import numpy as np

import ringdl


def main() -> None:
    ringdl.init()
    assert (ringdl.rank(), ringdl.size()) == (0, 1)
    assert (ringdl.local_rank(), ringdl.local_size()) == (0, 1)
    assert (ringdl.host_rank(), ringdl.host_count()) == (0, 1)
    x = np.arange(5, dtype=np.float32)
    for op in (ringdl.Sum, ringdl.Average, ringdl.Min, ringdl.Max, ringdl.Product):
        assert (ringdl.allreduce(x, op) == x).all()
    assert (ringdl.allreduce_async_(x.copy()).wait() == x).all()
    assert (ringdl.allgather(x) == x).all()
    assert (ringdl.broadcast(x) == x).all()
    assert ringdl.broadcast_object({"a": 1}) == {"a": 1}
    ringdl.barrier()
    buckets = ringdl.Buckets([("w", (3, 4), "float32"), ("b", (4,), "bfloat16")])
    for _ in range(3):
        for view in buckets.views():
            view[...] = 2
        buckets.ready(1)
        assert buckets.wait() == [False, True]
        assert [float(view.max()) for view in buckets.views()] == [0, 2]
    ringdl.shutdown()
    ringdl.init()
    assert (ringdl.allreduce(x) == x).all()

    assert "mpi4py.MPI" not in sys.modules
    with open("/proc/self/maps") as maps:
        assert "libmpi" not in maps.read()
    print("everything works alone")


if __name__ == "__main__":
    main()
