"""ringdl averages gradients for decentralized synchronous training.

Start a script with ``mpirun`` (or ``python -m ringdl run``), call `init`, and average with
`allreduce`, with `Buckets`, or by wrapping the optimizer: see ``ringdl.torch``.
"""

from ringdl._buckets import Buckets
from ringdl._communicator import Communicator
from ringdl._custom_op import CustomOp, custom_op
from ringdl._default import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    get_communicator,
    host_count,
    host_rank,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    stats,
)
from ringdl._engine import Reduction
from ringdl._errors import Error, MismatchError, StallError, UsageError
from ringdl._version import __version__
from ringdl._work import Work

Sum = Reduction.Sum
Average = Reduction.Average
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product

__all__ = [
    "Average",
    "Buckets",
    "Communicator",
    "CustomOp",
    "Error",
    "Max",
    "Min",
    "MismatchError",
    "Product",
    "Reduction",
    "StallError",
    "Sum",
    "UsageError",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "custom_op",
    "get_communicator",
    "host_count",
    "host_rank",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "stats",
]
