"""A ``torch.distributed.ProcessGroup`` over a ringdl communicator."""

# torch declares overloads for each form that its own bindings take; see _forms.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

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
from ringdl.torch._forms import Asked, collective, listed, nested
from ringdl.torch._futures import DistributedWork
from ringdl.torch._reduce_op import reduction_of, scale
from ringdl.torch._sparse import begin_sparse

DEVICES = ["cpu", "cuda"]


class ProcessGroup(dist.ProcessGroup):
    """What ``torch.distributed`` calls: one method per collective, each of which returns a work.

    Tensors of any strides on the CPU or a CUDA device; those that are not contiguous are copied,
    and results written back. On a device `wait` returns when results are there for every stream.
    What is not reduced may have any dtype; reductions take those of `ringdl.Communicator.allreduce`
    and complex sums. Works may be waited for by any thread if MPI offers MPI_THREAD_MULTIPLE.

    Args:
        communicator: its ranks, in the order of the group's; for this group alone.
        store: torch's, for those who ask the group for it.
        timeout: of waits that name none, instead of the communicator's.
        at_shutdown: called when torch destroys the group.
    """

    supports_splitting = False  # these are asked of what `_get_backend` returns
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        communicator: ringdl.Communicator,
        store: c10d.Store,
        timeout: timedelta | None = None,
        at_shutdown: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.communicator = communicator
        if timeout is not None:
            self.set_timeout(timeout)
        self._store = store
        self._name = ""
        self._description = ""
        self._sequence_number = 0
        self._sparse_count = 0
        self._at_shutdown = at_shutdown

    @collective("all_reduce", "tensors", rest=("op", "timeout"))
    def allreduce(
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """In place. Sums and averages of sparse tensors, too."""
        (tensor,) = tensors = listed(tensors)
        if tensor.layout == torch.sparse_coo:
            return self._allreduce_sparse(tensor, asked)
        return self._allreduce(tensor, asked, tensors)

    def _allreduce_sparse(self, tensor: torch.Tensor, asked: Asked) -> DistributedWork:
        op, _ = reduction_of(asked.op)
        if op not in (ringdl.Sum, ringdl.Average) or tensor.is_complex():
            raise ringdl.UsageError(
                f"all_reduce: sparse tensors of real numbers have sums and averages only, and this "
                f"is {op.name} of {tensor.dtype}; call to_dense() before"
            )
        self._sparse_count += 1
        name = f"sparse all_reduce {self._sparse_count} of {tuple(tensor.shape)}"  # errors name it
        works, end = begin_sparse(
            tensor.detach(), tensor, tensor.sparse_dim(), op, self.communicator, name
        )

        def finish() -> None:
            result = end()
            assert result is not None
            with torch.no_grad():
                tensor.copy_(result)

        return DistributedWork(works, finish, [tensor])

    @collective("all_reduce", "tensors", rest=("op", "timeout"))
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], asked: Asked) -> DistributedWork:
        """In place, all as one."""
        op, factor = reduction_of(asked.op)
        flat, unflatten = flattened(tensors, op)
        scale(flat, factor)
        work = self.communicator.grouped_allreduce_async_(flat, op)
        return DistributedWork([work], unflatten, tensors)

    @collective("reduce", "tensors", rest=("root", "op", "timeout"))
    def reduce(
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """In place on the root; the others' tensors stay as they are."""
        (tensor,) = tensors = listed(tensors)
        if self.communicator.rank != asked.root:
            return self._allreduce(tensor.detach().clone(), asked, tensors)
        return self._allreduce(tensor, asked, tensors)

    def _allreduce(
        self, tensor: torch.Tensor, asked: Asked, results: Sequence[torch.Tensor]
    ) -> DistributedWork:
        op, factor = reduction_of(asked.op)
        flat, unflatten = flattened([tensor], op)
        scale(flat, factor)
        work = self.communicator.allreduce_async_(flat[0], op)
        return DistributedWork([work], unflatten, results)

    @collective("broadcast", "tensors", rest=("root", "timeout"))
    def broadcast(
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """In place, from the root to all others."""
        tensors = listed(tensors)
        pairs = [as_flat(tensor) for tensor in tensors]
        works = [self.communicator.broadcast_async_(flat, asked.root) for flat, _ in pairs]
        return DistributedWork(works, in_turn(finish for _, finish in pairs), tensors)

    @collective("all_gather", "output", "input", rest=("timeout",))
    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[torch.Tensor] | torch.Tensor,
        _: Asked,
    ) -> DistributedWork:
        """Each rank's tensor to all; ranks' tensors may differ in shape."""
        return self._allgather(output_tensors, input_tensors)

    def _allgather(
        self, output_tensors: Sequence[Any], input_tensors: Sequence[torch.Tensor] | torch.Tensor
    ) -> DistributedWork:
        (given,) = listed(input_tensors)
        (outputs,) = nested(output_tensors)
        check_alike(given, outputs[self.communicator.rank])
        work = self.communicator.allgather_async(as_flat(given)[0])
        return DistributedWork([work], lambda: deal(work.wait(), outputs), outputs)

    @collective("all_gather", "output", "input", rest=("timeout",))
    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, _: Asked
    ) -> DistributedWork:
        """Each rank's tensor to all, one after the other in one tensor."""
        return self._all_gather_single(output, given)

    def _all_gather_single(self, output: torch.Tensor, given: torch.Tensor) -> DistributedWork:
        work = self.communicator.allgather_async(as_flat(given)[0])
        return DistributedWork([work], lambda: deal(work.wait(), [output]), [output])

    @collective("all_gather", "output", "input", rest=("timeout",))
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], _: Asked
    ) -> DistributedWork:
        """Several `all_gather_single`."""
        return _joined(map(self._all_gather_single, outputs, inputs), outputs)

    @collective("all_gather", "output", "input", rest=("timeout",))
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        _: Asked,
    ) -> DistributedWork:
        """Several `allgather`; a list of outputs per rank."""
        works = [
            self._allgather([[of_rank[number] for of_rank in output_lists]], given)
            for number, given in enumerate(inputs)
        ]
        return _joined(works, [tensor for of_rank in output_lists for tensor in of_rank])

    @collective("reduce_scatter", "output", "input", rest=("op", "timeout"))
    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor] | torch.Tensor,
        input_tensors: Sequence[Any],
        asked: Asked,
    ) -> DistributedWork:
        """The reduction of the tensors for this rank, of which ranks may have other lengths."""
        (output,), (parts,) = listed(output_tensors), nested(input_tensors)
        given = torch.cat([part.detach().reshape(-1) for part in parts])
        if len({part.numel() for part in parts}) == 1:
            return self._reduce_scatter(output, given, asked)
        op, factor = reduction_of(asked.op)
        whole, _ = flattened([given], op)
        scale(whole, factor)
        work = self.communicator.allreduce_async_(whole[0], op)
        begin = sum(part.numel() for part in parts[: self.communicator.rank])
        own = slice(begin, begin + output.numel())
        return DistributedWork([work], lambda: fill(output, work.wait()[own]), [output])

    @collective("reduce_scatter", "output", "input", rest=("op", "timeout"))
    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """The reduction of this rank's part of a tensor that has equal ones for all."""
        return self._reduce_scatter(output, given, asked)

    def _reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, asked: Asked
    ) -> DistributedWork:
        op, factor = reduction_of(asked.op)
        (flat,), _ = flattened([given], op)
        if factor is not None:
            flat = flat.clone()
            scale([flat], factor)
        rows = flat.reshape(self.communicator.size, -1, *flat.shape[1:])
        work = self.communicator.reducescatter_async(rows, op)
        return DistributedWork([work], lambda: fill(output, work.wait()), [output])

    @collective("reduce_scatter", "output", "input", rest=("op", "timeout"))
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], asked: Asked
    ) -> DistributedWork:
        """Several `reduce_scatter_single`."""
        works = [
            self._reduce_scatter(output, given, asked)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return _joined(works, outputs)

    @collective(
        *("all_to_all", "output", "input"),
        rest=("output_split_sizes", "input_split_sizes", "timeout"),
    )
    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """Rows of axis 0 for each rank; as many for each if no sizes are given."""
        size = self.communicator.size
        rows = len(given)
        splits = list(asked.input_split_sizes or [rows // size] * size)
        if sum(splits) != rows or len(splits) != size:
            raise ringdl.UsageError(
                f"all_to_all_single: the tensor has {rows} rows, for {size} ranks and the sizes "
                f"{splits}; give a size for each rank, which add up to the rows"
            )
        flat, _ = as_flat(given)
        work = self.communicator.alltoall_async(
            flat, [split * (len(flat) // max(rows, 1)) for split in splits]
        )
        sizes = list(asked.output_split_sizes or [len(output) // size] * size)
        parts = output.split(sizes)  # type: ignore[no-untyped-call]
        return DistributedWork([work], lambda: deal_received(work.wait(), parts), [output])

    @collective("all_to_all", "output", "input", rest=("timeout",))
    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        _: Asked,
    ) -> DistributedWork:
        """One tensor for each rank."""
        parts = [as_flat(tensor)[0] for tensor in input_tensors]
        work = self.communicator.alltoall_async(torch.cat(parts), [len(part) for part in parts])
        return DistributedWork(
            [work], lambda: deal_received(work.wait(), output_tensors), output_tensors
        )

    @collective("gather", "output", "input", rest=("root", "timeout"))
    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[torch.Tensor] | torch.Tensor,
        asked: Asked,
    ) -> DistributedWork:
        """Each rank's tensor to the root."""
        (given,) = listed(input_tensors)
        (outputs,) = nested(output_tensors) or [[]]
        if outputs:
            check_alike(given, outputs[self.communicator.rank])
        work = self.communicator.gather_async(as_flat(given)[0], asked.root)
        return DistributedWork([work], lambda: deal(work.wait(), outputs), outputs)

    @collective("gather", "output", "input", rest=("root", "timeout"))
    def gather_single(
        self, output: torch.Tensor, given: torch.Tensor, asked: Asked
    ) -> DistributedWork:
        """Each rank's tensor to the root, one after the other in one tensor."""
        work = self.communicator.gather_async(as_flat(given)[0], asked.root)
        return DistributedWork([work], lambda: deal(work.wait(), [output]), [output])

    @collective("scatter", "output", "input", rest=("root", "timeout"))
    def scatter(
        self,
        output_tensors: Sequence[torch.Tensor] | torch.Tensor,
        input_tensors: Sequence[Any],
        asked: Asked,
    ) -> DistributedWork:
        """One of the root's tensors to each rank."""
        (output,) = listed(output_tensors)
        (tensors,) = nested(input_tensors) or [[]]
        parts = [as_flat(tensor)[0] for tensor in tensors]
        given = torch.cat(parts) if parts else as_flat(output)[0][:0]
        splits = [len(part) for part in parts] or None
        work = self.communicator.scatter_async(given, asked.root, splits)
        return DistributedWork([work], lambda: deal(work.wait(), [output]), [output])

    @collective("barrier", rest=("timeout",))
    def barrier(self, _: Asked) -> DistributedWork:
        """Ends once all ranks have arrived."""
        return DistributedWork([self.communicator.barrier_async()], nothing, [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that is waited for; ranks that do not arrive are named in any case."""
        self.barrier(timeout=timeout).wait()

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        dstRank: int,  # noqa: N803
        tag: int = 0,
    ) -> DistributedWork:
        """To one rank, which receives as many bytes; messages of a tag keep their order."""
        return self._send(tensors, dstRank, tag)

    @collective("send", "tensors", rest=("to", "tag"), is_counted=False)
    def _send(self, tensors: Sequence[torch.Tensor], asked: Asked) -> DistributedWork:
        (tensor,) = listed(tensors)
        work = self.communicator.send_async(as_flat(tensor)[0], asked.to, f"tag {asked.tag}")
        return DistributedWork([work], nothing, [tensor])

    def recv(
        self,
        tensors: Sequence[torch.Tensor],
        srcRank: int,  # noqa: N803
        tag: int = 0,
    ) -> DistributedWork:
        """From one rank, in place."""
        return self._recv(tensors, srcRank, tag)

    @collective("recv", "tensors", rest=("source", "tag"), is_counted=False)
    def _recv(self, tensors: Sequence[torch.Tensor], asked: Asked) -> DistributedWork:
        return self._receive(tensors, asked)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> DistributedWork:
        """From any rank that sends with this tag, in place; `source_rank` of the work says which.

        Ranks are served in turn, and a rank's messages in the order in which it sent them.
        """
        return self._recv_anysource(tensors, tag)

    @collective("recvAnySource", "tensors", rest=("tag",), is_counted=False)
    def _recv_anysource(self, tensors: Sequence[torch.Tensor], asked: Asked) -> DistributedWork:
        return self._receive(tensors, asked)

    def _receive(self, tensors: Sequence[torch.Tensor], asked: Asked) -> DistributedWork:
        (tensor,) = listed(tensors)
        flat, finish = as_flat(tensor)
        work = self.communicator.recv_async_(flat, asked.source, f"tag {asked.tag}")
        return DistributedWork([work], finish, [tensor])

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
        name = group_name or f"{self._name}:{','.join(map(str, new_ranks))}"
        part = ProcessGroup(communicator, c10d.PrefixStore(f"{name}/", self._store), timeout)
        part.setGroupName(name)
        part.setGroupDesc(group_desc or "")
        return part

    def merge_remote_group(self, *_: Any, **__: Any) -> ProcessGroup:
        """Refused: the ranks of a job are those that MPI has started."""
        raise ringdl.UsageError(
            "a group cannot take in ranks of another job; start all ranks with one mpirun"
        )

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES]

    def _get_backend(self, device: torch.device) -> Any:
        """This one, for all devices that it knows."""
        if torch.device(device).type not in DEVICES:
            raise ringdl.UsageError(
                "the backend ringdl is for tensors on the CPU and on CUDA devices, not on "
                f"{device}; move them there"
            )
        return self

    def get_group_store(self) -> c10d.Store:
        """The group's own, by which torch made it."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set that of works that name none, from the next one on."""
        self.communicator._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks begin with 0."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has begun in the group; messages do not count."""
        return self._sequence_number

    # What they were called before torch 2.13, and what its C++ calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
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

    def _get_backend_name(self) -> str:
        """As `getBackendName`."""
        return "ringdl"

    def abort(self) -> None:
        """Nothing: a wait for a rank that is gone raises an error."""

    def shutdown(self) -> None:
        """The communicator stays: it ends with the program, or with ``ringdl.shutdown()``."""
        if self._at_shutdown is not None:
            self._at_shutdown()

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


def _joined(works: Iterable[DistributedWork], results: Sequence[torch.Tensor]) -> DistributedWork:
    handles = []
    for work in works:
        work._is_awaited = True  # by way of the joined one
        handles.append(work.handle)
    return DistributedWork(handles, nothing, results)
