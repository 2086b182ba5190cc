"""Warns when torch.distributed uses Gloo in a program that has imported ringdl's backend.

Trainers choose a backend themselves: on CPUs it is Gloo, whatever was imported.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

import ringdl

_MESSAGE = (
    "torch.distributed goes by Gloo here, although ringdl.torch.backend was imported: nothing goes "
    "by ringdl. Call torch.distributed.init_process_group('ringdl') before the trainer or the mesh "
    "is made, which then takes that group; Lightning is told by "
    "DDPStrategy(process_group_backend='ringdl')"
)


def warn_of_gloo() -> None:
    """From now on, warn once if the default process group is made with Gloo for CPU tensors.

    Only on rank 0, and not of groups for other purposes beside the default one. A script that has
    imported ``init_process_group`` itself before is not warned.
    """
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        if (
            "cpu:gloo" in dist.get_backend_config()
            and ringdl.is_initialized()
            and ringdl.rank() == 0
            and ringdl.size() > 1
            and not _has_warned
        ):
            _has_warned.append(True)
            warnings.warn(_MESSAGE, RuntimeWarning, stacklevel=2)

    for module in (dist, distributed_c10d, device_mesh):
        if getattr(module, "init_process_group", None) is original:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


_has_warned: list[bool] = []
