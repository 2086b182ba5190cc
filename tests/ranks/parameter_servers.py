"""Policies whose ranks push to and fetch from shards of the parameters, each at its own pace."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ringdl
import ringdl.numpy as rn
from ringdl import Communicator, policies
from ringdl.policies import EASGD, AsyncGossip, ParameterServer
from tests.ranks.numpy_optimizers import Arrays, batches, gradients, parameters
from tests.ranks.policies import all_policies, part_of
from tests.ranks.support import assert_same_bits, expect, needs


class Copies:
    """A rank's copy of some arrays, as a policy's model."""

    def __init__(self, comm: Communicator, parameters: Arrays, rate: float = 0.1) -> None:
        self.communicator, self.parameters, self.learning_rate = comm, parameters, rate
        self.gradients: dict[str, Any] = {}
        self.key, self.step, self.state = f"copies {comm._count('copies')}", 0, {}

    def reset_state(self) -> None:
        raise NotImplementedError

    def take_step(self, policy: Any, change: float) -> None:
        for array in self.parameters.values():
            array += change
        self.step += 1
        policy.after_step(self)


def shapes(comm: Communicator, dtype: Any) -> Arrays:
    """Odd ones, of several blocks, or of none."""
    return {
        "a": np.zeros((3, 5), dtype),
        "b": np.zeros(0, dtype),
        "c": np.zeros(190_001 + comm.size, dtype),
        "d": np.zeros((), dtype),
        "e": np.zeros((300, 700), dtype).T,
    }


@needs(ranks=2)
def check_rules(comm: Communicator) -> None:
    """Ranks push in turn; against NumPy, in float64."""
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
        for rule in ("sgd", "adagrad", "adam"):
            for servers in (1, comm.size, "all"):
                model: Any = Copies(comm, shapes(comm, dtype))
                policy = ParameterServer(servers, rule=rule)  # type: ignore[arg-type]
                policy.attach(model)
                policy.start_over(model)
                expected = {key: np.zeros(each.shape) for key, each in model.parameters.items()}
                first, second = (dict.fromkeys(expected, 0.0) for _ in range(2))
                random = np.random.default_rng(0)
                for count in range(1, comm.size + 3):
                    gradient = {
                        key: random.normal(size=each.shape).astype(dtype)
                        for key, each in expected.items()
                    }
                    for key, given in gradient.items():
                        g = given.astype(float)
                        if rule == "sgd":
                            expected[key] = expected[key] - 0.1 * g
                        elif rule == "adagrad":
                            first[key] = first[key] + g**2
                            expected[key] = expected[key] - 0.1 * g / (first[key] ** 0.5 + 1e-10)
                        else:
                            first[key] = 0.9 * first[key] + 0.1 * g
                            second[key] = 0.999 * second[key] + 0.001 * g**2
                            root = (second[key] / (1 - 0.999**count)) ** 0.5 + 1e-8
                            expected[key] = (
                                expected[key] - 0.1 / (1 - 0.9**count) * first[key] / root
                            )
                    if count % comm.size == comm.rank:
                        if rule == "sgd":
                            policy._fetch(model)
                            for key, given in gradient.items():
                                model.parameters[key][...] -= np.asarray(0.1 * given, dtype)
                        model.gradients = gradient
                        policy.before_step(model)
                        model.step += 1
                        policy.after_step(model)
                    comm.barrier()
                policies.ParameterServer.synchronize(policy, model)
                for key, each in expected.items():
                    np.testing.assert_allclose(
                        model.parameters[key], each, tolerance, tolerance, err_msg=f"{rule}, {key}"
                    )


@needs(ranks=2)
def check_no_update_is_lost(comm: Communicator) -> None:
    """All push at once; what is fetched meanwhile has whole updates of each shard."""
    count = 500_000
    model: Any = Copies(comm, {"w": np.zeros(count, np.float32)})
    policy = ParameterServer()
    policy.attach(model)
    policy.start_over(model)
    part = (count + comm.size - 1) // comm.size
    part = (part + 63) // 64 * 64
    pushes = 60
    for _ in range(pushes):
        model.take_step(policy, 1)
        for begin in range(0, count, part):
            shard = model.parameters["w"][begin : begin + part]
            assert (shard == shard[0]).all(), "half an update"
    policy.synchronize(model)
    assert (model.parameters["w"] == pushes * comm.size).all()


@needs(ranks=2, seconds=True)
def check_staleness_for_long(comm: Communicator) -> None:
    check_staleness(comm, 10_000)


@needs(ranks=2)
def check_staleness(comm: Communicator, clocks: int = 300) -> None:
    """No rank runs ahead, and what it fetches holds what is older, under random delays."""
    for staleness in (0, 1, 3):
        # Element r counts the pushes of rank r.
        model: Any = Copies(comm, {"w": np.zeros(comm.size)})
        policy = ParameterServer(staleness=staleness)
        policy.attach(model)
        policy.start_over(model)
        random = np.random.default_rng(comm.rank)
        furthest = 0.0
        for clock in range(1, clocks):
            if random.random() < 30 / clocks:
                time.sleep(random.random() * 0.002)
            model.parameters["w"][comm.rank] += 1
            model.step += 1
            policy.after_step(model)
            seen = model.parameters["w"]
            assert seen[comm.rank] == clock
            assert seen.min() >= clock - staleness, f"{seen} after {clock} pushes"
            assert seen.max() <= clock + staleness + 1, f"{seen} after {clock} pushes"
            furthest = max(furthest, clock - seen.min())
        policy.synchronize(model)
        most = comm.allreduce(np.array([furthest]), ringdl.Max)[0]
        assert most <= staleness


def check_training(comm: Communicator) -> None:
    """Each gets near to what one rank learns."""
    whole, bare = parameters(), rn.SGD(0.1)
    data = batches(20)
    for batch in data:
        bare.step(whole, gradients(whole, *batch))
    scale = max(float(abs(each).max()) for each in whole.values())
    for policy, rate in (
        (ParameterServer(), 0.1 / comm.size),
        (ParameterServer(staleness=1), 0.1 / comm.size),
        (ParameterServer(1, push_every=3, fetch_every=2, staleness=0), 0.1 / comm.size),
        (ParameterServer(rule="adagrad", lr=0.05), 0.1),
        (EASGD(2), 0.1),
        (AsyncGossip(), 0.1),
    ):
        its = parameters()
        optimizer = rn.DistributedOptimizer(rn.SGD(rate), policy=policy)
        for batch in data:
            optimizer.step(its, gradients(its, *part_of(batch, comm.rank, comm.size)))
        policies.synchronize(optimizer)
        assert_same_bits(comm, *its.values())
        far = max(float(abs(its[key] - whole[key]).max()) for key in its)
        assert far < 0.8 * scale, f"{policy!r}: {far} of {scale}"


@needs(ranks=2)
def check_parameters_that_are_loaded(comm: Communicator) -> None:
    """In mid-training, on all ranks alike: what policies keep beside them is begun anew."""
    for policy in all_policies(comm.size):
        its = {"w": np.full(3, 10.0)}
        optimizer = rn.DistributedOptimizer(rn.SGD(0.1), policy=policy)
        for _ in range(3):
            optimizer.step(its, {"w": np.full(3, 1.0 + comm.rank)})
        policies.synchronize(optimizer)
        its["w"][...] = 0
        policies.start_over(optimizer)
        for _ in range(4):
            optimizer.step(its, {"w": np.zeros(3)})
        policies.synchronize(optimizer)
        assert (its["w"] == 0).all(), f"{policy!r}: {its}"


@needs(ranks=2)
def check_moments_begin_anew(comm: Communicator) -> None:
    """With the parameters, when they were loaded."""
    for rule in ("adagrad", "adam"):
        found = []
        for earlier in (0, 4):
            model: Any = Copies(comm, {"w": np.zeros(3)})
            policy = ParameterServer(rule=rule)  # type: ignore[arg-type]
            policy.attach(model)
            for steps, gradient in ((earlier, -3.0), (5, 1.0)):
                model.parameters["w"][...] = 0
                model.step = 0
                policy.start_over(model)
                for _ in range(steps):
                    model.gradients = {"w": np.full(3, gradient)}
                    policy.before_step(model)
                    model.take_step(policy, 0)
                policies.ParameterServer.synchronize(policy, model)
            found.append(model.parameters["w"][0])
        assert found[0] == found[1], f"{rule}: {found}"


@needs(ranks=2)
def check_elastic(comm: Communicator) -> None:
    """One after the other, against NumPy."""
    model: Any = Copies(comm, {"w": np.full(70_000, 1.0), "v": np.full(3, 1.0, np.float32)})
    policy = EASGD(2, alpha=0.25)
    policy.attach(model)
    policy.start_over(model)
    center, own = 1.0, [1.0] * comm.size
    for turn in range(1, 7):
        for rank in range(comm.size):
            own[rank] += rank + 1
            if turn % 2 == 0:
                moved = 0.25 * (own[rank] - center)
                own[rank], center = own[rank] - moved, center + moved
            if rank == comm.rank:
                model.take_step(policy, rank + 1)
            comm.barrier()
    for array in model.parameters.values():
        np.testing.assert_allclose(array, own[comm.rank], 1e-5)
    policy.synchronize(model)
    for array in model.parameters.values():
        np.testing.assert_allclose(array, center, 1e-5)


@needs(ranks=2)
def check_gossip(comm: Communicator) -> None:
    """One after the other, against NumPy."""
    ring = {rank: [(rank + 1) % comm.size] for rank in range(comm.size)}
    for topology, mixing in (("exponential", 0.5), (ring, 0.25)):
        model: Any = Copies(comm, shapes(comm, np.float64) | {"f": np.zeros(3, np.float32)})
        policy = AsyncGossip(topology, mixing)  # type: ignore[arg-type]
        policy.attach(model)
        policy.start_over(model)
        shown, own, before = (np.zeros(comm.size) for _ in range(3))
        for turn in range(6):
            for rank in range(comm.size):
                own[rank] += rank + 1
                shown[rank] += own[rank] - before[rank]
                own[rank] = before[rank] = shown[rank]
                hops = 1 << turn % max(1, (comm.size - 1).bit_length()) if topology != ring else 1
                other = (rank + hops) % comm.size
                moved = mixing * (own[rank] - shown[other])
                own[rank] -= moved
                shown[other] += moved
                if rank == comm.rank:
                    model.take_step(policy, rank + 1)
                comm.barrier()
        for array in model.parameters.values():
            np.testing.assert_allclose(array, own[comm.rank], 1e-5)
        for _ in range(2):  # the second time there is nothing to be done
            policy.synchronize(model)
            for array in model.parameters.values():
                np.testing.assert_allclose(array, 6 * (comm.size + 1) / 2, 1e-5)


@needs(ranks=2)
def check_gossip_loses_nothing(comm: Communicator) -> None:
    """All at once, at paces of their own: the mean is what the steps have made it."""
    model: Any = Copies(comm, {"w": np.zeros(200_003)})
    policy = AsyncGossip()
    policy.attach(model)
    policy.start_over(model)
    for _ in range(30 + 20 * comm.rank):
        model.take_step(policy, 1)
    policy.synchronize(model)
    expected = 30 + 20 * (comm.size - 1) / 2
    np.testing.assert_allclose(model.parameters["w"], expected, 1e-12)


@needs(ranks=2)
def check_gossip_without_ranks_that_have_joined(comm: Communicator) -> None:
    """The mean is of their parameters, too, and what they had does not come back later."""
    optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=AsyncGossip())
    its = [np.zeros(1000)]
    mean = -1.0
    optimizer.step(its, [np.ones(1000)])
    if comm.rank > 0:
        for _ in range(3):
            policies.synchronize(optimizer)
            np.testing.assert_allclose(its[0], mean, rtol=1e-12)
            optimizer.step(its, [np.full(1000, 2.0)])
            mean -= 2 * (comm.size - 1) / comm.size
    last = comm.join()
    ringdl.broadcast_(its[0], last)
    before = its[0].copy()
    if comm.rank > 0:
        optimizer.step(its, [np.ones(1000)])
    comm.join()
    policies.synchronize(optimizer)
    np.testing.assert_allclose(its[0], before - (comm.size - 1) / comm.size, rtol=1e-12)
    assert_same_bits(comm, its[0])


@needs(ranks=2)
def check_joining(comm: Communicator) -> None:
    """Nobody waits for a rank that has no batch left."""
    optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=ParameterServer(staleness=0))
    its = [np.zeros(3)]
    for round_ in range(2):
        for _ in range(3 + 2 * comm.rank):
            optimizer.step(its, [np.ones(3)])
        last = comm.join()
        if round_ == 0:
            ringdl.broadcast_(its[0], last)
        else:
            policies.synchronize(optimizer)
    total = sum(3 + 2 * rank for rank in range(comm.size))
    first = -its[0][0] - total
    assert 0 < first <= total
    assert_same_bits(comm, its[0])
    before = its[0].copy()
    for round_ in range(2):  # some make no step at all
        if comm.rank == round_:
            optimizer.step(its, [np.ones(3)])
        comm.join()
        policies.synchronize(optimizer)
    assert (its[0] == before - 2).all()


@needs(ranks=2)
def check_ranks_of_their_own_pace(comm: Communicator) -> None:
    """Different numbers of steps, without any bound."""
    for policy in (ParameterServer(), EASGD(1), AsyncGossip("ring", 0.25)):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its = [np.zeros(3)]
        for _ in range(1 + 3 * comm.rank):
            optimizer.step(its, [np.ones(3)])
        policies.synchronize(optimizer)
        if isinstance(policy, ParameterServer):
            assert its[0].tolist() == [-sum(1 + 3 * rank for rank in range(comm.size))] * 3
        assert_same_bits(comm, its[0])


@needs(ranks=2)
def check_a_rank_that_only_serves(comm: Communicator) -> None:
    """For longer than others would be waited for."""
    for policy in (ParameterServer(1), EASGD(1), AsyncGossip()):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy)
        its = [np.zeros(1000)]
        before, comm._timeout = comm._timeout, 0.5
        for _ in range(4 if comm.rank > 0 else 0):
            optimizer.step(its, [np.ones(1000)])
            time.sleep(0.2)
        if comm.rank > 0:
            comm._timeout = before
        policies.synchronize(optimizer, its)
        comm._timeout = before
        assert_same_bits(comm, its[0])
        if isinstance(policy, ParameterServer):
            assert (its[0] == -4 * (comm.size - 1)).all()
        else:
            assert its[0][0] < 0


def check_half_a_push(comm: Communicator) -> None:
    """What an error has ended is not pushed again, and nothing else is."""
    if comm.size == 1:
        return
    model: Any = Copies(comm, {"w": np.zeros(3)})
    policy = ParameterServer(fetch_every=100)
    policy.attach(model)
    policy.start_over(model)
    push = policy._shards.push
    for turn in range(3):

        def fail(*_: Any) -> None:
            raise ringdl.StallError("pretended")

        policy._shards.push = fail if turn == 1 else push  # type: ignore[method-assign]
        model.parameters["w"] += 1
        model.step += 1
        if turn == 1:
            with expect(ringdl.StallError, "pretended"):
                policy.after_step(model)
        else:
            policy.after_step(model)
    policy.synchronize(model)
    assert (model.parameters["w"] == 2 * comm.size).all()
    model.parameters["w"].flags.writeable = False
    with expect(ValueError, "read-only"):
        policy._shards.fetch(model.parameters)
    comm.barrier()


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    for make, text in (
        (lambda: ParameterServer(0), "servers is 0; pass a number of ranks, at least 1"),
        (lambda: ParameterServer("some"), "servers is 'some'"),  # type: ignore[arg-type]
        (lambda: ParameterServer(push_every=0), "push_every is 0"),
        (lambda: ParameterServer(staleness=-1), "staleness is -1; pass a number of pushes"),
        (lambda: ParameterServer(rule="rmsprop"), "pass 'sgd', 'adagrad' or 'adam'"),  # type: ignore[arg-type]
        (lambda: ParameterServer(lr=0.1), "the wrapped optimizer's counts"),
        (lambda: EASGD(2, alpha=2), "alpha is 2"),
        (lambda: AsyncGossip("star"), "pass 'ring', 'exponential', or a graph"),
        (lambda: AsyncGossip(mixing=0.6), "mixing is 0.6; pass a share, above 0 and at most 0.5"),
    ):
        with expect(ringdl.UsageError, text):
            make()

    def step(policy: Any, dtype: Any = float, inner: Any = None) -> None:
        optimizer = rn.DistributedOptimizer(inner or rn.SGD(0.1), policy=policy)
        optimizer.step([np.ones(3, dtype)], [np.ones(3, dtype)])

    class Odd:
        def step(self, parameters: Any, gradients: Any) -> None:
            raise AssertionError("not reached")

    with expect(ringdl.UsageError, f"servers is {comm.size + 1}, and there are {comm.size} ranks"):
        step(ParameterServer(comm.size + 1))
    with expect(ringdl.UsageError, "holds float32 or float64, not float16"):
        step(EASGD(1), np.float16)
    with expect(ringdl.UsageError, "the learning rate is not known here; pass the policy its lr"):
        step(ParameterServer(rule="adam"), inner=Odd())
    for rule in ("adagrad", "adam"):
        its = [np.ones(3)]
        optimizer = rn.DistributedOptimizer(rn.SGD(0.1), policy=ParameterServer(rule=rule))
        optimizer.step(its, [np.ones(3)])
        with expect(ringdl.UsageError, "the gradient of", "is not finite"):
            optimizer.step(its, [np.array([0.0, np.inf, -np.inf])])
        policies.synchronize(optimizer)
        assert np.isfinite(its[0]).all()


@needs(ranks=2, seconds=True)
def check_stalls(comm: Communicator) -> None:
    """A rank that does not push is named."""
    optimizer = rn.DistributedOptimizer(rn.SGD(0.1), policy=ParameterServer(staleness=0))
    its = [np.ones(3)]
    optimizer.step(its, [np.ones(3)])
    before, comm._timeout = comm._timeout, 0.5
    if comm.rank != 0:
        with expect(ringdl.StallError, "rank 0 has pushed 1 steps", within=3):
            optimizer.step(its, [np.ones(3)])
    comm._timeout = before
    comm.barrier()
