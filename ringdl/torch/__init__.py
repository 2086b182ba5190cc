"""PyTorch on ringdl: ``import ringdl.torch as hvd``, then wrap the optimizer.

Names and signatures are those that MPI training scripts for PyTorch use already (``root_rank``, not
``root``).
"""

import sys
from typing import TYPE_CHECKING

import ringdl
from ringdl import (
    Adasum,
    Average,
    Error,
    Max,
    Min,
    MismatchError,
    Product,
    RankFailedError,
    StallError,
    Sum,
    UsageError,
    _communicator,
    _exchanges,
    _objects,
    _reductions,
    _work,
    average_metrics,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringdl import Error as HorovodInternalError
from ringdl._training.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringdl._training.joining import join
from ringdl._training.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Error",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "UsageError",
    "WrappedOptimizer",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "save",
    "scale_with_warm_up",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

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
