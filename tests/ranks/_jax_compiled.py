"""ringdl.jax: collectives inside of compiled, differentiated and vectorized functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax

import ringdl
import ringdl.jax as rj
from ringdl import Communicator, _engine
from tests.ranks.reference import dtypes_and_reductions, random_array, reduced
from tests.ranks.support import assert_same_bits, expect, needs

jax.config.update("jax_enable_x64", True)

Loss = Callable[..., Any]


def whole(x: Any) -> Any:
    return np.asarray(x)


def check_allreduce(comm: Communicator) -> None:
    """The bits of a call outside, for every dtype and reduction; the argument stays."""
    for count, dtype, op in dtypes_and_reductions(0, 1, 2003):
        arrays = [random_array(rank, count, dtype, op, 7) for rank in range(comm.size)]
        mine = jnp.asarray(arrays[comm.rank])
        found = jax.jit(lambda x, op=op: rj.allreduce(x, op))(mine)
        assert (whole(mine) == arrays[comm.rank]).all(), "the argument was changed"
        reduced(arrays, op).check(whole(found), f"{op.name} of {count} {dtype}")
        assert_same_bits(comm, whole(found))


def check_other_collectives(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for rows in (0, 1, 2 * size, 3 * size + 1):
        arrays = [np.arange(rows * 3.0).reshape(rows, 3) + 100 * each for each in range(size)]
        x, total = jnp.asarray(arrays[rank]), sum(arrays)
        for transform in (lambda f: f, jax.jit):
            assert (whole(transform(rj.allgather)(x)) == np.concatenate(arrays)).all()
            for root in range(size):
                got = transform(lambda x, root=root: rj.broadcast(x, root))(x)
                assert (whole(got) == arrays[root]).all()
            part = transform(lambda x: rj.reducescatter(x, ringdl.Sum))(x)
            assert (whole(part) == np.array_split(total, size)[rank]).all()
            if rows % size == 0:
                expected = np.concatenate([np.split(each, size)[rank] for each in arrays])
                assert (whole(transform(rj.alltoall)(x)) == expected).all()


def check_gradients(comm: Communicator) -> None:
    """Those of the sum of all ranks' losses, against one process that has all arrays."""
    size, rank = comm.size, comm.rank
    rows = 2 * size
    xs = np.random.default_rng(0).normal(size=(size, rows, 3))
    weights = np.random.default_rng(1).normal(size=(size, size * rows, 3))

    def collected(kind: str, x: Any) -> Any:
        return {
            "sum": lambda: rj.allreduce(x, ringdl.Sum),
            "average": lambda: rj.allreduce(x),
            "gather": lambda: rj.allgather(x),
            "root": lambda: rj.broadcast(x, size - 1),
            "scatter": lambda: rj.reducescatter(x),
            "scatter uneven": lambda: rj.reducescatter(x[: rows - 1], ringdl.Sum),
            "exchange": lambda: rj.alltoall(x),
        }[kind]()

    def alone(kind: str, x: Any) -> list[Any]:
        parts = lambda y: jnp.array_split(y, size)  # noqa: E731
        return {
            "sum": lambda: [x.sum(0)] * size,
            "average": lambda: [x.mean(0)] * size,
            "gather": lambda: [x.reshape(-1, 3)] * size,
            "root": lambda: [x[-1]] * size,
            "scatter": lambda: parts(x.mean(0)),
            "scatter uneven": lambda: parts(x.sum(0)[: rows - 1]),
            "exchange": lambda: [jnp.concatenate([parts(y)[r] for y in x]) for r in range(size)],
        }[kind]()

    def loss(result: Any, of_rank: int) -> Any:
        return (jnp.sin(result) * weights[of_rank][: result.shape[0]]).sum()

    for kind in ("sum", "average", "gather", "root", "scatter", "scatter uneven", "exchange"):
        own = jax.grad(lambda x, kind=kind: loss(collected(kind, x), rank))
        every = jax.grad(
            lambda x, kind=kind: sum(loss(each, r) for r, each in enumerate(alone(kind, x)))
        )(jnp.asarray(xs))
        for function in (own, jax.jit(own)):
            np.testing.assert_allclose(function(xs[rank]), every[rank], rtol=1e-12, err_msg=kind)
        value, tangent = jax.jvp(lambda x, kind=kind: collected(kind, x), (xs[rank],), (xs[rank],))
        np.testing.assert_allclose(value, tangent, rtol=1e-12, err_msg=kind)


def check_loops(comm: Communicator) -> None:
    """In scan, while_loop, cond and outside of them, in two functions that take turns."""
    mean = (comm.size + 1) / 2

    @jax.jit
    def first(x: Any) -> Any:
        def body(carry: Any, y: Any) -> Any:
            carry = rj.allreduce(carry + y)
            return carry, rj.allgather(carry[:1])

        x, rows = jax.lax.scan(body, rj.allreduce(x), jnp.ones((3, 5)))
        return rj.allreduce(x, ringdl.Max), rows

    def last(x: Any) -> Any:
        return rj.broadcast(x, comm.size - 1)

    @jax.jit
    def second(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda its: its[0] < 4,
            lambda its: (its[0] + 1, jax.lax.cond(its[0] < 4, last, lambda y: y, its[1]) + 1),
            (0, x),
        )[1]

    for turn in range(1000 if comm.size == 2 else 200):
        x = jnp.full(5, comm.rank + 1.0 + turn)
        found, rows = first(x)
        other = second(x * 2)
        if turn % 100 == 0:
            assert (whole(found) == mean + turn + 3).all()
            assert rows.shape == (3, comm.size)
            assert (whole(other) == 2 * (comm.size + turn) + 4).all()
            assert comm.allreduce(np.float64(turn)) == turn, "between them, outside"


def check_vmap(comm: Communicator) -> None:
    xs = jnp.arange(24.0).reshape(4, 2, 3) + comm.rank
    for axis in (0, 1):
        found = jax.jit(jax.vmap(lambda x: rj.allreduce(x, ringdl.Sum), axis, axis))(xs)
        expected = sum(np.arange(24.0).reshape(4, 2, 3) + rank for rank in range(comm.size))
        assert (whole(found) == expected).all()
        rows = jax.vmap(rj.allgather, axis)(xs)
        each = [
            np.moveaxis(np.arange(24.0).reshape(4, 2, 3) + r, axis, 0) for r in range(comm.size)
        ]
        assert (whole(rows) == np.concatenate(each, 1)).all()


def check_groups_and_epochs(comm: Communicator) -> None:
    """A compiled function of a group's ranks; and one that outlives shutdown()."""
    group = comm.group(range(comm.size)[::-1])
    assert group is not None
    function = jax.jit(lambda x: (rj.allgather(x, group), rj.allreduce(x)))
    for _ in range(2):
        rows, mean = function(jnp.array([comm.rank * 1.0]))
        assert whole(rows).tolist() == [*range(comm.size)][::-1]
        assert whole(mean).tolist() == [(comm.size - 1) / 2]
        ringdl.shutdown()
        assert ringdl.init() is comm


@needs(ranks=2, mpi=True)
def check_a_group_that_is_no_more() -> None:
    from mpi4py import MPI

    group = ringdl.get_communicator().group(range(MPI.COMM_WORLD.size))
    function = jax.jit(lambda x: rj.allreduce(x, communicator=group))
    of_all = jax.jit(lambda x: rj.allreduce(x))
    assert (whole(function(jnp.ones(3)) + of_all(jnp.ones(3))) == 2).all()
    ringdl.shutdown()
    ringdl.init(MPI.COMM_SELF)
    with expect(jax.errors.JaxRuntimeError, "ranks that there are no more since init()"):
        jax.block_until_ready(function(jnp.ones(3)))
    with expect(jax.errors.JaxRuntimeError, "compile it again: jax.clear_caches()"):
        jax.block_until_ready(of_all(jnp.ones(3)))
    ringdl.shutdown()
    ringdl.init()
    assert (whole(function(jnp.ones(3))) == 1).all()


def model(key: Any) -> Any:
    keys = jax.random.split(key, 3)
    shapes = ((8, 16), (16, 16), (16, 4))
    layers = [jax.random.normal(each, shape) / 4 for each, shape in zip(keys, shapes, strict=True)]
    return {"layers": layers, "bias": jnp.zeros(4), "scale": jnp.ones(())}


def loss_of(params: Any, inputs: Any, targets: Any) -> Any:
    x = inputs
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x * params["scale"] + params["bias"] - targets) ** 2)


def check_training(comm: Communicator) -> None:
    """Split batches give the parameters of one process with the whole batch."""
    data = np.random.default_rng(3)
    batches = [(data.normal(size=(12, 8)), data.normal(size=(12, 4))) for _ in range(5)]
    optimizer = optax.adam(0.01)
    averaging = optax.chain(rj.average_gradients(bucket_bytes=1500), optimizer)

    def trained(how: optax.GradientTransformation, params: Any, part: slice) -> Any:
        @jax.jit
        def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
            gradients = jax.grad(loss_of)(params, inputs, targets)
            updates, state = how.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        state = how.init(params)
        for inputs, targets in batches:
            params, state = step(params, state, inputs[part], targets[part])
        return params

    params = rj.broadcast_variables(model(jax.random.key(comm.rank)))
    found = trained(averaging, params, slice(comm.rank, None, comm.size))
    expected = trained(optimizer, model(jax.random.key(0)), slice(None))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        assert_same_bits(comm, whole(one))


def check_gradients_are_not_written_to(comm: Communicator) -> None:
    """They are averaged in their own memory only where nobody needs them any more."""
    average = rj.average_gradients()
    state = average.init(None)

    @jax.jit
    def both(tree: Any) -> Any:
        doubled = jax.tree.map(lambda x: 2 * x, tree)
        return average.update(doubled, state)[0], doubled, tree

    tree = {"a": jnp.full(300, comm.rank + 1.0), "b": jnp.full((300, 300), comm.rank + 2.0)}
    averages, doubled, same = both(tree)
    mean = (comm.size - 1) / 2
    for key, first in (("a", 1.0), ("b", 2.0)):
        assert (whole(averages[key]) == 2 * (mean + first)).all()
        assert (whole(doubled[key]) == 2 * (comm.rank + first)).all()
        assert (whole(same[key]) == whole(tree[key])).all()
    value, tangent = jax.jvp(lambda t: average.update(t, state)[0], (tree,), (tree,))
    assert (whole(value["b"]) == whole(tangent["b"])).all()
    pulled = jax.grad(lambda t: sum(x.sum() for x in jax.tree.leaves(average.update(t, state)[0])))
    assert all((whole(each) == 1).all() for each in jax.tree.leaves(pulled(tree)))
    rows = jax.vmap(lambda t: average.update(t, state)[0])(tree | {"a": jnp.ones((300, 2))})
    assert rows["a"].shape == (300, 2)


@needs(ranks=2)
def check_a_late_rank(comm: Communicator) -> None:
    """Who waits for too long gives up, as XLA takes its memory back; the late rank is told."""
    ranks = rj._ranks.ranks_of(comm)  # type: ignore[attr-defined]
    function = jax.jit(lambda x: rj.allreduce(x, ringdl.Sum))
    assert (whole(function(jnp.ones(100_000))) == comm.size).all()
    if comm.rank == 0:
        _engine.xla_use(ranks.number, comm._engine, comm._group, 0.3)
        with expect(jax.errors.JaxRuntimeError, "ringdl.StallError"):
            jax.block_until_ready(function(jnp.ones(100_000)))
        ranks._bind()
    else:
        time.sleep(1)
        with expect(jax.errors.JaxRuntimeError, "was given up on rank 0"):
            jax.block_until_ready(function(jnp.ones(100_000)))
    assert (whole(function(jnp.ones(100_000))) == comm.size).all()


def check_rows_without_bytes(comm: Communicator) -> None:
    for function in (rj.allgather, rj.alltoall, rj.reducescatter):
        assert jax.jit(function)(jnp.ones((comm.size, 0))).shape[1] == 0


@needs(ranks=3)
def check_shapes_that_fit_by_chance(comm: Communicator) -> None:
    """Rows 3, 4 and 5 are as many as three times 4: an error on that rank, too."""
    for function, unit in ((rj.allgather, 1), (rj.alltoall, comm.size)):
        with expect(jax.errors.JaxRuntimeError, "pass arrays of the same shape"):
            jax.block_until_ready(jax.jit(function)(jnp.ones(unit * (3 + comm.rank))))


def check_checkpoint(comm: Communicator) -> None:
    """Rematerialized in the backward pass, on all ranks."""

    def loss(x: Any) -> Any:
        return (jax.checkpoint(lambda y: jnp.sin(rj.allreduce(y, ringdl.Sum)) ** 2)(x)).sum()

    x = jnp.arange(3.0)
    expected = comm.size * jax.grad(lambda y: (jnp.sin(y) ** 2).sum())(comm.size * x)
    np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), expected, rtol=1e-12)


def check_broadcast_variables(comm: Communicator) -> None:
    """Of every kind of leaf; small ones travel together, large ones alone."""
    root = comm.size - 1

    def tree(rank: int) -> dict[str, Any]:
        arrays = {"jax": jnp.full(3, rank), "numpy": np.full((2, 2), rank, np.uint32)}
        arrays |= {"large": jnp.full(600_000, 0.5 + rank), "weak": jnp.asarray(0.5 + rank)}
        arrays |= {"narrow": jnp.full(5, rank, jnp.bfloat16), "none of them": np.zeros((0, 2))}
        return arrays | {"key": jax.random.key(rank), "none": None, "other": "text"}

    given = tree(comm.rank)
    found, wanted = rj.broadcast_variables(given, root), tree(root)
    assert (whole(given["jax"]) == comm.rank).all(), "the argument was changed"
    for name in ("jax", "numpy", "large", "weak", "narrow", "none of them"):
        assert found[name].dtype == wanted[name].dtype
        assert (whole(found[name]) == whole(wanted[name])).all(), name
    assert found["weak"].weak_type
    assert isinstance(found["numpy"], np.ndarray)
    assert found["key"] == wanted["key"]
    assert (found["none"], found["other"]) == (None, "text")


@needs(ranks=2)
def check_trees_that_cannot_be_broadcast(comm: Communicator) -> None:
    """An error on every rank, also if it is one rank's alone."""
    gone = jnp.ones(3)
    if comm.rank == 1:
        gone.delete()
    with expect(ringdl.MismatchError, "['a'] was deleted or donated on rank 1"):
        rj.broadcast_variables({"a": gone, "b": jnp.ones(2)})
    objects = np.array([{}, {}]) if comm.rank == 1 else np.ones(2)
    with expect(ringdl.MismatchError, "['a'] holds objects on rank 1"):
        rj.broadcast_variables({"a": objects})
    for root in (comm.size, -1):
        with expect(ringdl.UsageError, "is not a rank"):
            rj.broadcast_variables({"a": jnp.ones(3)}, root)
    with expect(ringdl.UsageError, "is for outside of compiled functions"):
        jax.jit(rj.broadcast_variables)({"a": jnp.ones(3)})
    assert rj.broadcast_variables({"a": jnp.full(3, comm.rank)})["a"].tolist() == [0] * 3


def check_shutdown_waits_for_what_was_dispatched(comm: Communicator) -> None:
    function = jax.jit(lambda x: rj.allreduce((x @ x).sum(0)))
    result = function(jnp.eye(1500))
    ringdl.shutdown()
    assert (whole(result) == 1).all()
    ringdl.init()


@needs(ranks=2)
def check_a_thread_that_goes_on(comm: Communicator) -> None:
    """XLA's thread waits for a rank that is late, while Python submits something else: no error."""
    function = jax.jit(lambda x: rj.allreduce((x @ x @ x).sum(0)))
    jax.block_until_ready(function(jnp.eye(800)))
    result = function(jnp.eye(800))
    if comm.rank == 0:
        time.sleep(2.5)
    assert comm.allreduce(np.ones(3)).tolist() == [1.0] * 3
    assert (whole(result) == 1).all()


@needs(ranks=2)
def check_an_error_in_the_background(comm: Communicator) -> None:
    """Of a function that XLA's threads run: after shutdown() and init() all begin anew."""
    function = jax.jit(lambda x: rj.allreduce(jnp.tanh(x @ x)))
    with expect(jax.errors.JaxRuntimeError, "ringdl.MismatchError"):
        jax.block_until_ready(function(jnp.eye(300 + comm.rank)))
    ringdl.shutdown()
    ringdl.init()
    assert (whole(function(jnp.eye(3))) == np.tanh(np.eye(3))).all()


@needs(ranks=2)
def check_disagreement(comm: Communicator) -> None:
    """An error on every rank, which says what differs; then all go on."""
    function = jax.jit(lambda x: rj.allreduce(x))
    with expect(jax.errors.JaxRuntimeError, "ringdl.MismatchError"):
        jax.block_until_ready(function(jnp.zeros(3 + (comm.rank == 1))))
    with expect(jax.errors.JaxRuntimeError, "pass arrays of the same shape to allgather"):
        jax.block_until_ready(jax.jit(rj.allgather)(jnp.zeros(3 + (comm.rank == 1))))
    assert (whole(function(jnp.ones(3))) == 1).all()


def check_wrong_use(comm: Communicator) -> None:
    for function in (rj.allgather, rj.reducescatter, rj.alltoall):
        with expect(ringdl.UsageError, "an array without axes has none"):
            jax.jit(function)(jnp.float32(3))
    with expect(ringdl.UsageError, "dtype complex64 are not supported"):
        jax.jit(rj.allreduce)(jnp.zeros(3, jnp.complex64))
    with expect(ringdl.UsageError, "a reduction by Max has no gradient here"):
        jax.grad(lambda x: rj.allreduce(x, ringdl.Max).sum())(jnp.zeros(3))
    with expect(ringdl.UsageError, "ringdl.jax reduces by ringdl's own reductions"):
        rj.allreduce(jnp.zeros(3), "sum")  # type: ignore[arg-type]
    for root in ("1", 1.5):
        with expect(ringdl.UsageError, "pass the number of a rank"):
            jax.jit(lambda x, root=root: rj.broadcast(x, root))(jnp.zeros(3))
    with expect(ringdl.UsageError, "is not a rank"):
        jax.jit(lambda x: rj.broadcast(x, comm.size))(jnp.zeros(3))
    with expect(ringdl.UsageError, "communicator is 'all'"):
        rj.allreduce(jnp.zeros(3), communicator="all")  # type: ignore[arg-type]
    assert isinstance(rj.allreduce(2.0), jax.Array)
    with expect(ringdl.UsageError, "gradients are reduced with Average or Sum"):
        rj.average_gradients(ringdl.Max)
    with expect(ringdl.UsageError, "the gradient ['a'] has dtype int32"):
        rj.average_gradients().update({"a": jnp.zeros(3, jnp.int32)}, optax.EmptyState())
    for function in (rj.allreduce, lambda x: rj.average_gradients().update([x, x], None)[0]):
        exported = jax.export.export(jax.jit(function), platforms=["cuda"])
        with expect(ringdl.UsageError, "are for the CPU, and this is compiled for cuda"):
            exported(jax.ShapeDtypeStruct((3,), jnp.float32))
    if comm.size > 1:
        with expect(ringdl.UsageError, "gives each of"):
            jax.jit(rj.alltoall)(jnp.zeros(comm.size + 1))
