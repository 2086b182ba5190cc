"""ringdl.tensorflow.keras with models of Keras 2, as tf_keras has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tf_keras as keras

import ringdl
import ringdl.tensorflow.keras as hvd
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect

BATCH, BATCHES = 24, 3


def network() -> Any:
    return keras.Sequential(
        [
            keras.layers.Conv2D(3, 3, activation="tanh", input_shape=(6, 6, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


def fitted(model: Any, optimizer: Any, comm: Communicator | None, **options: Any) -> Any:
    """Trained on this rank's part of each batch, or on whole ones."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(BATCH * BATCHES, 6, 6, 1)), random.normal(size=(BATCH * BATCHES, 4))
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    parts = [
        np.concatenate([each[b : b + BATCH][rank::size] for b in range(0, len(each), BATCH)])
        for each in (x, y)
    ]
    model.compile(optimizer=optimizer, loss="mse")
    options = {"epochs": 3, "shuffle": False, "verbose": 0} | options
    return model.fit(*parts, batch_size=BATCH // size, **options)


def check_fit(comm: Communicator) -> None:
    """Split batches are whole ones; models that begin unequal become equal."""
    keras.utils.set_random_seed(3)
    together, alone = network(), network()
    alone.set_weights(together.get_weights())
    if comm.rank > 0:
        together.set_weights([each + 1 for each in together.get_weights()])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))
    assert type(optimizer) is keras.optimizers.SGD
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = fitted(together, optimizer, comm, callbacks=callbacks).history
    fitted(alone, keras.optimizers.SGD(0.01, momentum=0.5), None)
    assert_same_bits(comm, np.array(history["loss"]))
    for mine, its in zip(together.get_weights(), alone.get_weights(), strict=True):
        assert_same_bits(comm, mine)
        if BATCH % comm.size == 0:
            np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


def check_legacy_optimizer(comm: Communicator) -> None:
    """The optimizers of Keras before 2.11."""
    keras.utils.set_random_seed(3)
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.01))
    rising = hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2)
    history = fitted(model, optimizer, comm, callbacks=[rising]).history
    np.testing.assert_allclose(history["lr"][-1], 0.01, rtol=1e-6)
    for weight in model.get_weights():
        assert_same_bits(comm, weight)


def check_accumulation_is_refused(comm: Communicator) -> None:
    with expect(ringdl.UsageError, "backward_passes_per_step=2 needs Keras 3"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2)
