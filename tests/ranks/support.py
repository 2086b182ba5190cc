"""What the checks share: which sizes they need, expected errors, equal bits on all ranks."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import ringdl
from ringdl import Communicator

Check = TypeVar("Check", bound=Callable[..., None])


def needs(
    *, ranks: int = 1, processes: bool = False, seconds: bool = False, mpi: bool = False
) -> Callable[[Check], Check]:
    """Say what a check needs, else it is skipped.

    Args:
        ranks: so many at least.
        processes: ranks that are processes, not threads.
        seconds: time, as it has to wait for what takes long; only run where that is asked for.
        mpi: ranks that are MPI's.
    """

    def mark(check: Check) -> Check:
        vars(check).update(ranks=ranks, processes=processes, seconds=seconds, mpi=mpi)
        return check

    return mark


@contextmanager
def expect(error: type[Exception], *texts: str, within: float = 30.0) -> Iterator[None]:
    """The block raises `error` with all `texts` in its message, in less than `within` seconds."""
    begin = time.monotonic()
    try:
        yield
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"no {error.__name__}")
    seconds = time.monotonic() - begin
    assert seconds < within, f"{error.__name__} only after {seconds:.1f} s: {message}"
    for text in texts:
        assert text in message, f"{text!r} is not in {message!r}"


def bits(*arrays: Any) -> bytes:
    """A digest of the arrays' bits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def assert_same_bits(comm: Communicator, *arrays: Any) -> None:
    """All ranks hold the same bits."""
    digests = comm.allgather(np.frombuffer(bits(*arrays), np.uint8)[None].copy())
    assert (digests == digests[0]).all(), "ranks hold other bits"


@contextmanager
def segments(comm: Communicator, segment_bytes: int) -> Iterator[None]:
    """Works of the block travel in segments of so many bytes. All ranks do the same."""
    comm._engine.set_segment_bytes(segment_bytes)
    try:
        yield
    finally:
        comm._engine.set_segment_bytes(256 << 10)


def expect_no_growth(
    comm: Communicator, use: Callable[[int], None], warm: int, times: int, most_bytes: int
) -> None:
    """After `use(warm)`, `use(times)` takes less than `most_bytes` more memory on each rank.

    An MPI's own pools grow for the first thousands of messages: `warm` lets them.
    """

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    use(warm)
    before = resident_bytes()
    use(times)
    comm.barrier()
    more = np.array([resident_bytes() - before])
    grown = int(comm.allreduce(more, ringdl.Max)[0])
    assert grown < most_bytes, f"{grown / 2**20:.2f} MiB more"


LARGE = 20_000
"""Elements of 4 bytes: beyond what recursive doubling takes."""


def shares_memory(comm: Communicator) -> bool:
    """Whether the ranks share memory. Collective."""
    try:
        comm.allreduce(np.zeros(LARGE, np.float32), algorithm="direct")
    except ringdl.UsageError:
        return False
    return True


def until(claim: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Sleep until the claim holds; whether it came to hold in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if claim():
            return True
        time.sleep(0.002)
    return claim()


def busy(seconds: float) -> None:
    """Compute without ever sleeping."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
