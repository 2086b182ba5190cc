"""Memory that ranks share, where a rank leaves, forks, or has no more of it."""

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

import ringdl
from ringdl import Communicator, _engine
from ringdl._window import share_memory

FORKED = """
import os
import numpy as np
import ringdl
from ringdl import _engine
from ringdl._communicator import communicator_over
from ringdl._window import share_memory
comm = communicator_over(_engine.alone())
share_memory(comm, [0])
before = comm.empty(1 << 20, np.uint8)
before[...] = 1
child = os.fork()
if child == 0:
    try:
        comm.empty(1 << 20, np.uint8)[...] = 2
    except ringdl.UsageError as error:
        assert "forked" in str(error)
        del before
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
after = comm.empty(1 << 20, np.uint8)
after[...] = 3
assert (before == 1).all()
"""

NO_ADDRESSES = """
import resource
import ringdl
from ringdl import _engine
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), used + (4 << 20)))
_engine.loopback(2)
"""


@pytest.mark.parametrize("count", [10, 10_000, 100_000])
def test_a_rank_may_leave_at_once(run_ranks, count: int) -> None:
    """What it has put into its slot, or tells by its array's place, counts after that, too."""

    def body(comm: Communicator) -> None:
        x = comm.empty(count)
        x[...] = comm.rank
        if comm.rank == 2:
            time.sleep(0.05)  # the others wait
        assert (comm.allreduce_(x, ringdl.Sum) == 3).all()

    for _ in range(10):
        run_ranks(3, body, shares_memory=True)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Ranks may share 64 MiB each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("little_memory")
def test_a_rank_without_memory_harms_nobody(run_ranks) -> None:
    """It raises, nothing of its call is left, and what was in flight before ends."""
    failed = threading.Event()
    in_flight: list[int] = []
    count = 1 << 20

    def body(comm: Communicator) -> None:
        works = []
        if comm.rank == 0:
            arrays = [comm.empty(count, np.uint8) for _ in range(64)]  # the last are elsewhere

            def fill() -> None:
                for i in range(100):
                    array = np.ones(count, np.float32)
                    works.append(comm.allreduce_async_(array, ringdl.Sum, str(i)))

            with pytest.raises(MemoryError, match="wait for works in flight"):
                fill()
            with pytest.raises(MemoryError, match="wait for works in flight"):
                comm.allreduce_(np.ones(count, np.float32))
            assert comm.stats()["works_in_flight"] == len(works)
            in_flight.append(len(works))
            assert len(arrays) == 64
            failed.set()
        else:
            assert failed.wait(30)
            for i in range(in_flight[0]):
                array = np.ones(count, np.float32)
                works.append(comm.allreduce_async_(array, ringdl.Sum, str(i)))
        assert len(works) > 4
        for work in works:
            assert (work.wait() == comm.size).all()
        assert (comm.allreduce(np.ones(1 << 20), ringdl.Sum) == comm.size).all()

    run_ranks(2, body, shares_memory=True)


def test_a_forked_child_gets_none_of_its_parents() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


class _Refused:
    """An engine on a host that has no shared memory."""

    def __init__(self, engine: _engine.Communicator) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def open_window(self, local_ranks: int) -> None:
        raise ringdl.Error(f"no memory for {local_ranks}")


@pytest.mark.parametrize(
    ("hosts", "refused", "wanted"),
    [
        ([0, 0, 1], set(), [0, 0, 1]),
        ([0, 1, 0, 1], {3}, [0, 5, 0, 7]),
        ([0, 0, 1, 1], {0, 2, 3}, [0, 1, 2, 3]),
    ],
)
def test_each_host_shares_memory_or_not(
    run_ranks, hosts: list[int], refused: set[int], wanted: list[int]
) -> None:
    """What one host lacks it lacks alone, and rank 0 has a sentence about it."""
    specs = [("a", (10,), "float32"), ("b", (300_000,), "float32")]

    def body(comm: Communicator) -> str | None:
        engine = comm._engine
        if comm.rank in refused:
            comm._engine = cast("_engine.Communicator", _Refused(engine))
        text = share_memory(comm, hosts)
        comm._engine = engine
        assert comm.memory_hosts() == wanted
        for count in (1, 20_000, 700_000):
            for x in (comm.empty(count), np.empty(count, np.float32)):
                x[...] = 1
                assert (comm.allreduce_(x, ringdl.Sum) == comm.size).all()
                assert comm.allgather(x).sum() == count * comm.size**2
        buckets = ringdl.Buckets(specs, first_bucket_bytes=40, communicator=comm)
        for step in range(3):
            for index, view in enumerate(buckets.views()):
                view[...] = step + comm.rank
                buckets.ready(index)
            buckets.wait()
            assert all((v == step + (comm.size - 1) / 2).all() for v in buckets.views())
        return text

    texts = run_ranks(len(hosts), body)
    assert texts[1:] == [None] * (len(hosts) - 1)
    if not refused:
        assert texts[0] is None
    else:
        first = min(refused)
        members = [str(r) for r, host in enumerate(hosts) if host == hosts[first]]
        assert f"the ranks {', '.join(members)} share no memory" in texts[0]
        assert f"rank {first} on " in texts[0]
        assert "no memory for 2" in texts[0]
        assert ("1 more hosts" in texts[0]) == (len(refused) == 3)


def test_no_memory_for_a_thread_is_said() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NO_ADDRESSES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Error: this process may start no thread more (" in ended.stderr
