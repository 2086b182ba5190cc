"""Samples of an epoch that are dealt out again when there are other ranks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from ringdl._errors import UsageError
from ringdl._numbers import is_count
from ringdl.data import ShardedSampler


class ElasticSampler(ShardedSampler):
    """A `ringdl.data.ShardedSampler` that counts what all ranks have trained on.

    As a value of a `State` it goes back to the last commit with it, and what is left of the epoch
    is dealt out to the ranks that there are then: nothing twice, nothing skipped, but what was
    trained since the commit. Make the loader anew, or iterate over it anew, after that. Until then,
    and within an epoch, its length and its indices stay.

    Args:
        dataset: a dataset, or how many samples it has.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders, the same on all ranks.
    """

    def __init__(self, dataset: Sized | int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed)
        self._processed = 0

    @property
    def epoch(self) -> int:
        """The epoch that is dealt out."""
        return self._epoch

    @property
    def processed_num(self) -> int:
        """How many of its samples all ranks together have trained on."""
        return self._processed

    @property
    def processed_indices(self) -> set[int]:
        """Which ones."""
        return set(self._order()[: self._processed].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. One that has begun goes on: see `reset` and `load_state_dict`."""
        if epoch != self._epoch:
            self.resume(epoch, 0)

    def resume(self, epoch: int, consumed: int) -> None:
        """As of `ShardedSampler`."""
        super().resume(epoch, consumed)
        self._processed = consumed

    def reset(self) -> None:
        """Deal out what is left of the epoch anew."""
        self._consumed = self._processed

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have trained on a batch.

        Args:
            batch_idx: ignored: batches are counted.
            batch_size: samples of each rank. The epoch's last batch may have fewer.

        Raises:
            UsageError: it is no number of samples.
        """
        del batch_idx
        if not is_count(batch_size, at_least=0):
            raise UsageError(f"batch_size is {batch_size!r}; pass how many samples a rank had")
        self._processed = min(self.sample_count, self._processed + batch_size * self.size)

    def record_indices(self, indices: Sized) -> None:
        """The same, for the samples of this rank's batch."""
        self.record_batch(0, len(indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples of a batch, counted since the epoch, or its rest, was dealt out."""
        first = batch_idx * batch_size
        own: list[int] = self.indices()[first : first + batch_size].tolist()
        return own

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples were trained on."""
        return {"epoch": self._epoch, "consumed": self._processed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.resume(state["epoch"], state["consumed"])
