"""ringdl.policies with ringdl.keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import ringdl
import ringdl.keras as hvd
from ringdl import Communicator, policies
from tests.ranks._keras import (
    BATCH,
    TOLERANCE,
    compiled,
    data,
    fitted,
    part_of_batches,
    perceptron,
)
from tests.ranks.support import assert_same_bits, expect, needs


def check_policies(comm: Communicator) -> None:
    """Parameters averaged in each step are those of the whole batch; others agree in the end."""
    ringdl.shutdown()  # JAX forgets calls of earlier checks that failed, as they had to
    ringdl.init()
    if BATCH % comm.size:
        return
    x, y = data()
    mine = part_of_batches(comm, x, y)

    def trained(policy: Any, make: Any, *rows: Any, size: int) -> Any:
        keras.utils.set_random_seed(1)
        model = perceptron()
        optimizer = make()
        if policy is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, policy=policy)
        fitted(compiled(model, optimizer), *rows, size=size)
        if policy is not None:
            policies.synchronize(model.optimizer)
        return model

    makers = (
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
    )
    whole = trained(None, makers[0], x, y, size=1).get_weights()
    for policy in (
        policies.ParameterAveraging(1, "average"),
        policies.ParameterAveraging(1, "keep"),
        policies.PostLocalSGD(1000, 1),
    ):
        own = trained(policy, makers[0], *mine, size=comm.size).get_weights()
        for ours, theirs in zip(own, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, **TOLERANCE)
            if comm.size == 1:
                assert (ours == theirs).all()
    before = None
    for policy in (
        policies.ParameterAveraging(2, overlap=True),
        policies.DiLoCo(3),
        policies.Gossip("ring"),
        policies.Gossip({r: [(r + 1) % comm.size] + [0] * (r == 1) for r in range(comm.size)}),
        policies.ParameterServer(staleness=1, rule="adam", lr=0.01),
        policies.EASGD(2),
        policies.AsyncGossip(),
    ):
        if comm.size == 1:
            break
        model = trained(policy, makers[1], *mine, size=comm.size)
        assert_same_bits(comm, *model.get_weights())
        loss = model.evaluate(x, y, verbose=0)[0]
        before = before or compiled(perceptron(), "sgd").evaluate(x, y, verbose=0)[0]
        assert loss < before, f"{policy!r}: {loss} of {before}"


@needs(ranks=2)
def check_state_is_averaged_whatever_else_was_built(comm: Communicator) -> None:
    """Keras counts layers, and names the optimizer's state by them."""
    if comm.rank == 0:
        perceptron()
    keras.utils.set_random_seed(1)
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), policy=policies.ParameterAveraging(1, "average")
    )
    x, y = data()
    fitted(compiled(model, optimizer), x + comm.rank, y, size=1)
    assert_same_bits(comm, *map(keras.ops.convert_to_numpy, model.optimizer.momentums))


def check_rounds_of_one_rank(comm: Communicator) -> None:
    if comm.size > 1:
        return
    policy = policies.ParameterAveraging(3, balance=True)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    model = compiled(perceptron(), optimizer)
    fitted(model, *data(), size=1)
    assert policy.rounds == int(model.optimizer.iterations) // 3 > 0


@needs(ranks=2)
def check_missing_gradients(comm: Communicator) -> None:
    """Averaged from when all ranks have them; refused on all, if some have them."""
    a, b = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), policy=policies.PostLocalSGD(1000, 1)
    )
    its = keras.ops.full((1,), float(comm.rank), dtype=a.dtype)
    for given in ((its, None), (its, its), (None, its)):
        optimizer.apply([*given], [a, b])
    for each in (a, b):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(each), 2 - comm.size, rtol=1e-6)
    with expect(Exception, "some ranks have a gradient of 'variable 1'"):
        optimizer.apply([its, its if comm.rank == 0 else None], [a, b])


@needs(ranks=2)
def check_one_network(comm: Communicator) -> None:
    a, b = keras.Variable([1.0]), keras.Variable([100.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), policy=policies.DiLoCo(2))
    optimizer.apply([keras.ops.ones(1)], [a])
    with expect(ringdl.UsageError, "these variables are not those of the first step"):
        optimizer.apply([keras.ops.ones(1)], [b])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), policy=policies.DiLoCo(2))
    with expect(ringdl.UsageError, "optimizer.build(model.trainable_variables)"):
        policies.synchronize(optimizer)
    optimizer.build([a])
    policies.synchronize(optimizer)


@needs(ranks=2)
def check_wrong_policies(comm: Communicator) -> None:
    for policy, options, text in (
        ("gossip", {}, "pass one of ringdl.policies"),
        (policies.PostLocalSGD(1, 1), {"gradient_predivide_factor": 2.0}, "as they are here"),
        (policies.Gossip(), {"op": ringdl.Sum}, "is for AllReduce()"),
        (policies.Gossip(), {"backward_passes_per_step": 2}, "counts calls of apply()"),
    ):
        with expect(ringdl.UsageError, text):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), policy=policy, **options)  # type: ignore[arg-type]
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for other, text in (
        (scaled, "LossScaleOptimizer"),
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0 is not done"),
    ):
        with expect(ringdl.UsageError, text):
            hvd.DistributedOptimizer(other, policy=policies.ParameterServer(rule="adam", lr=0.1))
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(), policy=policies.Gossip()))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(unbuilt)
    with expect(ringdl.UsageError, "give it a keras.layers.Input"):
        callback.on_train_begin()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), policy=policies.Gossip())
    with expect(ringdl.UsageError, "none can be local"):
        optimizer.register_local_var(keras.Variable([1.0]))
    variable = keras.Variable([float(comm.rank)])
    with expect(Exception, "the replicas differ"):
        optimizer.apply([keras.ops.ones(1)], [variable])


class Named(policies.Policy):
    """Notes what there is a gradient of."""

    found: dict[str, bool]

    def before_step(self, model: policies.Model) -> None:
        self.found = {name: model.gradients[name] is not None for name in model.parameters}

    def __repr__(self) -> str:
        return "Named()"


@needs(ranks=2)
def check_gradients_that_are_none(comm: Communicator) -> None:
    """A policy sees them by name, as everywhere."""
    a, b = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), policy=(policy := Named()))
    optimizer.apply([keras.ops.ones(1, dtype=a.dtype), None], [a, b])
    assert [*policy.found.values()] == [True, False]
