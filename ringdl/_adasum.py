"""Adasum: a sum of gradients with which large batches need no other learning rate."""

from __future__ import annotations

from ringdl import _engine
from ringdl._engine import CustomOperation, DType


class AdasumOp:
    """The type of `Adasum`, its only instance.

    Two arrays a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are
    orthogonal, their average where they are parallel (Maleki et al. 2021, "Scaling Distributed
    Training with Adaptive Summation"). More are combined in a tree, by recursive doubling. Its
    shape depends on the number of ranks alone, which need not be a power of two. Each array counts
    as one vector, also in `grouped_allreduce`. Products are summed in float64; floating dtypes
    only.
    """

    name = "Adasum"

    def operation(self, dtype: DType) -> CustomOperation:
        """What the engine takes for arrays of one dtype.

        Raises:
            UsageError: a dtype that is not floating.
        """
        return _engine.adasum_operation(dtype)

    def __repr__(self) -> str:
        return "ringdl.Adasum"


Adasum = AdasumOp()
