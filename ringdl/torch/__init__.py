"""PyTorch on ringdl: ``import ringdl.torch as hvd``, then wrap the optimizer.

Names and signatures are those that MPI training scripts for PyTorch use already (``root_rank``, not
``root``).
"""

from ringdl import (
    Average,
    Error,
    Max,
    Min,
    MismatchError,
    Product,
    StallError,
    Sum,
    UsageError,
    barrier,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringdl.torch._ops import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_object,
    poll,
    synchronize,
)
from ringdl.torch._optimizer import Compression, DistributedOptimizer
from ringdl.torch._state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Error",
    "Max",
    "Min",
    "MismatchError",
    "Product",
    "StallError",
    "Sum",
    "UsageError",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
