"""Ranks that disagree on the other collectives, and in groups: an error on every rank of the group,
soon, saying what and who; then all goes on, and other groups have not noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.in_flight import COLLECTIVES, EXCHANGES, run
from tests.ranks.support import expect, needs

SOON = 5.0

Fields = dict[str, Callable[[bool], Any]]
"""By what differs: the call, on the rank that is wrong or on the others."""


def calls(comm: Communicator, count: int) -> dict[str, Fields]:
    """Every kind, with every field that its ranks must agree on."""
    rows = 2 * comm.size

    def ones(wrong: bool) -> Any:
        return np.ones((rows, count + 1) if wrong else (rows, count))

    def flat(wrong: bool) -> Any:
        return np.ones(rows * count if wrong else (rows, count))

    def typed(wrong: bool) -> Any:
        return np.ones((rows, count), np.int64 if wrong else np.float64)

    shapes = {"shape (": ones, "shape": flat, "dtype": typed}

    def of(call: Callable[..., Any]) -> Fields:
        return {field: lambda w, make=make: call(make(w)) for field, make in shapes.items()}

    x = np.ones((rows, count))
    return {
        "reducescatter": of(lambda x: comm.reducescatter(x, name="x"))
        | {
            "reduction": lambda w: comm.reducescatter(x, ringdl.Max if w else ringdl.Sum, "x"),
            "rows": lambda w: comm.reducescatter(np.ones((rows + w, count)), name="x"),
        },
        "alltoall": of(lambda x: comm.alltoall(x, name="x")),
        "gather": of(lambda x: comm.gather(x, 1, "x"))
        | {"root": lambda w: comm.gather(x, int(w), "x")},
        "scatter": of(lambda x: comm.scatter(x, 0, name="x"))
        | {"root": lambda w: comm.scatter(x, int(w), name="x")},
        "allgather": of(lambda x: comm.allgather(x, "x")),
        "broadcast": {"root": lambda w: comm.broadcast(x, int(w), "x")},
        "allreduce": {
            "algorithm": lambda w: comm.allreduce(
                x[:, :4], name="x", algorithm="ring" if w else None
            ),
            "reduction": lambda w: comm.grouped_allreduce(
                [x], ringdl.Min if w else ringdl.Max, "x"
            ),
        },
    }


def all_disagree(comm: Communicator, count: int) -> None:
    """Each kind and field, with the first and the last rank in the wrong."""
    engine_ranks = comm.allgather(np.array(comm._engine.rank)).tolist()
    for wrong in (0, comm.size - 1):
        for kind, fields in calls(comm, count).items():
            for field, call in fields.items():
                texts = ("shape" if field == "rows" else field, f"rank {engine_ranks[wrong]}")
                name = "'x (1 of 1)'" if (kind, field) == ("allreduce", "reduction") else "'x'"
                try:
                    with expect(ringdl.MismatchError, *texts, f"{kind} {name}", within=SOON):
                        call(comm.rank == wrong)
                except AssertionError as error:
                    error.add_note(f"{kind}, {field}, rank {wrong} of {comm.size}")
                    raise
                call(False)  # the next use is well


@needs(ranks=2)
def check_every_kind_and_field(comm: Communicator) -> None:
    for count in (4, 5000):
        all_disagree(comm, count)
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2)
def check_unnamed_kinds(comm: Communicator) -> None:
    for wrong in range(comm.size):
        x = np.ones((comm.size, 5 if comm.rank == wrong else 4))
        for call in (comm.reducescatter, comm.alltoall, comm.gather, comm.scatter):
            for _ in range(2):
                with expect(ringdl.MismatchError, "shape", f"rank {wrong}", "unnamed", within=SOON):
                    call(x)
            call(np.ones((comm.size, 3)))


@needs(ranks=2)
def check_kinds_differ(comm: Communicator) -> None:
    last = comm.size - 1
    x = np.ones((comm.size, 700))
    for kind, call in {
        "reducescatter": lambda: comm.reducescatter(x, name="x"),
        "alltoall": lambda: comm.alltoall(x, name="x"),
        "gather": lambda: comm.gather(x, 0, "x"),
        "scatter": lambda: comm.scatter(x, 0, name="x"),
    }.items():
        with expect(ringdl.MismatchError, "kind", kind, "allgather", f"rank {last}", within=SOON):
            comm.allgather(x, "x") if comm.rank == last else call()
        call()
        with expect(ringdl.MismatchError, "kind", kind, "barrier", "rank 0", within=SOON):
            comm.barrier("x") if comm.rank == 0 else call()
        call()


@needs(ranks=2)
def check_messages(comm: Communicator) -> None:
    """Sender and receiver disagree: on both; another pair, and other messages, are well."""
    rank, last = comm.rank, comm.size - 1
    for count in (4, 9000):
        beside = np.ones(count)
        if rank == 0:
            healthy = comm.send_async(beside, last, "healthy")
        elif rank == last:
            healthy = comm.recv_async_(beside, 0, "healthy")
        for field, theirs in {
            "shape": np.ones(count + 1),
            "shape (": np.ones((2, count // 2)),
            "dtype": np.ones(count, np.float32),
        }.items():
            if rank in (0, last):
                with expect(ringdl.MismatchError, field, "message 'm' from rank 0", within=SOON):
                    comm.send(beside, last, "m") if rank == 0 else comm.recv_(theirs, 0, "m")
        if rank == 0:
            comm.send(np.full(count, 7.0), last, "m")
            healthy.wait()
        elif rank == last:
            assert (comm.recv_(np.ones(count), 0, "m") == 7).all()
            healthy.wait()
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=3)
def check_in_groups(comm: Communicator) -> None:
    """Two groups at once, one in the wrong all the time, the other one well, and works of all."""
    sick, well = comm.group(range(1, comm.size)), comm.split(int(comm.rank > 0))
    everybody = comm.group(range(comm.size)[::-1])
    rng = np.random.default_rng([12, comm.rank])
    large = [np.full(70_000, comm.rank, np.float32) for _ in range(3)]
    works = [everybody.allreduce_async_(x, ringdl.Sum, f"all {i}") for i, x in enumerate(large)]
    if sick is not None:
        all_disagree(sick, 600)
    starts = [
        lambda f=form, n=count: f(well, n, "x" if f not in EXCHANGES else "m")
        for count in (2, 900)
        for form in ([COLLECTIVES[0]] if well.size < 2 else [COLLECTIVES[0], *EXCHANGES])
    ]
    run(starts, rng)
    for work in works:
        assert (work.wait() == comm.size * (comm.size - 1) // 2).all()
    comm.barrier()
    assert comm.stats()["parked_keys"] == 0


@needs(ranks=2)
def check_grouped(comm: Communicator) -> None:
    """Another number of arrays, and one of another dtype."""
    for wrong in {0, comm.size - 1}:
        here = comm.rank == wrong
        with expect(ringdl.MismatchError, "shape", f"rank {wrong}", within=SOON):
            comm.grouped_allreduce([np.ones(3)] * (4 if here else 3))
        with expect(ringdl.MismatchError, "dtype", f"rank {wrong}", within=SOON):
            comm.grouped_allreduce([np.ones(3, "float32" if here else "float64")] * 3, name="g")
        assert comm.grouped_allreduce([np.ones(3)] * 3, ringdl.Sum, "g")[2][0] == comm.size
        assert comm.grouped_allreduce([np.ones(3)] * 3, ringdl.Sum)[2][0] == comm.size


@needs(ranks=2, seconds=True)
def check_operations_of_the_users_own(comm: Communicator) -> None:
    """Two functions of one name are told apart by their code."""
    larger = ringdl.custom_op(lambda a, b: a if a > b else b, "mine")
    other = ringdl.custom_op(lambda a, b: a if a < b else b, "mine")
    x = np.full(4000, comm.rank)
    larger.operation(ringdl._engine.DType.int64), other.operation(ringdl._engine.DType.int64)
    comm.barrier()  # compiled
    for wrong in (0, comm.size - 1):
        op = other if comm.rank == wrong else larger
        for call in (comm.allreduce, comm.reducescatter):
            with expect(
                ringdl.MismatchError, "reduction 'mine' (code", f"rank {wrong}", within=SOON
            ):
                call(x, op, "x")
            mixed = ringdl.Max if comm.rank == wrong else larger
            with expect(ringdl.MismatchError, "reduction", "max", "'mine'", within=SOON):
                call(x, mixed, "x")
            assert (call(x, larger, "x") == comm.size - 1).all()
