"""Several small arrays as one flat array, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdl._arrays import Operand

FUSED_BYTES = 256 << 10
"""Larger arrays travel alone: they keep a link busy, and copying them would cost more."""

Part = tuple[Operand, list[Operand]]
"""What is reduced at once, and the operands that were copied into it, if they were."""


def fuse(operands: Sequence[Operand]) -> list[Part]:
    """Join operands of at most `FUSED_BYTES`, of one kind and dtype, to flat ones, in their order.

    A function of the kinds, dtypes and sizes alone, so that all ranks join alike.
    """
    small: dict[tuple[type, str, str, Any], list[Operand]] = {}
    for operand in operands:
        if operand.array.nbytes <= FUSED_BYTES:
            where = str(operand.handed.device) if hasattr(operand.handed, "device") else ""
            key = (type(operand.array), where, str(operand.array.dtype), operand.dtype)
            small.setdefault(key, []).append(operand)
    joined = [group for group in small.values() if len(group) > 1]
    is_joined = {id(operand) for group in joined for operand in group}
    parts: list[Part] = [(_join(group), group) for group in joined]
    return parts + [(operand, []) for operand in operands if id(operand) not in is_joined]


def split(part: Part) -> None:
    """Copy a flat operand's elements back to where they came from."""
    flat, operands = part
    if operands:
        flat.framework.distribute(flat.array, [operand.array for operand in operands])
    for operand in operands:
        operand.write_back()


def _join(operands: Sequence[Operand]) -> Operand:
    first = operands[0]
    flat = first.framework.concatenated([operand.array for operand in operands])
    return Operand(flat, flat, first.framework.handed(flat), first.dtype, first.framework)
