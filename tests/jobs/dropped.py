"""Arrays, works, buckets and communicators that are dropped while works are in flight.

Whatever was dropped is overwritten at once by new arrays, so memory that the engine still used
would be seen: in wrong results here, or in wrong numbers where nobody should write.
"""

import gc
import sys

import numpy as np

import ringdl

LENGTHS = (1, 700, 40_000, 300_000)


def overwrite() -> list[np.ndarray]:
    """New arrays of the sizes that have just become free, full of a number to be found again."""
    gc.collect()
    return [np.full(length, 77.0, np.float32) for length in LENGTHS for _ in range(4)]


def check_untouched(arrays: list[np.ndarray]) -> None:
    assert all((array == 77).all() for array in arrays), "somebody wrote into a new array"


def arrays_and_works(rank: int, size: int) -> None:
    """The last rank comes late: the others' arrays are gone from Python by then."""
    for number in range(40):
        length = LENGTHS[number % len(LENGTHS)]
        late = rank == size - 1
        if late:
            ringdl.barrier()
        work = ringdl.allreduce_async_(np.full(length, rank + 1, np.float32), ringdl.Sum, "w")
        if number % 2:  # the work stays, the array goes
            new = overwrite()
        else:  # both go
            del work
            new = overwrite()
            work = None
        if not late:
            ringdl.barrier()
        if work is not None:
            assert (work.wait() == size * (size + 1) / 2).all()
        ringdl.barrier("all")
        check_untouched(new)


def buckets(rank: int, size: int) -> None:
    """Views keep their memory, whoever drops the buckets."""
    for number in range(20):
        made = ringdl.Buckets([("w", (300_000,), "float32"), ("b", (7,), "float32")], op=ringdl.Sum)
        views = made.views()
        for index, view in enumerate(views):
            view[...] = rank + 1
            made.ready(index)
        if number % 2:
            made.wait()
            del made
            new = overwrite()
            assert all((view == size * (size + 1) / 2).all() for view in views)
        else:  # in flight: its round fails on the ranks that wait, or has ended before
            del views, made
            new = overwrite()
        ringdl.barrier()
        check_untouched(new)


def communicators(rank: int, size: int) -> None:
    """Works outlive the name of their communicator."""
    for length in LENGTHS:
        communicator = ringdl.get_communicator()
        array = np.full(length, rank + 1, np.float32)
        work = communicator.allreduce_async_(array, ringdl.Sum)
        dropped = communicator.allreduce_async_(np.ones(length, np.float32), ringdl.Sum, "dropped")
        del communicator, dropped
        ringdl.shutdown()  # waits for works in flight, also those that nobody has any more
        new = overwrite()
        assert (work.wait() == size * (size + 1) / 2).all()
        assert work.wait() is array
        ringdl.init()
        ringdl.barrier()
        check_untouched(new)


def main() -> None:
    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    arrays_and_works(rank, size)
    buckets(rank, size)
    communicators(rank, size)
    sys.stdout.write("memory stayed valid\n")


if __name__ == "__main__":
    main()
