"""Ctrl-C during a wait: it is raised soon, and the work stays as it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

import ringdl
from ringdl import Communicator
from ringdl._work import Work
from tests.ranks.support import needs


def interrupted(wait: Callable[[], object]) -> float:
    """Press Ctrl-C a little after the wait has begun; seconds from there to KeyboardInterrupt."""
    pressed = 0.0

    def press() -> None:
        nonlocal pressed
        pressed = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, press)
    timer.start()
    try:
        wait()
    except KeyboardInterrupt:
        return time.monotonic() - pressed
    finally:
        timer.join()
    raise AssertionError("the wait was not interrupted")


@needs(ranks=2, processes=True, seconds=True)
def check_every_wait_is_interrupted(comm: Communicator) -> None:
    """Rank 0 is interrupted; only after that the last rank comes, and all ends well."""
    x = np.full(50_000, comm.rank + 1, np.float32)
    blocking: dict[str, tuple[Callable[[], object], Callable[[], Work]]] = {
        "allreduce": (
            lambda: comm.allreduce(x, ringdl.Sum, "interrupted allreduce"),
            lambda: comm.allreduce_async(x, ringdl.Sum, "interrupted allreduce"),
        ),
        "allgather": (
            lambda: comm.allgather(x, "interrupted allgather"),
            lambda: comm.allgather_async(x, "interrupted allgather"),
        ),
        "broadcast": (
            lambda: comm.broadcast(x, 0, "interrupted broadcast"),
            lambda: comm.broadcast_async(x, 0, "interrupted broadcast"),
        ),
        "barrier": (
            lambda: comm.barrier("interrupted barrier"),
            lambda: comm.barrier_async("interrupted barrier"),
        ),
    }
    for kind, (call, call_async) in blocking.items():
        if comm.rank == 0:
            seconds = interrupted(call)
            assert seconds < 2, f"{kind}: {seconds} s"
            comm.barrier("go on")
        elif comm.rank == comm.size - 1:
            comm.barrier("go on")
            call()
        else:  # has arrived, too
            work = call_async()
            comm.barrier("go on")
            work.wait()


@needs(ranks=2, processes=True, seconds=True)
def check_an_interrupted_work_can_be_waited_for_again(comm: Communicator) -> None:
    buckets = ringdl.Buckets([("w", (50_000,), "float32")], op=ringdl.Sum, communicator=comm)
    (view,) = buckets.views()
    total = sum(range(1, comm.size + 1))
    is_last = comm.rank == comm.size - 1

    if is_last:
        comm.barrier("go on")
    x = np.full(50_000, comm.rank + 1, np.float32)
    work = comm.allreduce_async_(x, ringdl.Sum, "interrupted")
    if comm.rank == 0:
        assert interrupted(work.wait) < 2
        assert not work.done()
    if not is_last:
        comm.barrier("go on")
    assert work.wait() is x
    assert (x == total).all()

    if is_last:
        comm.barrier("go on")
    view[...] = comm.rank + 1
    buckets.ready(0)
    if comm.rank == 0:
        assert interrupted(buckets.wait) < 2
    if not is_last:
        comm.barrier("go on")
    assert buckets.wait() == [True]
    assert (view == total).all()
