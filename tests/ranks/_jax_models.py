"""ringdl.jax with models of some size, of several libraries; and what is said when ranks differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import ringdl
import ringdl.jax as rj
from ringdl import Communicator, _engine
from tests.ranks.support import assert_same_bits, expect, needs

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles for longer than all takes

BATCH = 12
WIDTH = 16


@contextmanager
def failing(*texts: str) -> Any:
    """The block raises a MismatchError out of a compiled function; then ranks start anew."""
    with expect(jax.errors.JaxRuntimeError, "ringdl.MismatchError", *texts):
        yield
    ringdl.shutdown()
    ringdl.init()


def assert_alike(comm: Communicator, found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Parameters of split batches are those of whole ones, with the same bits on all ranks."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found) if eqx.is_array(leaf)]
    others = [np.asarray(leaf) for leaf in jax.tree.leaves(expected) if eqx.is_array(leaf)]
    for one, other in zip(leaves, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert_same_bits(comm, *leaves)


def part(comm: Communicator) -> slice:
    return slice(comm.rank, None, comm.size)


def transformer(seed: int, layers: int = 3) -> Any:
    """Of causal attention, its layers stacked."""
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape) * shape[-2] ** -0.5)

    stacked = {
        "attention": {
            "in": weights(layers, WIDTH, 3 * WIDTH),
            "out": weights(layers, WIDTH, WIDTH),
        },
        "mlp": [weights(layers, WIDTH, 4 * WIDTH), weights(layers, 4 * WIDTH, WIDTH)],
        "scale": jnp.ones((layers, 2, WIDTH)),
    }
    return {"embedding": weights(32, WIDTH), "layers": stacked, "head": weights(WIDTH, 32)}


def loss_of(params: Any, tokens: Any) -> Any:
    """The mean cross-entropy of each token after those before it."""

    def normal(x: Any, scale: Any) -> Any:
        return scale * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def layer(x: Any, its: Any) -> Any:
        q, k, v = jnp.split(normal(x, its["scale"][0]) @ its["attention"]["in"], 3, -1)
        scores = jnp.einsum("bid,bjd->bij", q, k) * WIDTH**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        x = x + jax.nn.softmax(jnp.where(seen, scores, -1e9)) @ v @ its["attention"]["out"]
        hidden = jax.nn.gelu(normal(x, its["scale"][1]) @ its["mlp"][0])
        return x + hidden @ its["mlp"][1], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], params["layers"])
    every = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:])
    return every.mean()


def check_transformer(comm: Communicator) -> None:
    """Layers in a scan, and steps in one, too; weights are clipped by the norm of the averages."""
    batches = np.random.default_rng(1).integers(0, 32, (5, BATCH, 9))
    after = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def trained(how: Any, params: Any, batches: Any) -> Any:
        def step(carry: Any, tokens: Any) -> Any:
            params, state = carry
            value, gradients = jax.value_and_grad(loss_of)(params, tokens)
            updates, state = how.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), rj.allreduce(value)

        run = jax.jit(lambda carry: jax.lax.scan(step, carry, batches))
        (params, _), losses = run((params, how.init(params)))
        assert losses[-1] < losses[0]
        return params

    params = rj.broadcast_variables(transformer(comm.rank))
    averaging = optax.chain(rj.average_gradients(bucket_bytes=20_000), after)
    found = trained(averaging, params, batches[:, part(comm)])
    assert_alike(comm, found, trained(after, transformer(0), batches))


class Network(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs, how = nnx.Rngs(seed), {"param_dtype": jnp.float32, "dtype": jnp.float32}
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs, **how) for _ in range(2)])
        self.norm = nnx.LayerNorm(8, rngs=rngs, **how)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
        self.head = nnx.Linear(8, 4, rngs=rngs, **how)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.dropout(nnx.gelu(layer(x)))
        return self.head(self.norm(x))


def data() -> list[tuple[Any, Any]]:
    random = np.random.default_rng(3)
    return [(random.normal(size=(BATCH, 8)), random.normal(size=(BATCH, 4))) for _ in range(5)]


def check_nnx(comm: Communicator) -> None:
    """A module of flax.nnx and its optimizer, which change in place, in float32."""

    def trained(model: Network, how: Any, rows: slice) -> Any:
        optimizer = nnx.Optimizer(model, how, wrt=nnx.Param)

        @nnx.jit
        def step(model: Network, optimizer: Any, inputs: Any, targets: Any) -> None:
            gradients = nnx.grad(lambda model: ((model(inputs) - targets) ** 2).mean())(model)
            optimizer.update(model, gradients)

        for inputs, targets in data():
            step(model, optimizer, inputs[rows], targets[rows])
        return nnx.state((model, optimizer), nnx.Not(nnx.RngState))

    model = rj.broadcast_variables(Network(comm.rank))
    assert isinstance(model, Network)
    after = optax.sgd(0.1, momentum=0.9)
    found = trained(model, optax.chain(rj.average_gradients(), after), part(comm))
    assert_alike(comm, found, trained(Network(0), after, slice(None)), 1e-5)
    state = rj.broadcast_variables(nnx.state(Network(comm.rank)))
    again = Network(comm.rank)
    nnx.update(again, state)
    assert (again.head.kernel[...] == Network(0).head.kernel[...]).all()
    assert again.dropout.rngs.key[...] == Network(0).dropout.rngs.key[...]


class Regressor(eqx.Module):
    mlp: eqx.nn.MLP
    scale: jax.Array
    missing: Any
    power: int = eqx.field(static=True)
    activation: Callable[..., Any] = jax.nn.tanh
    rate: float = 0.5

    def __call__(self, x: Any) -> Any:
        return self.activation(self.mlp(x)) ** self.power * self.scale * self.rate


def regressor(seed: int) -> Regressor:
    mlp = eqx.nn.MLP(8, 4, 16, 2, use_final_bias=False, key=jax.random.key(seed))
    return Regressor(mlp, jnp.full(4, 1.0 + seed), None, 3)


def check_equinox(comm: Communicator) -> None:
    """A module whose leaves are arrays, functions, numbers and None, and a static field."""

    def trained(model: Regressor, how: Any, rows: slice) -> Any:
        @eqx.filter_jit
        def step(model: Regressor, state: Any, inputs: Any, targets: Any) -> Any:
            def loss(model: Regressor) -> Any:
                return ((jax.vmap(model)(inputs) - targets) ** 2).mean()

            value, gradients = eqx.filter_value_and_grad(loss)(model)
            weights = eqx.filter(model, eqx.is_inexact_array)
            updates, state = how.update(gradients, state, weights)
            return eqx.apply_updates(model, updates), state, value

        state = how.init(eqx.filter(model, eqx.is_inexact_array))
        for inputs, targets in data():
            model, state, _ = step(model, state, inputs[rows], targets[rows])
        return model, state

    model = rj.broadcast_variables(regressor(comm.rank))
    assert isinstance(model, Regressor)
    assert model.activation is jax.nn.tanh
    averaging = optax.chain(rj.average_gradients(), optax.adam(1e-2))
    found = trained(model, averaging, part(comm))
    assert_alike(comm, found, trained(regressor(0), optax.adam(1e-2), slice(None)))


def check_value_and_grad(comm: Communicator) -> None:
    """Those of the whole batch, by one work, inside of compiled functions and outside."""
    inputs, targets = data()[0]
    random = np.random.default_rng(5)
    params = {"w": [jnp.asarray(random.normal(size=(8, 4)))], "none": None}
    bias, rows = jnp.asarray(random.normal(size=4)), part(comm)

    def loss(params: Any, inputs: Any, bias: Any, *, targets: Any) -> Any:
        error = inputs @ params["w"][0] + bias - targets
        return (error**2).mean(), {"first": inputs[0, 0]}

    def one(params: Any, inputs: Any, targets: Any) -> Any:
        return loss(params, inputs, 0, targets=targets)[0]

    expected = jax.value_and_grad(loss, (0, 2), has_aux=True)(params, inputs, bias, targets=targets)
    alone = jax.value_and_grad(one)(params, inputs, targets)
    for compiled in (lambda f: f, jax.jit):
        both = compiled(rj.value_and_grad(loss, (0, 2), has_aux=True))
        jax.block_until_ready(both(params, inputs[rows], bias, targets=targets[rows]))
        before = comm.stats()["works"]
        (value, aux), found = jax.block_until_ready(
            both(params, inputs[rows], bias, targets=targets[rows])
        )
        assert comm.stats()["works"] == before + 1
        assert aux["first"] == inputs[comm.rank, 0]
        assert_alike(comm, (value, found), (expected[0][0], expected[1]))
        total = compiled(rj.value_and_grad(one, op=ringdl.Sum))
        assert_alike(
            comm,
            total(params, inputs[rows], targets[rows]),
            jax.tree.map(lambda x: x * comm.size, alone),
        )
        assert_alike(comm, compiled(rj.grad(one))(params, inputs[rows], targets[rows]), alone[1])
        gradients, aux = compiled(rj.grad(loss, has_aux=True))(
            params, inputs[rows], bias, targets=targets[rows]
        )
        assert_alike(comm, gradients, expected[1][0])
        assert aux["first"] == inputs[comm.rank, 0]
    with expect(ringdl.UsageError, "the gradient ['w'] has dtype complex128"):
        rj.grad(lambda its: abs(its["w"] ** 2).sum())({"w": jnp.ones(3, complex)})
    for op in (ringdl.Max, "sum"):
        with expect(ringdl.UsageError, "gradients are reduced with Average or Sum"):
            rj.grad(one, op=op)
    with expect(ringdl.UsageError, "bucket_bytes is 0"):
        rj.value_and_grad(one, bucket_bytes=0)


def check_distributed_optimizer(comm: Communicator) -> None:
    """The name of other frameworks, for any optimizer of optax."""
    its = {"w": jnp.zeros(3)}
    for wrap in (rj.DistributedOptimizer, ringdl.DistributedOptimizer):
        optimizer = wrap(optax.sgd(1.0), op=ringdl.Sum)
        updates, _ = optimizer.update({"w": jnp.ones(3)}, optimizer.init(its), its)
        assert updates["w"].tolist() == [-comm.size] * 3
    with expect(ringdl.UsageError, "takes an optimizer of optax, not"):
        rj.DistributedOptimizer(its)


def check_optimizers_that_see_the_loss(comm: Communicator) -> None:
    """They see that of all ranks, and decide alike."""
    its = {"w": jnp.ones(3)}
    optimizer = rj.DistributedOptimizer(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    )
    state = optimizer.init(its)
    update = jax.jit(optimizer.update)
    for step in range(6):
        value = jnp.asarray(1.0 if comm.rank == 0 else float(step))
        updates, state = update({"w": jnp.full(3, float(comm.rank))}, state, its, value=value)
        its = optax.apply_updates(its, updates)
    assert_same_bits(comm, np.asarray(its["w"]), np.asarray(state[1][1].scale))
    seen = []
    spy = optax.GradientTransformationExtraArgs(
        lambda params: (),
        lambda updates, state, params=None, *, grad: (seen.append(grad), (updates, state))[1],
    )
    optimizer = rj.DistributedOptimizer(spy)
    gradients = {"w": jnp.full(3, float(comm.rank))}
    updates, _ = optimizer.update(gradients, optimizer.init(its), its, grad=gradients)
    assert (np.asarray(seen[0]["w"]) == np.asarray(updates["w"])).all()
    if comm.size > 1:
        lbfgs = rj.DistributedOptimizer(optax.lbfgs())
        with expect(ringdl.UsageError, "a line search evaluates value_fn on each rank's own data"):
            lbfgs.update(
                gradients, lbfgs.init(its), its, value=1.0, grad=gradients, value_fn=lambda _: 1.0
            )


@needs(ranks=2)
def check_unequal_replicas(comm: Communicator) -> None:
    """Found at the first step, with the call that mends it; of equal ones nothing is said later."""
    average = rj.average_gradients()
    last = comm.size - 1

    def its(rank: int) -> Any:
        return {"bias": jnp.zeros(3), "weight": jnp.full((300, 300), 1.0 + (rank == last))}

    def loss(params: Any) -> Any:
        return sum((each**2).sum() for each in jax.tree.leaves(params))

    def update(params: Any) -> Any:
        return average.update(jax.grad(loss)(params), optax.EmptyState(), params)[0]

    in_scan = lambda x: jax.lax.scan(lambda y, _: (update(y), None), x, None, 2)[0]  # noqa: E731
    for step in (jax.jit(update), update, jax.jit(in_scan), jax.jit(rj.grad(loss)), rj.grad(loss)):
        texts = (f"in the parameter \"['weight']\", rank {last} has other values than rank 0",)
        with failing(*texts, "params = ringdl.jax.broadcast_variables(params)"):
            jax.block_until_ready(step(its(comm.rank)))
        params = rj.broadcast_variables(its(comm.rank))
        jax.block_until_ready(step(params))
        before = comm.stats()["works"]
        jax.block_until_ready(step(its(comm.rank)))
        assert comm.stats()["works"] <= before + 4, "compared again"
        ringdl.shutdown()
        ringdl.init()
    jax.block_until_ready(jax.jit(lambda x: average.update(x, optax.EmptyState())[0])(params))
    for optimizer in (average, rj.average_gradients()):  # each finds for itself
        step = jax.jit(lambda x, its=optimizer: its.update(x, optax.EmptyState(), x)[0])
        jax.block_until_ready(step(params))
        params = {"bias": params["bias"], "weight": params["weight"] + 1}
    with failing("rank 0", "'weight'"):
        optimizer = rj.average_gradients()
        jax.block_until_ready(optimizer.update(its(comm.rank), optax.EmptyState(), its(comm.rank)))
    comm._shared.checks_replicas = False  # as by RINGDL_CHECK_REPLICAS=0
    jax.block_until_ready(jax.jit(lambda params: update(params))(its(comm.rank)))
    comm._shared.checks_replicas = True


@needs(ranks=2)
def check_compression(comm: Communicator) -> None:
    """Half as many bytes travel; gradients of other dtypes travel as they are."""
    ringdl.shutdown()
    os.environ["RINGDL_ALGORITHM"] = "ring"  # which sends messages inside of a host, too
    ringdl.init()
    del os.environ["RINGDL_ALGORITHM"]
    gradients = {"a": jnp.full(1 << 18, comm.rank + 1.0), "b": jnp.full(5, 1 / 3, jnp.float64)}
    sent = []
    for compression in ("none", "float16", "bfloat16"):
        average = rj.average_gradients(ringdl.Sum, compression=compression)
        step = jax.jit(lambda x, its=average: its.update(x, optax.EmptyState())[0])
        comm.barrier()
        before = comm.stats()["data_bytes_sent"]
        found = jax.block_until_ready(step(jax.tree.map(jnp.float32, gradients)))
        sent.append(comm.stats()["data_bytes_sent"] - before)
        assert (np.asarray(found["a"]) == comm.size * (comm.size + 1) / 2).all()
        np.testing.assert_allclose(step(gradients)["b"], comm.size / 3, rtol=1e-14)
    assert sent[1] == sent[2] < 0.51 * sent[0]
    with expect(ringdl.UsageError, "'int8'", "bfloat16"):
        rj.average_gradients(compression="int8")
    differing = rj.average_gradients(compression="float16" if comm.rank == 0 else None)
    with failing("compression is ", '"float16" on rank 0', '"none" on rank'):
        jax.block_until_ready(differing.update(gradients, optax.EmptyState())[0])


def check_made_while_tracing(comm: Communicator) -> None:
    """And again on some ranks alone, as their batches have other shapes: nothing is compared."""

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        gradients = jax.grad(lambda params: (params * batch.mean()).sum())(params)
        return rj.average_gradients().update(gradients, optax.EmptyState(), params)[0]

    for rows in (4, 4 + comm.rank, 5 + comm.rank, 4):
        assert step(jnp.ones(3), jnp.ones(rows)).tolist() == [1.0] * 3


@needs(ranks=2)
def check_trees_that_differ(comm: Communicator) -> None:
    """The first gradient that differs is named on all ranks; nothing hangs."""
    mine = comm.rank == comm.size - 1
    average = rj.average_gradients()

    def averaged(tree: Any, params: Any = None) -> None:
        step = jax.jit(lambda tree, params: average.update(tree, optax.EmptyState(), params)[0])
        jax.block_until_ready(step(tree, params))

    with failing("name of gradient 1", "['c']", f"on rank {comm.size - 1}"):
        averaged({"a": jnp.ones(3), "c" if mine else "b": jnp.ones(2)})
    with failing("shape of gradient 0 (\"['a']\")", "[300]", "[3]"):
        averaged({"a": jnp.ones(300 if mine else 3), "b": jnp.ones(2)})
    with failing("dtype of gradient 1 (\"['b']\")", "float32", "float64"):
        averaged({"a": jnp.ones(3), "b": jnp.ones(2, jnp.float32 if mine else jnp.float64)})
    with failing("name of gradient 1", "nothing"):
        averaged({"a": jnp.ones(3)} | ({} if mine else {"b": jnp.ones((400, 400))}))
    with failing("name of gradient 0", "nothing"):
        averaged({} if mine else {"a": jnp.ones(3)})
    with failing("name of gradient 1", "['b'][1]"):  # as many elements of as many arrays
        averaged({"a": jnp.ones(3), "b": [None, jnp.ones(2)] if mine else [jnp.ones(2), None]})
    with failing("whether parameters are given, to be compared, is"):
        averaged({"a": jnp.ones(3)}, {"a": jnp.ones(3)} if mine else None)
    averaged({})

    seen = jax.jit(lambda tree: average.update(tree, optax.EmptyState())[0])
    for _ in range(3):
        seen({"a": jnp.ones(3)})
    with failing("shape of gradient 0"):  # later, on one rank alone
        jax.block_until_ready(seen({"a": jnp.ones(4 if mine else 3)}))
    with expect(ringdl.MismatchError, "broadcast_variables", "float64[4]", "on the root rank"):
        rj.broadcast_variables({"a": jnp.ones(4 if mine else 3)}, comm.size - 1)
    with expect(ringdl.MismatchError, "broadcast_variables", "missing"):
        rj.broadcast_variables({"a": jnp.ones(3)} | ({"b": 1} if mine else {"b": jnp.ones(1)}))


@needs(ranks=2)
def check_errors_of_one_rank_while_tracing(comm: Communicator) -> None:
    """The others hear of it at once, for the right call: those that XLA still has to make come
    first.
    """
    mine = comm.rank == comm.size - 1
    where = f"rank {comm.size - 1} cannot make allreduce 'in jax.jit: "
    x = jnp.ones(3)

    def loss(x: Any) -> Any:
        return x["no tree"] if mine else x.sum()

    average = rj.average_gradients()
    reduced = jax.jit(lambda x: average.update({"a": x}, None)[0])
    plain = jax.jit(rj.allreduce)
    slow_reduced = jax.jit(lambda x: average.update([(x @ x @ x).sum(0)], None)[0])
    slow_plain = jax.jit(lambda x: rj.allreduce((x @ x @ x).sum(0)))
    large = jnp.eye(600)
    for step, wrong, error, text, slow in (
        (jax.jit(rj.value_and_grad(loss)), x, TypeError, "gradients (0)'", slow_reduced),
        (reduced, jnp.ones(3, int), ringdl.UsageError, "has dtype int64", slow_reduced),
        (plain, jnp.ones(3, complex), ringdl.UsageError, "dtype complex128", slow_plain),
    ):
        jax.block_until_ready(slow(large))
        before = [slow(large) for _ in range(3)]
        if mine:
            with expect(error):
                jax.block_until_ready(step(wrong))
        else:
            with expect(jax.errors.JaxRuntimeError, where, text, within=10):
                jax.block_until_ready(step(x))
        assert all((np.asarray(each) == 1).all() for each in before)
        ringdl.shutdown()
        ringdl.init()
    assert (plain(x) == 1).all()


@needs(ranks=2)
def check_a_callback_that_raises_on_one_rank(comm: Communicator) -> None:
    """The others give up in time, and say which rank has not come."""
    ranks, mine = rj._ranks.ranks_of(comm), comm.rank == comm.size - 1  # type: ignore[attr-defined]

    def called(x: Any) -> Any:
        if mine and x[0] > 1:
            raise ValueError("no such batch")
        return x

    @jax.jit
    def step(x: Any) -> Any:
        x = jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return rj.average_gradients().update([x], optax.EmptyState())[0]

    jax.block_until_ready(step(jnp.ones(3)))
    _engine.xla_use(ranks.number, comm._engine, comm._group, 1.0)
    others = ("gradients (0)' did not end within 1.0 s", f": rank {comm.size - 1} ")
    texts = ("no such batch",) if mine else others
    with expect(jax.errors.JaxRuntimeError, *texts, within=10):
        jax.block_until_ready(step(2 * jnp.ones(3)))
    comm.barrier()
    ringdl.shutdown()
    ringdl.init()
    assert step(jnp.ones(3))[0].tolist() == [1.0] * 3


def check_not_initialized() -> None:
    """Also in a function that was compiled before."""
    compiled = jax.jit(lambda x: rj.allreduce(x))
    assert (compiled(jnp.ones(3)) == 1).all()
    ringdl.shutdown()
    average = rj.average_gradients()
    new = jax.jit(lambda x: rj.allreduce(x))
    for call in (rj.allreduce, new, rj.broadcast_variables, rj.grad(jnp.sum)):
        with expect(ringdl.UsageError, "call ringdl.init() first"):
            call(jnp.ones(3))
    with expect(jax.errors.JaxRuntimeError, "ringdl.UsageError", "call ringdl.init() first"):
        jax.block_until_ready(compiled(jnp.ones(3)))
    with expect(ringdl.UsageError, "call ringdl.init() first"):
        average.update([jnp.ones(3)], optax.EmptyState())
    ringdl.init()
