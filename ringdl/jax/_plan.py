"""What ranks have to agree on about their gradients, and what they are told if they do not.

Each call of the engine carries a digest of it, and the number of the plan. Where digests differ,
and at the first call with parameters, XLA's thread asks here, on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ringdl
from ringdl import _engine
from ringdl._buckets import _first_difference
from ringdl._engine import DType, Reduction
from ringdl._training import replicas
from ringdl._training.in_numpy import Array, ArrayReplica
from ringdl.jax._ranks import by_number, name_of

Spec = tuple[str, tuple[int, ...], str]
"""A gradient's name, shape and dtype."""

HOW_TO_MEND = (
    "broadcast them from rank 0 before the first step: params = "
    "ringdl.jax.broadcast_variables(params)"
)
BUCKET_BYTES = 25 << 20
_EXPLAIN_SECONDS = 10.0
"""How long ranks wait for one that has failed otherwise and does not explain anything."""

_plans: list[Plan] = []


@dataclass(frozen=True)
class Options:
    """How gradients are averaged. See `ringdl.jax.average_gradients`."""

    op: Reduction = Reduction.Average
    bucket_bytes: int = BUCKET_BYTES
    wire: DType | None = None
    how_to_mend: str = HOW_TO_MEND


class Plan:
    """Gradients that are averaged together, and the parameters that are compared. See `plan_of`.

    Args:
        gradients: the same on all ranks.
        parameters: their names, likewise.
        options: likewise.
        user: tells users apart, of which each compares replicas at its first step.

    Attributes:
        number: its own.
        options: see above.
    """

    def __init__(
        self,
        gradients: Sequence[Spec],
        parameters: Sequence[str],
        options: Options,
        user: int,
    ) -> None:
        del user  # plan_of() goes by it
        self.parameters, self.options = parameters, options
        wire = options.wire.name if options.wire else "none"
        terms: dict[str, Any] = {"op": options.op.name, "compression": wire}
        terms["bucket_bytes"] = options.bucket_bytes
        terms["whether parameters are given, to be compared,"] = bool(parameters)
        listed: list[list[Any]] = [[*spec, []] for spec in gradients]
        listed += [[f"the parameter {name}", [], "", []] for name in parameters]
        self._own: list[Any] = [terms, listed]
        digest = hashlib.blake2b(repr(self._own).encode(), digest_size=4).digest()
        self._digest = int.from_bytes(digest) >> 1
        self.number = len(_plans)
        _plans.append(self)

    def root(self, bucket: int) -> int:
        """What travels with a bucket's calls: 31 bits that other gradients hardly have."""
        return self._digest ^ bucket

    def refuse_others(self, communicator: ringdl.Communicator, name: str) -> None:
        """Find out how ranks differ. Collective.

        Raises:
            MismatchError: names the first gradient that differs; on every rank.
        """
        plans = communicator.allgather_object(self._own, name, _EXPLAIN_SECONDS)
        if plans != plans[:1] * len(plans):
            raise ringdl.MismatchError(_first_difference(plans))

    def __repr__(self) -> str:
        return f"<plan {self.number}>"


plan_of = cache(Plan)
"""The plan, the same object for equal arguments."""


def _explain(number: int, plan: int, device: int) -> str:
    its, name = by_number[number].communicator, name_of("what the gradients are", device)
    text = error_of(lambda: _plans[plan].refuse_others(its, name))
    return text if text.startswith("ringdl.MismatchError") else ""  # else the first error is better


def _compare(number: int, plan: int, device: int, parameters: list[Array]) -> str:
    if plan >= len(_plans):  # of a function that another process has exported
        return ""
    known = _plans[plan]
    named = list(zip(known.parameters, map(ArrayReplica, parameters), strict=True))
    its, name = by_number[number].communicator, name_of("parameters", device)
    return error_of(lambda: replicas.check(named, its, name, known.options.how_to_mend))


def error_of(question: Callable[[], None]) -> str:
    """The text of an XlaError for what it raises; empty, if nothing."""
    try:
        question()
    except Exception as error:
        return f"ringdl.{type(error).__name__}: {error}"
    return ""


_engine.xla_ask(_explain, _compare)
