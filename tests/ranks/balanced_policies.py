"""Policies in whose rounds slower ranks make fewer steps."""

from __future__ import annotations

import time

import numpy as np

import ringdl.numpy as rn
from ringdl import Communicator, MismatchError, policies
from ringdl.policies import DiLoCo, ParameterAveraging, PostLocalSGD
from tests.ranks.support import assert_same_bits, expect, needs


@needs(ranks=2)
def check_slower_ranks_make_fewer_steps(comm: Communicator) -> None:
    """In balanced rounds; each rank counts in the mean as much as it has done."""
    local = DiLoCo(8, outer_lr=1.0, outer_momentum=0.0, balance=True)
    late = ParameterAveraging(8, overlap=True, balance=True)
    for policy, first in (
        (ParameterAveraging(8, "keep", balance=True), 0),
        (PostLocalSGD(2, 8, balance=True), 2),
        (local, 0),
        (late, 0),
    ):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its, steps = [np.zeros(3)], [0]
        while policy.rounds < 5:
            time.sleep(0.1 if comm.rank == comm.size - 1 else 0.01)
            optimizer.step(its, [np.full(3, float(comm.rank))])
            steps[-1] += 1
            if policy.rounds == len(steps):
                steps.append(0)
        steps[0] -= first  # these averaged gradients
        made = comm.allgather(np.array([steps[:-1]], float))
        if policy is not late:
            ranks = np.arange(comm.size)
            value = first * ranks.mean() + (ranks @ made**2 / made.sum(0)).sum()
            np.testing.assert_allclose(its[0], -value, rtol=1e-6, err_msg=repr(policy))
        assert (made[:, 0] == 1).all(), made
        assert made.max() <= 8, made
        assert made[-1, 1:].sum() < made[0, 1:].sum() / 2, made
        policies.synchronize(optimizer)
        assert_same_bits(comm, its[0])


def check_rounds_of_one_rank(comm: Communicator) -> None:
    """They are counted, and loops end; from nought, where training begins again."""
    if comm.size > 1:
        return
    for policy, steps in (
        (ParameterAveraging(4, balance=True), 8),
        (PostLocalSGD(3, 4, balance=True), 11),
        (DiLoCo(4, balance=True), 8),
    ):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its, made = [np.zeros(3)], 0
        while policy.rounds < 2 and made < 20:
            optimizer.step(its, [np.ones(3)])
            made += 1
        assert made == steps, repr(policy)
        comm.join()
        optimizer.step(its, [np.ones(3)])
        assert policy.rounds == 0


@needs(ranks=2)
def check_ranks_that_end_in_other_rounds(comm: Communicator) -> None:
    """All are told by what to end."""
    for policy in (ParameterAveraging(4, balance=True), DiLoCo(4, balance=True)):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its = [np.zeros(3)]
        with expect(MismatchError, "when the policy's `rounds` has reached the same number"):
            for _ in range(2 + 4 * (comm.rank == 1)):
                optimizer.step(its, [np.ones(3)])
            policies.synchronize(optimizer)
