"""Parameters one after the other, in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Mapping

from ringdl.policies._policy import Array, Model


class Flat:
    """One array for all parameters of each dtype.

    Args:
        model: whose parameters.

    Attributes:
        own: by dtype.
    """

    def __init__(self, model: Model) -> None:
        counts: dict[str, int] = {}
        self._places: dict[str, tuple[str, slice]] = {}
        for name, array in model.parameters.items():
            dtype = array.dtype.name
            begin = counts.get(dtype, 0)
            counts[dtype] = begin + array.size
            self._places[name] = dtype, slice(begin, begin + array.size)
        self._communicator, self._counts = model.communicator, counts
        self.own = self.empty()

    def empty(self) -> dict[str, Array]:
        """Arrays like `own`."""
        return {
            dtype: self._communicator.empty((count,), dtype)
            for dtype, count in self._counts.items()
        }

    def gather(self, arrays: Mapping[str, Array]) -> None:
        """Copy arrays into `own`."""
        for name, array in arrays.items():
            self._part(name, array)[...] = array

    def add(self, arrays: Mapping[str, Array], factor: float) -> None:
        """Add arrays to `own`, times a factor."""
        for name, array in arrays.items():
            part = self._part(name, array)
            part += factor * array

    def spread(self, arrays: Mapping[str, Array], factor: float = 1.0) -> None:
        """Copy `own` into arrays, times a factor."""
        for name, array in arrays.items():
            part = self._part(name, array)
            array[...] = part if factor == 1.0 else factor * part

    def _part(self, name: str, like: Array) -> Array:
        dtype, place = self._places[name]
        return self.own[dtype][place].reshape(like.shape)
