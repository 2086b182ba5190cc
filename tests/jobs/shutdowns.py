"""shutdown(): works in flight end well, and waits for a rank that has left end with an error.

With the argument "late", rank 2 is busy when rank 1 leaves: rank 0 hears of it all the same. With
"interrupted", rank 0 is interrupted in shutdown(), goes on, and calls it again.
"""

import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import ringdl


def finish_works_in_flight() -> None:
    ringdl.init()
    rank, average = ringdl.rank(), (ringdl.size() - 1) / 2
    arrays = [np.full(1 << i, rank, np.float32) for i in range(18)]
    works = [ringdl.allreduce_async_(x, name=str(i)) for i, x in enumerate(arrays)]
    buckets = ringdl.Buckets([("w", (1 << 16,), "float32")])
    buckets.views()[0][:] = rank
    buckets.ready(0)
    if rank == 0:
        time.sleep(0.3)
    ringdl.shutdown()
    assert all(work.done() for work in works)
    assert all((x == average).all() for x in arrays)
    assert (buckets.views()[0] == average).all()
    assert not ringdl.is_initialized()


def check_refused(call: Callable[[], object]) -> None:
    begin = time.monotonic()
    try:
        call()
    except ringdl.MismatchError as error:
        said = str(error)
    else:
        raise AssertionError("nothing was wrong")
    seconds = time.monotonic() - begin
    assert seconds < 5, f"{seconds} s: {said}"
    assert "rank 1 has shut down" in said, said


def leave_one_by_one() -> None:
    ringdl.init()
    buckets = ringdl.Buckets([("w", (1000,), "float32"), ("b", (10,), "float32")])
    buckets.wait()
    x = np.ones(1 << 16, np.float32)
    if ringdl.rank() == 1:
        time.sleep(0.2)
    else:
        check_refused(lambda: ringdl.allreduce(x))
        check_refused(lambda: ringdl.allreduce(x, name="x"))
        check_refused(ringdl.barrier)
        check_refused(lambda: ringdl.broadcast(x))
        check_refused(lambda: ringdl.allgather(x))
        check_refused(buckets.wait)
    ringdl.shutdown()


def leave_while_another_is_late() -> None:
    ringdl.init()
    ringdl.barrier()
    if ringdl.rank() == 0:
        check_refused(ringdl.barrier)
    elif ringdl.rank() == 2:
        time.sleep(6)
    ringdl.shutdown()


def leave_after_an_interruption() -> None:
    ringdl.init()

    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, raise_timeout)
    x = np.full(300_000, ringdl.rank(), np.float64)
    if ringdl.rank() == 0:
        ringdl.allreduce_async_(x, name="x")
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            ringdl.shutdown()
        except TimeoutError:
            ringdl.barrier("go on")
            ringdl.shutdown()
        else:
            raise AssertionError("it was not interrupted")
    else:
        ringdl.barrier("go on")
        ringdl.allreduce_(x, name="x")
        ringdl.shutdown()
    assert (x == 1).all()  # of 3 ranks
    assert not ringdl.is_initialized()


if __name__ == "__main__":
    if sys.argv[1:2] == ["late"]:
        leave_while_another_is_late()
    elif sys.argv[1:2] == ["interrupted"]:
        leave_after_an_interruption()
    else:
        finish_works_in_flight()
        leave_one_by_one()
    sys.stdout.write("shut down well\n")
