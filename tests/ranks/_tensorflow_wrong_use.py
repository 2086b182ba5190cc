"""ringdl.tensorflow: what ranks are told that do not agree, or cannot do what is asked of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ringdl
import ringdl.tensorflow as hvd
from ringdl import Communicator
from tests.ranks._tensorflow import both, whole
from tests.ranks.support import expect, needs


@needs(ranks=2)
def check_disagreement(comm: Communicator) -> None:
    """An error on every rank, which says what differs; then all go on."""
    x = tf.zeros(3 + (comm.rank == 1))
    errors = (ringdl.MismatchError, tf.errors.UnknownError)
    with expect(ringdl.MismatchError, "shape"):
        hvd.allreduce(x)
    with expect(tf.errors.UnknownError, "MismatchError: ", "shape"):
        tf.function(hvd.allreduce)(x)
    pair = [tf.ones(3 + comm.rank % 2), tf.ones(5 - comm.rank % 2)]  # as many elements
    for run, error in zip(both(lambda: hvd.grouped_allreduce(pair)), errors, strict=True):
        with expect(error, "the tensor 0 is float32[3] on rank 0, but float32[4] on rank 1"):
            run()
    v, w = tf.Variable([1.0, 2.0]), tf.Variable([1.0])
    sources = [v, w] if comm.rank == 0 else [w, v]

    def step(sources: Any = sources, dtype: Any = tf.float32) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) + tf.reduce_sum(w)
        return hvd.DistributedGradientTape(tape).gradient(tf.cast(loss, dtype), sources)

    text = "the gradient 0 (Variable:0) is float32[2] on rank 0, but float32[1] on rank 1"
    for run, error in zip(both(step), errors, strict=True):
        with expect(error, text, "pass the same ones in the same order on all ranks"):
            run()
    with expect(ringdl.MismatchError, "there are 2 on rank 0, but 1 on rank 1"):
        step([v, w][: 2 - comm.rank])
    table = tf.Variable(tf.ones([4, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [1]) if comm.rank == 0 else table)
    with expect(ringdl.MismatchError, "is tf.IndexedSlices float32[4, 2] on rank 0", "sparse_as_d"):
        hvd.DistributedGradientTape(tape).gradient(loss, [table])
    assert (whole(hvd.allreduce(tf.ones(3))) == 1).all()


@needs(ranks=2)
def check_errors_of_one_rank(comm: Communicator) -> None:
    """The others are told, and do not wait."""
    is_wrong = comm.rank == comm.size - 1
    text = f"rank {comm.size - 1}"
    x = tf.constant(["text"]) if is_wrong else tf.ones(1)
    kinds = ("dtype object are not supported",) if is_wrong else (text, "dtype object")
    errors = (ringdl.UsageError, tf.errors.InvalidArgumentError)
    if not is_wrong:
        errors = (ringdl.MismatchError, tf.errors.UnknownError)
    with expect(ValueError if is_wrong else ringdl.MismatchError, "" if is_wrong else text):
        hvd.alltoall(object() if is_wrong else tf.ones(comm.size))
    with expect(errors[0], "compression is 3"):
        hvd.reducescatter(x, compression=3 if is_wrong else None)  # type: ignore[arg-type]
    for make in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.reducescatter):
        for run, error in zip(both(make), errors, strict=True):
            with expect(error, *kinds):
                run(x)
    variable = tf.Variable([1j] if is_wrong else [1.0])
    with tf.GradientTape() as tape:
        loss = variable * 1
    own = "has dtype complex128; gradients are float64" if is_wrong else text
    with expect(errors[0], own, "complex128"):
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
    with expect(errors[0], "broadcast_variables takes variables"):
        hvd.broadcast_variables(3 if is_wrong else [tf.Variable(1.0)], 0)

    @tf.function
    def function(x: Any) -> Any:
        if is_wrong:
            tf.debugging.assert_less(x, 0.0, "this rank's own")
        return hvd.allreduce(x, name="after an assertion")

    if is_wrong:
        with expect(tf.errors.InvalidArgumentError, "this rank's own"):
            function(1.0)
        with expect(ringdl.MismatchError, "wait for one another", "after an assertion"):
            comm.barrier()
    else:
        kind = "MismatchError: ranks wait for one another"
        with expect(tf.errors.UnknownError, kind, "after an assertion", within=10):
            function(1.0)


@needs(ranks=2)
def check_unequal_replicas(comm: Communicator) -> None:
    """Found in the tenth call, unless somebody has broadcast: scripts do that in the first step."""
    last = comm.size - 1
    text = f"the replicas differ: in the parameter 'w:0', rank {last} has other values than rank 0"
    v, unused = tf.Variable([1.0, 2.0]), tf.Variable(float(comm.rank))
    table = tf.Variable(tf.fill([3, 2], float(comm.rank)))
    for is_compiled, error in enumerate((ringdl.MismatchError, tf.errors.UnknownError)):
        w = tf.Variable(1.0, name="w")

        def step(w: Any = w) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v) * w + tf.reduce_sum(tf.gather(table, [1]))
            return hvd.DistributedGradientTape(tape).gradient(loss, [unused, table, v, w])

        run = both(step)[is_compiled]
        for is_broadcast in (False, True):
            ringdl.shutdown()
            ringdl.init()
            w.assign(1.0 + (comm.rank == last))
            for _ in range(9):
                run()
            if is_broadcast:
                hvd.broadcast_variables([v], 0)
                run()
            else:
                with expect(error, text, "broadcast_variables(variables, root_rank=0)"):
                    run()
            run()  # which compares no more
        w.assign(1.0)
        ringdl.shutdown()
        ringdl.init()
        for _ in range(11):  # only what differs by design does
            run()


@needs(ranks=2)
def check_gradients_that_others_have(comm: Communicator) -> None:
    """Of a tf.function none may be missing, not even all; sparse ones are refused by Adasum."""
    v, table = tf.Variable(1.0), tf.Variable(tf.ones([4, 2]))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = v * 2.0 if comm.rank == 0 else tf.constant(1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [v])

    with expect(tf.errors.UnknownError, "is None on", "cannot make a tensor of None", within=10):
        step()

    @tf.function
    def nothing() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.constant(1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [v])

    assert nothing() == [None]
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.gather(table, [1]))
    adasum = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
    with expect(ringdl.UsageError, "is tf.IndexedSlices", "sparse_as_dense=True"):
        adasum.gradient(loss, [table])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * tf.gather(table, [1])) if comm.rank == 0 else v * 1.0
    with expect(ringdl.MismatchError, "on rank 0, but None on rank 1"):
        hvd.DistributedGradientTape(tape).gradient(loss, [v, table])
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == comm.size


def check_wrong_use(comm: Communicator) -> None:
    del comm
    with expect(ringdl.UsageError, "give op or average, not both"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with expect(ringdl.UsageError, "op is 'sum'; take ringdl.Average"):
        hvd.allreduce(1.0, op="sum")  # type: ignore[arg-type]
    with expect(ringdl.UsageError, "compression is 3"):
        hvd.allreduce(1.0, compression=3)  # type: ignore[arg-type]
    with expect(ringdl.UsageError, "leave jit_compile out"):
        tf.function(hvd.allreduce, jit_compile=True)(1.0)
    with expect(ringdl.UsageError, "not a int"):
        hvd.DistributedGradientTape(3)  # type: ignore[arg-type]
    tape = tf.GradientTape()
    with expect(ringdl.UsageError, "reduced with Average, Sum or Adasum"):
        hvd.DistributedGradientTape(tape, op=hvd.Max)
    with expect(ringdl.UsageError, "only averages are divided"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    with expect(ringdl.UsageError, "is no layer of Keras"):
        hvd.PartialDistributedGradientTape(tape, local_layers=3)
    with expect(ringdl.UsageError, "is an optimizer of TensorFlow 1"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with expect(AttributeError, "ringdl.tensorflow has no elastic: "):
        hvd.elastic  # noqa: B018
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        value = hvd.allreduce(variable, op=hvd.Max)
    with expect(ringdl.UsageError, "has no gradient here"):
        tape.gradient(value, variable)
    assert hvd.check_num_rank_power_of_2(8)
    assert not hvd.check_num_rank_power_of_2(6)
