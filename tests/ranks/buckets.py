"""Gradient buckets: agreement, averages, missing gradients, any order, overlap, rounds apart."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Buckets, Communicator
from tests.ranks.support import assert_same_bits, expect, needs

SPECS: list[tuple[Any, ...]] = [
    ("embed", (40, 16), "float32"),
    ("layer.weight", (16, 16), "bfloat16"),
    ("layer.bias", (16,), "float16"),
    ("norm", (), "float64"),
    ("conv", (4, 3, 5, 2), "float32", (30, 1, 6, 3)),  # channels last
    ("nothing", (0, 7), "float32"),
    ("head", (16, 33), "float64", (1, 16)),
    ("last", (7,), "bfloat16"),
]


def make(comm: Communicator, **options: Any) -> Buckets:
    return Buckets(SPECS, communicator=comm, **options)


def integers(rank: int, round_number: int, index: int) -> np.ndarray[Any, Any]:
    """Small integers, so that sums are exact in every dtype; averages round once."""
    shape = SPECS[index][1]
    values = np.arange(int(np.prod(shape))).reshape(shape) + 3 * rank + round_number + index
    return values % 7 - 3


def total(size: int, round_number: int, index: int, missing: tuple[int, ...] = ()) -> Any:
    zero = np.zeros(SPECS[index][1], np.int64)
    present = [rank for rank in range(size) if rank not in missing]
    return sum((integers(rank, round_number, index) for rank in present), zero)


def check_views(comm: Communicator) -> None:
    """Shape, dtype, strides as asked for; zero at first; the same memory always."""
    buckets = make(comm)
    views = buckets.views()
    for view, (_, shape, dtype, *strides) in zip(views, SPECS, strict=True):
        assert view.shape == shape
        assert view.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert view.flags.writeable
        assert not view.astype(np.float32).any()
        if strides:
            assert tuple(s // view.itemsize for s in view.strides) == strides[0]
    views[0][...] = 5
    assert (buckets.views()[0] == 5).all()
    planned = [index for bucket in buckets.plan for index in bucket]
    assert sorted(planned) == list(range(len(SPECS)))
    for bucket in buckets.plan:
        assert bucket == sorted(bucket, reverse=True), "from the last to the first"
        assert len({SPECS[index][2] for index in bucket}) == 1
    view = views[0]
    del buckets, views
    assert (view == 5).all(), "a view keeps its memory alive"


def check_hundreds_of_rounds(comm: Communicator) -> None:
    """In a random order on each rank, each round; the same bits as NumPy, to the last."""
    rng = np.random.default_rng([3, comm.rank])
    for op in (ringdl.Average, ringdl.Sum):
        buckets = make(comm, bucket_bytes=400, first_bucket_bytes=100, op=op)
        assert len(buckets.plan) > 5
        views = buckets.views()
        for round_number in range(150):
            for index in rng.permutation(len(SPECS)):
                views[index][...] = integers(comm.rank, round_number, index)
                buckets.ready(int(index))
            if rng.random() < 0.05:
                time.sleep(0.002)
            assert buckets.wait() == [True] * len(SPECS)
            for index, view in enumerate(views):
                expected = total(comm.size, round_number, index).astype(np.float64)
                if op == ringdl.Average:
                    wide = np.float64 if view.dtype == np.float64 else np.float32
                    expected = expected.astype(wide) / wide(comm.size)
                name = SPECS[index][0]
                assert np.array_equal(view, expected.astype(view.dtype)), (name, round_number)
        assert_same_bits(comm, *views)


def check_missing_gradients(comm: Communicator) -> None:
    """Missing on some ranks: zeros, and produced. Missing on all: not produced."""
    size = comm.size
    for bucket_bytes in (1, 1 << 20):
        buckets = make(
            comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes, op=ringdl.Sum
        )
        views = buckets.views()
        for round_number in range(6):
            missing = {
                index: tuple(r for r in range(size) if (r * 5 + index * 3 + round_number) % 4 == 0)
                for index in range(len(SPECS))
            }
            missing[round_number] = tuple(range(size))
            if round_number == 5:
                missing = dict.fromkeys(missing, tuple(range(size)))
            for index in range(len(SPECS)):
                views[index][...] = integers(comm.rank, round_number, index)  # stale if missing
                if comm.rank not in missing[index]:
                    buckets.ready(index)
            produced = buckets.wait()
            assert produced == [len(missing[i]) < size for i in range(len(SPECS))]
            for index, view in enumerate(views):
                expected = total(size, round_number, index, missing[index])
                assert np.array_equal(view, expected.astype(view.dtype)), SPECS[index][0]


def check_ready_twice(comm: Communicator) -> None:
    buckets = make(comm)
    buckets.ready(2)
    with expect(ringdl.UsageError, "'layer.bias'", "already"):
        buckets.ready(2)
    for wrong in (-1, len(SPECS)):
        with expect(ringdl.UsageError, f"ready({wrong})"):
            buckets.ready(wrong)
    assert buckets.wait() == [index == 2 for index in range(len(SPECS))]
    buckets.ready(2)
    buckets.wait()


def check_what_is_not_finite_is_counted(comm: Communicator) -> None:
    """On each rank what it has produced itself, of every dtype."""
    specs = [(name, (70_001,), name) for name in ("float64", "float32", "float16", "bfloat16")]
    buckets = ringdl.Buckets(specs, 100_000, communicator=comm)
    assert buckets.nonfinite == 0
    buckets.count_nonfinite()
    for turn in range(3):
        for index, view in enumerate(buckets.views()):
            view[...] = 1
            if comm.rank == 0 and turn == 1:
                view[: 3 + index] = [np.nan, np.inf, -np.inf, *[np.nan] * index]
            buckets.ready(index)
        assert buckets.wait() == [True] * 4
        assert buckets.nonfinite == (3 + 4 + 5 + 6 if comm.rank == 0 and turn == 1 else 0)
        assert all(
            np.isfinite(view[5]) == (turn != 1 or i < 3) for i, view in enumerate(buckets.views())
        )


@needs(ranks=2)
def check_ranks_disagree(comm: Communicator) -> None:
    """MismatchError on all ranks; it names the first difference and who differs."""
    other: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []

    def change(index: int, *spec: Any, texts: tuple[str, ...]) -> None:
        other.append(("specs", {"specs": [*SPECS[:index], spec, *SPECS[index + 1 :]]}, texts))

    change(3, "norm2", (), "float64", texts=("name of gradient 3", '"norm2"', '"norm"'))
    change(0, "embed", (16, 40), "float32", texts=("shape of gradient 0", "'embed'", "[16, 40]"))
    change(6, "head", (16, 33), "float32", (1, 16), texts=("dtype of gradient 6", '"float32"'))
    change(4, "conv", (4, 3, 5, 2), "float32", texts=("strides of gradient 4", "'conv'"))
    other.append(("order", {"specs": SPECS[::-1]}, ("name of gradient 0", '"last"', '"embed"')))
    other.append(("fewer", {"specs": SPECS[:-1]}, ("name of gradient 7", "nothing")))
    other.append(("bytes", {"bucket_bytes": 999}, ("bucket_bytes", "999")))
    other.append(("first", {"first_bucket_bytes": 9}, ("first_bucket_bytes is",)))
    other.append(("op", {"op": ringdl.Sum}, ("op is", '"Sum"', '"Average"')))
    for what, options, texts in other:
        for wrong in range(comm.size):
            chosen: dict[str, Any] = {"specs": SPECS}
            if comm.rank == wrong:
                chosen |= options
            try:
                named = (f"rank {wrong}",) if comm.size > 2 else ("rank 0", "rank 1")
                with expect(ringdl.MismatchError, *texts, *named, within=5.0):
                    Buckets(communicator=comm, **chosen)
            except AssertionError as error:
                error.add_note(f"{what}, wrong on rank {wrong}")
                raise
    buckets = make(comm)
    buckets.ready(0)
    assert buckets.wait()[0]


@needs(ranks=2)
def check_one_rank_cannot(comm: Communicator) -> None:
    """A usage error on one rank is heard of on all."""
    for wrong in range(comm.size):
        dtype = "int32" if comm.rank == wrong else "float32"
        with expect(ringdl.UsageError, f"rank {wrong}", "int32", within=5.0):
            Buckets([("a", (3,), dtype)], communicator=comm)
    comm.barrier()


@needs(ranks=2)
def check_overlap(comm: Communicator) -> None:
    """What ready() has started completes while no rank calls anything."""
    buckets = Buckets(
        [("rest", (100,), "float32"), ("early", (500_000,), "float32")],
        bucket_bytes=1000,
        first_bucket_bytes=1000,
        communicator=comm,
        op=ringdl.Sum,
    )
    assert buckets.plan == [[1], [0]]
    view = buckets.views()[1]
    expected = comm.size * (comm.size + 1) // 2  # which no rank has from the start
    for doing in ("sleep", "compute", "sleep"):
        view[...] = comm.rank + 1
        comm.barrier()
        buckets.ready(1)
        deadline = time.monotonic() + 5.0
        while doing == "compute" and not (view == expected).all():
            assert time.monotonic() < deadline, "nothing moved while ranks compute"
        if doing == "sleep":
            time.sleep(0.3)
        assert (view == expected).all(), f"nothing moved while ranks {doing}"
        comm.barrier()
        assert buckets.wait() == [False, True]


@needs(ranks=2, processes=True)
def check_small_rounds_let_the_progress_thread_sleep(comm: Communicator) -> None:
    """Buckets that the ranks' own calls reduce at once do not wake it one by one.

    Each wake-up takes the core from the thread that launches. If ranks share cores there are works
    for it to move; as others may take a core at any time, one turn of ten has to be right.
    """
    if comm.size > 2 or os.cpu_count() == 1 or len(set(comm.memory_hosts())) > 1:
        return
    specs = [(f"w{index}", (1000,), "float32") for index in range(20)]
    buckets = Buckets(specs, bucket_bytes=4096, communicator=comm)

    def switches_of_others() -> int:
        this = str(threading.get_native_id())
        tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != this]
        texts = [(task / "status").read_text() for task in tasks]
        return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)

    too_many: list[int] = []  # on the rank with most
    while not too_many or (too_many[-1] > 0 and len(too_many) < 10):
        begin, before = time.monotonic(), switches_of_others()
        for _ in range(1000):
            for index in range(len(specs)):
                buckets.ready(index)
            buckets.wait()
        allowed = 150 + int((time.monotonic() - begin) / 500e-6)
        most = comm.allreduce(np.array([switches_of_others() - before - allowed]), ringdl.Max)
        too_many.append(int(most[0]))
    assert too_many[-1] <= 0, f"switches more than allowed, in 20,000 launches: {too_many}"


@needs(ranks=2)
def check_rank_ahead(comm: Communicator) -> None:
    """A rank may launch its next round while others have not waited for theirs."""
    buckets = Buckets(
        [("w", (3000,), "float64"), ("b", (3,), "float64")],
        bucket_bytes=1,
        first_bucket_bytes=1,
        communicator=comm,
        op=ringdl.Sum,
    )
    weight, bias = buckets.views()
    late = comm.size - 1
    for round_number in range(40):
        weight[...] = comm.rank + round_number
        bias[...] = 2 * comm.rank
        buckets.ready(1)
        buckets.ready(0)
        if comm.rank == late and round_number % 8 == 0:
            time.sleep(0.02)
        buckets.wait()
        ranks = comm.size * (comm.size - 1) // 2
        assert (weight == ranks + comm.size * round_number).all(), round_number
        assert (bias == 2 * ranks).all()


@needs(ranks=2)
def check_stalled_round(comm: Communicator) -> None:
    """A wait that times out names the rank that has not arrived; the round goes on."""
    late = comm.size - 1
    buckets = make(comm, op=ringdl.Sum)
    views = buckets.views()
    for index, view in enumerate(views):
        view[...] = integers(comm.rank, 0, index)
    if comm.rank == late:
        time.sleep(1.5)
    for index in range(1, len(views)):
        buckets.ready(index)
    if comm.rank != late:
        with expect(ringdl.StallError, f"rank {late} has not arrived", "gradient bucket"):
            buckets.wait(timeout=0.6)
        with expect(ringdl.UsageError, "too late"):
            buckets.ready(0)
    assert buckets.wait() == [False] + [True] * (len(views) - 1)
    for index in range(1, len(views)):
        expected = total(comm.size, 0, index).astype(views[index].dtype)
        assert np.array_equal(views[index], expected)


def check_buckets_side_by_side(comm: Communicator) -> None:
    """Two models train in turn; collectives run between, and dropped buckets leave nothing."""
    for _ in range(5):
        one, two = make(comm, op=ringdl.Sum), make(comm, op=ringdl.Sum)
        for round_number in range(3):
            for index in range(len(SPECS)):
                one.views()[index][...] = integers(comm.rank, round_number, index)
                two.views()[index][...] = 1
                one.ready(index)
            assert comm.allreduce(np.ones(3000), ringdl.Sum)[0] == comm.size
            two.wait()
            one.wait()
            for index, view in enumerate(one.views()):
                expected = total(comm.size, round_number, index)
                assert np.array_equal(view, expected.astype(view.dtype))
                assert not two.views()[index].astype(np.float32).any()
    del one, two
    comm.barrier()
    assert comm.stats()["works_in_flight"] == 0
