"""Equal replicas: broadcast parameters and optimizer state, find replicas that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

import ringdl
from ringdl._engine import Kind
from ringdl._training import Gradients, replicas
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set, root_in
from ringdl._work import one_of_several_steps
from ringdl.torch._unwrapped import watch

CUTS = "_ringdl_cuts"
"""The attribute of a module that says which of its parameters ranks have different parts of: by a
parameter's name, what has their ``communicator`` (`ringdl.torch.parallel.Cut`)."""
cut_modules: WeakSet[torch.nn.Module] = WeakSet()
"""Those that have it. A parameter itself would not do: ``load_state_dict(assign=True)`` and
``to_empty`` make it anew."""
HOW_TO_MEND = (
    "call ringdl.torch.broadcast_parameters(model.state_dict(), root_rank=0) before training (with "
    "the process_set of DistributedOptimizer, if it has one), or, if they are meant to differ, set "
    "RINGDL_CHECK_REPLICAS=0 or pass check_replicas=False to DistributedOptimizer"
)
"""What to do about replicas that differ at the first step."""
_HOW_TO_BEGIN_ALIKE = (
    "ranks along an axis that a network is cut over have it whole, so begin with the same random "
    "numbers there (torch.manual_seed); or, if each has a part, tell by parallel.cut_parameter"
)


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
        MismatchError: on every rank, if names, shapes or dtypes differ, a name occurs twice,
            elements of a tensor share memory, or ranks have different parts of one
            (`ringdl.torch.parallel`); no tensor has changed then.
    """
    communicator = communicator_of(process_set)
    parts = parts_over(communicator)
    with communicator._telling(Kind.broadcast, None):
        root_rank = root_in(process_set, root_rank)
        pairs = _pairs_of(params)
    named: dict[str, torch.Tensor] = {}
    unfit = None
    for key, value in pairs:
        name, tensor = value if isinstance(value, tuple) else (str(key), value)
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout != torch.strided:
            unfit = f"{name!r} is sparse; leave it out, or pass its .to_dense()"
            tensor = torch.empty(0)
        if tensor.device.type not in ("cpu", "cuda"):
            unfit = f"{name!r} is on {tensor.device}; move the model to the CPU or a CUDA device"
        if name in named and tensor.data_ptr() != named[name].data_ptr():
            unfit = f"two tensors are called {name!r}; call it once for each model"
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            unfit = f"elements of {name!r} share memory (it was expanded); make it .contiguous()"
        if tensor.untyped_storage()._cdata in parts:
            unfit = (
                f"ranks have different parts of {name!r}; pass those that have the same one, as "
                "process_set=grid.data"
            )
        named[name] = tensor.detach()
    specs = [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in named.items()
    ]
    names = replicas.agree_with_root(
        specs,
        unfit and f"{unfit} (rank {communicator.rank})",
        root_rank,
        communicator,
        "broadcast_parameters",
    )
    with one_of_several_steps():
        replicas.broadcast((TensorReplica(named[name]) for name in names), root_rank, communicator)
    if communicator.size > 1:
        watch(named.values())


def parts_over(communicator: ringdl.Communicator) -> set[int]:
    """The storages of parameters of which these ranks have different parts."""
    ranks = {*communicator._numbers()}
    return {
        storage for storage, its in cut_storages().items() if len(ranks & {*its._numbers()}) > 1
    }


def cut_storages() -> dict[int, ringdl.Communicator]:
    """The storages of cut parameters, and the ranks that have their parts."""
    found: dict[int, ringdl.Communicator] = {}
    for module in [*cut_modules]:
        for name, cut in vars(module)[CUTS].items():
            own = module._parameters.get(name)
            # A parametrization has it, or what it has made of it, in modules of its own.
            for parameter in module.parameters() if own is None else [own]:
                found[parameter.untyped_storage()._cdata] = cut.communicator
    return found


def first_part(
    named: Iterable[tuple[str, torch.Tensor]], communicator: ringdl.Communicator
) -> str | None:
    """The name of the first of these of which the ranks have different parts; None if of none."""
    parts = parts_over(communicator)
    its = (name for name, each in named if each.untyped_storage()._cdata in parts)
    return next(its, None) if parts else None


def refuse_parts(
    named: Sequence[tuple[str, torch.Tensor]], communicator: ringdl.Communicator
) -> None:
    """Refuse to average where there is nothing to average.

    Raises:
        UsageError: the ranks have different parts of a parameter.
    """
    name = first_part(named, communicator)
    if name is not None:
        raise ringdl.UsageError(
            f"ranks have different parts of {name!r}, and so of its gradient; pass those that "
            "have the same one, as process_set=grid.data"
        )


def check_parts(
    named: Sequence[tuple[str, torch.Tensor]], gradients: Gradients[torch.Tensor]
) -> None:
    """Before the first step, of a cut network: what ranks have whole is the same on each cut's.

    Raises:
        MismatchError: on every rank, if it differs.
    """
    cuts = {} if gradients.are_replicas_checked else cut_storages()
    found: dict[ringdl.Communicator, None] = {}
    whole = []
    for name, parameter in named if cuts else ():
        ranks = cuts.get(parameter.untyped_storage()._cdata)
        if ranks is None:
            whole.append((name, TensorReplica(parameter)))
        else:
            found[ranks] = None
    for ranks in found if whole else ():
        replicas.check(whole, ranks, "DistributedOptimizer.whole", _HOW_TO_BEGIN_ALIKE)


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

    Works for any optimizer whose ``state_dict()`` holds tensors (dense or sparse) and picklable
    values, also if the other ranks have no state yet (only the root has read a checkpoint). Tensors
    arrive with the root's dtype and strides, also where ``load_state_dict()`` would cast them.

    Args:
        optimizer: the same kind with the same parameters on every rank, wrapped or not.
        root_rank: whose state all ranks get.
        model: ignored.
        process_set: as in `broadcast_parameters`.

    Raises:
        UsageError: this is no optimizer, or ranks have different parts of its parameters
            (`ringdl.torch.parallel`); the other ranks get a MismatchError.
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
        its = (("", parameter) for group in optimizer.param_groups for parameter in group["params"])
        if first_part(its, communicator) is not None:
            raise ringdl.UsageError(
                "ranks have different parts of this optimizer's parameters, and so of its state; "
                "broadcast among those that have the same ones, as process_set=grid.data"
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
        tensors = sent if is_root else received
        replicas.broadcast(map(TensorReplica, tensors), root_rank, communicator)
    if not is_root:
        state_dict = _map(parts, _Sparse, _Sparse.join)
        optimizer.load_state_dict(state_dict)
        _undo_casts(optimizer, state_dict["state"])


def replicas_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, TensorReplica]]:
    """The parameters as what all ranks hold one of each."""
    for name, parameter in named_parameters:
        yield name, TensorReplica(parameter)


class TensorReplica:
    """A tensor of any dtype and strides, whose elements lie apart."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.nbytes = tensor.numel() * tensor.element_size()

    def read(self) -> replicas.Bytes:
        """The elements in row-major order; the same memory if it is contiguous, on the CPU."""
        return self._tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()

    def write(self, elements: replicas.Bytes) -> None:
        """Nothing, if these are the tensor's own memory."""
        if elements.ctypes.data != self._tensor.data_ptr():
            values = torch.from_numpy(elements).view(self._tensor.dtype)
            self._tensor.copy_(values.reshape(self._tensor.shape))


@dataclass(frozen=True)
class _Form:
    """What stands for a tensor in a skeleton."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str  # its type


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
        tuple(tensor.shape),
        torch.empty_like(tensor, device="meta").stride(),
        tensor.dtype,
        tensor.device.type,
    )


def _make(form: _Form | _Sparse, received: list[torch.Tensor]) -> torch.Tensor | _Sparse:
    if isinstance(form, _Sparse):
        return replace(
            form, indices=_make(form.indices, received), values=_make(form.values, received)
        )
    device = form.device if torch.cuda.is_available() else "cpu"
    received.append(torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device))
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
    """Install what the root has: it has not loaded, so its tensors are not cast.

    Those that lie on a device lie on the parameter's.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if index in state:
            to_device = partial(_on_device, device=parameter.device)
            optimizer.state[parameter] = _map(state[index], torch.Tensor, to_device)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.is_cpu else tensor.to(device)
