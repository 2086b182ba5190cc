"""PyTorch on ringdl: ``import ringdl.torch as hvd``, then wrap the optimizer.

Names and signatures are those that MPI training scripts for PyTorch use already (``root_rank``, not
``root``).
"""

import sys
from typing import TYPE_CHECKING

import ringdl
from ringdl import (
    _communicator,
    _exchanges,
    _objects,
    _reductions,
    _work,
)
from ringdl._training import names
from ringdl._training.joining import join
from ringdl._training.names import *  # noqa: F403
from ringdl.torch import elastic as elastic
from ringdl.torch._batch_norm import SyncBatchNorm
from ringdl.torch._checkpoint import load, save
from ringdl.torch._compiled import leave_uncompiled
from ringdl.torch._compression import Compression
from ringdl.torch._exchange_ops import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from ringdl.torch._handles import Handle, poll, synchronize
from ringdl.torch._reduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from ringdl.torch._reducescatter_ops import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ringdl.torch._schedules import scale_with_warm_up
from ringdl.torch._state import broadcast_optimizer_state, broadcast_parameters
from ringdl.torch._wrapped import Wrapped as WrappedOptimizer

if TYPE_CHECKING:
    from ringdl.torch._typed import DistributedOptimizer
else:
    from ringdl.torch._optimizer import DistributedOptimizer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "SyncBatchNorm",
    "WrappedOptimizer",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "load",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "save",
    "scale_with_warm_up",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += names.__all__

leave_uncompiled(ringdl, names=ringdl.__all__)
leave_uncompiled(sys.modules[__name__], names=__all__)
leave_uncompiled(
    _communicator.Communicator,
    _exchanges.Exchanges,
    _objects.Objects,
    _reductions.Reductions,
    _work.GroupedWork,
    _work.Work,
    Handle,
)
