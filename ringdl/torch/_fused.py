"""Gradients that live in ``ringdl.Buckets``, and a note that travels with them.

The note says at which step of the optimizer a rank is, and whether it holds a sparse gradient of
which the others may not know. It lies behind the last gradient of the last bucket, so it costs no
message of its own; the step is one element set out of eight, so that any difference of steps but a
multiple of eight is seen in each dtype, after sums and averages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

import ringdl
from ringdl._buckets import AGREEING
from ringdl._reductions import CompressionName

_RESIDUES = 8
_NOTE = "ringdl.step"


@dataclass(frozen=True)
class Round:
    """What is known once a round has ended, the same on all ranks.

    Attributes:
        produced: the gradients that some rank produced.
        is_in_step: whether all ranks are at the same step.
        has_sparse: whether some rank holds a sparse gradient.
    """

    produced: Collection[int]
    is_in_step: bool
    has_sparse: bool


class FusedGradients:
    """Views into buckets for some of an optimizer's parameters. Collective.

    Args:
        named: by index, in the order of registration, the name and the parameter; the same on all
            ranks.
        op: Average or Sum over the ranks.
        compression: as `ringdl.Buckets` takes it.
        communicator: the ranks.
        predivisor: of gradients before they are summed; results are multiplied by it.

    Raises:
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """

    def __init__(
        self,
        named: Mapping[int, tuple[str, torch.Tensor]],
        op: ringdl.Reduction,
        compression: CompressionName | None,
        communicator: ringdl.Communicator,
        predivisor: float = 1.0,
    ) -> None:
        gradients = [_spec(name, parameter) for name, parameter in named.values()]
        dtype = gradients[0][2] if gradients else "float32"
        try:
            self._buckets = ringdl.Buckets(
                [(_NOTE, (_RESIDUES + 1,), dtype), *gradients],
                op=op,
                compression=compression,
                communicator=communicator,
            )
        except ringdl.MismatchError as error:
            if AGREEING not in str(error) or " cannot make " in str(error):
                raise
            raise ringdl.MismatchError(
                f"{error}. Every rank has to wrap its optimizer: "
                "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())"
            ) from None
        self._positions = {index: position for position, index in enumerate(named, start=1)}
        self._note = from_dlpack(self._buckets.dlpack(0))
        self._is_noted = False
        self._predivisor = predivisor
        self.ready: set[int] = set()
        """The gradients that this rank has marked ready in this round."""
        self.views: dict[int, torch.Tensor] = {
            index: _as_gradient(
                from_dlpack(self._buckets.dlpack(self._positions[index])), parameter
            )
            for index, (_, parameter) in named.items()
        }
        """By index, with the strides of the parameter: always the same memory."""

    def mark_ready(self, index: int) -> None:
        """Gradient ``index`` is in its view; the last one of a bucket starts its allreduce."""
        self.ready.add(index)
        if self._predivisor != 1.0:
            self.views[index].div_(self._predivisor)
        self._buckets.ready(self._positions[index])

    def end_round(self, step: int, has_sparse: bool) -> Round:
        """Flush what is not ready (as zeros), wait, and begin the next round. Collective.

        Args:
            step: how many steps of the optimizer this rank has ended.
            has_sparse: whether it holds a sparse gradient that is not known to be sparse.

        Raises:
            StallError: some rank has not come in time; call again.
        """
        if not self._is_noted:
            self._is_noted = True
            self._note.zero_()
            self._note[step % _RESIDUES] = 1
            self._note[_RESIDUES] = has_sparse
            self._buckets.ready(0)
        produced = self._buckets.wait()
        self._is_noted = False
        self.ready.clear()
        averaged = {index for index, position in self._positions.items() if produced[position]}
        if self._predivisor != 1.0:
            for index in averaged:
                self.views[index].mul_(self._predivisor)
        return Round(
            averaged,
            int(self._note[:_RESIDUES].count_nonzero()) == 1,
            bool(self._note[_RESIDUES]),
        )


def raise_out_of_step(step: int, communicator: ringdl.Communicator, name: str) -> None:
    """Tell all ranks who is at which step. Collective, after a round that was not in step."""
    steps = communicator.allgather(np.array([step]), name=name).tolist()
    where = " and ".join(
        f"step {each + 1} on {_ranks_text([r for r, other in enumerate(steps) if other == each])}"
        for each in sorted(set(steps))
    )
    raise ringdl.MismatchError(
        f"the ranks are out of step: gradients met that belong to {where}; every rank must call "
        "backward() equally often between two steps (or not at all), and step() equally often; one "
        "that has no batch left calls join()"
    )


def _ranks_text(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _spec(name: str, parameter: torch.Tensor) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    """What buckets are told of a gradient: a complex one is pairs of real numbers to them."""
    like = torch.empty_like(parameter, device="meta")
    if like.is_complex():
        like = torch.view_as_real(like)
    return name, tuple(like.shape), str(like.dtype).removeprefix("torch."), like.stride()


def _as_gradient(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(view) if parameter.is_complex() else view
