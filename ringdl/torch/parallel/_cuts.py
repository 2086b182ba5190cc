"""Parameters of which each rank has a part, and the state of the network that they are parts of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import ringdl
from ringdl import Communicator
from ringdl._training import replicas
from ringdl.torch._state import CUTS, TensorReplica, cut_modules
from ringdl.torch.parallel._exchanges import span, whole

LAYER_COUNT = "_ringdl_layer_count"
"""The attribute of a module that has some of a network's layers: how many layers the network has;
their names are their numbers."""


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut over the ranks of an axis.

    Args:
        communicator: the ranks.
        dim: along which dimension.
        size: the whole's length there.
        sections: how many equal parts of the dimension are each cut by themselves, as a query's, a
            key's and a value's weights are that lie in one.
    """

    communicator: Communicator
    dim: int
    size: int
    sections: int = 1

    def own(self, whole_tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, a copy."""
        begin, count = span(self.size // self.sections, self.communicator)
        each = whole_tensor.chunk(self.sections, self.dim)
        return torch.cat([one.narrow(self.dim, begin, count) for one in each], self.dim)

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """The whole, from all ranks' parts, of any dtype. Collective."""
        count = own.shape[self.dim] // self.sections
        each = [own.narrow(self.dim, i * count, count) for i in range(self.sections)]
        return torch.cat([self._joined(one) for one in each], self.dim)

    def _joined(self, part: torch.Tensor) -> torch.Tensor:
        rows = part.detach().movedim(self.dim, 0).contiguous()
        as_bytes = rows.unsqueeze(-1).view(torch.uint8)
        joined = whole(as_bytes, self.communicator, 0).view(part.dtype).squeeze(-1)
        return joined.movedim(0, self.dim).contiguous()


def cut_parameter(module: torch.nn.Module, name: str, cut: Cut) -> None:
    """Leave this rank's part alone of one of a module's own parameters, which is whole before.

    Raises:
        UsageError: the parameter has another size along the cut's dimension, or sections of
            different sizes.
    """
    parameter = module.get_parameter(name)
    size = parameter.shape[cut.dim] if -parameter.ndim <= cut.dim < parameter.ndim else None
    if size != cut.size or cut.sections < 1 or cut.size % cut.sections != 0:
        raise ringdl.UsageError(
            f"{name!r} has the shape {tuple(parameter.shape)}, and cannot be cut along dimension "
            f"{cut.dim} as {cut.size} in {cut.sections} equal sections"
        )
    if CUTS not in vars(module):
        setattr(module, CUTS, {})
        module.register_state_dict_post_hook(_note)  # type: ignore[no-untyped-call]
    vars(module)[CUTS][name] = cut
    if cut.communicator.size > 1:
        own = torch.nn.Parameter(cut.own(parameter.detach()), parameter.requires_grad)
        module.register_parameter(name, own)
        cut_modules.add(module)


def _note(module: torch.nn.Module, *_: Any) -> None:
    """Before its state goes anywhere, also that of a copy, which nobody has told of."""
    cut_modules.add(module)


def cuts_of(module: torch.nn.Module) -> dict[str, Cut]:
    """How parameters of a network are cut, by their names; this rank has all of the others.

    Raises:
        UsageError: one is there no more, as a parametrization has taken its place.
    """
    found: dict[str, Cut] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        for name, cut in vars(each).get(CUTS, {}).items():
            whole_name = f"{path}.{name}" if path else name
            if name not in each._parameters:
                raise ringdl.UsageError(
                    f"{whole_name!r} is cut over ranks, and is not a parameter of its layer any "
                    "more; leave parametrizations of cut parameters (weight_norm, say) out"
                )
            found[whole_name] = cut
    return found


def clip_grad_norm_(
    module: torch.nn.Module, max_norm: float, pipeline: Communicator | None = None
) -> torch.Tensor:
    """Scale the gradients of a network down, so that the norm of all of them is at most so much.

    As ``torch.nn.utils.clip_grad_norm_`` does for the uncut network. Collective.

    Args:
        module: this rank's part of the network.
        max_norm: the largest 2-norm.
        pipeline: the ranks that have the other stages, if it has some.

    Returns:
        The norm before, the same on all ranks.
    """
    cuts = cuts_of(module)
    squares: dict[Communicator | None, torch.Tensor] = {None: torch.zeros((), dtype=torch.float64)}
    for name, parameter in module.named_parameters():
        ranks = cuts[name].communicator if name in cuts else None
        sum_before = squares.setdefault(ranks, torch.zeros((), dtype=torch.float64))
        if parameter.grad is not None:
            square = parameter.grad.detach().abs().double().square().sum()  # complex ones, too
            squares[ranks] = sum_before.to(square.device) + square
    here = squares.pop(None).cpu()
    for number, (communicator, square) in enumerate(squares.items()):
        assert communicator is not None
        # What all have whole counts once, by one rank: others may add it up in another order.
        adds = number == 0 and communicator.rank == 0
        own = square.cpu() + here if adds else square.cpu()
        total = communicator.allreduce(own, ringdl.Sum)
        here = total if number == 0 else here + total
    if pipeline is not None:
        here = pipeline.allreduce(here, ringdl.Sum)
    norm = here.sqrt()
    factor = max_norm / (float(norm) + 1e-6)  # as PyTorch has it
    if not factor >= 1:  # NaN, too
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


def state_dict(
    module: torch.nn.Module, pipeline: Communicator | None = None
) -> dict[str, torch.Tensor]:
    """The state of the network as it is uncut, on all ranks. Collective.

    It is what ``state_dict()`` of the same network in one process gives, so it can be loaded there,
    or on any other grid.

    Args:
        module: this rank's part of the network.
        pipeline: the ranks that have the other stages, if it has some.

    Raises:
        MismatchError: ranks have cut the network in different ways; on all of them.
    """
    cuts = cuts_of(module)
    _agree(module, cuts)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        cut = cuts.get(name)
        if not isinstance(tensor, torch.Tensor):  # a module's extra state
            state[name] = tensor
        else:
            state[name] = tensor.detach().clone() if cut is None else cut.whole(tensor)
    if pipeline is None or pipeline.size == 1:
        return state
    told = pipeline.allgather_object(
        {
            name: (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else None
            for name, each in state.items()
        }
    )
    device = device_of(module)
    complete: dict[str, torch.Tensor] = {}
    for rank, its in enumerate(told):
        for name, like in its.items():
            if like is None:
                own = state[name] if rank == pipeline.rank else None
                complete.setdefault(name, pipeline.broadcast_object(own, rank))
                continue
            shape, dtype = like
            has = rank == pipeline.rank
            tensor = state[name] if has else torch.empty(shape, dtype=dtype, device=device)
            replicas.broadcast([TensorReplica(tensor)], rank, pipeline)
            complete.setdefault(name, tensor)
    return complete


def _agree(module: torch.nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Raise on all ranks unless those along each cut have cut the same network alike."""
    by_ranks: dict[Communicator, dict[str, Any]] = {}
    for name, cut in cuts.items():
        part = module.get_parameter(name)
        rest = [size for dim, size in enumerate(part.shape) if dim != cut.dim % part.ndim]
        words = cut.dim % part.ndim, cut.size, cut.sections, rest, str(part.dtype)
        by_ranks.setdefault(cut.communicator, {})[name] = words
    for communicator, its in by_ranks.items():
        told = communicator.allgather_object(its)
        for rank, other in enumerate(told):
            for name in told[0] | other:
                if told[0].get(name) != other.get(name):
                    raise ringdl.MismatchError(
                        f"ranks have cut the network in different ways: {name!r} is "
                        f"{_text(told[0].get(name))} on rank 0, and {_text(other.get(name))} on "
                        f"rank {rank}; build the same network on all ranks"
                    )


def _text(words: tuple[int, int, int, list[int], str] | None) -> str:
    if words is None:
        return "not cut"
    dim, size, sections, rest, dtype = words
    return f"{size} along dimension {dim} in {sections} sections, {rest} along others, of {dtype}"


def device_of(module: torch.nn.Module) -> torch.device | None:
    """Where its first parameter is, or its first buffer; None if it has none."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), None)


def load_state_dict(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the state of the uncut network: of each parameter this rank's part.

    Args:
        module: this rank's part of the network.
        state: of all of it, as `state_dict` gives it; tensors may be memory-mapped.

    Raises:
        UsageError: something is missing, is not the network's, or has another shape.
    """
    cuts = cuts_of(module)
    own: dict[str, torch.Tensor] = {}
    here = module.state_dict()
    for name in state:
        if name not in here and not _is_elsewhere(name, module):
            raise ringdl.UsageError(f"the state that is loaded has {name!r}; this network has not")
    for name, tensor in here.items():
        if name not in state:
            raise ringdl.UsageError(f"the state that is loaded has no {name!r}")
        if not isinstance(tensor, torch.Tensor):
            own[name] = state[name]
            continue
        cut, given = cuts.get(name), torch.as_tensor(state[name])
        if cut is not None and (cut.dim >= given.ndim or given.shape[cut.dim] != cut.size):
            raise ringdl.UsageError(
                f"{name!r} has the shape {tuple(given.shape)} in the state that is loaded, and not "
                f"{cut.size} along dimension {cut.dim}"
            )
        own[name] = given if cut is None else cut.own(given)
        if own[name].shape != tensor.shape:
            raise ringdl.UsageError(
                f"{name!r} has the shape {tuple(given.shape)} in the state that is loaded; this "
                f"rank's part of it is {tuple(own[name].shape)}, and not {tuple(tensor.shape)}"
            )
    module.load_state_dict(own)


def _is_elsewhere(name: str, module: torch.nn.Module) -> bool:
    """Whether it is of a pipeline's layer that other ranks have."""
    for path, each in module.named_modules():
        count = vars(each).get(LAYER_COUNT)
        prefix = f"{path}." if path else ""
        if count is not None and name.startswith(prefix):
            number = name.removeprefix(prefix).split(".")[0]
            if number.isdecimal() and int(number) < count and number not in each._modules:
                return True
    return False
