"""ringdl.tensorflow: training with averaged gradients, tapes, replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
import ringdl.tensorflow as hvd
from ringdl import Communicator
from tests.ranks._tensorflow import both, whole
from tests.ranks.support import assert_same_bits, expect, expect_no_growth, needs


def mlp(rank: int) -> tuple[list[Any], Callable[[Any, Any], Any]]:
    """Parameters, other ones on each rank, and a loss in float64."""
    random = np.random.default_rng(rank)
    shapes = ((8, 16), (16,), (16, 4), (4,), ())
    parameters = [tf.Variable(random.normal(size=shape) / 3) for shape in shapes]

    def loss(inputs: Any, targets: Any) -> Any:
        w, b, v, c, scale = parameters
        outputs = tf.tanh(inputs @ w + b) @ v * scale + c
        return tf.reduce_mean((outputs - targets) ** 2)

    return parameters, loss


def network(rank: int) -> tuple[list[Any], Callable[[Any, Any], Any]]:
    """The same of a small convolutional network with attention over its positions."""
    random = np.random.default_rng(rank)
    shapes = ((3, 3, 1, 4), (4,), (4, 12), (4, 4), (4,), (4, 4))
    parameters = [tf.Variable(random.normal(size=shape) / 2) for shape in shapes]

    def loss(inputs: Any, targets: Any) -> Any:
        kernel, bias, mixing, back, gain, head = parameters
        x = tf.nn.relu(tf.nn.conv2d(inputs, kernel, 1, "SAME") + bias)
        x = tf.reshape(tf.nn.avg_pool2d(x, 2, 2, "VALID"), (-1, 16, 4))
        query, key, value = tf.split(x @ mixing, 3, axis=-1)
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 2)
        x = x + tf.matmul(weights, value) @ back
        x = gain * x / (1 + tf.abs(x))
        return tf.reduce_mean((tf.reduce_mean(x, 1) @ head - targets) ** 2)

    return parameters, loss


def check_training(comm: Communicator) -> None:
    """Split batches give the parameters of one process with the whole batch."""
    data = np.random.default_rng(3)
    for model, shape in ((mlp, (12, 8)), (network, (12, 8, 8, 1))):
        batches = [(data.normal(size=shape), data.normal(size=(12, 4))) for _ in range(4)]

        def trained(
            rank: int,
            part: slice,
            wraps: bool,
            compiles: bool,
            model: Any = model,
            batches: Any = batches,
        ) -> list[Any]:
            parameters, loss = model(rank)
            velocities = [tf.Variable(tf.zeros_like(each)) for each in parameters]

            def step(inputs: Any, targets: Any) -> Any:
                with tf.GradientTape() as tape:
                    value = loss(inputs, targets)
                if wraps:
                    tape = hvd.DistributedGradientTape(tape)
                for parameter, velocity, gradient in zip(
                    parameters, velocities, tape.gradient(value, parameters), strict=True
                ):
                    velocity.assign(0.9 * velocity + gradient)
                    parameter.assign_sub(0.05 * velocity)
                return value

            run = tf.function(step, autograph=False) if compiles else step
            if wraps:
                hvd.broadcast_variables(parameters, root_rank=0)
            for inputs, targets in batches:
                run(tf.constant(inputs[part]), tf.constant(targets[part]))
            return [whole(parameter) for parameter in parameters]

        expected = trained(0, slice(None), wraps=False, compiles=True)
        for compiles in (True, False):
            mine = slice(comm.rank, None, comm.size)
            found = trained(comm.rank, mine, wraps=True, compiles=compiles)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
            assert_same_bits(comm, *found)


def check_optimizer_of_keras(comm: Communicator) -> None:
    """The first step of a script: gradients, the optimizer's variables, then the broadcast."""
    keras = tf.keras
    keras.utils.set_random_seed(comm.rank)
    layers = [keras.layers.Input((8,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    model, optimizer = keras.Sequential(layers), keras.optimizers.Adam(0.01)

    @tf.function
    def step(x: Any, is_first: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - tf.reduce_sum(x, 1)) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for number in range(3):
        step(tf.random.stateless_normal((4, 8), (number, comm.rank)), number == 0)
        assert_same_bits(comm, *map(whole, [*model.variables, *optimizer.variables]))


def check_wrapped_optimizer(comm: Communicator) -> None:
    """It is that of ringdl.keras, also under the names of scripts."""
    import ringdl.tensorflow.keras as of_keras

    assert of_keras.DistributedOptimizer is ringdl.keras.DistributedOptimizer
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0),
        None,
        False,
        "",
        "",
        hvd.Compression.none,
        False,
        1,
        hvd.Average,
    )
    variable = tf.keras.Variable(tf.zeros([2]))
    optimizer.apply_gradients([(tf.fill([2], comm.rank + 1.0), variable)])
    assert whole(variable.value).tolist() == [-(comm.size + 1) / 2] * 2


def check_missing_gradients(comm: Communicator) -> None:
    """Zeros where only others have one; None where nobody has."""
    v, w, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(4.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (w if comm.rank == 0 else 1.0)
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, {"v": v, "w": w, "unused": unused})

    found = step()
    np.testing.assert_allclose(found["v"], [(3 + comm.size - 1) / comm.size] * 2, rtol=1e-6)
    np.testing.assert_allclose(found["w"], 3 / comm.size, rtol=1e-6)
    assert found["unused"] is None
    if comm.size > 1:
        text = "is None on", f"of {comm.size} ranks, and a tf.function cannot make a tensor of None"
        with expect(tf.errors.UnknownError, "MismatchError: the gradient 2", *text):
            tf.function(step)()
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    assert hvd.DistributedGradientTape(tape).gradient(loss, [v, unused]) == [None, None]


@needs(ranks=2)
def check_join(comm: Communicator) -> None:
    """A rank that is out of data counts as one without gradients."""
    v, unused = tf.Variable(1.0), tf.Variable(1.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = v * (comm.rank + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [v, unused])

    mean = (comm.size + 1) / 2
    for run in both(step):
        found = run()
        assert (float(found[0]), found[1]) == (mean, None)
        if comm.rank > 0:
            np.testing.assert_allclose(run()[0], mean - 1 / comm.size, rtol=1e-6)
        assert int(hvd.join()) > 0


def check_sparse_gradients(comm: Communicator) -> None:
    """Rows of all ranks; those of a dense gradient, when they are added up."""
    table = tf.Variable(tf.reshape(tf.range(12.0), (6, 2)))
    rows = tf.constant([comm.rank, 5, 5][: 2 + (comm.rank == 0)])

    def step(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [table])[0]

    expected = np.zeros((6, 2))
    for rank in range(comm.size):
        for row in [rank, 5, 5][: 2 + (rank == 0)]:
            expected[row] += 2 * whole(table)[row] / comm.size
    for run in both(step):
        found = run()
        assert isinstance(found, tf.IndexedSlices)
        np.testing.assert_allclose(whole(tf.convert_to_tensor(found)), expected, rtol=1e-6)
    for run in both(lambda: step(sparse_as_dense=True)):
        np.testing.assert_allclose(whole(run()), expected, rtol=1e-6)
    index, shape = tf.constant([comm.rank]), tf.constant([comm.size, 2])
    slices = tf.IndexedSlices(tf.ones([1, 2]), index, shape)
    for op, value in ((hvd.Average, 1 / comm.size), (hvd.Sum, 1.0)):
        for reduce in both(lambda x, op=op: hvd.grouped_allreduce([x, 1.0], op=op)[0]):
            assert (whole(tf.convert_to_tensor(reduce(slices))) == np.float32(value)).all()
    if comm.size > 1:  # matched by name
        with expect(ringdl.MismatchError, "allgather.first.values", "allgather.others.values"):
            hvd.allreduce(slices, name="first" if comm.rank == 0 else "others")
    with expect(NotImplementedError, "are reduced with Sum or Average"):
        hvd.allreduce(slices, op=hvd.Max)


def check_options_of_tapes(comm: Communicator) -> None:
    """Reductions, factors, local sources, process sets, and what is left of the wrapped tape."""
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    rank, size = comm.rank, comm.size
    mean = (size + 1) / 2

    def step(sources: Any, local: Any = None, **options: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(v * v) * (rank + 1.0) + w * (rank + 1.0)
        wrapped = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(wrapped, tf.GradientTape)
        if local is not None:
            wrapped.register_local_source(local)
        own, found = tape.gradient(loss, w), wrapped.gradient(loss, sources)
        tf.debugging.assert_equal(own, rank + 1.0)
        return found

    for run in both(lambda: step([v, w])):
        found = run()
        assert whole(found[0]).tolist() == [2 * mean, 4 * mean]
        assert float(found[1]) == mean
    assert float(step(w, op=hvd.Sum)) == size * mean
    assert np.isclose(step(w, gradient_predivide_factor=3.0), mean)
    assert float(step(w, compression=hvd.Compression.fp16)) == mean
    np.testing.assert_allclose(
        step(v, op=hvd.Adasum), whole(hvd.allreduce(2 * v * (rank + 1), op=hvd.Adasum))
    )
    assert float(step((v, w), local=w)[1]) == np.float32((rank + 1) / size)
    assert float(step((v, w), local=w, scale_local_gradients=False)[1]) == rank + 1
    evens = hvd.global_process_set
    if size > 1:
        evens = hvd.add_process_set([*range(0, size, 2)])
    its_mean = np.mean([r + 1 for r in range(0, size, 2)])
    expected = its_mean if rank % 2 == 0 else rank + 1
    for run in both(lambda: step(w, process_set=evens)):
        assert float(run()) == expected
    assert int(hvd.size_op(evens.process_set_id)) == (size + 1) // 2
    assert int(hvd.process_set_included_op(evens.process_set_id)) == 1 - rank % 2
    hvd.remove_process_set(evens)
    layer = tf.keras.layers.Dense(1)
    layer.build((None, 2))
    with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
        loss = tf.reduce_sum(layer(v[None])) * (rank + 1.0) + w * (rank + 1.0)
    local, others = tape.get_local_and_global_gradients(loss, [*layer.trainable_weights, w])
    assert [float(gradient) for _, gradient in others] == [mean]
    np.testing.assert_allclose(local[0][1][0], (rank + 1) / size)


def check_second_derivatives(comm: Communicator) -> None:
    """Through a wrapped tape: the average of what others do with the average."""
    x = tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            y = (comm.rank + 1) * x**3
        slope = hvd.DistributedGradientTape(tape).gradient(y, x)
        loss = (comm.rank + 1) * slope
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(outer.gradient(loss, x), 12 * (comm.rank + 1) * mean, rtol=1e-6)


def check_results_stay(comm: Communicator) -> None:
    """What a call returns is not written to by later ones, and is given back in the end."""
    parameters = [tf.Variable(tf.ones([200_000])), tf.Variable(1.0)]

    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = factor * tf.add_n([tf.reduce_sum(each) for each in parameters])
        return hvd.DistributedGradientTape(tape).gradient(loss, parameters)

    for run in both(step):
        kept = [run(tf.constant(float(number))) for number in range(5)]
        for number, gradients in enumerate(kept):
            assert all((whole(each) == number).all() for each in gradients)
        del kept, gradients

        def use(times: int, run: Any = run) -> None:
            for _ in range(times):
                run(tf.constant(1.0))
                hvd.broadcast(hvd.allgather(parameters[0][:1000]), 0)

        expect_no_growth(comm, use, 30, 60, 8 << 20)


def check_broadcast_variables(comm: Communicator) -> None:
    root, rank = comm.size - 1, comm.rank
    dtypes = (tf.float32, tf.bfloat16, tf.int64, tf.bool, tf.complex128)

    def made(value: int) -> list[Any]:
        plain = [tf.Variable(tf.cast(tf.fill([2, 3], value), dtype)) for dtype in dtypes]
        large = tf.Variable(tf.fill([300_000], float(value)))
        return [*plain, large, tf.keras.Variable([float(value)]), tf.Variable(tf.zeros([0, 2]))]

    for number in range(2):
        variables = made(rank)
        both(partial(hvd.broadcast_variables, variables, root))[number]()
        for one, other in zip(variables, made(root), strict=True):
            assert (whole(tf.convert_to_tensor(one)) == whole(tf.convert_to_tensor(other))).all()
    assert (whole(hvd.broadcast_(made(rank)[:1], root)[0]) == root).all()
    hvd.broadcast_variables([], root)
    variable = tf.Variable(tf.fill([2 + (rank == 1)], rank))
    if comm.size > 1:
        text = "'variable 0' is int32[3] on rank 1, but int32[2] on the root rank"
        with expect(ringdl.MismatchError, text):
            hvd.broadcast_variables([variable], 0)
        with expect(tf.errors.UnknownError, "MismatchError", text):
            tf.function(lambda: hvd.broadcast_variables([variable], 0))()
        with expect(ringdl.MismatchError, "'variable 0' is missing on rank 1"):
            hvd.broadcast_variables([variable] if rank != 1 else [], 0)
        assert (whole(variable) == rank).all()
    assert hvd.broadcast_object({"rank": rank}, root) == {"rank": root}
    assert hvd.broadcast_object_fn(root)(rank) == root
    assert hvd.allgather_object(rank) == [*range(comm.size)]


def check_batch_normalization(comm: Communicator) -> None:
    """The statistics, results and gradients of one process with all ranks' batches."""
    rank, size = comm.rank, comm.size
    counts = [3 + 2 * r for r in range(size)]
    batch = np.random.default_rng(5).normal(2, 3, (sum(counts), 4, 3))
    begin = sum(counts[:rank])
    mine = slice(begin, begin + counts[rank])

    def step(layer: Any, x: Any, scale: float) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = scale * tf.reduce_sum(tf.sin(y) * tf.cast(x, y.dtype))
        return y, tape.gradient(loss, x)

    layer = tf.keras.layers.BatchNormalization(dtype="float64")
    y, dx = step(layer, tf.constant(batch), 1.0)
    for compiles in (False, True):
        sync = hvd.SyncBatchNormalization(dtype="float64")
        sync.build((None, 4, 3))
        run = tf.function(step, autograph=False) if compiles else step
        its_y, its_dx = run(sync, tf.constant(batch[mine]), 1.0)
        np.testing.assert_allclose(its_y, whole(y)[mine], rtol=1e-9)
        np.testing.assert_allclose(its_dx, whole(dx)[mine], rtol=1e-9, atol=1e-12)
        for one, other in zip(sync.variables, layer.variables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
            assert_same_bits(comm, whole(tf.convert_to_tensor(one)))
    with expect(ringdl.UsageError, "it is not fused"):
        hvd.SyncBatchNormalization(fused=True)
