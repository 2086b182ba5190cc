"""What ringdl is compared with: MPI's own collectives, Gloo's or NCCL's, and plain memcpy.

Peers do in place what ringdl does in place; else they write into an array that is there already,
where ringdl returns a new one. An average is a sum and a division, as their users write it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdl import _cuda, _cuda_mpi, _engine
from ringdl._errors import UsageError
from ringdl._sockets import networks
from ringdl.bench._arrays import Slot, part
from ringdl.bench._timing import Contender, Run

if TYPE_CHECKING:
    from ringdl import Communicator
    from ringdl.bench._collectives import Case

COPIES = ("copyto", "stream_copy")
"""The ways to copy; the table shows the faster."""

_TITLES = {"gloo": "Gloo", "nccl": "NCCL"}

_MEETING_SECONDS = 60
"""After this long, ranks that torch does not bring together end the job."""


def copies(device: int | None) -> list[Contender]:
    """Copying as many bytes as the case has, on all ranks at once: what no collective beats.

    Args:
        device: where arrays lie: the number of a CUDA device, or None.
    """

    def contender(name: str, copy: Callable[[Any, Any], Any]) -> Contender:
        return Contender(
            name, lambda slot: copy(slot.target_bytes, slot.source_bytes), checked=False
        )

    def copy_there(into: _cuda.Array, source: _cuda.Array) -> None:
        _engine.cuda_copy(
            into.device, into.address, source.address, into.nbytes, _cuda.DEFAULT_STREAM
        )

    if device is not None:
        return [contender(COPIES[0], copy_there)]
    functions: tuple[Callable[[Any, Any], Any], ...] = (np.copyto, _engine.stream_copy)
    return [contender(name, copy) for name, copy in zip(COPIES, functions, strict=True)]


class Mpi:
    """MPI's own collectives.

    Args:
        world: an mpi4py communicator for these alone.
        device: where arrays lie: the number of a CUDA device, or None.
    """

    name = "mpi"

    def __init__(self, world: Any, device: int | None) -> None:
        self._world = world
        self._device = device

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
            sent = part(slot.source_bytes, send_bytes, slot.source_bytes.dtype)
            call([sent, MPI.BYTE], [slot.target_bytes, MPI.BYTE])
            return slot.target

        return exchange

    def _reduction(self, case: Case) -> Run:
        from mpi4py import MPI

        if case.dtype.name in ("float16", "bfloat16", "bool"):
            raise UsageError(f"MPI does not reduce {case.dtype.name}")
        _refuse_integer_average(case, "MPI")
        world, ranks, average = self._world, case.ranks, case.op == "avg"
        if average and self._device is not None:
            raise UsageError("MPI divides nothing on a device")
        kind = MPI.Datatype.fromcode(case.dtype.char)
        op = {"prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}.get(case.op or "", MPI.SUM)

        def divide(array: Any) -> None:
            array /= ranks

        def allreduce(slot: Slot) -> Any:
            world.Allreduce(MPI.IN_PLACE, [slot.source, kind], op=op)
            if average:
                divide(slot.source)
            return slot.source

        def reducescatter(slot: Slot) -> Any:
            world.Reduce_scatter_block([slot.source, kind], [slot.target, kind], op=op)
            if average:
                divide(slot.target)
            return slot.target

        return allreduce if case.collective == "allreduce" else reducescatter


class Torch:
    """The collectives of torch.distributed. Collective to make and to close.

    Args:
        name: of its backend: ``"gloo"``, or ``"nccl"`` on devices.
        communicator: of all ranks, which agree by it on where rank 0 listens.
        device: where arrays lie: the number of a CUDA device, or None.
    """

    def __init__(self, name: str, communicator: Communicator, device: int | None) -> None:
        import torch

        self.name = name
        self._device = device
        dist: Any = torch.distributed
        one_host = communicator.host_count == 1
        if one_host:  # the name of the host may belong to no interface
            os.environ.setdefault(f"{name.upper()}_SOCKET_IFNAME", "lo")
        if device is not None:
            torch.cuda.set_device(device)
        rank, size = communicator.rank, communicator.size
        host, store, port = "127.0.0.1", None, 0
        timeout = timedelta(seconds=_MEETING_SECONDS)
        if rank == 0:
            if not one_host:  # its own name may be that of a loopback address
                host = next(iter(networks()), host)
            store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
            port = store.port
        host, port = communicator.broadcast_object((host, port))
        if store is None:
            store = dist.TCPStore(host, port, size, False, timeout)
        hook = sys.excepthook
        dist.init_process_group(name, store=store, rank=rank, world_size=size)
        sys.excepthook = hook  # torch's would swallow the traceback of a rank that ends the job

    def contender(self, case: Case) -> Contender:
        """What it does in this case, after a trial with parts of one element.

        Raises:
            UsageError: it has no such thing.
        """
        run = self._run(case)
        source = self._zeros(1 if case.collective == "allgather" else case.ranks, case.dtype)
        target = self._zeros(1 if case.collective == "reducescatter" else case.ranks, case.dtype)
        try:
            run(Slot(source, target, source, target))
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error).splitlines()[0]) from error
        return Contender(self.name, run)

    def close(self) -> None:
        """End the process group. Collective."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def _zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        zeros = np.zeros(count, dtype)
        if self._device is None:
            return zeros
        return _cuda.Array((count,), dtype, self._device).set(zeros)

    def _run(self, case: Case) -> Run:
        import torch
        import torch.distributed as dist

        _refuse_integer_average(case, _TITLES[self.name])
        ops = {
            "prod": dist.ReduceOp.PRODUCT,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        op = ops.get(case.op or "", dist.ReduceOp.SUM)
        average = case.op == "avg"

        scatter, gather = (  # the latter were their names before torch 2.13
            getattr(dist, name, None) or getattr(dist, before)
            for name, before in (
                ("reduce_scatter_single", "reduce_scatter_tensor"),
                ("all_gather_single", "all_gather_into_tensor"),
            )
        )

        @cache
        def tensors(slot: Slot) -> tuple[Any, Any]:
            return _tensor(slot.source), _tensor(slot.target)

        def end() -> None:
            if self._device is not None:
                torch.cuda.current_stream().synchronize()

        def allreduce(slot: Slot) -> Any:
            source, _ = tensors(slot)
            dist.all_reduce(source, op)
            if average:
                source /= case.ranks
            end()
            return slot.source

        def reducescatter(slot: Slot) -> Any:
            source, target = tensors(slot)
            scatter(target, source, op)
            if average:
                target /= case.ranks
            end()
            return slot.target

        def broadcast(slot: Slot) -> Any:
            dist.broadcast(tensors(slot)[0], src=case.root)
            end()
            return slot.source

        def allgather(slot: Slot) -> Any:
            source, target = tensors(slot)
            gather(target, source)
            end()
            return slot.target

        def alltoall(slot: Slot) -> Any:
            source, target = tensors(slot)
            dist.all_to_all_single(target, source)
            end()
            return slot.target

        runs = [allreduce, reducescatter, broadcast, allgather, alltoall]
        return next(run for run in runs if run.__name__ == case.collective)


def missing(peers: Sequence[str], communicator: Communicator, device: int | None) -> str:
    """What this rank lacks for the peers, in one sentence; empty if nothing.

    Args:
        peers: their names.
        communicator: of all ranks.
        device: where arrays lie: the number of a CUDA device, or None.
    """
    backends = [name for name in peers if name != "mpi"]
    if backends and importlib.util.find_spec("torch") is None:
        return (
            f"--peers {backends[0]} needs PyTorch, which is not installed: "
            "pip install 'ringdl[bench]'"
        )
    if "nccl" in peers:
        import torch.distributed as dist

        if not dist.is_nccl_available():
            return "--peers nccl needs a PyTorch with NCCL, and this one is for the CPU"
        if communicator.local_size > len(_engine.cuda_devices()):
            return "--peers nccl needs a device for each rank; start fewer ranks"
    if "mpi" in peers and communicator._shared.mpi is None:
        return "--peers mpi needs ranks that an MPI has started: mpirun -n N ringdl bench ..."
    if device is not None and "mpi" in peers and not _cuda_mpi.is_said(communicator):
        return "--peers mpi needs an MPI that takes arrays on CUDA devices; this one does not"
    return ""


def open_peers(
    names: Sequence[str], communicator: Communicator, world: Any, device: int | None
) -> list[Mpi | Torch]:
    """Make the peers ready. Collective.

    Args:
        names: which.
        communicator: of all ranks.
        world: the mpi4py communicator below it.
        device: where arrays lie: the number of a CUDA device, or None.
    """
    peers: list[Mpi | Torch] = []
    for name in names:
        is_mpi = name == "mpi"
        peers.append(Mpi(world.Dup(), device) if is_mpi else Torch(name, communicator, device))
    return peers


def _refuse_integer_average(case: Case, who: str) -> None:
    if case.op == "avg" and case.dtype.kind != "f" and case.dtype.name != "bfloat16":
        raise UsageError(f"{who} has no average of {case.dtype.name}")


def _tensor(array: Any) -> Any:
    import torch

    is_narrow = array.dtype.name == "bfloat16"
    if is_narrow:
        array = part(array, array.shape[0], np.dtype(np.int16))
    tensor = torch.as_tensor(array)
    return tensor.view(torch.bfloat16) if is_narrow else tensor
