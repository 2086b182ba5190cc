"""Works of all kinds in flight at once, submitted and waited for in any order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import needs, until

Started = tuple[Any, Callable[[Any], None]]
"""A work, and what says whether its result is right."""


def _equal(expected: Any) -> Callable[[Any], None]:
    def check(result: Any) -> None:
        assert np.array_equal(result, expected), (result, expected)

    return check


def _reduce(comm: Communicator, count: int, name: str | None) -> Started:
    work = comm.allreduce_async(np.full(count, comm.rank), ringdl.Sum, name)
    return work, _equal(np.full(count, comm.size * (comm.size - 1) // 2))


def _reduce_in_place(comm: Communicator, count: int, name: str | None) -> Started:
    x = np.full(count, comm.rank, np.float32)
    work = comm.allreduce_async_(x, ringdl.Max, name)

    def check(result: Any) -> None:
        assert result is x
        assert (x == comm.size - 1).all()

    return work, check


def _reduce_several(comm: Communicator, count: int, name: str | None) -> Started:
    xs = [np.full(count, comm.rank * i) for i in (1, 2)] + [np.ones(count, np.float16)]
    work = comm.grouped_allreduce_async_(xs, ringdl.Sum, name)

    def check(results: Any) -> None:
        for x, result, factor in zip(xs, results, (1, 2), strict=False):
            assert result is x
            assert (x == factor * comm.size * (comm.size - 1) // 2).all()
        assert (results[2] == comm.size).all()

    return work, check


def _reduce_rows(comm: Communicator, count: int, name: str | None) -> Started:
    x = np.arange(count * comm.size) + comm.rank
    mean = (np.arange(count * comm.size) * comm.size + sum(range(comm.size))) // comm.size
    return comm.reducescatter_async(x, name=name), _equal(mean[comm.rank * count :][:count])


def _broadcast(comm: Communicator, count: int, name: str | None) -> Started:
    root = count % comm.size
    return comm.broadcast_async(np.full(count, comm.rank), root, name), _equal([root] * count)


def _broadcast_in_place(comm: Communicator, count: int, name: str | None) -> Started:
    x = np.full(count, comm.rank)
    return comm.broadcast_async_(x, comm.size - 1, name), _equal([comm.size - 1] * count)


def _allgather(comm: Communicator, count: int, name: str | None) -> Started:
    x = np.full(count * comm.rank, comm.rank)
    return comm.allgather_async(x, name), _equal(np.repeat(ranks(comm), count * ranks(comm)))


def _alltoall(comm: Communicator, count: int, name: str | None) -> Started:
    splits = [count * (to + 1) for to in range(comm.size)]
    work = comm.alltoall_async(np.full(sum(splits), comm.rank), splits, name)
    mine = count * (comm.rank + 1)

    def check(result: Any) -> None:
        assert np.array_equal(result[0], np.repeat(ranks(comm), mine))
        assert result[1] == [mine] * comm.size

    return work, check


def _gather(comm: Communicator, count: int, name: str | None) -> Started:
    root = (count + 1) % comm.size
    work = comm.gather_async(np.full(count, comm.rank), root, name)
    return work, _equal(np.repeat(ranks(comm), count) if comm.rank == root else None)


def _scatter(comm: Communicator, count: int, name: str | None) -> Started:
    root = (count + 2) % comm.size
    x = np.repeat(ranks(comm), count) if comm.rank == root else np.zeros(0, int)
    return comm.scatter_async(x, root, name=name), _equal([comm.rank] * count)


def _send(comm: Communicator, count: int, name: str | None) -> Started:
    if comm.size == 1:
        return _barrier(comm, count, name)
    return comm.send_async(np.full(count, comm.rank), (comm.rank + 1) % comm.size, name), _equal(
        None
    )


def _receive(comm: Communicator, count: int, name: str | None) -> Started:
    if comm.size == 1:
        return _barrier(comm, count, name)
    source = (comm.rank - 1) % comm.size
    return comm.recv_async_(np.zeros(count, int), source, name), _equal([source] * count)


def _barrier(comm: Communicator, count: int, name: str | None) -> Started:
    return comm.barrier_async(name), _equal(None)


def ranks(comm: Communicator) -> Any:
    return np.arange(comm.size)


EXCHANGES = [_send, _receive]
COLLECTIVES = [
    *(_reduce, _reduce_in_place, _reduce_several, _reduce_rows, _broadcast, _broadcast_in_place),
    *(_allgather, _alltoall, _gather, _scatter, _barrier),
]


def run(starts: list[Callable[[], Started]], rng: np.random.Generator) -> None:
    """Wait for what was started in any order, and check."""
    works = [start() for start in starts]
    for i in rng.permutation(len(works)):
        work, check = works[i]
        check(work.wait())
        assert work.done()


def check_all_kinds_at_once(comm: Communicator) -> None:
    """Named works of all kinds and sizes: each rank submits and waits in an order of its own."""
    rng = np.random.default_rng([8, comm.rank])
    starts = []
    for count in (1, 40, 3000):
        for form in COLLECTIVES:
            name = f"{form.__name__} of {count}"
            starts.append(lambda form=form, n=count, name=name: form(comm, n, name))
        for form in EXCHANGES:  # the two ends use one name
            starts.append(lambda form=form, n=count: form(comm, n, f"message of {n}"))
    for _ in range(2):
        run([starts[i] for i in rng.permutation(len(starts))], rng)
    assert comm.stats()["works_in_flight"] == 0


def check_unnamed_kinds_at_once(comm: Communicator) -> None:
    """Unnamed works keep the order of their kind only; kinds are mixed differently on each rank."""
    rng = np.random.default_rng([9, comm.rank])
    forms = [_reduce, _reduce_rows, _broadcast, _allgather, _alltoall, _gather, _scatter, _barrier]
    forms += EXCHANGES if comm.size > 2 else []  # of two ranks, both messages have one pair
    left = {form: [50, 1, 2500, 7] for form in forms}
    starts = []
    while left:
        form = list(left)[rng.integers(len(left))]
        count = left[form].pop()
        starts.append(lambda form=form, n=count: form(comm, n, None))
        if not left[form]:
            del left[form]
    run(starts, rng)


@needs(ranks=2)
def check_dropped_works_of_all_kinds(comm: Communicator) -> None:
    """Nobody waits for them: arguments live until a work has ended, and no longer."""
    late = comm.size - 1
    if comm.rank == late:
        comm.barrier(name="all have looked")
    references = []
    for call in (
        lambda x: comm.reducescatter_async(x),
        lambda x: comm.allgather_async(x),
        lambda x: comm.alltoall_async(x),
        lambda x: comm.gather_async(x, late),
        lambda x: comm.broadcast_async_(x, late),
        lambda x: comm.grouped_allreduce_async_([x, np.ones(40_000)]),
        lambda x: comm.scatter_async(x, 0),
    ):
        x = np.ones(40_000 * comm.size)
        call(x)
        references.append(weakref.ref(x))
        del x
    gc.collect()
    if comm.rank != late:
        kept = [reference() is not None for reference in references]
        comm.barrier(name="all have looked")
        assert all(kept), f"let go of in flight: {kept}"
    assert until(lambda: comm.stats()["works_in_flight"] == 0)
    comm.barrier()
    gc.collect()
    assert all(reference() is None for reference in references), "kept after the end"
