"""The forms that calls of ``ProcessGroup``'s methods take, and what is the same for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ringdl.torch._futures import DistributedWork, Recording

if TYPE_CHECKING:
    from ringdl.torch._process_group import ProcessGroup

_NAMES = {
    "tensors": ("tensors", "tensor"),
    "output": (
        *("output_tensors", "output_tensor", "output", "outputs", "output_lists"),
        *("outputTensors", "outputTensor"),
    ),
    "input": (
        *("input_tensors", "input_tensor", "input", "inputs", "input_list"),
        *("inputTensors", "inputTensor"),
    ),
}


class Asked:
    """What a call says beside its tensors.

    Attributes:
        op: the reduction, as torch has it.
        root: a rank of the group.
        timeout: seconds; None if the call names none.
        output_split_sizes: rows from each rank, of all_to_all_single.
        input_split_sizes: rows for each rank.
        to: the rank that a message goes to.
        source: the rank that it comes from; None for any.
        tag: the message's.
    """

    def __init__(self, options: Any = None, **said: Any) -> None:
        op = said.get("op")
        self.op: Any = getattr(options, "reduceOp", None) if op is None else op
        self.root = int(said.get("root", getattr(options, "rootRank", 0)))
        timeout: timedelta | None = said.get("timeout", getattr(options, "timeout", None))
        is_named = timeout is not None and timeout > timedelta(0)  # options hold -1 ms for none
        self.timeout = timeout.total_seconds() if timeout is not None and is_named else None
        self.output_split_sizes: Sequence[int] | None = said.get("output_split_sizes")
        self.input_split_sizes: Sequence[int] | None = said.get("input_split_sizes")
        self.to: int = said.get("to", -1)
        self.source: int | None = said.get("source")
        self.tag: int = said.get("tag", 0)


def collective(
    event: str, *tensors: str, rest: Sequence[str] = (), is_counted: bool = True
) -> Callable[[Callable[..., DistributedWork]], Callable[..., DistributedWork]]:
    """A method of all forms that C++'s bindings offer.

    They take tensors, and then an options object or, each by position or by name, what is in
    ``rest``. The method itself gets the tensors and an `Asked`. Its work waits for as long as the
    latter says, and is an event of torch's profilers until it ends.

    Args:
        event: what profilers call it.
        tensors: which of `_NAMES` each parameter answers to; the last one is the input.
        rest: ``op``, ``root``, ``timeout``..., in the order of positions.
        is_counted: by the group's sequence number.
    """

    def decorate(method: Callable[..., DistributedWork]) -> Callable[..., DistributedWork]:
        @functools.wraps(method)
        def call(self: ProcessGroup, *given: Any, **named: Any) -> DistributedWork:
            values, asked = _read(method.__name__, tensors, rest, list(given), named)
            recording = Recording.begin(f"ringdl:{event}", _inputs(values))
            try:
                work = method(self, *values, asked)
            except BaseException:
                if recording is not None:
                    recording.end()
                raise
            self._sequence_number += is_counted
            work.begun(asked.timeout, recording)
            return work

        return call

    return decorate


def _read(
    method: str,
    tensors: Sequence[str],
    rest: Sequence[str],
    given: list[Any],
    named: dict[str, Any],
) -> tuple[list[Any], Asked]:
    values = []
    for kind in tensors:
        name = next((name for name in _NAMES[kind] if name in named), None)
        if given:
            values.append(given.pop(0))
        elif name is not None:
            values.append(named.pop(name))
        else:
            raise TypeError(f"{method}() lacks its argument {_NAMES[kind][0]!r}")
    options = named.pop("opts", None)
    said = {}
    for name in rest:
        if not given:
            break
        value = given.pop(0)
        if hasattr(value, "timeout"):  # as all options objects, and nothing else
            options = value
            break
        said[name] = value
    if given and given[0] is not None:  # None stands for no options
        raise TypeError(f"{method}() takes no argument {given[0]!r} there")
    for name in [*named]:
        if name not in rest:
            raise TypeError(f"{method}() has no argument {name!r}")
        said[name] = named.pop(name)
    return values, Asked(options, **said)


def _inputs(values: Sequence[Any]) -> list[torch.Tensor]:
    last = values[-1] if values else []
    while isinstance(last, Sequence) and last and isinstance(last[0], Sequence):
        last = last[0]
    return [last] if isinstance(last, torch.Tensor) else [*last]


def listed(tensors: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    """One tensor as a list of it."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(tensors: Sequence[Any]) -> Sequence[Sequence[torch.Tensor]]:
    """A list of tensors as a list of it."""
    return [tensors] if tensors and isinstance(tensors[0], torch.Tensor) else tensors
