"""ringdl.keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ringdl
import ringdl.keras as hvd
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect, needs

BACKEND = keras.backend.backend()
BATCH, BATCHES = 24, 3
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6} if BACKEND == "torch" else {"rtol": 1e-9, "atol": 1e-12}
"""On PyTorch Keras multiplies matrices of float64 in float32."""

keras.config.set_floatx("float64")


def perceptron() -> Any:
    layers = [keras.layers.Input((6, 6, 1)), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])


def convolutions() -> Any:
    inputs = keras.layers.Input((6, 6, 1))
    first = keras.layers.Conv2D(3, 3, activation="relu", padding="same")(inputs)
    second = keras.layers.SeparableConv2D(3, 3, activation="relu", padding="same")(first)
    pooled = keras.layers.AveragePooling2D(2)(keras.layers.Add()([first, second]))
    outputs = keras.layers.Dense(4)(keras.layers.Flatten()(pooled))
    return keras.Model(inputs, outputs)


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    images = random.normal(size=(BATCH * BATCHES, 6, 6, 1))
    return images, random.normal(size=(len(images), 4))


def part_of_batches(comm: Communicator, *arrays: Any) -> list[Any]:
    """This rank's rows of each batch."""
    begins = range(0, BATCH * BATCHES, BATCH)
    return [
        np.concatenate([each[begin : begin + BATCH][comm.rank :: comm.size] for begin in begins])
        for each in arrays
    ]


@keras.saving.register_keras_serializable()
class Squares(keras.losses.Loss):
    """Their mean in float64: Keras' own losses are reduced in float32."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        difference = y_pred - keras.ops.cast(y_true, y_pred.dtype)
        return keras.ops.sum(difference * difference) / keras.ops.cast(
            keras.ops.size(difference), y_pred.dtype
        )


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer=optimizer, loss=Squares(), metrics=["mae"], **options)
    return model


def fitted(model: Any, x: Any, y: Any, size: int = 1, **options: Any) -> Any:
    options = {"epochs": 3, "shuffle": False, "verbose": 0} | options
    return model.fit(x, y, batch_size=BATCH // size, **options)


def check_fit(comm: Communicator) -> None:
    """Split batches are whole ones: dense and convolutional networks, compiled and not."""
    if BATCH % comm.size:
        return
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (perceptron, lambda: sgd(0.1, momentum=0.9, weight_decay=0.01), {}),
        (perceptron, lambda: adam(0.01, global_clipnorm=0.5), {"run_eagerly": True}),
        (convolutions, lambda: adam(0.01), {}),
    ]
    for make, optimizer, options in cases:
        keras.utils.set_random_seed(3)
        together, alone = make(), make()
        alone.set_weights(together.get_weights())
        whole, own = data(), part_of_batches(comm, *data())
        fitted(
            compiled(together, hvd.DistributedOptimizer(optimizer()), **options), *own, comm.size
        )
        fitted(compiled(alone, optimizer(), **options), *whole)
        for mine, its in zip(together.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, its, **TOLERANCE)
            assert_same_bits(comm, mine)


def check_options(comm: Communicator) -> None:
    """Sums, divided before; gradients of several passes applied at once; wrapping again."""
    for options, rate in (
        ({"gradient_predivide_factor": 4.0}, 0.1),
        ({"op": ringdl.Sum}, 0.1 / comm.size),
        ({"backward_passes_per_step": 3, "average_aggregated_gradients": True}, 0.1),
        ({"backward_passes_per_step": 3}, 0.1 / 3),
    ):
        keras.utils.set_random_seed(3)
        together, alone = perceptron(), perceptron()
        alone.set_weights(together.get_weights())
        passes = options.get("backward_passes_per_step", 1)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
        own = part_of_batches(comm, *data())
        fitted(compiled(together, optimizer), *own, comm.size)
        bare = keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes if passes > 1 else None)
        fitted(compiled(alone, bare), *data())
        if BATCH % comm.size == 0:
            for mine, its in zip(together.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(mine, its, **TOLERANCE)


def tensor(value: Any, dtype: str = "float64") -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value, dtype))


def zeros(*shape: int, name: str = "v") -> Any:
    return keras.Variable(np.zeros(shape), dtype="float64", name=name)


def check_gradients_by_hand(comm: Communicator) -> None:
    """Gradients of a loop of one's own; None where there is none on any rank."""
    variables = [zeros(3), zeros(2, 2), zeros(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for _ in range(3):
        given = [tensor([comm.rank] * 3), None, tensor([1.0, comm.rank])]
        optimizer.apply(given, variables)
    mean = (comm.size - 1) / 2
    assert variables[0].numpy().tolist() == [-3 * mean] * 3
    assert (variables[1].numpy() == 0).all()
    assert variables[2].numpy().tolist() == [-3.0, -3 * mean]
    optimizer.apply_gradients(zip(given, variables, strict=True))
    assert variables[2].numpy().tolist() == [-4.0, -4 * mean]


def check_compiled_again(comm: Communicator) -> None:
    """With another optimizer, as after a freeze: the first one has no more to do with it."""
    keras.utils.set_random_seed(3)
    together, alone = perceptron(), perceptron()
    alone.set_weights(together.get_weights())
    own = part_of_batches(comm, *data())
    for turn in range(2):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 / comm.size), op=ringdl.Sum)
        first = weakref.ref(optimizer)
        fitted(compiled(together, optimizer), *own, comm.size)
        fitted(compiled(alone, keras.optimizers.SGD(0.1)), *data())
        if BATCH % comm.size == 0:
            for mine, its in zip(together.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(mine, its, **TOLERANCE)
        del optimizer
        compiled(together, keras.optimizers.SGD(0.1))
        if BACKEND == "torch":
            assert first() is None, turn  # without the garbage collector, which each rank has


def check_changed_gradients(comm: Communicator) -> None:
    """What each rank has changed before it is applied is averaged, in each step."""
    variable = zeros(3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    mean = (comm.size - 1) / 2
    for step in range(1, 4):
        if BACKEND == "torch":
            variable.value.grad = None
            (variable.value * 2).sum().backward()
            gradient = variable.value.grad + comm.rank
        else:
            gradient = tensor([2.0 + comm.rank] * 3)
        optimizer.apply([gradient], [variable])
        assert variable.numpy().tolist() == [-(2 + mean) * step] * 3


def check_embeddings(comm: Communicator) -> None:
    """Their gradients are sparse on TensorFlow: accumulated, and of local layers, too."""
    x, y = np.arange(BATCH * 4).reshape(BATCH, 4) % 9, np.ones((BATCH, 1))
    for is_local in (False, True):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Embedding(9, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        wrap = hvd.PartialDistributedOptimizer if is_local else hvd.DistributedOptimizer
        options = {"local_layers": model.layers[0]} if is_local else {"backward_passes_per_step": 2}
        optimizer = wrap(keras.optimizers.SGD(0.1), **options)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        compiled(model, optimizer).fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
        assert_same_bits(comm, model.layers[-1].kernel.numpy())


@needs(ranks=2)
def check_models_built_in_the_first_step(comm: Communicator) -> None:
    """On TensorFlow they are broadcast after it."""
    keras.utils.set_random_seed(comm.rank)
    for is_eager in (False, True):
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        x, y = np.ones((12, 2)), np.ones((12, 1))
        its = compiled(model, optimizer, run_eagerly=is_eager)
        its.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
        for weight in model.get_weights():
            assert_same_bits(comm, weight)


@needs(ranks=2)
def check_compression(comm: Communicator) -> None:
    """float32 is rounded on its way, where messages are sent; float64 is not."""
    ringdl.shutdown()
    os.environ["RINGDL_ALGORITHM"] = "ring"
    ringdl.init()
    del os.environ["RINGDL_ALGORITHM"]
    for compression, rounded in ((hvd.Compression.fp16, True), (hvd.Compression.none, False)):
        for dtype in ("float32", "float64"):
            variable = keras.Variable(np.zeros(comm.size), dtype=dtype)
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
            optimizer.apply([tensor([1 + 2**-13] * comm.size, dtype)], [variable])
            is_rounded = rounded and dtype == "float32"
            assert (variable.numpy() == -1 - (0 if is_rounded else 2**-13)).all()
    ringdl.shutdown()
    ringdl.init()


def check_some_of_the_variables(comm: Communicator) -> None:
    """In another order, too; those that are left out stay."""
    first, second = zeros(2), zeros(3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=ringdl.Sum)
    optimizer.build([first, second])
    optimizer.apply([tensor(np.ones(2)), tensor(np.ones(3))], [first, second])
    optimizer.apply([tensor(np.ones(3)), tensor(np.ones(2))], [second, first])
    optimizer.apply([tensor(np.ones(3))], [second])
    assert first.numpy().tolist() == [-2.0 * comm.size] * 2
    assert second.numpy().tolist() == [-3.0 * comm.size] * 3
    with expect(ringdl.UsageError, "2 gradients for 1 variables"):
        optimizer.apply([tensor(np.ones(3)), None], [second])
    with expect(ringdl.UsageError, "'late' was not among those of the first step"):
        optimizer.apply([tensor(np.ones(3))], [zeros(3, name="late")])


@needs(ranks=2)
def check_gradients_missing_on_some_ranks(comm: Communicator) -> None:
    """Zeros there; on JAX it is a mismatch."""
    variables = [zeros(3), zeros(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=ringdl.Sum)
    given = [tensor([1.0] * 3), tensor([2.0, 2.0]) if comm.rank == 0 else None]
    if BACKEND == "jax":
        with expect(ringdl.MismatchError, "'variable 1 (v)' is missing on rank 1, but float64[2]"):
            optimizer.apply(given, variables)
        return
    optimizer.apply(given, variables)
    assert variables[0].numpy().tolist() == [-comm.size] * 3
    assert variables[1].numpy().tolist() == [-2.0, -2.0]


def check_local_layers(comm: Communicator) -> None:
    keras.utils.set_random_seed(3)
    model = perceptron()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[1]
    )
    fitted(compiled(model, optimizer), *part_of_batches(comm, *data()), comm.size)
    local, shared = model.layers[1].kernel.numpy(), model.layers[2].kernel.numpy()
    assert_same_bits(comm, shared)
    if comm.size > 1:
        assert (comm.allreduce(local, ringdl.Max) != comm.allreduce(local, ringdl.Min)).any()


def check_callbacks(comm: Communicator) -> None:
    """Unequal replicas become equal, metrics are averages, the rate rises and falls."""
    keras.utils.set_random_seed(comm.rank)
    model = perceptron()
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5))
    its = hvd.callbacks
    own = part_of_batches(comm, *data())
    history = fitted(
        compiled(model, optimizer),
        *own,
        comm.size,
        epochs=4,
        validation_data=own,
        callbacks=[
            its.BroadcastGlobalVariablesCallback(0),
            its.MetricAverageCallback(),
            its.LearningRateWarmupCallback(0.4, warmup_epochs=2),
            its.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2),
            Rates(),
        ],
    ).history
    for weight in model.get_weights():
        assert_same_bits(comm, weight)
    assert_same_bits(comm, np.array([history["loss"], history["val_mae"]]))
    steps = len(own[0]) // -(-BATCH // comm.size) if BATCH % comm.size else BATCHES
    rising = [
        0.4 / comm.size * (step / steps / 2 * (comm.size - 1) + 1)
        for step in range(1, 2 * steps + 1)
    ]
    if BATCH % comm.size == 0:
        np.testing.assert_allclose(rates[: 2 * steps], rising, rtol=1e-6)
        np.testing.assert_allclose(rates[2 * steps :], [0.4] * steps + [0.04] * steps, rtol=1e-6)
        np.testing.assert_allclose(history["lr"][2:], [0.4, 0.04], rtol=1e-6)


def check_local_variables_are_not_broadcast(comm: Communicator) -> None:
    keras.utils.set_random_seed(comm.rank)
    model = perceptron()
    local, *others = model.trainable_variables
    before = keras.ops.convert_to_numpy(local).copy()
    broadcasting = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    broadcasting.set_model(compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))))
    broadcasting.on_train_begin()
    assert (keras.ops.convert_to_numpy(local) == before).all()
    assert_same_bits(comm, *map(keras.ops.convert_to_numpy, others))


def check_momentum_is_corrected(comm: Communicator) -> None:
    """A velocity holds the rate: it changes with it."""
    model = compiled(
        perceptron(), hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9))
    )
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(np.ones(optimizer.momentums[0].shape))
    for correction in (True, False):
        callback = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: 0.5 ** (epoch + 1), momentum_correction=correction
        )
        callback.set_model(model)
        callback.on_epoch_begin(0 if correction else 1)
        assert (optimizer.momentums[0].numpy() == 0.5).all()


def check_saved_models(comm: Communicator) -> None:
    """Keras saves and loads as ever; load_model wraps."""
    folder = Path(comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None))
    path = folder / "best.keras"
    keras.utils.set_random_seed(3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    assert type(optimizer) is type(keras.optimizers.Adam())
    assert optimizer.get_config() == keras.optimizers.Adam(0.01, name=optimizer.name).get_config()
    model = compiled(perceptron(), optimizer)
    saver = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    own = part_of_batches(comm, *data())
    callbacks = [hvd.callbacks.MetricAverageCallback(), saver]
    fitted(model, *own, comm.size, callbacks=callbacks)
    comm.barrier()
    bare, loaded = keras.saving.load_model(path), hvd.load_model(path)
    assert "apply" not in vars(bare.optimizer)
    assert "apply" in vars(loaded.optimizer)
    assert type(bare.optimizer) is type(optimizer)
    for mine, its in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)
    fitted(loaded, *own, comm.size, epochs=1)
    fitted(model, *own, comm.size, epochs=1)
    for mine, its in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-12)
    comm.barrier()
    if comm.rank == 0:
        assert os.listdir(folder) == ["best.keras"]
        path.unlink()
        folder.rmdir()


@needs(ranks=2)
def check_loss_scaling(comm: Communicator) -> None:
    """A gradient that is not finite on one rank is skipped by all."""
    variable = zeros(2)
    inner = keras.optimizers.SGD(1.0)
    scaling = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaling)
    optimizer.build([variable])

    def apply(*elements: float) -> None:
        if BACKEND != "jax":
            optimizer.apply([tensor(elements)], [variable])
            return
        state = [each.value for each in optimizer.variables]
        values, state = optimizer.stateless_apply(state, [tensor(elements)], [variable.value])
        variable.assign(values[0])
        for each, value in zip(optimizer.variables, state, strict=True):
            each.assign(value)

    apply(np.inf if comm.rank == 0 else 1.0, 1.0)
    assert variable.numpy().tolist() == [0.0, 0.0]
    assert float(keras.ops.convert_to_numpy(scaling.dynamic_scale)) == 2.0
    apply(2.0, 2.0 * comm.rank)
    assert variable.numpy().tolist() == [-1.0, -(comm.size - 1) / 2]


def check_loss_scaling_by_policy(comm: Communicator) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
        keras.utils.set_random_seed(3)
        model = perceptron()
        fitted(compiled(model, wrapped), *part_of_batches(comm, *data()), comm.size, epochs=1)
        assert model.optimizer is wrapped
        for weight in model.get_weights():
            assert_same_bits(comm, weight)
    finally:
        keras.config.set_dtype_policy("float64")
    bare = keras.optimizers.SGD(1.0)
    inside = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(bare))
    broadcasting = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    with expect(ringdl.UsageError, "DistributedOptimizer(keras.optimizers.LossScaleOptimizer("):
        fitted(compiled(perceptron(), inside), *data(), callbacks=broadcasting)


def check_values(comm: Communicator) -> None:
    assert hvd.allreduce(float(comm.rank)) == (comm.size - 1) / 2
    assert hvd.allreduce(tensor([1.0, 2.0]), average=False).tolist() == [comm.size, 2.0 * comm.size]
    assert hvd.allgather(tensor([comm.rank])).tolist() == list(range(comm.size))
    assert hvd.broadcast(tensor([comm.rank]), root_rank=comm.size - 1).tolist() == [comm.size - 1]
    assert len(hvd.reducescatter(np.ones(comm.size), op=ringdl.Sum)) == 1
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        value = hvd.allreduce(np.float32([comm.rank, 1.0]), average=None, compression=compression)
        assert value.dtype == np.float32
        assert value.tolist() == [(comm.size - 1) / 2, 1.0]


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    is_last = comm.rank == comm.size - 1
    with expect(ringdl.UsageError, "wraps an optimizer of Keras 3, not a builtins.str"):
        hvd.DistributedOptimizer("adam")
    with expect(ringdl.UsageError, "reduced with Average or Sum, not"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=ringdl.Max)
    with expect(ringdl.UsageError, "gradient_predivide_factor=2.0"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(), gradient_predivide_factor=2.0, op=ringdl.Sum
        )
    with expect(ringdl.UsageError, "backward_passes_per_step must be at least 1, not 0"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    with expect(ringdl.UsageError, "has others already"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(gradient_accumulation_steps=3), backward_passes_per_step=2
        )
    with expect(ringdl.UsageError, "a MultiOptimizer accumulates nothing"):
        several = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD())
        )
        hvd.DistributedOptimizer(several, backward_passes_per_step=2)
    layer = keras.layers.Dense(2, name="late")
    with expect(ringdl.UsageError, "the local layer 'late' has no variables yet"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=layer)
    layer.build((None, 2))
    for bare in (
        keras.optimizers.SGD(global_clipnorm=1.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        with expect(ringdl.UsageError, "variables cannot be local with"):
            hvd.PartialDistributedOptimizer(bare, local_layers=layer)
    with expect(ringdl.MismatchError, "broadcast_variables", "float64[3]", "float64[2]"):
        hvd.broadcast_variables([zeros(3 if is_last else 2)])
    with expect(ringdl.Error, "pass model.weights or"):
        hvd.broadcast_variables([np.zeros(3)] if is_last else [zeros(3)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    size = 3 if is_last else 2
    with expect(ringdl.MismatchError, "variable 0 (v)", "3", "2"):
        optimizer.apply([tensor(np.ones(size))], [zeros(size)])


@needs(ranks=2)
def check_unequal_replicas_are_found(comm: Communicator) -> None:
    keras.utils.set_random_seed(comm.rank)
    model = compiled(perceptron(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with expect(Exception, "replicas differ", "BroadcastGlobalVariablesCallback(0)"):
        fitted(model, *part_of_batches(comm, *data()), comm.size)


@needs(ranks=2)
def check_forgotten_wrapping_is_told(comm: Communicator) -> None:
    model = compiled(perceptron(), keras.optimizers.SGD(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(
            model,
            *part_of_batches(comm, *data()),
            comm.size,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        )
    assert any("is not wrapped" in str(each.message) for each in caught)
