"""ringdl averages gradients for decentralized synchronous training.

Start a script with ``mpirun`` (or ``python -m ringdl run``), call `init`, and average with
`allreduce`, with `Buckets`, or by wrapping the optimizer: see ``ringdl.torch``.
"""

try:
    from ringdl._engine import Reduction
except ModuleNotFoundError:
    raise ImportError(
        f"{__path__[0]} has ringdl's sources without the compiled engine: unless ringdl is "
        "installed already, run `pip install .` in the folder above; then start Python in another "
        "folder, where it finds the installed one"
    ) from None

from ringdl._adapters import Adapter, DistributedOptimizer, register_adapter
from ringdl._adasum import Adasum, AdasumOp
from ringdl._buckets import Buckets
from ringdl._communicator import Communicator
from ringdl._custom_op import CustomOp, custom_op
from ringdl._default import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    barrier_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    empty,
    gather,
    gather_async,
    group,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    host_count,
    host_rank,
    join,
    local_device,
    local_rank,
    local_size,
    rank,
    recv_,
    recv_async_,
    reducescatter,
    reducescatter_async,
    scatter,
    scatter_async,
    send,
    send_async,
    size,
    split,
    stats,
)
from ringdl._errors import Error, MismatchError, RankFailedError, StallError, UsageError
from ringdl._grid import Grid
from ringdl._metrics import average_metrics
from ringdl._startup import (
    get_communicator,
    init,
    is_initialized,
    shutdown,
    start_timeline,
    stop_timeline,
)
from ringdl._tuning import Tuning
from ringdl._version import __version__
from ringdl._work import GroupedWork, Work

Sum = Reduction.Sum
Average = Reduction.Average
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product
BitAnd = Reduction.BitAnd
BitOr = Reduction.BitOr
BitXor = Reduction.BitXor

__all__ = [
    "Adapter",
    "Adasum",
    "AdasumOp",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Buckets",
    "Communicator",
    "CustomOp",
    "DistributedOptimizer",
    "Error",
    "Grid",
    "GroupedWork",
    "Max",
    "Min",
    "MismatchError",
    "Product",
    "RankFailedError",
    "Reduction",
    "StallError",
    "Sum",
    "Tuning",
    "UsageError",
    "Work",
    "__version__",
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
    "barrier_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "custom_op",
    "empty",
    "gather",
    "gather_async",
    "get_communicator",
    "group",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "host_count",
    "host_rank",
    "init",
    "is_initialized",
    "join",
    "local_device",
    "local_rank",
    "local_size",
    "rank",
    "recv_",
    "recv_async_",
    "reducescatter",
    "reducescatter_async",
    "register_adapter",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "shutdown",
    "size",
    "split",
    "start_timeline",
    "stats",
    "stop_timeline",
]
