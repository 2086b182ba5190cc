"""Many threads of each rank use one communicator at once."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator
from ringdl._work import GroupedWork, Work
from tests.ranks.support import needs

THREADS = 4
LENGTHS = (1, 300, 5000, 70_000)


def _run(*bodies: Callable[[], None]) -> None:
    """Run each in a thread of its own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check_threads_wait_for_each_others_works(comm: Communicator) -> None:
    """Each thread submits, in an order of its own, what another one waits for."""
    total = sum(range(1, comm.size + 1))
    queues: list[queue.Queue[ringdl.Work | None]] = [queue.Queue() for _ in range(THREADS)]

    def submit(thread: int) -> None:
        numbers = list(range(60))
        random.Random(10 * comm.rank + thread).shuffle(numbers)
        for number in numbers:
            array = np.full(LENGTHS[number % len(LENGTHS)], comm.rank + 1, np.float32)
            work = comm.allreduce_async_(array, ringdl.Sum, f"thread {thread}, {number}")
            queues[(thread + number) % THREADS].put(work)
        for waiter in queues:
            waiter.put(None)

    def wait(thread: int) -> None:
        ends = 0
        while ends < THREADS:
            work = queues[thread].get()
            if work is None:
                ends += 1
            else:
                assert (work.wait() == total).all()

    _run(
        *(lambda i=i: submit(i) for i in range(THREADS)),
        *(lambda i=i: wait(i) for i in range(THREADS)),
    )


def check_threads_use_the_same_names(comm: Communicator) -> None:
    """Which thread's array meets which is left open; each use of a name is matched once."""
    total = sum(range(1, comm.size + 1))

    def reduce(thread: int) -> None:
        order = random.Random(10 * comm.rank + thread)
        for number in range(80):
            array = np.full(LENGTHS[number % 3], comm.rank + 1, np.float32)
            name = f"shared, {number % 3}"
            if order.random() < 0.3:
                comm.allreduce_async_(array, ringdl.Sum, name)  # dropped: ends all the same
            else:
                assert (comm.allreduce_(array, ringdl.Sum, name) == total).all()

    _run(*(lambda i=i: reduce(i) for i in range(THREADS)))
    comm.barrier("all dropped works have been submitted")


def check_threads_do_different_things(comm: Communicator) -> None:
    buckets = ringdl.Buckets(
        [("w", (40_000,), "float32"), ("b", (10,), "float32")], op=ringdl.Sum, communicator=comm
    )
    total = sum(range(1, comm.size + 1))

    def train() -> None:
        for _ in range(30):
            for index, view in enumerate(buckets.views()):
                view[...] = comm.rank + 1
                buckets.ready(index)
            assert buckets.wait() == [True, True]
            assert all((view == total).all() for view in buckets.views())

    def reduce() -> None:
        for number in range(60):
            x = np.full(LENGTHS[number % len(LENGTHS)], comm.rank + 1)
            assert (comm.allreduce(x, ringdl.Sum, "reduced") == total).all()

    def gather() -> None:
        for number in range(60):
            rows = np.full((number % 7 + comm.rank, 2), comm.rank)
            assert len(comm.allgather(rows, "gathered")) == sum(
                number % 7 + rank for rank in range(comm.size)
            )

    def broadcast() -> None:
        for number in range(60):
            root = number % comm.size
            assert comm.broadcast_object(comm.rank, root, f"object, {number % 3}") == root
            comm.barrier("between")

    _run(train, reduce, gather, broadcast)


def _wait_in_threads(work: Work | GroupedWork) -> list[Any]:
    results: list[Any] = []
    _run(*[lambda: results.append(work.wait())] * THREADS)
    return results


@needs(ranks=2)
def check_threads_wait_for_the_same_work(comm: Communicator) -> None:
    """All get the same array: of a work that collects, and of a group of works."""
    size = comm.size
    x = np.arange(50_000.0) + comm.rank
    for _ in range(20):
        results = _wait_in_threads(comm.allgather_async(x))
        groups = _wait_in_threads(comm.grouped_allreduce_async([x, x[:3]], ringdl.Sum))
        assert all(result is results[0] for result in results)
        assert (results[0].reshape(size, -1) == x - comm.rank + np.arange(size)[:, None]).all()
        assert all(group is groups[0] for group in groups)
        expected = size * (x - comm.rank) + sum(range(size))
        assert all((part == expected[: len(part)]).all() for part in groups[0])
