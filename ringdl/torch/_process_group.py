"""A ``torch.distributed.ProcessGroup`` over a ringdl communicator."""

# torch declares overloads for each form that its own bindings take.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringdl
from ringdl.torch._flat import (
    as_flat,
    check_alike,
    deal,
    deal_received,
    fill,
    flattened,
    in_turn,
    nothing,
)
from ringdl.torch._futures import DistributedWork

_REDUCTIONS = {
    dist.ReduceOp.SUM: ringdl.Sum,
    dist.ReduceOp.AVG: ringdl.Average,
    dist.ReduceOp.MIN: ringdl.Min,
    dist.ReduceOp.MAX: ringdl.Max,
    dist.ReduceOp.PRODUCT: ringdl.Product,
}


class ProcessGroup(dist.ProcessGroup):
    """What ``torch.distributed`` calls: one method per collective, each of which returns a work.

    CPU tensors of any strides; those that are not contiguous are copied, and results written back.
    What is not reduced may have any dtype; reductions take those of `ringdl.Communicator.allreduce`
    and complex sums. Works may be waited for by any thread if MPI offers MPI_THREAD_MULTIPLE.

    Args:
        communicator: its ranks, in the order of the group's; for this group alone.
        timeout: of waits that name none, instead of the communicator's.
    """

    def __init__(self, communicator: ringdl.Communicator, timeout: timedelta | None = None) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        if timeout is not None:
            communicator._timeout = timeout.total_seconds()
        self.communicator = communicator
        self._name = ""
        self._description = ""

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> DistributedWork:
        """In place."""
        (tensor,) = _listed(tensors)
        return self._allreduce(tensor, opts, [tensor])

    def allreduce_coalesced(
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> DistributedWork:
        """In place, all as one."""
        op = _reduction(opts)
        flat, unflatten = flattened(tensors, op)
        work = self.communicator.grouped_allreduce_async_(flat, op)
        return DistributedWork([work], unflatten, tensors)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> DistributedWork:
        """In place on the root; the others' tensors stay as they are."""
        (tensor,) = _listed(tensors)
        if self.communicator.rank != opts.rootRank:
            return self._allreduce(tensor.detach().clone(), opts, tensors)
        return self._allreduce(tensor, opts, tensors)

    def _allreduce(
        self, tensor: torch.Tensor, opts: Any, results: Sequence[torch.Tensor]
    ) -> DistributedWork:
        op = _reduction(opts)
        (flat,), unflatten = flattened([tensor], op)
        return DistributedWork([self.communicator.allreduce_async_(flat, op)], unflatten, results)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> DistributedWork:
        """In place, from the root to all others."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        tensors = _listed(tensors)
        pairs = [as_flat(tensor) for tensor in tensors]
        works = [self.communicator.broadcast_async_(flat, root) for flat, _ in pairs]
        return DistributedWork(works, in_turn(finish for _, finish in pairs), tensors)

    def allgather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> DistributedWork:
        """Each rank's tensor to all; ranks' tensors may differ in shape."""
        (given,) = inputs = _listed(input_tensors)
        outputs: Any = output_tensors if inputs is not input_tensors else output_tensors[0]
        check_alike(given, outputs[self.communicator.rank])
        work = self.communicator.allgather_async(as_flat(given)[0])
        return DistributedWork([work], lambda: deal(work.wait(), outputs), outputs)

    def all_gather_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        opts: Any = None,
    ) -> DistributedWork:
        """Each rank's tensor to all, one after the other in one tensor."""
        work = self.communicator.allgather_async(as_flat(given)[0])
        return DistributedWork([work], lambda: deal(work.wait(), [output]), [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> DistributedWork:
        """Several `all_gather_single`."""
        return _joined(map(self.all_gather_single, outputs, inputs), outputs)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> DistributedWork:
        """Several `allgather`; a list of outputs per rank."""
        works = [
            self.allgather([[of_rank[number] for of_rank in output_lists]], [given])
            for number, given in enumerate(inputs)
        ]
        return _joined(works, [tensor for of_rank in output_lists for tensor in of_rank])

    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> DistributedWork:
        """The reduction of the tensors for this rank, of which ranks may have other lengths."""
        (output,), (parts,) = output_tensors, input_tensors
        if len({part.numel() for part in parts}) == 1:
            given = torch.cat([part.detach().reshape(-1) for part in parts])
            return self.reduce_scatter_single(output, given, opts)
        op = _reduction(opts)
        whole, _ = flattened([torch.cat([part.detach().reshape(-1) for part in parts])], op)
        work = self.communicator.allreduce_async_(whole[0], op)
        begin = sum(part.numel() for part in parts[: self.communicator.rank])
        own = slice(begin, begin + output.numel())
        return DistributedWork([work], lambda: fill(output, work.wait()[own]), [output])

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        opts: Any = None,
    ) -> DistributedWork:
        """The reduction of this rank's part of a tensor that has equal ones for all."""
        op = _reduction(opts)
        (flat,), _ = flattened([given], op)
        rows = flat.reshape(self.communicator.size, -1, *flat.shape[1:])
        work = self.communicator.reducescatter_async(rows, op)
        return DistributedWork([work], lambda: fill(output, work.wait()), [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> DistributedWork:
        """Several `reduce_scatter_single`."""
        works = [
            self.reduce_scatter_single(output, given, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return _joined(works, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> DistributedWork:
        """Rows of axis 0 for each rank; as many for each if no sizes are given."""
        size = self.communicator.size
        rows = len(given)
        splits = list(input_split_sizes or [rows // size] * size)
        if sum(splits) != rows or len(splits) != size:
            raise ringdl.UsageError(
                f"all_to_all_single: the tensor has {rows} rows, for {size} ranks and the sizes "
                f"{splits}; give a size for each rank, which add up to the rows"
            )
        flat, _ = as_flat(given)
        work = self.communicator.alltoall_async(
            flat, [split * (len(flat) // max(rows, 1)) for split in splits]
        )
        parts = output.split(list(output_split_sizes or [len(output) // size] * size))  # type: ignore[no-untyped-call]
        return DistributedWork([work], lambda: deal_received(work.wait(), parts), [output])

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> DistributedWork:
        """One tensor for each rank."""
        parts = [as_flat(tensor)[0] for tensor in input_tensors]
        work = self.communicator.alltoall_async(torch.cat(parts), [len(part) for part in parts])
        return DistributedWork(
            [work], lambda: deal_received(work.wait(), output_tensors), output_tensors
        )

    def gather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> DistributedWork:
        """Each rank's tensor to the root."""
        (given,) = input_tensors
        outputs = output_tensors[0] if output_tensors else []
        if outputs:
            check_alike(given, outputs[self.communicator.rank])
        work = self.communicator.gather_async(as_flat(given)[0], opts.rootRank)
        return DistributedWork([work], lambda: deal(work.wait(), outputs), outputs)

    def scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> DistributedWork:
        """One of the root's tensors to each rank."""
        (output,) = output_tensors
        parts = [as_flat(tensor)[0] for tensor in (input_tensors[0] if input_tensors else ())]
        given = torch.cat(parts) if parts else as_flat(output)[0][:0]
        splits = [len(part) for part in parts] or None
        work = self.communicator.scatter_async(given, opts.rootRank, splits)
        return DistributedWork([work], lambda: deal(work.wait(), [output]), [output])

    def barrier(self, opts: Any = None) -> DistributedWork:
        """Ends once all ranks have come."""
        work = self.communicator.barrier_async()
        if opts is not None and opts.timeout > timedelta(0):
            work._timeout = opts.timeout.total_seconds()
        return DistributedWork([work], nothing, [])

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        to: int,
        tag: int = 0,
    ) -> DistributedWork:
        """To one rank, which receives as many bytes; messages of a tag keep their order."""
        (tensor,) = tensors
        work = self.communicator.send_async(as_flat(tensor)[0], to, f"tag {tag}")
        return DistributedWork([work], nothing, tensors)

    def recv(
        self,
        tensors: Sequence[torch.Tensor],
        source: int,
        tag: int = 0,
    ) -> DistributedWork:
        """From one rank, in place."""
        (tensor,) = tensors
        flat, finish = as_flat(tensor)
        work = self.communicator.recv_async_(flat, source, f"tag {tag}")
        return DistributedWork([work], finish, tensors)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> DistributedWork:
        """Refused: messages are matched by the ranks at both ends."""
        raise ringdl.UsageError("recv() from any rank is not offered; name the rank with src=")

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of some of these ranks, on each of them; None on the others."""
        communicator = self.communicator.group(new_ranks)
        if communicator is None:
            return None
        part = ProcessGroup(communicator, timeout)
        part.setGroupName(group_name or f"{self._name}:{','.join(map(str, new_ranks))}")
        part.setGroupDesc(group_desc or "")
        return part

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """This one, for the one device that there is."""
        if torch.device(device).type != "cpu":
            raise ringdl.UsageError(
                f"the backend ringdl is for tensors on the CPU, not on {device}; move them there"
            )
        return self

    # What they were called before torch 2.13, and what its C++ calls them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    splitGroup = split_group  # noqa: N815

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.communicator.rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self.communicator.size

    def name(self) -> str:
        """As `getBackendName`."""
        return "ringdl"

    def abort(self) -> None:
        """Nothing: who waits for a rank that is gone gets an error."""

    def shutdown(self) -> None:
        """Nothing: the communicator ends with the program, or with ``ringdl.shutdown()``."""

    def getBackendName(self) -> str:  # noqa: N802
        """As `init_process_group` calls it."""
        return "ringdl"

    def getRank(self) -> int:  # noqa: N802
        """As `rank`."""
        return self.communicator.rank

    def getSize(self) -> int:  # noqa: N802
        """As `size`."""
        return self.communicator.size

    def getGroupName(self) -> str:  # noqa: N802
        """The name that functional collectives find the group by."""
        return self._name

    def setGroupName(self, group_name: str) -> None:  # noqa: N802
        """See `getGroupName`."""
        self._name = group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in words."""
        return self._description

    def setGroupDesc(self, group_desc: str) -> None:  # noqa: N802
        """See `getGroupDesc`."""
        self._description = group_desc

    _set_group_name = setGroupName  # type: ignore[assignment]
    _set_group_desc = setGroupDesc  # type: ignore[assignment]

    @property
    def group_name(self) -> str:
        """As `getGroupName`."""
        return self._name

    @property
    def group_desc(self) -> str:
        """As `getGroupDesc`."""
        return self._description

    def __repr__(self) -> str:
        return f"<ringdl.torch.backend.ProcessGroup {self._name!r} of {self.communicator.size}>"


def _listed(tensors: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _reduction(opts: Any) -> ringdl.Reduction:
    given = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for known, reduction in _REDUCTIONS.items():
        if given == known:
            return reduction
    raise ringdl.UsageError(f"ringdl has no {given}; take ReduceOp.SUM, AVG, MIN, MAX or PRODUCT")


def _joined(works: Iterable[DistributedWork], results: Sequence[torch.Tensor]) -> DistributedWork:
    return DistributedWork([work.handle for work in works], nothing, results)
