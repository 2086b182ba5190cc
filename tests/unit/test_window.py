"""Memory that ranks share, where a rank leaves, forks, or has no more of it."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ringdl
from ringdl import Communicator

FORKED = """
import os
import numpy as np
import ringdl
from ringdl import Communicator, _engine
from ringdl._window import share_memory
comm = Communicator(_engine.alone())
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


def test_a_rank_without_memory_harms_nobody(run_ranks) -> None:
    """It raises, nothing of its work is left, and the others hear that it has not come."""
    failed = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            hogs = []
            size = 1 << 40
            while size >= 1 << 10:
                try:
                    hogs.append(comm.empty(size, np.uint8))
                except MemoryError:
                    size //= 2
            for call in (comm.allreduce_, lambda x: comm.allreduce_async_(x, name="named")):
                with pytest.raises(MemoryError):
                    call(np.ones(1 << 20, np.float32))
            assert comm.stats()["works_in_flight"] == 0
            hogs.clear()
            failed.set()
        else:
            assert failed.wait(30)
        assert (comm.allreduce(np.ones(1 << 20), ringdl.Sum) == comm.size).all()

    run_ranks(2, body, shares_memory=True)


def test_a_forked_child_gets_none_of_its_parents() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
