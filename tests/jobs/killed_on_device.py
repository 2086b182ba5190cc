"""Rank 1 is killed while the others reduce arrays on devices with it; then they go on.

    killed_on_device.py direct | staged | nccl

With "nccl", the others have made NCCL's call already, which waits for rank 1 on their devices.
"""

import ctypes
import os
import signal
import sys
import time

import numpy as np

import ringdl
from ringdl import _cuda
from tests.ranks._devices import InStream, on_device, pretended
from tests.ranks.support import expect


def stuck_stream() -> int:
    """One in which something is queued that does not end."""
    make = pretended("stream")
    make.restype = ctypes.c_size_t
    stream = make(False)
    pretended("block")(ctypes.c_void_p(stream))
    return int(stream)


def main(way: str) -> None:
    comm = ringdl.init()
    device = comm.local_device or 0
    others = comm.group([0, 2])
    algorithm = "nccl" if way == "nccl" else None

    def array() -> _cuda.Array:
        return on_device(np.full(300_000, comm.rank + 1, np.float32), device)

    assert (comm.allreduce(array(), ringdl.Sum, algorithm=algorithm).numpy() == 6).all()
    buckets = ringdl.Buckets([("a", (1000,), "float32")], communicator=comm, device=device)
    buckets.ready(0)
    buckets.wait()
    comm.barrier()
    if comm.rank == 1:
        stuck = InStream(array(), stuck_stream())
        comm.allreduce_async_(stuck, ringdl.Sum, "awaited", algorithm=algorithm)
        time.sleep(0.5)
        print(f"ends at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    buckets.ready(0)
    for wait in (
        comm.allreduce_async_(array(), ringdl.Sum, "awaited", algorithm=algorithm).wait,
        buckets.wait,
    ):
        with expect(ringdl.RankFailedError, "rank 1"):
            wait()
    assert others is not None
    assert (others.allreduce(array(), ringdl.Sum, algorithm=algorithm).numpy() == 4).all()
    print("has gone on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
