"""Communicators that are dropped while works are in flight: nobody writes into freed memory."""

import gc

import numpy as np
import pytest

import ringdl
from ringdl import Communicator, _engine
from ringdl._communicator import communicator_over
from ringdl._settings import Settings

LENGTH = 300_000


def pair() -> list[Communicator]:
    settings = Settings(timeout=0.5)
    return [communicator_over(engine, settings) for engine in _engine.loopback(2)]


def new_arrays() -> list[np.ndarray]:
    """Where the dropped ones lay, most likely."""
    gc.collect()
    return [np.full(LENGTH, 77.0, np.float32) for _ in range(8)]


@pytest.mark.parametrize("holds_work", [True, False])
def test_a_communicator_dropped_in_flight(holds_work: bool) -> None:
    first, second = pair()
    work = first.allreduce_async_(np.ones(LENGTH, np.float32), ringdl.Sum, "w")
    del first
    if not holds_work:
        del work
    new = new_arrays()
    other = second.allreduce_async_(np.full(LENGTH, 2.0, np.float32), ringdl.Sum, "w")
    if holds_work:  # and with it the engine
        assert (work.wait(timeout=20) == 3).all()
        assert (other.wait(timeout=20) == 3).all()
    else:
        with pytest.raises(ringdl.StallError, match="rank 0"):
            other.wait()
    assert all((array == 77).all() for array in new)


def test_views_outlive_buckets_and_communicator() -> None:
    comm = communicator_over(_engine.alone())
    buckets = ringdl.Buckets([("w", (LENGTH,), "float32")], communicator=comm)
    (view,) = buckets.views()
    view[...] = 5
    buckets.ready(0)
    buckets.wait()
    del buckets, comm
    new = new_arrays()
    view += 1
    assert (view == 6).all()
    assert all((array == 77).all() for array in new)
