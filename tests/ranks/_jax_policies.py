"""ringdl.policies with optax, against the same policies over NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringdl
import ringdl.jax as rj
from ringdl import Communicator, policies
from ringdl.jax import _followers
from ringdl.policies import (
    EASGD,
    AsyncGossip,
    DiLoCo,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    PostLocalSGD,
)
from tests.ranks.numpy_optimizers import batches, parameters
from tests.ranks.policies import MAKERS, all_policies, part_of
from tests.ranks.policies import train as train_in_numpy
from tests.ranks.support import assert_same_bits, expect, needs

OPTAX: dict[str, Any] = {
    "SGD": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "Adam": lambda: optax.adam(0.01),
}


def loss_of(its: Any, inputs: Any, targets: Any) -> Any:
    error = jnp.tanh(inputs @ its["w"] + its["b"]) @ its["v"] - targets
    return (error**2).sum() / (2 * len(inputs))


def train(comm: Communicator, policy: Any, make: Any, *, is_compiled: bool = True) -> Any:
    its = jax.tree.map(jnp.asarray, parameters())
    optimizer = make()
    if policy != "bare":
        optimizer = rj.DistributedOptimizer(optimizer, policy=policy, communicator=comm)

    def step(its: Any, state: Any, inputs: Any, targets: Any) -> Any:
        gradients = jax.grad(loss_of)(its, inputs, targets)
        updates, state = optimizer.update(gradients, state, its)
        return optax.apply_updates(its, updates), state

    if is_compiled:
        step = jax.jit(step)
    state = optimizer.init(its)
    for batch in batches(2):
        its, state = step(its, state, *part_of(batch, comm.rank, comm.size))
    return optimizer, its


def equal_policies(size: int) -> list[Any]:
    """Those that optax's optimizers can follow."""
    return [each for each in all_policies(size) if "reset" not in repr(each)]


def check_policies_are_those_of_numpy(comm: Communicator) -> None:
    each = zip(equal_policies(comm.size), equal_policies(comm.size), strict=True)
    for turn, (own, other) in enumerate(each):
        name = list(OPTAX)[turn % 3]
        optimizer, its = train(comm, own, OPTAX[name], is_compiled=turn % 2 == 0)
        expected = train_in_numpy(comm, other, MAKERS[name])[1]
        for key, array in expected.items():
            np.testing.assert_allclose(
                its[key], array, 1e-9, 1e-11, err_msg=f"{own!r}, {name}, {key}"
            )
        its = policies.synchronize(optimizer, its)
        assert_same_bits(comm, *(np.asarray(each) for each in its.values()))


def check_one_rank_is_the_bare_optimizer(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    bare = train(alone, "bare", OPTAX["Adam"])[1]
    for policy in equal_policies(1):
        its = train(alone, policy, OPTAX["Adam"])[1]
        for key in bare:
            assert (its[key] == bare[key]).all(), f"{policy!r}"


@needs(ranks=2)
def check_ranks_of_their_own_pace(comm: Communicator) -> None:
    before = float(loss_of(parameters(), *batches(2)[0]))
    for policy, rate in (
        (ParameterServer(staleness=1), 0.1 / comm.size),
        (ParameterServer(rule="adam", lr=0.01, push_every=2), 0.0),
        (EASGD(2), 0.1),
        (AsyncGossip(), 0.1),
    ):
        optimizer, its = train(comm, policy, lambda rate=rate: optax.sgd(rate))
        its = policies.synchronize(optimizer, its)
        after = float(loss_of(its, *batches(2)[0]))
        assert after < 0.9 * before, f"{policy!r}: {after} of {before}"
        assert_same_bits(comm, *(np.asarray(each) for each in its.values()))


def check_rounds_of_one_rank(comm: Communicator) -> None:
    """In compiled steps, too; and what these change is what the bare optimizer does."""
    if comm.size > 1:
        return
    policy = ParameterAveraging(3, balance=True)
    optimizer = rj.DistributedOptimizer(optax.sgd(0.1), policy=policy)

    @jax.jit
    def step(its: Any, state: Any) -> Any:
        updates, state = optimizer.update(its, state, its)
        return optax.apply_updates(its, updates), state

    its, state = {"w": jnp.ones(3)}, optimizer.init({"w": jnp.ones(3)})
    for number in range(1, 8):
        its, state = step(its, state)
        jax.block_until_ready(its)
        jax.effects_barrier()
        assert policy.rounds == number // 3


def check_optimizers_in_chains(comm: Communicator) -> None:
    """They are synchronized by what DistributedOptimizer returned."""
    policy = ParameterAveraging(1000)
    inside = rj.DistributedOptimizer(optax.sgd(0.1), policy=policy)
    chain = optax.chain(optax.clip(1.0), inside)
    its, state = jnp.ones(3), None
    state = chain.init(its)
    updates, state = chain.update(jnp.full(3, float(comm.rank)), state, its)
    its = optax.apply_updates(its, updates)
    if comm.size > 1:
        with expect(ringdl.UsageError, "is not wrapped; pass what DistributedOptimizer returned"):
            policies.synchronize(chain, its)
    its = policies.synchronize(inside, its)
    assert_same_bits(comm, np.asarray(its))


@needs(ranks=2)
def check_scans(comm: Communicator) -> None:
    """Several steps in one compiled function, of float32."""
    optimizer = rj.DistributedOptimizer(optax.sgd(1.0), policy=ParameterAveraging(2))

    @jax.jit
    def run(weight: Any) -> Any:
        def step(carry: Any, gradient: Any) -> Any:
            weight, state = carry
            updates, state = optimizer.update({"w": gradient}, state, weight)
            return (optax.apply_updates(weight, updates), state), weight["w"]

        gradients = jnp.full((6, 3), comm.rank, jnp.float32)
        return jax.lax.scan(step, (weight, optimizer.init(weight)), gradients)

    (weight, _), seen = run({"w": jnp.zeros(3, jnp.float32)})
    assert weight["w"].dtype == jnp.float32
    mean = (comm.size - 1) / 2
    np.testing.assert_allclose(weight["w"], -6 * mean, rtol=1e-6)
    np.testing.assert_allclose(seen[2], -2 * mean, rtol=1e-6)
    np.testing.assert_allclose(seen[3], -2 * mean - comm.rank, rtol=1e-6)


@needs(ranks=2)
def check_nothing_grows(comm: Communicator) -> None:
    """Steps outside of compiled functions are compiled once."""
    optimizer = rj.DistributedOptimizer(optax.sgd(1.0), policy=ParameterAveraging(2))
    its = {"w": jnp.zeros(3)}
    state = optimizer.init(its)
    for turn in range(6):
        updates, state = optimizer.update({"w": jnp.full(3, comm.rank)}, state, its)
        its = optax.apply_updates(its, updates)
        if turn == 1:
            before = len(_followers._calls)
    assert len(_followers._calls) == before
    np.testing.assert_allclose(its["w"], -6 * (comm.size - 1) / 2, rtol=1e-6)


@needs(ranks=2)
def check_two_networks(comm: Communicator) -> None:
    """One optimizer for both would exchange the one for the other, as optax keeps nothing."""
    for other in ({"w": jnp.full(3, 100.0)}, {"w": jnp.ones(4)}):
        optimizer = rj.DistributedOptimizer(optax.sgd(0.1), policy=DiLoCo(2))
        its = {"w": jnp.ones(3)}
        optimizer.update(its, optimizer.init(its), its)
        with expect(
            Exception,
            "of another call of init()",
            "steps one network",
            "start_over(optimizer) first",
        ):
            jax.block_until_ready(optimizer.update(other, optimizer.init(other), other))
    policies.start_over(optimizer)
    optimizer.update(its, optimizer.init(its), its)


@needs(ranks=2)
def check_integers(comm: Communicator) -> None:
    """What optax.masked leaves alone is not exchanged."""
    inner = optax.masked(optax.sgd(1.0), {"w": True, "n": False})
    optimizer = rj.DistributedOptimizer(inner, policy=ParameterAveraging(1))
    its = {"w": jnp.zeros(3), "n": jnp.array(comm.rank)}
    gradients = {"w": jnp.full(3, float(comm.rank)), "n": jnp.array(0)}
    updates, _ = optimizer.update(gradients, optimizer.init(its), its)
    its = optax.apply_updates(its, updates)
    np.testing.assert_allclose(its["w"], -(comm.size - 1) / 2, rtol=1e-6)
    assert int(policies.synchronize(optimizer, its)["n"]) == comm.rank


@needs(ranks=2)
def check_synchronizing_first(comm: Communicator) -> None:
    """As loops do that evaluate before they train."""
    for policy in equal_policies(comm.size):
        optimizer = rj.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), policy=policy)
        its = policies.synchronize(optimizer, {"w": jnp.ones(3)})
        state = optimizer.init(its)
        for _ in range(3):
            updates, state = optimizer.update({"w": its["w"] - comm.rank}, state, its)
            its = optax.apply_updates(its, updates)
        its = policies.synchronize(optimizer, its)
        assert_same_bits(comm, np.asarray(its["w"]))


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    its = {"w": jnp.ones(3)}

    def step(policy: Any, values: Any = its, **options: Any) -> Any:
        optimizer = rj.DistributedOptimizer(optax.sgd(0.1, 0.9), policy=policy, **options)
        return jax.jit(optimizer.update)(its, optimizer.init(values), values)

    for policy, options, text in (
        ("gossip", {}, "pass one of ringdl.policies"),
        (Gossip(), {"op": ringdl.Sum}, "is for AllReduce()"),
        (DiLoCo(2), {"compression": "bfloat16"}, "none travel"),
        (PostLocalSGD(2, 2), {"compression": "bfloat16"}, "as they are here"),
    ):
        with expect(ringdl.UsageError, text):
            step(policy, **options)
    optimizer = rj.DistributedOptimizer(optax.sgd(0.1), policy=Gossip())
    with expect(ringdl.UsageError, "optimizer.update(gradients, state, params)"):
        optimizer.update(its, optimizer.init(its))
    with expect(ringdl.UsageError, "params = synchronize(optimizer, params)"):
        policies.synchronize(optimizer)
    for policy, text in (
        (ParameterAveraging(1, "reset"), "the optimizer's state is not reset here"),
        (ParameterServer(rule="adam"), "pass the policy its lr"),
        (ParameterAveraging(2 + (comm.rank == 1)), "policy is"),
    ):
        with expect(Exception, text):
            jax.block_until_ready(step(policy))
    with expect(Exception, "the replicas differ"):
        jax.block_until_ready(step(DiLoCo(2), {"w": jnp.full(3, float(comm.rank))}))


@needs(ranks=2)
def check_updates_that_are_thrown_away(comm: Communicator) -> None:
    """By what accumulates gradients around a policy: inside, it is right."""
    its = {"w": jnp.ones(3)}
    around = optax.MultiSteps(rj.DistributedOptimizer(optax.sgd(0.1), policy=Gossip()), 2)
    state = around.init(its)
    _, state = around.update(its, state, its)
    with expect(Exception, "what an update has returned was thrown away"):
        jax.block_until_ready(around.update(its, state, its))
    inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    inside = rj.DistributedOptimizer(inner, policy=ParameterAveraging(1))
    loaded = state = inside.init(its)
    own = {"w": jnp.full(3, float(comm.rank))}
    for _ in range(2):
        updates, state = inside.update(own, state, its)
        its = optax.apply_updates(its, updates)
    np.testing.assert_allclose(its["w"], 1 - 0.1 * (comm.size - 1) / 2, rtol=1e-6)
    with expect(Exception, "a state was loaded", "policies.start_over(optimizer)"):
        jax.block_until_ready(inside.update(own, loaded, its))
    comm.barrier()
    policies.start_over(inside)
    jax.block_until_ready(inside.update(own, loaded, its))
