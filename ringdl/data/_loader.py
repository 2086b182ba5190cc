"""Batches that are read before they are needed."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ringdl._errors import UsageError
from ringdl._numbers import is_count
from ringdl.data._files import Table
from ringdl.data._sampler import Remainder, ShardedSampler

if TYPE_CHECKING:
    from ringdl._communicator import Communicator


class Loader:
    """This rank's batches of a dataset, epoch by epoch; threads read the next ones meanwhile.

    Iterating over it gives what is left of an epoch; then the next one begins, in another order,
    and its first batches are read already. It goes on in the middle of an epoch where
    `load_state_dict` says so, also on another number of ranks.

    Args:
        data: `Files`, or anything with a length and ``gather(indices)``; or an array, or a
            dictionary of arrays of the same length.
        batch_size: how many samples each rank gets at once; the last batch may have fewer.
        shuffle: as in `ShardedSampler`; so are the next two.
        seed: of the orders.
        remainder: what becomes of samples if ranks cannot have the same number each.
        ahead: how many batches are read before they are needed.
        threads: how many read.
        transform: called for each batch in these threads, as ``torch.from_numpy`` may be.
        communicator: the ranks along the data axis, as ``grid.data``; by default all.

    Raises:
        UsageError: an argument is wrong.

    Example:
        >>> loader = ringdl.data.Loader(ringdl.data.Files("train-*.safetensors"), 32)
        >>> for epoch in range(loader.epoch, 10):
        ...     for batch in loader:
        ...         train(batch["inputs"], batch["targets"])
        ...     print(f"data {loader.waiting_share:.1%}")
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
        ahead: int = 4,
        threads: int = 1,
        transform: Callable[[Any], Any] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("ahead", ahead), ("threads", threads)):
            if not is_count(value):
                raise UsageError(f"{name} is {value!r}; pass a number, at least 1")
        is_array = isinstance(data, Mapping) or hasattr(data, "dtype")  # torch's have a gather, too
        if is_array or not hasattr(data, "gather"):
            arrays = data if isinstance(data, Mapping) else {"": data}
            data = Table({name: _InMemory(each) for name, each in arrays.items()})
        self.batch_size = batch_size
        self._gather = partial(_gather, data, transform)
        self._sampler = ShardedSampler(
            data,
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
            communicator=communicator,
        )
        its = self._sampler
        if remainder == "drop" and its.sample_count < its.size:
            raise UsageError(
                f"of {its.sample_count} samples {its.size} ranks cannot have the same number each; "
                "pass remainder='pad', or 'keep'"
            )
        self._seed, self._shuffle = seed, shuffle
        self._ahead, self._threads = ahead, threads
        self._make_pool()
        self._next: _Reading | None = None
        self._epoch = self._consumed = 0
        self._loads = 0
        """How often `load_state_dict` was called."""
        self._waited = self._total = 0.0

    @property
    def epoch(self) -> int:
        """The epoch that is iterated over next, or now."""
        return self._epoch

    @property
    def waiting_share(self) -> float:
        """The share of time that steps have waited for batches, in this epoch, or the last one."""
        return self._waited / self._total if self._total > 0 else 0.0

    def state_dict(self) -> dict[str, int]:
        """Where training is: keep it with a checkpoint.

        The same on all ranks; but in an epoch's last batch, where some have fewer samples.
        """
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "samples": self._sampler.sample_count,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there, the next time that this is iterated over; a loop that runs now ends.

        Raises:
            UsageError: it is no loader's state, or one within an epoch of another order: of another
                dataset or seed, or shuffled where this one is not.
        """
        if not {"epoch", "consumed"} <= state.keys():
            raise UsageError(f"this is no state of a loader: {dict(state)!r:.80}")
        consumed, its = state["consumed"], self._sampler
        alike = {"samples": its.sample_count, "seed": self._seed, "shuffle": self._shuffle}
        for name, own in alike.items():
            if consumed > 0 and state.get(name, own) != own:
                raise UsageError(
                    f"the state is of a loader with {name}={state[name]}, and here it is {own}, so "
                    "it does not say what is left of this one's epoch; load it into one alike"
                )
        its.resume(state["epoch"], consumed)
        self._epoch, self._consumed = state["epoch"], consumed
        self._loads += 1

    def __len__(self) -> int:
        """How many batches are left of the epoch."""
        self._sampler.resume(self._epoch, self._consumed)
        return -(-len(self._sampler) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        reading = self._next or self._begin()
        self._next = None
        if reading.place != self._place():
            reading.cancel()
            reading = self._begin()
        self._waited = self._total = 0.0
        began = time.perf_counter()
        is_over, place, loads = not reading.futures, self._place(), self._loads
        try:
            while not is_over and loads == self._loads:
                if self._process != os.getpid():
                    raise UsageError(
                        "this loop was begun before the process was forked, and its batches are "
                        "read in the other one; begin another loop"
                    )
                asked = time.perf_counter()
                count, batch = reading.take()
                is_over = not reading.futures
                self._waited += time.perf_counter() - asked
                self._consumed = min(
                    self._consumed + count * self._sampler.size, self._sampler.sample_count
                )
                self._total = time.perf_counter() - began
                place = self._place()
                yield batch
                self._total = time.perf_counter() - began
        finally:
            reading.cancel()
            # Also if nobody asks for another one; but not if a state was loaded meanwhile.
            if is_over and place == self._place():
                self._epoch, self._consumed = self._epoch + 1, 0
        self._next = self._begin()

    def _place(self) -> tuple[int, ...]:
        """What is read depends on."""
        return self._epoch, self._consumed, self._sampler.rank, self._sampler.size, os.getpid()

    def _make_pool(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self._threads, "ringdl.data")

    def _begin(self) -> _Reading:
        """Begin to read what is left of the epoch."""
        self._sampler.resume(self._epoch, self._consumed)
        indices = self._sampler.indices()
        parts = [
            indices[begin : begin + self.batch_size]
            for begin in range(0, len(indices), self.batch_size)
        ]
        if self._process != os.getpid():  # threads stay in their process
            self._make_pool()
        reading = _Reading(self._place(), parts, self._pool, self._threads, self._gather)
        reading.begin(self._ahead)
        return reading


def _gather(data: Any, transform: Callable[[Any], Any] | None, indices: Any) -> Any:
    """A batch. It is no method, so what is read keeps no loader alive."""
    batch = data.gather(indices)
    return batch if transform is None else transform(batch)


class _Reading:
    """What is read, or going to be, of an epoch.

    Each batch's call begins the next one: Python ends only after all that was submitted, and then
    submits no more.
    """

    def __init__(
        self,
        place: tuple[int, ...],
        parts: Sequence[Any],
        pool: ThreadPoolExecutor,
        threads: int,
        gather: Callable[[Any], Any],
    ) -> None:
        self.place = place
        self.futures: deque[tuple[int, Future[Any]]] = deque()
        self._parts, self._pool, self._gather = iter(parts), pool, gather
        self._wanted: deque[tuple[Any, Future[Any]]] = deque()
        self._threads, self._running = threads, 0
        self._lock = threading.Lock()

    def begin(self, count: int) -> None:
        """Begin to read so many batches more."""
        for part in itertools.islice(self._parts, count):
            future: Future[Any] = Future()
            self.futures.append((len(part), future))
            self._wanted.append((part, future))
            self._submit()

    def _submit(self) -> None:
        with self._lock:
            if not self._wanted or self._running == self._threads:
                return
            self._pool.submit(self._read, *self._wanted.popleft())
            self._running += 1

    def _read(self, part: Any, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._gather(part))
            except BaseException as error:
                future.set_exception(error)
                del future  # which has the error, and this the frame
        with self._lock:
            self._running -= 1
        with suppress(RuntimeError):  # Python ends
            self._submit()

    def take(self) -> tuple[int, Any]:
        """The next batch, and how many samples it has; another one is begun."""
        count, future = self.futures.popleft()
        batch = future.result()
        self.begin(1)
        return count, batch

    def cancel(self) -> None:
        """Read no more."""
        self._wanted.clear()
        while self.futures:
            self.futures.pop()[1].cancel()


class _InMemory:
    """An array, as a column."""

    def __init__(self, array: Any) -> None:
        if not hasattr(array, "dtype") or getattr(array, "ndim", 1) == 0:
            raise UsageError(
                f"{array!r:.40} is no array of samples; pass numpy.asarray of a list, or what has "
                "gather(indices)"
            )
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def gather(self, indices: Any) -> Any:
        return self._array[indices]
