"""ringdl.jax where each rank has several devices: in shard_map, in pmap, and between functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringdl
import ringdl.jax as rj
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect, needs

DEVICES = 3
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles for longer than all takes

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
ROWS = jax.P("i")


def mesh(kind: Any = AUTO) -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("i",), axis_types=(kind,))


def mapped(function: Any, out: Any = ROWS, of: Any = None, **how: Any) -> Callable[..., Any]:
    its = {"mesh": of or mesh(), "in_specs": ROWS, "out_specs": out}
    return jax.jit(jax.shard_map(function, **(its | how)))


def spread(values: Any, over: Any = None) -> jax.Array:
    return jax.device_put(values, jax.NamedSharding(over or mesh(), ROWS))


def given(comm: Communicator, rows: int = 4) -> list[Any]:
    """By rank: rows for all devices, which their own parts are of."""
    random = np.random.default_rng(7)
    return [random.normal(size=(DEVICES * rows, 2)) for _ in range(comm.size)]


def check_collectives(comm: Communicator) -> None:
    """Each device calls for itself, with the same device of the other ranks."""
    size, rank = comm.size, comm.rank
    arrays = given(comm, 2 * size)
    parts = [np.split(each, DEVICES) for each in arrays]
    total = [sum(each) for each in zip(*parts, strict=True)]
    expected = {
        "sum": (lambda x: rj.allreduce(x, ringdl.Sum), total),
        "root": (lambda x: rj.broadcast(x, size - 1), parts[-1]),
        "rows": (rj.allgather, [np.concatenate(each) for each in zip(*parts, strict=True)]),
        "part": (
            lambda x: rj.reducescatter(x, ringdl.Sum),
            [np.split(each, size)[rank] for each in total],
        ),
        "exchange": (
            rj.alltoall,
            [
                np.concatenate([np.split(its, size)[rank] for its in each])
                for each in zip(*parts, strict=True)
            ],
        ),
    }
    for kind in (AUTO, EXPLICIT):
        its = mesh(kind)
        for name, (function, wanted) in expected.items():
            found = mapped(function, of=its)(spread(arrays[rank], its))
            np.testing.assert_allclose(found, np.concatenate(wanted), rtol=1e-12, err_msg=name)
    whole = mapped(lambda x: rj.allreduce(jax.lax.psum(x.sum(), "i"), ringdl.Sum), jax.P())
    np.testing.assert_allclose(whole(spread(arrays[rank])), np.sum(arrays), rtol=1e-12)
    means = jax.pmap(lambda x: rj.allreduce(jax.lax.pmean(x, "j")), axis_name="j")
    np.testing.assert_allclose(means(jnp.arange(DEVICES) + rank), 1 + (size - 1) / 2)


def check_gradients(comm: Communicator) -> None:
    """Of the sum of the losses of all devices of all ranks."""
    arrays = given(comm)
    weights = np.random.default_rng(1).normal(size=arrays[0].shape)

    def own(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            return (jnp.sin(rj.allreduce(x, ringdl.Sum)) * weights).sum()

        return jax.grad(loss)(x)

    found = mapped(own, in_specs=(ROWS, ROWS))(spread(arrays[comm.rank]), spread(weights))
    total = sum(arrays)
    np.testing.assert_allclose(found, comm.size * np.cos(total) * weights, rtol=1e-12)


def check_training(comm: Communicator) -> None:
    """Batches that are split over ranks and devices: parameters are those of whole ones."""
    random = np.random.default_rng(3)
    count = DEVICES * 6
    batches = [(random.normal(size=(count, 8)), random.normal(size=(count, 3))) for _ in range(4)]

    def initial(seed: int) -> Any:
        random = np.random.default_rng(seed)
        return {"w": jnp.asarray(random.normal(size=(8, 3))), "b": jnp.zeros(3)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean()

    def scattered(tree: Any) -> Any:
        """The mean over devices and ranks, of which each device sends its part alone."""

        def mean(x: Any) -> Any:
            flat = jnp.pad(x.ravel(), (0, -x.size % DEVICES))
            mine = rj.allreduce(jax.lax.psum_scatter(flat, "i", tiled=True) / DEVICES)
            return jax.lax.all_gather(mine, "i", tiled=True)[: x.size].reshape(x.shape)

        return jax.tree.map(mean, tree)

    plain = optax.adam(0.01)
    averaging = optax.chain(rj.average_gradients(), plain)

    def trained(how: Any, update: Callable[..., Any]) -> Any:
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            return update(jax.grad(loss)(params, x, y), state, params)

        specs = (jax.P(), jax.P(), ROWS, ROWS)
        run = mapped(step, jax.P(), in_specs=specs, check_vma=False)
        params = rj.broadcast_variables(initial(comm.rank))
        state = how.init(params)
        for x, y in batches:
            mine = slice(comm.rank, None, comm.size)
            params, state = run(params, state, x[mine], y[mine])
        return params

    def by_optax(gradients: Any, state: Any, params: Any) -> Any:
        gradients = jax.lax.pmean(gradients, "i")
        updates, state = averaging.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def by_parts(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = plain.update(scattered(gradients), state, params)
        return optax.apply_updates(params, updates), state

    expected = initial(0)
    state = plain.init(expected)
    for x, y in batches:
        updates, state = plain.update(jax.grad(loss)(expected, x, y), state, expected)
        expected = optax.apply_updates(expected, updates)
    for found in (trained(averaging, by_optax), trained(plain, by_parts)):
        for name, its in found.items():
            np.testing.assert_allclose(its, expected[name], rtol=1e-9, atol=1e-12)
            assert_same_bits(comm, *(np.asarray(each.data) for each in its.addressable_shards))


def check_order(comm: Communicator) -> None:
    """Devices and ranks that are late by turns, in two functions that take turns: no deadlock."""
    arrays = given(comm)
    mean = np.mean(arrays, 0)

    def late(number: Any, turn: Any) -> Any:
        time.sleep(0.002 * ((int(number) + int(turn) + comm.rank) % 3))
        return np.zeros(())

    def first(x: Any, turn: Any) -> Any:
        number = jax.lax.axis_index("i")
        x += jax.pure_callback(late, jax.ShapeDtypeStruct((), np.float64), number, turn)
        several = [rj.allreduce(x.sum() * k) for k in range(4)]

        def body(carry: Any, _: Any) -> Any:
            return rj.allreduce(carry), rj.allgather(carry[:1])

        x, _ = jax.lax.scan(body, x, None, length=3)
        return x + 0 * jax.lax.psum(sum(several), "i")

    def second(x: Any) -> Any:
        return rj.allreduce(rj.broadcast(x, comm.size - 1), ringdl.Max)

    one = mapped(first, in_specs=(ROWS, jax.P()), check_vma=False)
    other = mapped(second)
    x = spread(arrays[comm.rank])
    for turn in range(100):
        found, last = one(x, turn), other(x)
        if turn % 25 == 0:
            np.testing.assert_allclose(found, mean, rtol=1e-12)
            assert (np.asarray(last) == arrays[-1]).all()


def check_outside(comm: Communicator) -> None:
    """Arrays that are spread over the devices, between functions that are compiled for these."""
    arrays = given(comm)
    x, mean = spread(arrays[comm.rank]), np.mean(arrays, 0)
    found = rj.allreduce(x)
    assert found.sharding == x.sharding
    np.testing.assert_allclose(found, mean, rtol=1e-12)
    assert rj.allgather(x).shape == (comm.size * len(x), 2)
    tree = {"spread": x, "small": jnp.full(3, comm.rank)}
    equal = rj.broadcast_variables(tree)
    assert equal["spread"].sharding == x.sharding
    assert (np.asarray(equal["spread"]) == arrays[0]).all()
    everywhere = jax.device_put(arrays[comm.rank], jax.NamedSharding(mesh(), jax.P()))
    average = rj.average_gradients()
    gradients = {"spread": x, "everywhere": everywhere, "small": jnp.full(3, 1.0 + comm.rank)}
    averages, _ = average.update(gradients, optax.EmptyState(), jax.tree.map(jnp.ones_like, tree))
    for name in ("spread", "everywhere"):
        assert averages[name].sharding == gradients[name].sharding
        np.testing.assert_allclose(averages[name], mean, rtol=1e-12)
    assert averages["small"].tolist() == [1 + (comm.size - 1) / 2] * 3


@needs(ranks=2)
def check_what_differs(comm: Communicator) -> None:
    """Replicas, trees, and an error on one rank: each device's call fails, on all ranks."""
    mine = comm.rank == comm.size - 1
    average = rj.average_gradients()

    def update(tree: Any) -> Any:
        return average.update(tree, optax.EmptyState(), tree)[0]

    def run(tree: Any) -> None:
        jax.block_until_ready(mapped(update)(jax.tree.map(spread, tree)))

    def again() -> None:
        ringdl.shutdown()
        ringdl.init()

    def late_rank_told() -> None:
        wrong = mapped(lambda x: rj.allreduce(x, "sum"))  # type: ignore[arg-type]
        right = mapped(lambda x: rj.allreduce(x))
        with expect(ringdl.UsageError if mine else jax.errors.JaxRuntimeError, "not by 'sum'"):
            jax.block_until_ready((wrong if mine else right)(spread(np.ones(DEVICES))))

    x = np.ones((DEVICES, 2))
    with expect(jax.errors.JaxRuntimeError, "other values than rank 0; broadcast them"):
        run({"a": x + mine})
    again()
    with expect(jax.errors.JaxRuntimeError, "name of gradient 0"):
        run({"a" if mine else "b": x})
    again()
    late_rank_told()
    again()
    run({"a": x})


def check_refusals(comm: Communicator) -> None:
    x = spread(given(comm)[comm.rank])
    average = rj.average_gradients()
    for function in (rj.allreduce, lambda x: average.update(x, None)[0]):
        with expect(ringdl.UsageError, f"compiled for {DEVICES} devices at once", "jax.shard_map"):
            jax.jit(function)(x)
    two = jax.make_mesh((DEVICES, 1), ("i", "j"), axis_types=(AUTO, AUTO))
    inner = jax.shard_map(
        rj.allreduce, mesh=two, in_specs=jax.P("i"), out_specs=jax.P("i"), axis_names={"i"}
    )
    with expect(ringdl.UsageError, "over all axes of the mesh"):
        jax.jit(inner)(jax.device_put(np.ones((DEVICES, 2)), jax.NamedSharding(two, ROWS)))


def check_compilation_cache(comm: Communicator) -> None:
    """jaxlib would crash when it writes there what has been compiled."""
    x = spread(given(comm)[comm.rank])
    with (
        caching(),
        expect(ringdl.UsageError, "persistent compilation cache", "JAX_ENABLE_COMPILATION_CACHE=0"),
    ):
        mapped(rj.allreduce).lower(x)
    mapped(rj.allreduce).lower(x)


@contextlib.contextmanager
def caching() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_compilation_cache_dir", "/nowhere")
        jax.config.update("jax_enable_compilation_cache", True)
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_enable_compilation_cache", before[1])
