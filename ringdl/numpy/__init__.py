"""Training loops that are written with NumPy: averaged gradients, and optimizers.

import ringdl, ringdl.numpy

ringdl.init()
optimizer = ringdl.numpy.DistributedOptimizer(ringdl.numpy.SGD(0.1, momentum=0.9))
for x, y in batches:                                # this rank's
    optimizer.step([w, b], gradients(w, b, x, y))   # w and b are the same on all ranks
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdl._training.descent import SGD, Adam, AdamW
from ringdl._training.in_numpy import Array, ArrayReplica, spec_of
from ringdl._training.plain import DistributedOptimizer as _DistributedOptimizer
from ringdl._training.plain import PlainStore
from ringdl._training.replicas import Replica
from ringdl._training.store import Spec

__all__ = ["SGD", "Adam", "AdamW", "DistributedOptimizer"]


class _Store(PlainStore[Array]):
    def spec(self, name: str, parameter: Array) -> Spec:
        return spec_of(name, parameter)

    def view(self, index: int, memory: Any) -> Array:
        return np.from_dlpack(memory)

    def replica(self, parameter: Array) -> Replica:
        return ArrayReplica(parameter)

    def own(self, index: int, gradient: Any, is_kept: bool) -> Any:
        """See `PlainStore`: numbers, as NumPy has them for arrays without axes, and lists, too."""
        if gradient is None or isinstance(gradient, np.ndarray):
            return super().own(index, gradient, is_kept)
        return np.array(gradient, self.specs[index][2])


class DistributedOptimizer(_DistributedOptimizer[Array]):
    """The one of `ringdl`, for arrays of NumPy."""

    __doc__ = _DistributedOptimizer.__doc__
    _store = _Store
