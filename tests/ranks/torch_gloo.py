"""Gloo beside ringdl's backend: a warning where it is in its place."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringdl.torch.backend
from ringdl import Communicator
from ringdl.torch import _gloo


def texts_of(how: str, comm: Communicator) -> list[str]:
    """What is warned of when the default group is made so."""
    if dist.is_initialized():
        dist.destroy_process_group()
    del os.environ["MASTER_PORT"]  # where ranks that are late would find the store before
    ringdl.torch.backend._set_environment()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "mesh":
            init_device_mesh("cpu", (comm.size,))
        elif how == "named elsewhere":
            dist.distributed_c10d.init_process_group("cpu:gloo")
        else:
            dist.init_process_group(how or None)
            dist.new_group(backend="gloo")
    comm.barrier()  # ranks that are slower may still be connecting to this one
    dist.destroy_process_group()
    return [str(warning.message) for warning in caught if "Gloo" in str(warning.message)]


def check_gloo_in_the_place_of_ringdl(comm: Communicator) -> None:
    for how in ("gloo", "", "mesh", "named elsewhere"):
        _gloo._has_warned.clear()
        texts = texts_of(how, comm)
        assert len(texts) == (comm.rank == 0 and comm.size > 1), (how, texts)
        if texts:
            assert "init_process_group('ringdl') before the trainer" in texts[0]
    assert texts_of("gloo", comm) == []  # once


def check_gloo_beside_ringdl(comm: Communicator) -> None:
    _gloo._has_warned.clear()
    assert texts_of("ringdl", comm) == []


def check_environment(comm: Communicator) -> None:
    ringdl.torch.backend._set_environment()
    expected = {
        "RANK": comm.rank,
        "WORLD_SIZE": comm.size,
        "LOCAL_RANK": comm.local_rank,
        "LOCAL_WORLD_SIZE": comm.local_size,
        "GROUP_RANK": comm.host_rank,
    }
    assert {name: int(os.environ[name]) for name in expected} == expected
