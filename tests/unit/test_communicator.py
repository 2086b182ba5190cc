"""The checks of tests/ranks with ranks that are threads; and one rank alone."""

import importlib
import inspect
import os

import numpy as np
import pytest

import ringdl
from ringdl import Communicator, _engine
from ringdl._communicator import communicator_over

SIZES = {
    "allreduces": (1, 2, 3, 4, 5, 6, 7, 8),
    "collectives": (1, 2, 3, 4, 5, 6, 7, 8),
    "arrays": (1, 2, 3),
    "protocol": (1, 2, 5, 8),
    "mismatches": (2, 5),
    "buckets": (1, 2, 3, 5),
    "threads": (1, 3),
}
SHARING_SIZES = {
    "allreduces": (2, 5),
    "shared": (1, 2, 3, 5),
    "mismatches": (2, 5),
    "buckets": (3, 4),
    "threads": (3,),
}
SLOW_SIZES = (3,) if os.environ.get("RINGDL_TEST_ALL") == "1" else ()
"""Of checks that wait for seconds; without it, only processes do."""


def cases(modules):
    for module_name, sizes in modules.items():
        module = importlib.import_module(f"tests.ranks.{module_name}")
        for name, check in vars(module).items():
            if not name.startswith("check_") or not inspect.signature(check).parameters:
                continue
            if getattr(check, "processes", False):
                continue
            for size in SLOW_SIZES if getattr(check, "seconds", False) else sizes:
                if size >= getattr(check, "ranks", 1):
                    yield pytest.param(check, size, id=f"{module_name}-{name[6:]}-{size}")


@pytest.mark.parametrize(("check", "size"), list(cases(SIZES)))
def test_ranks_that_are_threads(check, size, run_ranks) -> None:
    run_ranks(size, check)


@pytest.mark.parametrize(("check", "size"), list(cases(SHARING_SIZES)))
def test_ranks_that_are_threads_and_share_memory(check, size, run_ranks) -> None:
    run_ranks(size, check, shares_memory=True)


def test_results_by_rank(run_ranks) -> None:
    assert run_ranks(3, lambda comm: comm.rank) == [0, 1, 2]


def test_a_failing_rank_is_reported(run_ranks) -> None:
    """The tests can fail: a wrong reference on one rank, and a rank that does not arrive."""

    def wrong(comm: Communicator) -> None:
        assert comm.allreduce(np.ones(3), ringdl.Sum)[0] == (3 if comm.rank else 4)

    def absent(comm: Communicator) -> None:
        if comm.rank:
            comm.barrier()

    with pytest.raises(AssertionError, match=r"^rank 0:\n"):
        run_ranks(3, wrong)
    with pytest.raises(AssertionError, match=r"(?s)^rank 1:.*MismatchError: rank 0 has shut down"):
        run_ranks(2, absent)


def test_alone() -> None:
    comm = communicator_over(_engine.alone())
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
    array = np.arange(5.0)
    for op in (ringdl.Sum, ringdl.Average, ringdl.Min, ringdl.Max, ringdl.Product):
        assert comm.allreduce(array, op).tolist() == [0, 1, 2, 3, 4]
    assert comm.allgather(array).tolist() == [0, 1, 2, 3, 4]
    assert comm.broadcast_object({"a": 1}) == {"a": 1}
    comm.barrier()
    work = comm.allreduce_async_(array)
    assert work.done()
    assert work.wait() is array
    assert comm.stats()["messages_sent"] == 0
    comm.shutdown()
    comm.shutdown()
    with pytest.raises(ringdl.UsageError, match="shut down"):
        comm.barrier()


def test_stats_are_numbers() -> None:
    comm = communicator_over(_engine.alone())
    before = comm.stats()
    comm.allreduce(np.ones(3))
    after = comm.stats()
    assert after["works"] == before["works"] + 1
    assert {"messages_sent", "bytes_sent", "grants_sent", "wait_seconds"} <= set(after)
    assert all(isinstance(after[key], int) for key in after if key != "wait_seconds")
    assert isinstance(after["wait_seconds"], float)
    comm.shutdown()


def test_module_functions_need_init() -> None:
    assert not ringdl.is_initialized()
    for call in (ringdl.rank, ringdl.size, ringdl.barrier, ringdl.stats, ringdl.get_communicator):
        with pytest.raises(ringdl.UsageError, match=r"ringdl\.init\(\)"):
            call()
