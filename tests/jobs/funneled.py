"""An MPI that was asked for less than MPI_THREAD_MULTIPLE: one thread may call, and all works."""

import sys
import threading

import mpi4py
import numpy as np

mpi4py.rc.thread_level = "funneled"

import ringdl  # noqa: E402 - MPI is told first


def main() -> None:
    ringdl.init()
    from mpi4py import MPI

    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE, "this MPI gives more than it was asked for"
    assert not any("ringdl" in thread.name for thread in threading.enumerate())
    x = np.full(1 << 18, ringdl.rank(), np.float32)
    average = (ringdl.size() - 1) / 2
    errors: list[str] = []

    def call() -> None:
        try:
            ringdl.allreduce(x)
        except ringdl.UsageError as error:
            errors.append(str(error))

    for _ in range(3):
        assert (ringdl.allreduce(x) == average).all()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    small = np.ones(3, np.float32)
    polls = []
    for _ in range(100):
        before = ringdl.stats()["polls"]
        for _ in range(100):
            ringdl.allreduce_(small)
        polls.append(ringdl.stats()["polls"] - before)
    assert min(polls) < 50, polls
    assert sum(polls) > 0
    buckets = ringdl.Buckets([("w", x.shape, "float32"), ("b", (3,), "float64")])
    for view in buckets.views():
        view[...] = ringdl.rank()
    buckets.ready(1)
    assert buckets.wait() == [False, True]
    assert (buckets.views()[1] == average).all()
    work = ringdl.allreduce_async(x)
    assert (work.wait() == average).all()
    sys.stdout.write(f"{len(errors)} refused: {errors[0]}\n")


if __name__ == "__main__":
    main()
