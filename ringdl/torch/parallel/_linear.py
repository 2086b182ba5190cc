"""Linear layers of which each rank has some columns, or some rows.

From Megatron-LM (Shoeybi and others 2019). A weight is (out, in), as PyTorch has it; columns are
those of the product x @ weight.T.

```
x, the same  --ColumnParallelLinear-->  y, own part  --RowParallelLinear-->  z, the same
                                                       adds up over ranks
```
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import ringdl
from ringdl import Communicator
from ringdl.torch.parallel import _exchanges
from ringdl.torch.parallel._cuts import Cut, cut_parameter


class ColumnParallelLinear(torch.nn.Linear):
    """A linear layer whose outputs are cut over ranks.

    On each rank it begins with the part of what ``torch.nn.Linear`` would begin with, by the same
    random numbers.

    Args:
        in_features: of an input.
        out_features: of an output, all parts together.
        bias: whether there is one.
        communicator: the ranks, as ``grid.model``.
        gathers: whether each rank gets the whole output.
        sequence_dim: if given, inputs are cut along this dimension, and put together first.
        sections: see `Cut`.
        options: ``device`` and ``dtype``.

    Raises:
        UsageError: outputs are not a multiple of sections, or both sections and gathers are given.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        communicator: Communicator,
        gathers: bool = False,
        sequence_dim: int | None = None,
        sections: int = 1,
        **options: Any,
    ) -> None:
        if out_features % sections != 0 or (sections > 1 and gathers):
            raise ringdl.UsageError(
                f"{out_features} outputs in {sections} sections: sections have to be equal, and "
                "are not put together again; leave out gathers"
            )
        super().__init__(in_features, out_features, bias, **options)
        self.communicator, self.gathers = communicator, gathers
        self.sequence_dim = sequence_dim
        cut = Cut(communicator, 0, out_features, sections)
        cut_parameter(self, "weight", cut)
        if bias:
            cut_parameter(self, "bias", cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with this rank's columns."""
        if self.sequence_dim is None:
            x = _exchanges.copy(x, self.communicator)
        else:
            x = _exchanges.allgather(x, self.communicator, self.sequence_dim)
        y = functional.linear(x, self.weight, self.bias)
        return _exchanges.gather(y, self.communicator, -1) if self.gathers else y


class RowParallelLinear(torch.nn.Linear):
    """A linear layer whose inputs are cut over ranks: their products are added up.

    It begins as `ColumnParallelLinear` does.

    Args:
        in_features: of an input, all parts together.
        out_features: of an output.
        bias: whether there is one; all ranks have it whole.
        communicator: the ranks, as ``grid.model``.
        scatters: whether inputs are the same on all ranks, and are cut here.
        sequence_dim: if given, each rank gets its part of the output along this dimension.
        options: ``device`` and ``dtype``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        communicator: Communicator,
        scatters: bool = False,
        sequence_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.communicator, self.scatters = communicator, scatters
        self.sequence_dim = sequence_dim
        cut_parameter(self, "weight", Cut(communicator, 1, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' products."""
        if self.scatters:
            x = _exchanges.scatter(x, self.communicator, -1)
        y = functional.linear(x, self.weight)
        bias: torch.Tensor | None = self.bias
        if self.sequence_dim is None:
            y = _exchanges.add(y, self.communicator)
        else:
            y = _exchanges.reducescatter(y, self.communicator, self.sequence_dim)
            if bias is not None:
                bias = _exchanges.copy(bias, self.communicator)
        return y if bias is None else y + bias.to(y.dtype)
