"""A backend for ``torch.distributed``: import this, then ``init_process_group("ringdl")``.

    import ringdl.torch.backend
    torch.distributed.init_process_group("ringdl")

Under mpirun, ``python -m ringdl run`` or torchrun, with torch 2.10 or newer, these then use ringdl:
DistributedDataParallel, FSDP2 (``fully_shard``), ZeroRedundancyOptimizer, distributed checkpoints
and functional collectives. The import calls `ringdl.init`, and sets what ``torch.distributed``
reads where it is not set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR
and MASTER_PORT. Collective. In a child of ``multiprocessing``, init_process_group does so instead.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import ringdl
from ringdl import _children
from ringdl.torch._gloo import warn_of_gloo
from ringdl.torch._process_group import DEVICES, ProcessGroup
from ringdl.torch._reducer import Reducer

__all__ = ["ProcessGroup"]

_set: dict[str, str] = {}
"""What this module has put into the environment."""


def _set_environment() -> None:
    communicator = ringdl.init()
    for name, own in (("RANK", communicator.rank), ("WORLD_SIZE", communicator.size)):
        if os.environ.get(name, str(own)) != str(own):
            raise ringdl.UsageError(
                f"{name} is {os.environ[name]} in the environment, and {own} for ringdl; unset it, "
                "and start the job with one of mpirun, `python -m ringdl run` and torchrun alone"
            )
    address = _address(communicator.host_count) if communicator.rank == 0 else None
    host, port = communicator.broadcast_object(address, name="ringdl.torch.backend")
    for name, value in (
        ("RANK", communicator.rank),
        ("WORLD_SIZE", communicator.size),
        ("LOCAL_RANK", communicator.local_rank),
        ("LOCAL_WORLD_SIZE", communicator.local_size),
        ("GROUP_RANK", communicator.host_rank),
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
    ):
        if name not in os.environ:
            os.environ[name] = _set[name] = str(value)


def _address(host_count: int) -> tuple[str, int]:
    """Where rank 0 may keep torch's store: a port that is free now."""
    with _free_port() as free:
        port = _port_of(free)
    if host_count == 1:
        return "127.0.0.1", port
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name, port
    return name if address.startswith("127.") else address, port  # other hosts may know better


def _free_port() -> socket.socket:
    """A port that nobody else gets while this is open."""
    free = socket.socket()
    free.bind(("", 0))
    return free


def _port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def _next_port(communicator: ringdl.Communicator) -> Callable[[], None]:
    """A function that replaces this MASTER_PORT by another, where it is ours. Collective.

    To be called when the group of all ranks is destroyed. Otherwise a fast rank would join the
    store of the old group for its next one, before rank 0 has closed it, and wait there for ever.
    The port is agreed on beforehand: ranks destroy their groups without asking each other.
    """
    own = os.environ.get("MASTER_PORT")
    free = _free_port() if communicator.rank == 0 else None
    port = communicator.broadcast_object(
        None if free is None else _port_of(free), name="ringdl.torch.backend.port"
    )

    def take() -> None:
        if free is not None:
            free.close()
        if own is not None and own == os.environ.get("MASTER_PORT") == _set.get("MASTER_PORT"):
            os.environ["MASTER_PORT"] = _set["MASTER_PORT"] = str(port)

    return take


def _make_group(options: Any, _: Any) -> ProcessGroup:
    if not ringdl.is_initialized():  # what torch says counts, not what a parent's import has set
        os.environ.update(RANK=str(options.group_rank), WORLD_SIZE=str(options.group_size))
        _set_environment()
    default = ringdl.get_communicator()
    ranks = list(options.global_ranks_in_group)
    if not ranks and (options.group_rank, options.group_size) != (default.rank, default.size):
        raise ringdl.UsageError(
            f"torch.distributed calls this rank {options.group_rank} of {options.group_size}, and "
            f"ringdl {default.rank} of {default.size}; leave RANK and WORLD_SIZE unset, or start "
            "the job with one of mpirun and torchrun alone"
        )
    communicator = default.group(ranks or range(default.size))
    assert communicator is not None  # only members are asked
    is_given = options.timeout != dist.default_pg_timeout
    at_shutdown = None if ranks else _next_port(default)
    group = ProcessGroup(
        communicator, options.store, options.timeout if is_given else None, at_shutdown
    )
    group.setGroupName(options.group_id)
    return group


def _leave_parents_store() -> None:
    """In a child of a rank: torch opens its store before it calls ringdl, which refuses.

    The child of rank 0 would try to serve that store again, and fail by its port. So it gets one of
    its own.
    """
    with _free_port() as free:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(_port_of(free))}
    if _children.find_parent({**os.environ, **alone}) is not None:
        os.environ.update(alone)


if multiprocessing.current_process().name == "MainProcess":
    _set_environment()
else:  # a child that imports the script
    _leave_parents_store()
dist.Backend.register_backend("ringdl", _make_group, extended_api=True, devices=DEVICES)
# torch 2.15 attaches a flight recorder to groups that have none of their own, and asks C++'s half
# of the group for a backend, which a group that is written in Python does not have.
_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_recording.add("ringdl")
# DistributedDataParallel takes it from there: torch offers no other way to its buckets' memory.
dist.Reducer = Reducer  # type: ignore[attr-defined]
warn_of_gloo()
