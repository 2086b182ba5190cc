"""A call that one rank cannot make: it counts, the others hear of it at once, and all go on in
step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.support import expect, needs

SOON = 5.0


def go_on(comm: Communicator) -> None:
    """Unnamed calls of each kind are in step."""
    size = comm.size
    assert comm.allreduce(np.ones(2), ringdl.Sum).tolist() == [size, size]
    assert comm.allreduce(np.ones(30_000), ringdl.Sum).sum() == 30_000 * size
    assert comm.broadcast(np.full(2, comm.rank)).tolist() == [0, 0]
    assert comm.allgather(np.array([comm.rank])).tolist() == list(range(size))
    assert comm.alltoall(np.full(size, comm.rank)).tolist() == list(range(size))
    assert comm.reducescatter(np.ones(size), ringdl.Sum).tolist() == [size]
    comm.barrier()


def one_refuses(
    comm: Communicator, call: Callable[[Any], Any], right: Any, wrong: Any, label: str, why: str
) -> None:
    """Each rank in turn passes what is wrong."""
    for refusing in range(comm.size):
        if comm.rank == refusing:
            with expect(ringdl.UsageError, why, within=SOON):
                call(wrong)
        else:
            told = f"rank {refusing} cannot make "
            with expect(ringdl.MismatchError, told, label, why, within=SOON):
                call(right)
    go_on(comm)


@needs(ranks=2)
def check_no_arrays(comm: Communicator) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "unnamed allreduce": comm.allreduce,
        "allreduce 'x'": lambda x: comm.allreduce_(x, name="x"),
        "unnamed broadcast": comm.broadcast,
        "unnamed allgather": comm.allgather,
        "unnamed alltoall": lambda x: comm.alltoall_async(x).wait(),
        "reducescatter 'x'": lambda x: comm.reducescatter(x, name="x"),
        "unnamed gather": comm.gather,
        "unnamed scatter": comm.scatter,
    }
    for label, call in calls.items():
        for count in (2, 20_000):
            x = np.ones(comm.size * count)
            one_refuses(comm, call, x, [1.0, 2.0], label, "not list")


@needs(ranks=2)
def check_other_reasons(comm: Communicator) -> None:
    read_only = np.ones(4)
    read_only.flags.writeable = False
    one_refuses(comm, comm.allreduce_, np.ones(4), read_only, "unnamed allreduce", "read-only")
    x = np.ones(comm.size)
    for splits in ([1.0] * comm.size, [2] * comm.size, "all", 3, [-1] * comm.size):
        one_refuses(
            comm,
            lambda splits: comm.alltoall(x, splits),
            [1] * comm.size,
            splits,
            "unnamed alltoall",
            "splits",
        )
    for root in (comm.size, None, "0"):
        one_refuses(
            comm, lambda root: comm.broadcast(x, root), 0, root, "unnamed broadcast", "root"
        )
    for op in ("sum", None, 1):
        one_refuses(
            comm, lambda op: comm.allreduce(x, op), ringdl.Sum, op, "unnamed allreduce", "op is"
        )
    one_refuses(comm, lambda name: comm.barrier(name), None, 3, "unnamed barrier", "name is 3")


@needs(ranks=2)
def check_groups_of_arrays(comm: Communicator) -> None:
    """Two small ones travel as one, the large one alone."""
    right = [np.ones(3), np.ones(40_000), np.ones(5)]
    read_only = [np.ones(3), np.ones(40_000), np.ones(5)]
    read_only[1].flags.writeable = False
    for name in (None, "group"):
        for wrong, why in (([np.ones(3), right[1], [1]], "not list"), (right, "op is")):
            one_refuses(
                comm,
                lambda xs, name=name, why=why: comm.grouped_allreduce(
                    xs[0], "sum" if why == "op is" and xs[1] else ringdl.Sum, name
                ),
                (right, False),
                (wrong, True),
                "allreduce",
                why,
            )
        assert comm.grouped_allreduce(right, ringdl.Sum, name)[2][0] == comm.size


@needs(ranks=2)
def check_options_of_groups(comm: Communicator) -> None:
    """All parts count as made, though these are of several dtypes; and nothing is reduced."""
    group = [np.ones(3, np.int64), np.ones(3, np.float32), np.ones(3)]
    for name in (None, "group"):
        one_refuses(
            comm,
            lambda how, name=name: comm.grouped_allreduce_(
                group, ringdl.Sum, name, compression=how
            ),
            None,
            "bad",
            "allreduce",
            "compression is 'bad'",
        )
    with expect(ringdl.UsageError, "compression is for sums and averages"):
        comm.grouped_allreduce_(group, ringdl.Max, compression="float16")
    assert all((each == 1).all() for each in group)
    go_on(comm)


@needs(ranks=2)
def check_errors_that_are_not_ours(comm: Communicator) -> None:
    """Of arguments that raise something else than ringdl does."""

    def raises() -> Any:
        yield ("a", (3,), "float32")
        raise ZeroDivisionError

    is_first = comm.rank == 0
    other = ringdl.MismatchError
    with expect(TypeError if is_first else other, "'str' object", within=SOON):
        comm.split("a" if is_first else 0)  # type: ignore[arg-type]
    with expect(ringdl.UsageError if is_first else other, "of 64 bits", within=SOON):
        comm.split(2951 << 64 if is_first else 0)
    with expect(Exception, "ZeroDivisionError", within=SOON):
        ringdl.Buckets(raises() if is_first else [("a", (3,), "float32")], communicator=comm)
    with expect(ZeroDivisionError if is_first else other, within=SOON):
        comm.grouped_allreduce((1 / 0 for _ in "a") if is_first else [np.ones(1)])  # type: ignore[arg-type]
    go_on(comm)


@needs(ranks=2)
def check_all_refuse(comm: Communicator) -> None:
    """As where a script tries, and all ranks go on with something else."""
    for call in (comm.allreduce, comm.allgather, comm.broadcast):
        for name in (None, "x"):
            with expect(ringdl.UsageError, "not list", within=SOON):
                call([1], name=name)
            assert call(np.ones(1), name=name).sum() > 0
    go_on(comm)
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2)
def check_timeouts(comm: Communicator) -> None:
    """They are looked at before anything is sent."""
    x = np.ones(comm.size)
    calls: dict[str, Callable[[Any], Any]] = {
        "unnamed allreduce": lambda timeout: comm.allreduce(x, timeout=timeout),
        "allreduce 'x (1 of 1)'": lambda timeout: comm.grouped_allreduce(
            [x], name="x", timeout=timeout
        ),
        "unnamed broadcast": lambda timeout: comm.broadcast(x, timeout=timeout),
        "unnamed allgather": lambda timeout: comm.allgather(x, timeout=timeout),
        "unnamed alltoall": lambda timeout: comm.alltoall(x, timeout=timeout),
        "unnamed reducescatter": lambda timeout: comm.reducescatter(x, timeout=timeout),
        "unnamed gather": lambda timeout: comm.gather(x, timeout=timeout),
        "unnamed scatter": lambda timeout: comm.scatter(x, timeout=timeout),
        "unnamed barrier": lambda timeout: comm.barrier(timeout=timeout),
    }
    for label, call in calls.items():
        for timeout in ("5", -1, float("nan"), [1]):
            one_refuses(comm, call, 5, timeout, label, "pass a number of seconds")
    if comm.rank == 0:
        with expect(ringdl.UsageError, "timeout is '5'", within=SOON):
            comm.send(x, 1, timeout="5")  # type: ignore[arg-type]
    if comm.rank == 1:
        with expect(ringdl.MismatchError, "rank 0 cannot make", within=SOON):
            comm.recv_(x, 0)
    work = comm.allreduce_async(x, ringdl.Sum)
    with expect(ringdl.UsageError, "timeout is '5'"):
        work.wait("5")  # type: ignore[arg-type]
    assert work.wait(5).tolist() == [comm.size] * comm.size


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    if comm.rank == 0:
        with expect(ringdl.UsageError, "not list", within=SOON):
            comm.send([1], 1)
        comm.send(np.ones(2), 1)
    if comm.rank == 1:
        with expect(ringdl.MismatchError, "rank 0 cannot make", "not list", within=SOON):
            comm.recv_(np.ones(2), 0)
        assert comm.recv_(np.zeros(2), 0).tolist() == [1, 1]
    go_on(comm)


@needs(ranks=2)
def check_objects(comm: Communicator) -> None:
    lock = __import__("threading").Lock()
    last = comm.size - 1
    error = TypeError if comm.rank == last else ringdl.MismatchError
    with expect(error, "cannot pickle", within=SOON):
        comm.broadcast_object(lock, last)
    with expect(error, "cannot pickle", within=SOON):
        comm.allgather_object(lock if comm.rank == last else 1)
    assert comm.broadcast_object(comm.rank) == 0
    go_on(comm)


@needs(ranks=3)
def check_within_a_group(comm: Communicator) -> None:
    pair = comm.group([0, 1])
    if pair is not None:
        one_refuses(pair, pair.allreduce, np.ones(3), [1], "unnamed allreduce", "not list")
    go_on(comm)
