"""Which samples of a dataset each rank takes, epoch by epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, Literal

from ringdl._errors import UsageError
from ringdl._startup import get_communicator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ringdl._communicator import Communicator

Remainder = Literal["pad", "drop", "keep"]


class ShardedSampler:
    """The indices of this rank's samples: each epoch in another order, dealt out like cards.

    An iterable of integers with a length: plain indices for any framework, and what a
    ``torch.utils.data.DataLoader`` takes as ``sampler``. All ranks draw the same order, and this
    one takes every size-th sample, so with ``batch_size=B // size`` the ranks' batches make up the
    same global batches of B samples on any number of ranks that divides B.

    To continue in the middle of an epoch, on any number of ranks, keep how many samples all ranks
    have trained on, and call `resume`. (The sampler cannot count them: loaders read ahead.)

    Args:
        data: a dataset, or how many samples it has.
        shuffle: whether each epoch has an order of its own; else that of the dataset.
        seed: of the orders, the same on all ranks.
        remainder: what becomes of the last samples if ranks cannot have the same number each: "pad"
            repeats some from the beginning of the epoch, "drop" leaves them out, and "keep" gives
            some ranks one more, for scripts that `Communicator.join`.
        communicator: the ranks; by default those of `ringdl.init`.

    Raises:
        UsageError: there are no samples, or another argument is wrong.

    Example:
        >>> sampler = ringdl.data.ShardedSampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=64 // hvd.size(), sampler=sampler)
        >>> for epoch in range(epochs):
        ...     sampler.set_epoch(epoch)
        ...     for batch in loader:
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        communicator: Communicator | None = None,
    ) -> None:
        self.sample_count = len(data) if hasattr(data, "__len__") else operator.index(data)
        if self.sample_count <= 0:
            raise UsageError(f"ShardedSampler: a dataset of {self.sample_count} samples is empty")
        if remainder not in ("pad", "drop", "keep"):
            raise UsageError(f"ShardedSampler: remainder is {remainder!r}; pad, drop or keep")
        if seed < 0:
            raise UsageError(f"ShardedSampler: seed is {seed}; pass 0 or more")
        self._communicator: Communicator | None = communicator or get_communicator()
        self._follow()
        self._shuffle = shuffle
        self._seed = seed
        self._remainder = remainder
        self._epoch = 0
        self._consumed = 0

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        self._follow()
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        self._follow()
        return self._size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it before each one, also after `resume`."""
        if epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def resume(self, epoch: int, consumed: int) -> None:
        """Go on in the middle of an epoch.

        Args:
            epoch: which one.
            consumed: how many of its samples all ranks together have had: steps x global batch,
                which may count some twice, as the last batches have fewer.

        Raises:
            UsageError: those are the samples of several epochs.
        """
        if not 0 <= consumed < 2 * self.sample_count:
            raise UsageError(
                f"resume: {consumed} of {self.sample_count} samples cannot have been consumed; "
                "count those of one epoch, over all ranks"
            )
        self._epoch, self._consumed = epoch, min(consumed, self.sample_count)

    def indices(self) -> NDArray[np.int64]:
        """What is left of the epoch for this rank."""
        import numpy as np

        self._follow()
        order = self._order()
        left = order[self._consumed :]
        if self._remainder == "drop":
            left = left[: len(left) // self._size * self._size]
        elif self._remainder == "pad":
            missing = -len(left) % self._size
            left = np.concatenate([left, np.resize(order, missing)])
        return left[self._rank :: self._size]

    def _order(self) -> NDArray[np.int64]:
        """All samples, as the epoch has them."""
        import numpy as np

        order = np.arange(self.sample_count)
        if self._shuffle:
            np.random.default_rng((self._seed, self._epoch)).shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        self._follow()
        left = self.sample_count - self._consumed
        if self._remainder == "drop":
            return left // self._size
        if self._remainder == "pad":
            return -(-left // self._size)
        return (left - self._rank + self._size - 1) // self._size

    def _follow(self) -> None:
        """After another `ringdl.init` ranks may be numbered anew."""
        if self._communicator is not None:
            self._rank, self._size = self._communicator.rank, self._communicator.size

    def __getstate__(self) -> dict[str, Any]:
        """A pickle is for this rank, as it is numbered now: communicators stay in their process."""
        self._follow()
        return vars(self) | {"_communicator": None}
