"""What ringdl is compared with: MPI's own collectives, Gloo's, and plain memcpy.

Peers do in place what ringdl does in place; else they write into an array that is there already,
where ringdl returns a new one. An average is a sum and a division, as their users write it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdl import _engine
from ringdl._errors import UsageError
from ringdl.bench._arrays import Slot
from ringdl.bench._timing import Contender, Run

if TYPE_CHECKING:
    from ringdl import Communicator
    from ringdl.bench._collectives import Case

COPIES = ("copyto", "stream_copy")
"""The ways to copy; the table shows the faster."""

_MEETING_SECONDS = 60
"""After this long, ranks that Gloo does not bring together end the job."""


def copies() -> list[Contender]:
    """Copying as many bytes as the case has, on all ranks at once: what no collective beats."""

    def contender(name: str, copy: Callable[[Any, Any], Any]) -> Contender:
        return Contender(
            name, lambda slot: copy(slot.target_bytes, slot.source_bytes), checked=False
        )

    functions: tuple[Callable[[Any, Any], Any], ...] = (np.copyto, _engine.stream_copy)
    return [contender(name, copy) for name, copy in zip(COPIES, functions, strict=True)]


class Mpi:
    """MPI's own collectives.

    Args:
        world: an mpi4py communicator for these alone.
    """

    name = "mpi"

    def __init__(self, world: Any) -> None:
        self._world = world

    def contender(self, case: Case) -> Contender:
        """What MPI does in this case.

        Raises:
            UsageError: it has no such thing.
        """
        return Contender(self.name, self._run(case))

    def close(self) -> None:
        """Give the communicator back. Collective."""
        self._world.Free()

    def _run(self, case: Case) -> Run:
        from mpi4py import MPI

        world = self._world
        if case.op is not None:
            return self._reduction(case)
        if case.collective == "broadcast":

            def broadcast(slot: Slot) -> Any:
                world.Bcast([slot.source_bytes, MPI.BYTE], root=case.root)
                return slot.source

            return broadcast
        call = world.Allgather if case.collective == "allgather" else world.Alltoall
        send_bytes = case.shape.send * case.dtype.itemsize

        def exchange(slot: Slot) -> Any:
            call([slot.source_bytes[:send_bytes], MPI.BYTE], [slot.target_bytes, MPI.BYTE])
            return slot.target

        return exchange

    def _reduction(self, case: Case) -> Run:
        from mpi4py import MPI

        if case.dtype.name in ("float16", "bfloat16", "bool"):
            raise UsageError(f"MPI does not reduce {case.dtype.name}")
        _refuse_integer_average(case, "MPI")
        world, ranks, average = self._world, case.ranks, case.op == "avg"
        kind = MPI.Datatype.fromcode(case.dtype.char)
        op = {"prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}.get(case.op or "", MPI.SUM)

        def allreduce(slot: Slot) -> Any:
            world.Allreduce(MPI.IN_PLACE, [slot.source, kind], op=op)
            if average:
                slot.source /= ranks
            return slot.source

        def reducescatter(slot: Slot) -> Any:
            world.Reduce_scatter_block([slot.source, kind], [slot.target, kind], op=op)
            if average:
                slot.target /= ranks
            return slot.target

        return allreduce if case.collective == "allreduce" else reducescatter


class Gloo:
    """Gloo's collectives, as torch.distributed has them. Collective to make and to close.

    Args:
        communicator: of all ranks, which agree by it on where rank 0 listens.
    """

    name = "gloo"

    def __init__(self, communicator: Communicator) -> None:
        import torch

        dist: Any = torch.distributed
        one_host = communicator.host_count == 1
        if one_host:  # the name of the host may belong to no interface
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, size = communicator.rank, communicator.size
        host, store, port = "127.0.0.1", None, 0
        timeout = timedelta(seconds=_MEETING_SECONDS)
        if rank == 0:
            if not one_host:
                host = socket.gethostbyname(socket.gethostname())
            store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
            port = store.port
        host, port = communicator.broadcast_object((host, port))
        if store is None:
            store = dist.TCPStore(host, port, size, False, timeout)
        hook = sys.excepthook
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        sys.excepthook = hook  # torch's would swallow the traceback of a rank that ends the job

    def contender(self, case: Case) -> Contender:
        """What Gloo does in this case, after a trial with parts of one element.

        Raises:
            UsageError: it has no such thing.
        """
        run = self._run(case)
        source = np.zeros(1 if case.collective == "allgather" else case.ranks, case.dtype)
        target = np.zeros(1 if case.collective == "reducescatter" else case.ranks, case.dtype)
        try:
            run(Slot(source, target, source, target))
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error).splitlines()[0]) from error
        return Contender(self.name, run)

    def close(self) -> None:
        """End the process group. Collective."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def _run(self, case: Case) -> Run:
        import torch.distributed as dist

        _refuse_integer_average(case, "Gloo")
        ops = {
            "prod": dist.ReduceOp.PRODUCT,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        op = ops.get(case.op or "", dist.ReduceOp.SUM)
        average = case.op == "avg"

        @cache
        def tensors(slot: Slot) -> tuple[Any, Any]:
            return _tensor(slot.source), _tensor(slot.target)

        def allreduce(slot: Slot) -> Any:
            source, _ = tensors(slot)
            dist.all_reduce(source, op)
            if average:
                source /= case.ranks
            return slot.source

        def reducescatter(slot: Slot) -> Any:
            source, target = tensors(slot)
            dist.reduce_scatter_single(target, source, op)
            if average:
                target /= case.ranks
            return slot.target

        def broadcast(slot: Slot) -> Any:
            dist.broadcast(tensors(slot)[0], src=case.root)
            return slot.source

        def allgather(slot: Slot) -> Any:
            source, target = tensors(slot)
            dist.all_gather_single(target, source)
            return slot.target

        def alltoall(slot: Slot) -> Any:
            source, target = tensors(slot)
            dist.all_to_all_single(target, source)
            return slot.target

        runs = [allreduce, reducescatter, broadcast, allgather, alltoall]
        return next(run for run in runs if run.__name__ == case.collective)


def missing(peers: tuple[str, ...]) -> str:
    """What this rank lacks for the peers, in one sentence; empty if nothing."""
    if "gloo" in peers and importlib.util.find_spec("torch") is None:
        return "--peers gloo needs PyTorch, which is not installed: pip install 'ringdl[bench]'"
    return ""


def open_peers(names: tuple[str, ...], communicator: Communicator, world: Any) -> list[Mpi | Gloo]:
    """Make the peers ready. Collective.

    Args:
        names: which.
        communicator: of all ranks.
        world: the mpi4py communicator below it.
    """
    peers: list[Mpi | Gloo] = []
    for name in names:
        peers.append(Mpi(world.Dup()) if name == "mpi" else Gloo(communicator))
    return peers


def _refuse_integer_average(case: Case, who: str) -> None:
    if case.op == "avg" and case.dtype.kind != "f" and case.dtype.name != "bfloat16":
        raise UsageError(f"{who} has no average of {case.dtype.name}")


def _tensor(array: Any) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
