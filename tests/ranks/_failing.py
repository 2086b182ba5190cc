"""Not run with the others: checks that fail, to show that the runner says so and goes on."""

from __future__ import annotations

import numpy as np

import ringdl
from ringdl import Communicator


def check_fails_on_one_rank(comm: Communicator) -> None:
    assert comm.rank != 1, "meant to fail"
    comm.barrier()


def check_wrong_reference(comm: Communicator) -> None:
    assert comm.allreduce(np.ones(3), ringdl.Sum).tolist() == [comm.size + 1] * 3, "meant too"


def check_goes_on(comm: Communicator) -> None:
    assert comm.allreduce(np.ones(3), ringdl.Sum).tolist() == [comm.size] * 3
