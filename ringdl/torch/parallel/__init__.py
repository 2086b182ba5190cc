"""Networks that are cut over ranks: their layers, and the sequence of their layers.

Make a ``ringdl.Grid``, build the network of these layers, and average gradients along its data
axis by the wrapper: ``hvd.DistributedOptimizer(..., process_set=grid.data)``. With one rank along
an axis each layer is the one of PyTorch, and calls nothing.
"""

from ringdl.torch.parallel._blocks import ParallelAttention, ParallelMLP
from ringdl.torch.parallel._cuts import (
    Cut,
    clip_grad_norm_,
    cut_parameter,
    cuts_of,
    load_state_dict,
    state_dict,
)
from ringdl.torch.parallel._exchanges import (
    add,
    allgather,
    alltoall,
    copy,
    gather,
    receive,
    reducescatter,
    scatter,
    send,
    span,
)
from ringdl.torch.parallel._linear import ColumnParallelLinear, RowParallelLinear
from ringdl.torch.parallel._local import LocallyConnected2d
from ringdl.torch.parallel._norms import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from ringdl.torch.parallel._pipeline import Pipeline
from ringdl.torch.parallel._schedule import utilization
from ringdl.torch.parallel._vocabulary import VocabularyParallelEmbedding, cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "LocallyConnected2d",
    "ParallelAttention",
    "ParallelMLP",
    "Pipeline",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabularyParallelEmbedding",
    "add",
    "allgather",
    "alltoall",
    "clip_grad_norm_",
    "copy",
    "cross_entropy",
    "cut_parameter",
    "cuts_of",
    "gather",
    "load_state_dict",
    "receive",
    "reducescatter",
    "scatter",
    "send",
    "span",
    "state_dict",
    "utilization",
]
