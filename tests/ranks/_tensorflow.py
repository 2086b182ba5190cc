"""ringdl.tensorflow: collectives of tensors in eager mode and in tf.function, and their order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import ringdl
import ringdl.tensorflow as hvd
from ringdl import Communicator
from tests.ranks.reference import dtypes_and_reductions, random_array, reduced
from tests.ranks.support import assert_same_bits, expect

THREADS = 4
"""As many operations of a graph run at once, also where ranks have fewer cores."""
tf.config.threading.set_inter_op_parallelism_threads(THREADS)


def whole(x: Any) -> Any:
    return np.asarray(x)


def both(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function as it is, and compiled."""
    return function, tf.function(function, autograph=False)


def check_allreduce(comm: Communicator) -> None:
    """The bits of ringdl's own, for every dtype and reduction; the argument stays."""
    for count, dtype, op in dtypes_and_reductions(0, 1, 2003):
        arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
        mine = tf.convert_to_tensor(arrays[comm.rank])
        eager, compiled = both(lambda x, op=op: hvd.allreduce(x, op=op))
        for reduce in (eager, compiled) if op == ringdl.Sum else (eager,):
            found = reduce(mine)
            assert (found.dtype, found.shape) == (mine.dtype, mine.shape)
            assert whole(mine).tobytes() == arrays[comm.rank].tobytes(), "the argument was changed"
            reduced(arrays, op).check(whole(found), f"{op.name} of {count} {dtype}")
            assert_same_bits(comm, whole(found))
    assert float(hvd.allreduce(float(comm.rank), average=False)) == sum(range(comm.size))


def check_ringdls_own_functions(comm: Communicator) -> None:
    """They take tensors, and return tensors."""
    total = sum(range(1, comm.size + 1))
    for dtype in (tf.float32, tf.bfloat16, tf.int32):
        mine = tf.cast(tf.fill([6 * comm.size, 2], comm.rank + 1), dtype)
        one, other = comm.grouped_allreduce([mine, mine[:0]], ringdl.Sum)
        for found in (comm.allreduce(mine, ringdl.Sum), one):
            assert tf.is_tensor(found)
            assert (whole(found) == total).all()
        assert other.shape == (0, 2)
        assert (whole(mine) == comm.rank + 1).all()
        assert comm.allgather(mine).shape == (6 * comm.size**2, 2)
        assert comm.alltoall(mine).shape == mine.shape
        assert (whole(comm.broadcast(mine, comm.size - 1)) == comm.size).all()
        assert comm.reducescatter(mine).dtype == dtype
    x = tf.ones(3)
    with expect(ringdl.UsageError, "does not change"):
        comm.allreduce_(x)
    with expect(ringdl.UsageError, "tf.convert_to_tensor(variable)"):
        comm.allreduce(tf.Variable(x))
    with expect(ringdl.UsageError, "inside of tf.function call ringdl.tensorflow's functions"):
        tf.function(comm.allreduce)(x)


def check_exchanges(comm: Communicator) -> None:
    """Also of dtypes that ringdl does not reduce."""
    rank, size = comm.rank, comm.size
    splits = [r + 1 for r in range(size)]
    begin = sum(splits[:rank])
    for dtype in (tf.float64, tf.bfloat16, tf.uint16, tf.complex64, tf.bool):
        name = dtype.as_numpy_dtype
        arrays = [
            (np.arange(6.0 * (r + 1)) % 2 + r % 2).reshape(-1, 3).astype(name) for r in range(size)
        ]
        for gather in both(hvd.allgather):
            found = gather(tf.constant(arrays[rank]))
            assert found.dtype == dtype
            assert (whole(found) == np.concatenate(arrays)).all()
        for send in both(lambda x: hvd.broadcast(x, size - 1)):
            root = arrays[-1][:2]
            assert (
                whole(send(tf.constant(root if rank == size - 1 else ~root.astype(bool), dtype)))
                == root
            ).all()
        deals = [np.arange(2 * sum(splits)).reshape(-1, 2).astype(name) for _ in range(size)]
        expected = np.concatenate([each[begin : begin + rank + 1] for each in deals])
        for exchange in both(hvd.alltoall):
            got, counts = exchange(tf.constant(deals[rank]), tf.constant(splits, tf.int64))
            assert (counts.dtype, whole(counts).tolist()) == (tf.int64, [rank + 1] * size)
            assert (whole(got) == expected).all()
    rows = np.arange(2.0 * (size + 1)).reshape(-1, 2)
    total = sum(rows + r for r in range(size))
    for scatter in both(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1]):
        assert (whole(scatter(tf.constant(rows + rank))) == np.array_split(total, size)[rank]).all()
    assert whole(hvd.grouped_allgather([rank, 5])[0]).tolist() == [*range(size)]
    assert whole(hvd.allgather(tf.constant(rank, tf.uint16))).tolist() == [*range(size)]
    assert hvd.broadcast(tf.constant(1, tf.uint16), 0).shape == ()
    assert int(hvd.join()) in range(size)


def check_static_shapes(comm: Communicator) -> None:
    """What is known of results when a function is compiled."""
    found: list[Any] = []

    def function(x: Any) -> Any:
        its = hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x), hvd.reducescatter(x)
        found[:] = [[*each.shape] for each in (*its, hvd.alltoall(x))]
        return its

    tf.function(function, autograph=False).get_concrete_function(tf.ones([6 * comm.size, 2]))
    assert found == [[6 * comm.size, 2]] * 2 + [[None, 2]] * 3


def check_scales_and_compression(comm: Communicator) -> None:
    total = sum(range(1, comm.size + 1))
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for dtype in (tf.float32, tf.float16, tf.int32):
        x = tf.fill([3], tf.cast(10 * (comm.rank + 1), dtype))
        for reduce in both(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum, **scales)):
            assert all((whole(each) == 15 * total).all() for each in reduce(x))
    large = hvd.allreduce(tf.constant(2**26 + 2), op=hvd.Max, prescale_factor=0.5)
    assert int(large) == 2**25 + 1, "cut to the precision of float32"
    x = tf.fill([4 * comm.size, 2], float(comm.rank + 1))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.none):
        assert (whole(hvd.allreduce(x, compression=compression, op=hvd.Sum)) == total).all()
        part = hvd.reducescatter(x, compression=compression, op=hvd.Sum, **scales)
        assert part.dtype == tf.float32
        assert (whole(part) == 1.5 * total).all()
    assert (whole(hvd.allreduce(x, op=hvd.Adasum)) == whole(comm.allreduce(x, ringdl.Adasum))).all()


def check_gradients_of_collectives(comm: Communicator) -> None:
    """Those that training scripts expect: eager, compiled, and of a function under a tape."""
    rank, size = comm.rank, comm.size
    rows = 2 * size
    x = np.random.default_rng(rank).normal(size=(rows, 3))
    weights = [np.random.default_rng(10 + r).normal(size=(size * rows, 3)) for r in range(size)]
    mean = sum(weights) / size
    exchanged = np.concatenate([w[2 * rank : 2 * rank + 2] for w in weights])
    scattered = np.concatenate([w[:2] for w in weights])
    for name, collective, expected in (
        ("sum", lambda x: hvd.allreduce(x, op=hvd.Sum), size * mean[:rows]),
        ("average", hvd.allreduce, mean[:rows]),
        ("scaled", lambda x: hvd.allreduce(x, prescale_factor=3.0), 3 * mean[:rows]),
        ("group", lambda x: tf.add_n(hvd.grouped_allreduce([x, 2 * x])), 3 * mean[:rows]),
        ("gather", hvd.allgather, mean[rank * rows : (rank + 1) * rows]),
        ("root", lambda x: hvd.broadcast(x, 0), (rank == 0) * mean[:rows]),
        ("exchange", hvd.alltoall, exchanged),
        ("splits", lambda x: hvd.alltoall(x, [2] * size)[0], exchanged),
        ("scatter", hvd.reducescatter, scattered),
        ("scatter sum", lambda x: hvd.reducescatter(x, op=hvd.Sum), size * scattered),
    ):

        def loss(x: Any, collective: Any = collective) -> Any:
            result = collective(x)
            return tf.reduce_sum(result * tf.constant(weights[rank])[: tf.shape(result)[0]])

        def gradient(x: Any, loss: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x)
            return tape.gradient(value, x)

        compiled = tf.function(lambda x, loss=loss: gradient(x, loss), autograph=False)
        for how, found in (
            ("eager", gradient(tf.constant(x), loss)),
            ("inside", compiled(tf.constant(x))),
            ("outside", gradient(tf.constant(x), tf.function(loss, autograph=False))),
        ):
            np.testing.assert_allclose(whole(found), expected, rtol=1e-12, err_msg=f"{name} {how}")


def late(x: Any) -> Any:
    """The same tensor some time later, and its gradient, too."""

    def wait(array: Any) -> Any:
        time.sleep(np.random.default_rng().uniform(0, 0.003))
        return np.asarray(array)

    @tf.custom_gradient
    def waited(x: Any) -> Any:
        result = tf.numpy_function(wait, [x], x.dtype, stateful=False)
        result.set_shape(x.shape)
        return result, late

    return waited(x)


def total(x: Any) -> Any:
    """The sum over the ranks, of tensors and of gradients."""
    return late(hvd.allreduce(late(x), op=hvd.Sum))


def tangled(v: Any, w: Any, helper: Callable[[Any], Any]) -> Any:
    """Collectives that do not depend on each other, each of a shape of its own: in loops, branches.

    In the wrong order they do not match, and raise.
    """

    def body(i: Any, loop: Any) -> tuple[Any, Any]:
        first = tf.reduce_sum(total(v * tf.ones(2)))
        second = tf.cond(
            w > 0,
            lambda: tf.reduce_sum(total(w * tf.ones(3))),
            lambda: tf.reduce_sum(total(w * tf.ones(4))),
        )
        return i + 1, loop + first + second

    before = [tf.reduce_sum(total(v * tf.ones(5))), tf.reduce_sum(total(w * tf.ones(6)))]
    _, loop = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), tf.constant(0.0)])
    called = [helper(w), helper(v)]
    branch = tf.cond(v > 0, lambda: tf.reduce_sum(total(w * tf.ones(7))), lambda: w)
    after = [tf.reduce_sum(total(v * tf.ones(8))), tf.reduce_sum(total(w * tf.ones(9)))]
    return sum([*before, loop, *called, branch, *after])


def check_order(comm: Communicator) -> None:
    """All ranks make the calls of a program in one order, forward and backward."""
    v, w = tf.Variable(1.0), tf.Variable(2.0)
    helper = tf.function(lambda x: tf.reduce_sum(total(x * tf.ones(10))), autograph=False)

    def step(inner: Callable[[Any], Any] = helper) -> Any:
        with tf.GradientTape() as tape:
            loss = tangled(v, w, inner)
        return loss, tape.gradient(loss, [v, w])

    inside = tf.function(step, autograph=False)
    function = tf.function(lambda: tangled(v, w, helper.python_function), autograph=False)

    def outside() -> Any:
        with tf.GradientTape() as tape:
            loss = function()
        return loss, tape.gradient(loss, [v, w])

    of_v, of_w = 5 + 3 * 2 + 10 + 8, 6 + 3 * 3 + 10 + 7 + 9
    for run in (inside, outside):
        for _ in range(12):
            loss, (dv, dw) = run()
            assert float(loss) == comm.size * (of_v + 2 * of_w)
            assert (float(dv), float(dw)) == (comm.size * of_v, comm.size * of_w)


def check_epochs(comm: Communicator) -> None:
    """A compiled function goes on after shutdown() and init()."""
    group = comm.group([*range(comm.size)][::-1])
    assert group is not None
    function = tf.function(lambda x: (hvd.allgather(x, process_set=group), hvd.allreduce(x)))
    for _ in range(2):
        rows, mean = function(tf.constant([float(comm.rank)]))
        assert whole(rows).tolist() == [*range(comm.size)][::-1]
        assert float(mean[0]) == (comm.size - 1) / 2
        ringdl.shutdown()
        with expect(ringdl.UsageError, "init()"):
            hvd.allreduce(1.0)
        with expect(tf.errors.InvalidArgumentError, "UsageError", "init()"):
            function(tf.constant([0.0]))
        assert ringdl.init() is comm


def check_graphs_of_tensorflow_1(comm: Communicator) -> None:
    """Of more operations than there are threads."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        x = tf.constant([comm.rank + 1.0])
        sums = [tf.reduce_sum(total(x * tf.ones(n + 1))) for n in range(8)]
        gradient = tf.gradients(hvd.allreduce(2 * x, op=hvd.Sum), x)[0]
        variable = tf.compat.v1.get_variable("v", initializer=x)
        send = hvd.broadcast_global_variables(comm.size - 1)
        session.run(tf.compat.v1.global_variables_initializer())
        found, of_x, rank = session.run([sums, gradient, hvd.rank_op()])
        whole_sum = sum(range(1, comm.size + 1))
        assert found == [(n + 1) * whole_sum for n in range(8)]
        assert (of_x.tolist(), rank) == ([2 * comm.size], comm.rank)
        session.run(send)
        assert session.run(variable).tolist() == [comm.size]
    with expect(ringdl.UsageError, "call broadcast_variables(model.variables, root_rank)"):
        hvd.broadcast_global_variables(0)
