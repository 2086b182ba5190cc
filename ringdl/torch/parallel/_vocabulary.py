"""Embeddings and cross-entropy of a vocabulary that is cut over ranks (Shoeybi and others 2019)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

import ringdl
from ringdl import Communicator
from ringdl._engine import Kind
from ringdl.torch._compiled import uncompiled
from ringdl.torch.parallel import _exchanges
from ringdl.torch.parallel._cuts import Cut, cut_parameter


class VocabularyParallelEmbedding(torch.nn.Embedding):
    """An embedding; each rank has some rows of the table.

    Its weight can be tied to that of a `ColumnParallelLinear` whose outputs are the vocabulary's.

    Args:
        num_embeddings: rows, all ranks' together.
        embedding_dim: features of a row.
        communicator: the ranks, as ``grid.model``.
        sequence_dim: if given, each rank gets its part of the output along this dimension.
        options: ``device`` and ``dtype``.

    Raises:
        UsageError: another option of ``torch.nn.Embedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        communicator: Communicator,
        sequence_dim: int | None = None,
        **options: Any,
    ) -> None:
        if strange := options.keys() - {"device", "dtype"}:
            raise ringdl.UsageError(f"{sorted(strange)[0]} is not there for a cut embedding")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.communicator, self.sequence_dim = communicator, sequence_dim
        cut_parameter(self, "weight", Cut(communicator, 0, num_embeddings))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the whole table.

        Raises:
            IndexError: there is no such row; on every rank.
        """
        _refuse_strange(ids, self.num_embeddings)
        begin, count = _exchanges.span(self.num_embeddings, self.communicator)
        local = ids - begin
        is_here = (local >= 0) & (local < count)
        if count == 0:
            rows = self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        else:
            rows = functional.embedding(local.where(is_here, 0), self.weight)
            rows = rows.where(is_here.unsqueeze(-1), 0)
        if self.sequence_dim is None:
            return _exchanges.add(rows, self.communicator)
        return _exchanges.reducescatter(rows, self.communicator, self.sequence_dim)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    communicator: Communicator,
    *,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Cross-entropy of logits that are cut over ranks, the same on all; no rank has all of them.

    Args:
        logits: (..., this rank's part of the vocabulary), as a `ColumnParallelLinear` gives them.
        targets: (...), of the whole vocabulary.
        communicator: the ranks, as ``grid.model``.
        vocabulary: its size.
        ignore_index: targets that do not count.
        reduction: as in ``torch.nn.functional.cross_entropy``.

    Raises:
        IndexError: there is no such target; on every rank.
        UsageError: an argument is wrong; the other ranks get a MismatchError.
    """
    begin, count = _exchanges.span(vocabulary, communicator)
    _refuse_wrong(logits, targets, vocabulary, count, reduction, communicator)
    counts = targets != ignore_index
    _refuse_strange(targets[counts], vocabulary)
    losses = _exchanges.applied(_CrossEntropy, logits, targets - begin, counts, communicator)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


@uncompiled
def _refuse_wrong(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    count: int,
    reduction: str,
    communicator: Communicator,
) -> None:
    with communicator._telling(Kind.allreduce, None):
        if logits.shape[-1] != count or logits.shape[:-1] != targets.shape:
            raise ringdl.UsageError(
                f"logits have the shape {tuple(logits.shape)}; of a vocabulary of {vocabulary} "
                f"this rank has {count}, for targets of the shape {tuple(targets.shape)}"
            )
        if reduction not in ("mean", "sum", "none"):
            raise ringdl.UsageError(f"reduction is {reduction!r}; pass 'mean', 'sum' or 'none'")


class _CrossEntropy(torch.autograd.Function):
    """Of targets counted from this rank's first."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        counts: torch.Tensor,
        communicator: Communicator,
    ) -> torch.Tensor:
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        size = wide.shape[-1]
        most = (
            wide.amax(-1)
            if size
            else torch.full(targets.shape, -torch.inf, dtype=wide.dtype, device=wide.device)
        )
        wide = wide - communicator.allreduce_(most, ringdl.Max).unsqueeze(-1)
        is_here = counts & (targets >= 0) & (targets < size)
        own = targets.where(is_here, 0).unsqueeze(-1)
        hits = wide.gather(-1, own).squeeze(-1) if size else torch.zeros_like(most)
        found = torch.stack([wide.exp().sum(-1), hits.where(is_here, 0)])
        total, hit = communicator.allreduce_(found, ringdl.Sum)
        log_total = total.log()
        ctx.dtype = logits.dtype
        ctx.save_for_backward(wide, log_total, own, is_here, counts)
        losses: torch.Tensor = (log_total - hit).where(counts, 0)
        is_mixed = torch.is_autocast_enabled(logits.device.type)
        return losses if is_mixed else losses.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        wide, log_total, own, is_here, counts = ctx.saved_tensors
        result = (wide - log_total.unsqueeze(-1)).exp()
        if result.shape[-1]:
            result.scatter_add_(-1, own, -is_here.unsqueeze(-1).to(result.dtype))
        result *= gradient.where(counts, 0).unsqueeze(-1)
        return result.to(ctx.dtype), None, None, None


@uncompiled
def _refuse_strange(ids: torch.Tensor, size: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise IndexError(
            f"ids are from {int(ids.min())} to {int(ids.max())}, and the vocabulary has {size}"
        )
