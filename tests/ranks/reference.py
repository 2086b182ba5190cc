"""What NumPy says a reduction is, and how far floating point may be from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Reduction

_FLOATS = ("float64", "float32", "float16", ml_dtypes.bfloat16)
DTYPES = [np.dtype(n) for n in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")]
FLOATS, INTEGERS = DTYPES[:4], DTYPES[4:9]
REDUCTIONS = (ringdl.Sum, ringdl.Average, ringdl.Min, ringdl.Max, ringdl.Product)
BITWISE = {
    ringdl.BitAnd: np.bitwise_and,
    ringdl.BitOr: np.bitwise_or,
    ringdl.BitXor: np.bitwise_xor,
}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Expected:
    """A value in a wide type and how far from it the result may be; exact where bound is 0."""

    value: Array
    bound: Array | float

    def check(self, result: Array, what: str) -> None:
        """Raise AssertionError unless the result is within the bound everywhere."""
        assert result.shape == self.value.shape, f"{what}: shape {result.shape}"
        if result.dtype.kind == "f" or result.dtype == ml_dtypes.bfloat16:
            error = np.abs(result.astype(self.value.dtype) - self.value)
            wrong = np.flatnonzero(~(error <= self.bound))
        else:
            assert result.dtype == self.value.dtype
            wrong = np.flatnonzero(result != self.value)
        if wrong.size:
            i = wrong[0]
            raise AssertionError(
                f"{what}: {wrong.size} of {result.size} elements are wrong, first [{i}]: "
                f"{result.flat[i]!r}, expected {self.value.flat[i]!r}"
            )


def random_array(rank: int, count: int, dtype: np.dtype[Any], op: Reduction, seed: int) -> Array:
    """What rank `rank` contributes; every rank can make it. Nothing overflows but integers."""
    rng = np.random.default_rng([seed, rank])
    if dtype.kind == "b":
        return rng.random(count) < np.where(np.arange(count) % 2 == 0, 0.1, 0.9)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, count, dtype, endpoint=True)
    values = rng.normal(size=count) * 2.0 ** rng.integers(-3, 4, count)
    if op == ringdl.Product:
        values = np.sign(values) * 2.0 ** rng.uniform(-1, 1, count)
    return values.astype(dtype)


def reductions_of(dtype: np.dtype[Any]) -> tuple[Reduction, ...]:
    """Those that its elements have."""
    return (*REDUCTIONS, *BITWISE) if dtype.kind in "iub" else REDUCTIONS


def dtypes_and_reductions(*counts: int) -> Iterator[tuple[int, np.dtype[Any], ringdl.Reduction]]:
    """Every dtype at every count; every reduction where counts are small, else the average."""
    for count in counts:
        for dtype in DTYPES:
            for op in reductions_of(dtype) if count < 10_000 else (ringdl.Average,):
                yield count, dtype, op


def reduced(arrays: Sequence[Array], op: Reduction) -> Expected:
    """The reduction of the ranks' arrays."""
    dtype = arrays[0].dtype
    if op in BITWISE:
        return Expected(reduce(BITWISE[op], arrays), 0)
    if dtype.kind == "b":
        join = np.logical_or if op in (ringdl.Sum, ringdl.Max) else np.logical_and
        return Expected(reduce(join, arrays), 0)
    if dtype.kind in "iu":
        return Expected(_integers(arrays, op), 0)
    return _floats(arrays, op)


def _integers(arrays: Sequence[Array], op: Reduction) -> Array:
    if op == ringdl.Min:
        return reduce(np.minimum, arrays)
    if op == ringdl.Max:
        return reduce(np.maximum, arrays)
    if op == ringdl.Product:
        return reduce(np.multiply, arrays)
    total = reduce(np.add, arrays)
    if op == ringdl.Sum:
        return total
    size = total.dtype.type(len(arrays))
    return (total - np.fmod(total, size)) // size


def _floats(arrays: Sequence[Array], op: Reduction) -> Expected:
    """Each of the P-1 hops rounds once to the array's type, 16-bit types once more, to fp32 first.

    So a sum is off by at most gamma(P-1) times the sum of magnitudes, gamma(n) = n u / (1 - n u)
    (Higham 2002, section 3.1), and a product by gamma(P-1) of itself. An average rounds once more.
    """
    dtype, size = arrays[0].dtype, len(arrays)
    wide = [array.astype(np.longdouble) for array in arrays]
    if op in (ringdl.Min, ringdl.Max):
        return Expected(reduce(np.minimum if op == ringdl.Min else np.maximum, wide), 0)
    info = ml_dtypes.finfo(dtype)
    unit = float(info.eps) / 2
    if dtype.itemsize == 2:
        unit += 2.0**-24 * (2 if op == ringdl.Average else 1)
    n = size - 1 + (1 if op == ringdl.Average and dtype.itemsize > 2 and size > 1 else 0)
    gamma = n * unit / (1 - n * unit)
    if op == ringdl.Product:
        value = reduce(np.multiply, wide)
        return Expected(value, gamma * np.abs(value))
    value, magnitude = sum(wide), sum(np.abs(array) for array in wide)
    if op == ringdl.Average:
        value, magnitude = value / size, magnitude / size
    return Expected(value, gamma * magnitude + float(info.smallest_subnormal) * n)
