"""JAX's arrays, on the CPU and, if JAX has one, on a device."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import random_array, reduced
from tests.ranks.support import assert_same_bits, expect

DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "bool")


def whole(x: jax.Array) -> Any:
    return np.asarray(x)


def check_allreduce(comm: Communicator) -> None:
    """A new array, with the bits of NumPy's; the argument stays."""
    for dtype in DTYPES:
        for shape in ((), (0,), (7,), (300, 5), (100_003,)):
            count = int(np.prod(shape))
            arrays = [
                random_array(rank, count, jnp.dtype(dtype), ringdl.Sum, 3).reshape(shape)
                for rank in range(comm.size)
            ]
            mine = jnp.asarray(arrays[comm.rank])
            found = comm.allreduce(mine, ringdl.Sum)
            assert isinstance(found, jax.Array)
            assert found.shape == shape
            assert found.devices() == mine.devices()
            assert found.dtype == mine.dtype
            assert (whole(mine) == arrays[comm.rank]).all(), "the argument was changed"
            reduced(arrays, ringdl.Sum).check(whole(found), f"{shape} of {dtype}")
            assert whole(found).tobytes() == comm.allreduce(arrays[comm.rank], ringdl.Sum).tobytes()
            assert_same_bits(comm, whole(found))


def check_results_can_be_computed_with(comm: Communicator) -> None:
    """At once, and what was computed just before is what is reduced."""
    step = jax.jit(lambda x: jnp.tanh(x @ x.T))
    x = jnp.full((500, 500), 0.01 * (comm.rank + 1))
    for _ in range(5):
        expected = sum(
            np.float64(step(jnp.full((500, 500), 0.01 * (rank + 1))).sum())
            for rank in range(comm.size)
        )
        found = step(x)
        assert np.isclose(float(comm.allreduce(found, ringdl.Sum).sum()), expected, rtol=1e-4)


def check_asynchronous(comm: Communicator) -> None:
    """Works that are waited for in another order, grouped ones, and one that nobody keeps."""
    total = comm.size * (comm.size + 1) / 2
    counts = (3, 70_000, 5, 0, 200, 200_000)
    arrays = [jnp.full(count, comm.rank + 1.0) for count in counts]
    works = [comm.allreduce_async(array, ringdl.Sum) for array in arrays]
    for count, work in reversed(list(zip(counts, works, strict=True))):
        found = work.wait()
        assert isinstance(found, jax.Array)
        assert found.shape == (count,)
        assert (found == total).all()
    for found in comm.grouped_allreduce(arrays, ringdl.Sum):
        assert isinstance(found, jax.Array)
        assert (found == total).all()
    comm.allreduce_async(jnp.ones(1 << 20), name="let go of")
    gc.collect()
    comm.barrier()
    assert all((array == comm.rank + 1).all() for array in arrays)


def check_exchanges(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    mine = jnp.arange(6.0).reshape(3, 2) + 100 * rank
    all_rows = np.concatenate([np.arange(6.0).reshape(3, 2) + 100 * other for other in range(size)])
    last = comm.broadcast(mine, size - 1)
    assert isinstance(last, jax.Array)
    assert (whole(last) == all_rows[-3:]).all()
    assert (whole(comm.broadcast_async(mine).wait()) == all_rows[:3]).all()
    gathered = comm.allgather(mine)
    assert isinstance(gathered, jax.Array)
    assert (whole(gathered) == all_rows).all()
    assert comm.allgather(mine[:0]).shape == (0, 2)
    rows = comm.reducescatter(gathered, ringdl.Sum)
    assert isinstance(rows, jax.Array)
    assert (whole(rows) == size * all_rows[3 * rank : 3 * rank + 3]).all()
    assert comm.reducescatter(mine[:0]).shape == (0, 2)
    dealt = comm.alltoall(jnp.full((size, 2), rank, jnp.int32))
    assert (whole(dealt) == np.arange(size)[:, None]).all()
    at_root = comm.gather(mine, 0)
    assert (at_root is None) == (rank != 0)
    if at_root is not None:
        assert isinstance(at_root, jax.Array)
        assert (whole(at_root) == all_rows).all()
    assert (whole(comm.scatter(gathered, 0)) == all_rows[3 * rank : 3 * rank + 3]).all()
    assert (whole(mine) == all_rows[3 * rank : 3 * rank + 3]).all()


def check_memory_is_held(comm: Communicator) -> None:
    """Arrays that are given away while they travel; and one that is gone before, on one rank."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for _ in range(10):
        x = jnp.full((1 << 18,), comm.rank + 1.0)
        work = comm.allgather_async(x)
        if cpu().platform == "gpu":
            with expect(ValueError, "external reference"):
                double(x)
        else:
            double(x).block_until_ready()
        expected = np.repeat(np.arange(1.0, comm.size + 1), 1 << 18)
        assert (whole(work.wait()) == expected).all()
    if comm.size > 1:
        x = jnp.ones(3)
        if comm.rank == 0:
            x.delete()
        with expect(RuntimeError, "deleted", within=10):
            comm.allreduce(x)


def check_layouts(comm: Communicator) -> None:
    """An array that lies by columns; and results that may meet arrays of any device."""
    from jax.experimental.layout import Format, Layout

    values = np.arange(6.0, dtype=np.float32).reshape(2, 3) + comm.rank
    x = jax.device_put(values, Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(cpu())))
    if cpu().platform == "gpu":
        with expect(ringdl.UsageError, "pass one that lies by rows"):
            comm.allgather(x)
    else:
        gathered = whole(comm.allgather(x))
        assert (gathered[2 * comm.rank : 2 * comm.rank + 2] == values).all()
        assert (whole(comm.allreduce(x, ringdl.Max)) == values - comm.rank + comm.size - 1).all()
    for device in jax.devices():
        free = comm.allgather(jnp.ones(3))
        assert (free + jax.device_put(jnp.ones(3 * comm.size), device)).devices() == {device}
        bound = jax.device_put(jnp.ones(3), device)
        assert comm.allgather(bound).devices() == {device}


def cpu() -> Any:
    return jax.devices()[0]


def check_refusals(comm: Communicator) -> None:
    """On all ranks, and nothing is left behind."""
    x = jnp.ones(10)
    with expect(ringdl.UsageError, "does not change; call the form without an underscore"):
        comm.allreduce_(x)
    with expect(ringdl.UsageError, "does not change"):
        comm.broadcast_(x)
    with expect(ringdl.UsageError, "tracer"):
        jax.jit(lambda x: comm.allreduce(x))(x)
    with expect(ringdl.UsageError, "arrays of dtype uint32"):
        comm.allreduce(jnp.ones(3, jnp.uint32))
    if len(jax.devices()) > 1:
        mesh = jax.make_mesh((2,), ("x",))
        spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        with expect(ringdl.UsageError, "spread over 2 devices"):
            comm.allreduce(spread)
    assert (comm.allreduce(x, ringdl.Sum) == comm.size).all()
    assert (x == 1).all()
