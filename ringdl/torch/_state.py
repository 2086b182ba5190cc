"""Equal replicas: broadcast parameters and optimizer state, find replicas that differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import ringdl
from ringdl._engine import Kind
from ringdl._work import one_of_several_steps
from ringdl.torch._process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl.torch._unwrapped import watch

_DIGEST_BYTES = 16

_ALONE_BYTES = 1 << 20
"""Larger tensors are broadcast where they are: to copy them costs more than a call."""

_FUSED_BYTES = 25 << 20
"""Smaller ones are broadcast together, up to so many bytes at once."""

_ALIGNMENT = 16
"""Of a tensor in a flat buffer: the bytes of the largest element."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
    process_set: AnySet = global_process_set,
) -> None:
    """Overwrite tensors with those of ``root_rank``, in place. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``: CPU
            tensors of any dtype and strides, with the same names, shapes and dtypes on every rank.
            Other values of a state_dict (a module's extra state) are left alone.
        root_rank: whose values all ranks get.
        process_set: whose ranks; ``root_rank`` is one of them, by its number among all.

    Raises:
        UsageError: these are no tensors, but a module or an optimizer's state; other ranks get a
            MismatchError.
        MismatchError: on every rank, if names, shapes or dtypes differ, a name occurs twice, or
            elements of a tensor share memory; no tensor has changed then.
    """
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.broadcast, None):
        root_rank = root_in(process_set, root_rank)
        pairs = _pairs_of(params)
    named: dict[str, torch.Tensor] = {}
    unfit = None
    for key, value in pairs:
        name, tensor = value if isinstance(value, tuple) else (str(key), value)
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type != "cpu":
            unfit = f"{name!r} is on {tensor.device}; move the model to the CPU"
        if name in named and tensor.data_ptr() != named[name].data_ptr():
            unfit = f"two tensors are called {name!r}; call it once for each model"
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            unfit = f"elements of {name!r} share memory (it was expanded); make it .contiguous()"
        named[name] = tensor.detach()
    specs = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()]
    root_specs = communicator.broadcast_object(specs, root_rank)
    difference = (
        _first_difference(specs, root_specs, communicator.rank)
        if unfit is None
        else f"broadcast_parameters: {unfit} (rank {communicator.rank})"
    )
    own = np.array([[communicator.rank, difference is not None]])
    differing = [rank for rank, differs in communicator.allgather(own).tolist() if differs]
    if differing:
        raise ringdl.MismatchError(communicator.broadcast_object(difference, differing[0]))
    with one_of_several_steps():
        _broadcast_tensors([named[name] for name, _, _ in root_specs], root_rank, communicator)
    if communicator.size > 1:
        watch(named.values())


def _pairs_of(params: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(params, torch.nn.Module):
        raise ringdl.UsageError("broadcast_parameters takes tensors: pass model.state_dict()")
    if isinstance(params, Mapping) and set(params) == {"state", "param_groups"}:
        raise ringdl.UsageError(
            "this is the state of an optimizer: call broadcast_optimizer_state(optimizer)"
        )
    if isinstance(params, Mapping):
        return params.items()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ringdl.UsageError(
            f"broadcast_parameters takes model.state_dict(), not a {type(params).__name__}"
        )
    return enumerate(list(params))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: AnySet = global_process_set,
) -> None:
    """Give every rank the optimizer state and options of ``root_rank``. Collective.

    Works for any optimizer whose ``state_dict()`` holds CPU tensors (dense or sparse) and picklable
    values, also if the other ranks have no state yet (only the root has read a checkpoint). Tensors
    arrive with the root's dtype and strides, also where ``load_state_dict()`` would cast them.

    Args:
        optimizer: the same kind with the same parameters on every rank, wrapped or not.
        root_rank: whose state all ranks get.
        model: ignored.
        process_set: as in `broadcast_parameters`.

    Raises:
        UsageError: this is no optimizer; the other ranks get a MismatchError.
    """
    del model
    communicator = communicator_of(process_set)
    with communicator._telling(Kind.broadcast, None):
        root_rank = root_in(process_set, root_rank)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ringdl.UsageError(
                "broadcast_optimizer_state takes a torch.optim.Optimizer, not a "
                f"{type(optimizer).__name__}"
            )
    is_root = communicator.rank == root_rank
    sent: list[torch.Tensor] = []
    skeleton = (
        _map(optimizer.state_dict(), torch.Tensor, lambda tensor: _describe(tensor, sent))
        if is_root
        else None
    )
    skeleton = communicator.broadcast_object(skeleton, root_rank)
    received: list[torch.Tensor] = []
    parts = (
        None if is_root else _map(skeleton, (_Form, _Sparse), lambda form: _make(form, received))
    )
    with one_of_several_steps():
        _broadcast_tensors(sent if is_root else received, root_rank, communicator)
    if not is_root:
        state_dict = _map(parts, _Sparse, _Sparse.join)
        optimizer.load_state_dict(state_dict)
        _undo_casts(optimizer, state_dict["state"])


def check_replicas(
    named_parameters: Sequence[tuple[str, torch.Tensor]],
    communicator: ringdl.Communicator,
    name: str,
) -> None:
    """Compare the bits of the parameters over all ranks. Collective; reads them once.

    Nothing is done where RINGDL_CHECK_REPLICAS=0.

    Args:
        named_parameters: the same names in the same order on every rank.
        communicator: the ranks.
        name: what the collectives are matched by.

    Raises:
        MismatchError: on every rank, if they differ; names the first one, the ranks, and the call
        that mends it.
    """
    if communicator.size == 1 or not communicator._shared.checks_replicas:
        return
    digests = np.stack([_digest(parameter) for _, parameter in named_parameters])
    combined = np.frombuffer(hashlib.sha256(digests.tobytes()).digest()[:_DIGEST_BYTES], np.uint8)
    if _all_equal(communicator.allgather(combined[None].copy(), name=name)):
        return
    gathered = communicator.allgather(digests[None], name=f"{name}.each")
    index = next(index for index in range(len(digests)) if not _all_equal(gathered[:, index]))
    differing = [
        rank for rank in range(len(gathered)) if (gathered[rank, index] != gathered[0, index]).any()
    ]
    raise ringdl.MismatchError(
        f"the replicas differ at the first step: in the parameter {named_parameters[index][0]!r}, "
        f"{_ranks_text(differing)} other values than rank 0; call "
        "ringdl.torch.broadcast_parameters(model.state_dict(), root_rank=0) before training, or, "
        "if they are meant to differ, set RINGDL_CHECK_REPLICAS=0 or pass check_replicas=False to "
        "DistributedOptimizer"
    )


@dataclass(frozen=True)
class _Form:
    """What stands for a tensor in a skeleton."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Sparse:
    """A sparse tensor by its parts, which are forms or tensors."""

    shape: tuple[int, ...]
    indices: Any
    values: Any
    is_coalesced: bool

    def join(self) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            self.indices,
            self.values,
            self.shape,
            is_coalesced=self.is_coalesced,
            check_invariants=False,
        )


def _describe(tensor: torch.Tensor, sent: list[torch.Tensor]) -> _Form | _Sparse:
    tensor = tensor.detach()
    if tensor.is_sparse:
        return _Sparse(
            tuple(tensor.shape),
            _describe(tensor._indices(), sent),
            _describe(tensor._values(), sent),
            tensor.is_coalesced(),
        )
    sent.append(tensor)
    return _Form(
        tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), tensor.dtype
    )


def _make(form: _Form | _Sparse, received: list[torch.Tensor]) -> torch.Tensor | _Sparse:
    if isinstance(form, _Sparse):
        return replace(
            form, indices=_make(form.indices, received), values=_make(form.values, received)
        )
    received.append(torch.empty_strided(form.shape, form.strides, dtype=form.dtype))
    return received[-1]


def _map(tree: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with ``function`` applied to each ``kind``."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map(value, kind, function) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map(value, kind, function) for value in tree)
    return tree


def _undo_casts(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """Install what the root has: it has not loaded, so its tensors are not cast."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if index in state:
            optimizer.state[parameter] = state[index]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in row-major order as uint8; the same memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _broadcast_tensors(
    tensors: Sequence[torch.Tensor], root_rank: int, communicator: ringdl.Communicator
) -> None:
    """Overwrite tensors, of the same shapes and dtypes on every rank, with those of the root."""
    together: list[torch.Tensor] = []
    total = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > _ALONE_BYTES:
            _broadcast_tensor(tensor, root_rank, communicator)
            continue
        if total + size > _FUSED_BYTES:
            _broadcast_together(together, root_rank, communicator)
            together, total = [], 0
        if size > 0:
            together.append(tensor)
            total += size
    _broadcast_together(together, root_rank, communicator)


def _broadcast_together(
    tensors: Sequence[torch.Tensor], root_rank: int, communicator: ringdl.Communicator
) -> None:
    if len(tensors) < 2:
        for tensor in tensors:
            _broadcast_tensor(tensor, root_rank, communicator)
        return
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    flat = torch.zeros(sum(padded), dtype=torch.uint8)
    ends = itertools.accumulate(padded)
    begins = [end - size for end, size in zip(ends, padded, strict=True)]
    pieces = [flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    if communicator.rank == root_rank:
        for piece, tensor in zip(pieces, tensors, strict=True):
            piece.copy_(_as_bytes(tensor))
    communicator.broadcast_(flat, root_rank)
    if communicator.rank != root_rank:
        for piece, tensor in zip(pieces, tensors, strict=True):
            tensor.copy_(piece.view(tensor.dtype).reshape(tensor.shape))


def _broadcast_tensor(
    tensor: torch.Tensor, root_rank: int, communicator: ringdl.Communicator
) -> None:
    if tensor.numel() == 0:
        return
    contiguous = tensor.detach().contiguous()
    communicator.broadcast_(_as_bytes(contiguous), root_rank)
    if contiguous.data_ptr() != tensor.data_ptr() and communicator.rank != root_rank:
        tensor.copy_(contiguous)


def _digest(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(
        hashlib.sha256(_as_bytes(tensor).numpy().data).digest()[:_DIGEST_BYTES], np.uint8
    )


def _all_equal(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    return bool((rows == rows[0]).all())


def _first_difference(specs: list[Any], root_specs: list[Any], rank: int) -> str | None:
    """How these specs differ from the root's, in any order; None if they do not."""
    own = {name: (shape, dtype) for name, shape, dtype in specs}
    root = {name: (shape, dtype) for name, shape, dtype in root_specs}
    for name in own | root:
        if own.get(name) != root.get(name):
            here, there = (_spec_text(side.get(name)) for side in (own, root))
            return (
                f"broadcast_parameters: {name!r} is {here} on rank {rank}, "
                f"but {there} on the root rank; build the same model on all ranks"
            )
    return None


def _spec_text(spec: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if spec is None else f"{spec[1].removeprefix('torch.')}{list(spec[0])}"


def _ranks_text(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"
