"""ringdl.policies where ranks make different numbers of steps, and join."""

from __future__ import annotations

import numpy as np

import ringdl
import ringdl.numpy as rn
from ringdl import Communicator, policies
from ringdl.policies import DiLoCo, ParameterAveraging, PostLocalSGD
from tests.ranks.support import assert_same_bits, needs


@needs(ranks=2)
def check_joining(comm: Communicator) -> None:
    """The mean is of those that have not joined."""
    optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=ParameterAveraging(2, "keep"))
    its = [np.zeros(3)]
    for _ in range(2 + 2 * comm.rank):
        optimizer.step(its, [np.full(3, float(comm.rank))])
    last = comm.join()
    assert last == comm.size - 1
    value, done = 0.0, 0
    for rank in range(comm.size):  # two steps more of those that are left
        left = range(rank, comm.size)
        value -= 2 * sum(left) / len(left)
        done += 2
        if rank == comm.rank:
            np.testing.assert_allclose(its[0], value, rtol=1e-6)
    ringdl.broadcast_(its[0], last)
    optimizer.step(its, [np.full(3, float(comm.rank))])
    optimizer.step(its, [np.full(3, float(comm.rank))])
    assert_same_bits(comm, its[0])


@needs(ranks=2)
def check_after_a_join(comm: Communicator) -> None:
    """Ranks have the newest parameters, and begin as at first."""
    for policy in (
        ParameterAveraging(2),
        ParameterAveraging(2, overlap=True),
        DiLoCo(2),
        PostLocalSGD(3, 2),
    ):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its = [np.zeros(3)]
        for _ in range(3 + 2 * comm.rank):
            optimizer.step(its, [np.full(3, float(comm.rank))])
        newest = its[0].copy()
        last = comm.join()
        policies.synchronize(optimizer)
        if comm.rank == last:
            assert (its[0] == newest).all(), repr(policy)
        assert_same_bits(comm, its[0])
        optimizer.step(its, [np.full(3, float(comm.rank))])
        if isinstance(policy, PostLocalSGD):
            assert_same_bits(comm, its[0])
        policies.synchronize(optimizer)
        before = its[0].copy()
        policies.synchronize(optimizer)
        assert np.allclose(its[0], before), f"{policy!r} again"
        assert_same_bits(comm, its[0])


@needs(ranks=3)
def check_a_part_of_the_ranks_after_a_join(comm: Communicator) -> None:
    """They have the parameters of the one of them that has made most steps."""
    members = [comm.size - 2, comm.size - 1]
    part = comm.group(members)
    for most in members:
        if part is not None:
            policy = ParameterAveraging(100)
            optimizer = rn.DistributedOptimizer(rn.SGD(1.0), communicator=part, policy=policy)
            its = [np.zeros(3)]
            for _ in range(5 if comm.rank == most else 2):
                optimizer.step(its, [np.ones(3)])
        comm.join()
        if part is not None:
            policies.synchronize(optimizer)
            assert (its[0] == -5).all(), its[0]
        comm.barrier()


@needs(ranks=2)
def check_a_rank_that_joins_before_the_first_mean(comm: Communicator) -> None:
    """The optimizer's state is kept then."""
    optimizer = rn.DistributedOptimizer(rn.SGD(1.0, 0.5), policy=ParameterAveraging(4))
    its = [np.zeros(3)]
    for _ in range(3 + 6 * (comm.rank != 0)):
        optimizer.step(its, [np.full(3, float(comm.rank))])
    comm.join()
    policies.synchronize(optimizer)
    for _ in range(4):
        optimizer.step(its, [np.full(3, float(comm.rank))])
    assert_same_bits(comm, its[0], *optimizer.optimizer.state.values())
