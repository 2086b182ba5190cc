"""DistributedDataParallel's buckets, in memory that the ranks of a host share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

import ringdl
from ringdl.torch._process_group import ProcessGroup


class Reducer(c10d.Reducer):
    """What DistributedDataParallel keeps its buckets in, with the arguments of torch's own.

    In a group of ringdl's they lie where an allreduce inside a host reads and writes them in place:
    from torch's own memory they would be copied through stages, which takes two to four times as
    long. In other groups it is torch's own.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = (*arguments, *named.values())
        group = next((value for value in given if isinstance(value, ProcessGroup)), None)
        self._memory: AbstractContextManager[Any] = (
            nullcontext() if group is None else _SharedMemory(group.communicator)
        )
        with self._memory:
            super().__init__(*arguments, **named)

    def _rebuild_buckets(self) -> bool:
        """After the first step, in the order in which gradients were made."""
        with self._memory:
            return bool(super()._rebuild_buckets())


class _SharedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, ``torch.empty`` on the CPU, also that of C++, is `ringdl.Communicator.empty`."""

    def __init__(self, communicator: ringdl.Communicator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._communicator = communicator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        made = func(*args, **options)
        if func is not torch.ops.aten.empty.memory_format or made.device.type != "cpu":
            return made
        memory = self._communicator.empty(made.nbytes, "uint8")
        return torch.from_numpy(memory).view(made.dtype).view(made.shape)
