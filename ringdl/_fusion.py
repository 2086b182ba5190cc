"""Several small arrays as one flat array, and back."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from ringdl._arrays import Operand

FUSED_BYTES = 256 << 10
"""Larger arrays travel alone: they keep a link busy, and copying them would cost more."""

Part = tuple[Operand, list[Operand]]
"""What is reduced at once, and the operands that were copied into it, if they were."""


def grouped(operands: Sequence[Operand]) -> list[list[Operand]]:
    """Those of at most `FUSED_BYTES`, of one kind and dtype, together, in their order.

    A function of the kinds, dtypes and sizes alone, so that all ranks join alike.
    """
    small: dict[tuple[type, str, str, Any], list[Operand]] = {}
    for operand in operands:
        byte_count = math.prod(operand.array.shape) * operand.array.dtype.itemsize
        if byte_count <= FUSED_BYTES:
            where = str(operand.handed.device) if hasattr(operand.handed, "device") else ""
            key = (type(operand.array), where, str(operand.array.dtype), operand.dtype)
            small.setdefault(key, []).append(operand)
    groups = [group for group in small.values() if len(group) > 1]
    is_joined = {id(operand) for group in groups for operand in group}
    return groups + [[operand] for operand in operands if id(operand) not in is_joined]


def joined(group: Sequence[Operand]) -> Part:
    """What reduces a group at once: several are copied into a flat one."""
    return (group[0], []) if len(group) == 1 else (_join(group), list(group))


def digest(part: Part) -> int:
    """31 bits that differ where other arrays are joined, or in another order; -1 for one alone."""
    shapes = [tuple(operand.array.shape) for operand in part[1]]
    return zlib.crc32(repr(shapes).encode()) >> 1 if shapes else -1


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
