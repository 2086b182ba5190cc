"""CuPy's arrays on a device: the real ones, or those of a stand-in on a pretended device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdl import Communicator
from tests.ranks import stand_in_cupy
from tests.ranks._devices import pretended
from tests.ranks.reference import Array
from tests.ranks.support import assert_same_bits, expect


def check_cupy(comm: Communicator) -> None:
    """Arrays of CuPy are taken and returned, and gradients are views for it."""
    if pretended("launches") is None:
        import cupy  # the real one
    else:
        cupy = stand_in_cupy.install()
    import ringdl.cupy

    mine = cupy.array(np.arange(3000.0) + comm.rank)
    total = comm.size * (np.arange(3000.0) + (comm.size - 1) / 2)
    result = comm.allreduce(mine, ringdl.Sum)
    assert isinstance(result, cupy.ndarray)
    assert (_numpy(result) == total).all()
    assert (_numpy(mine) == np.arange(3000.0) + comm.rank).all(), "the argument was changed"
    assert comm.allreduce_(mine, ringdl.Sum) is mine
    assert (_numpy(mine) == total).all()
    turned = cupy.array(np.arange(12.0).reshape(3, 4) + comm.rank).T
    assert comm.allreduce_(turned, ringdl.Sum) is turned
    assert (_numpy(turned) == total[:12].reshape(3, 4).T).all(), "not contiguous"
    gathered = comm.allgather(cupy.array([comm.rank]))
    assert isinstance(gathered, cupy.ndarray)
    assert _numpy(gathered).tolist() == list(range(comm.size))
    group = [cupy.array(np.full(count, float(comm.rank))) for count in (2, 5)]
    ringdl.grouped_allreduce_(group, ringdl.Sum)
    assert all((_numpy(each) == comm.size * (comm.size - 1) / 2).all() for each in group)
    parameters = {"w": cupy.array(np.zeros((4, 3))), "b": cupy.array(np.zeros(3, np.float32))}
    buckets = ringdl.cupy.Buckets(parameters, communicator=comm)
    for turn in range(2):
        for index, gradient in enumerate(buckets.views()):
            assert isinstance(gradient, cupy.ndarray)
            gradient.set(np.full(gradient.shape, comm.rank + turn, gradient.dtype))
            buckets.ready(index)
        assert buckets.wait() == [True, True]
        mean = turn + (comm.size - 1) / 2
        assert all((_numpy(gradient) == mean).all() for gradient in buckets.views())
    ringdl.shutdown()
    ringdl.init()
    buckets.rebind()
    for index, gradient in enumerate(buckets.views()):
        assert (_numpy(gradient) == mean).all(), "gradients are kept"
        buckets.ready(index)
    assert buckets.wait() == [True, True]
    mean = (comm.size - 1) / 2
    buckets.count_nonfinite()
    halves = cupy.array(np.full((4, 3), comm.rank * 2.0))
    singles = cupy.array(np.full(3, np.inf if comm.rank == 1 else comm.rank, np.float32))
    buckets.ready(0, source=halves, scale=0.5)
    buckets.ready(1, source=singles)
    assert buckets.wait() == [True, True]
    assert buckets.nonfinite == (3 if comm.rank == 1 else 0)
    assert (_numpy(buckets.view(0)) == mean).all()
    assert (np.isinf(_numpy(buckets.view(1))) == (comm.size > 1)).all()
    buckets.unpack({0: halves, 1: singles}, scale=4.0)
    assert (_numpy(halves) == 4 * mean).all()
    assert (_numpy(halves.T) == 4 * mean).all()
    assert _numpy(singles).tobytes() == _numpy(buckets.view(1)).tobytes() or comm.size == 1
    for wrong, what in (({2: halves}, "unpack(2)"), ({0: singles}, "shape"), ({0: halves.T}, "C-")):
        with expect(ringdl.UsageError, what):
            buckets.unpack(wrong)
    with expect(ringdl.UsageError, "does not pack"):
        buckets.unpack({0: cupy.array(np.zeros((4, 3), np.float32))})
    with expect(ringdl.UsageError, "make buckets for each device"):
        ringdl.cupy.Buckets({}, communicator=comm)


def check_cupy_optimizer(comm: Communicator) -> None:
    """The parameters that NumPy's gets, to the last bit."""
    if pretended("launches") is None:
        import cupy  # the real one
    else:
        cupy = stand_in_cupy.install()
    import ringdl.cupy
    import ringdl.numpy

    random = np.random.default_rng(comm.rank)
    ours, theirs = ([np.ones((3, 4)), np.full(5, 2.0)] for _ in range(2))
    on_devices = [cupy.array(each) for each in ours]
    own = ringdl.numpy.DistributedOptimizer(ringdl.numpy.AdamW(0.1), backward_passes_per_step=2)
    others = ringdl.cupy.DistributedOptimizer(ringdl.cupy.AdamW(0.1), backward_passes_per_step=2)
    for turn in range(6):
        gradients = [random.normal(size=each.shape) for each in theirs]
        given: list[Any] = [cupy.array(each) for each in gradients]
        if turn == comm.rank:
            gradients[1] = given[1] = None
        assert own.step(ours, gradients) == others.step(on_devices, given) == (turn % 2 == 1)
    for one, other in zip(ours, on_devices, strict=True):
        np.testing.assert_allclose(_numpy(other), one, rtol=1e-12)
        assert_same_bits(comm, _numpy(other))
    with expect(ringdl.UsageError, "parameters are arrays of CuPy"):
        ringdl.cupy.DistributedOptimizer(ringdl.cupy.SGD(0.1)).step([np.ones(3)], [np.ones(3)])


def _numpy(array: Any) -> Array:
    return array.numpy() if hasattr(array, "numpy") else array.get()
