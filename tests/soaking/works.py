"""Works of random kinds, dtypes, sizes and names, on all ranks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import ringdl

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
SHAPES = {"w": (300, 200), "b": (200,), "v": (70_000,), "c": (7,)}


class Works:
    """Of one life of a communicator. `done`: how many works there were."""

    def __init__(self, random: np.random.Generator, folder: Path) -> None:
        self.random, self.folder = random, folder
        self.rank, self.size = ringdl.rank(), ringdl.size()
        specs = [(name, shape, "float32") for name, shape in SHAPES.items()]
        self.buckets = ringdl.Buckets(specs, bucket_bytes=200_000, op=ringdl.Sum)
        self.done = 0

    def length(self, largest: int = 1 << 19) -> int:
        return int(np.exp(self.random.uniform(0, np.log(largest))))

    def name(self) -> str | None:
        number = int(self.random.integers(0, 60))
        return f"name {number}" if number < 30 else None

    def array(self, length: int) -> np.ndarray:
        return np.full(length, 1 + self.rank % 3, self.random.choice(DTYPES))

    def total(self) -> int:
        return sum(1 + rank % 3 for rank in range(self.size))

    def check_sum(self, result: np.ndarray) -> None:
        assert (result == result.dtype.type(self.total())).all(), (result, self.total())
        self.done += 1

    def allreduce(self) -> None:
        self.check_sum(ringdl.allreduce(self.array(self.length()), ringdl.Sum, self.name()))

    def small_works(self) -> None:
        for _ in range(100):
            self.check_sum(ringdl.allreduce(self.array(self.length(8)), ringdl.Sum, self.name()))

    def flight(self) -> None:
        """Named works in another order on each rank; some are never waited for."""
        arrays = [self.array(self.length(1 << 16)) for _ in range(self.random.integers(2, 40))]
        is_kept = self.random.random(len(arrays)) < 0.7
        order = np.random.default_rng(self.done + self.rank).permutation(len(arrays))
        works = {i: ringdl.allreduce_async_(arrays[i], ringdl.Sum, f"flight {i}") for i in order}
        for i in range(len(arrays)):
            if not is_kept[i]:
                del works[i]
        for work in works.values():
            self.check_sum(work.wait())
        self.done += len(arrays) - len(works)

    def gather(self) -> None:
        length = self.length(1 << 14)
        parts = ringdl.allgather(np.full((length + self.rank, 3), self.rank), self.name())
        ends = np.cumsum([length + rank for rank in range(self.size)])
        assert len(parts) == ends[-1]
        assert (parts[ends - 1, 0] == np.arange(self.size)).all()
        self.done += 1

    def broadcast(self) -> None:
        root = int(self.random.integers(self.size))
        x = ringdl.broadcast(np.full(self.length(), self.rank, np.int32), root, self.name())
        assert (x == root).all()
        thing = {"bytes": bytes(self.length(100_000)), "root": root}
        assert ringdl.broadcast_object(thing if self.rank == root else None, root) == thing
        ringdl.barrier(self.name())
        self.done += 4

    def bucket_rounds(self) -> None:
        for _ in range(5):
            missing = int(self.random.integers(-3, len(SHAPES)))
            missing_everywhere = self.random.random() < 0.5
            for i, view in enumerate(self.buckets.views()):
                if i != missing or (self.rank > 0 and not missing_everywhere):
                    view[...] = 1 + self.rank % 3
                    self.buckets.ready(i)
            produced = self.buckets.wait()
            for i, view in enumerate(self.buckets.views()):
                expected = self.total() - (i == missing)
                if i == missing and (missing_everywhere or self.size == 1):
                    expected = 0
                assert produced[i] == (expected > 0), (produced, missing)
                assert (view == expected).all(), (i, missing, view)
            self.done += 2

    def exchange(self) -> None:
        """Rows of each rank for each other one, by each call that moves them."""
        length, ranks = self.length(1 << 12), range(self.size)
        x = np.full((length * self.size + self.size, 2), 1 + self.rank % 3)
        mine = ringdl.reducescatter(x, ringdl.Sum, self.name())
        assert mine.shape == (length + 1, 2)
        self.check_sum(mine)
        splits = [length + (self.rank + to) % 3 for to in ranks]
        got, counts = ringdl.alltoall(np.full((sum(splits), 2), self.rank), splits)
        assert counts == [length + (rank + self.rank) % 3 for rank in ranks]
        assert (got[:, 0] == np.repeat(ranks, counts)).all()
        root = int(self.random.integers(self.size))
        gathered = ringdl.gather(np.full(length, self.rank), root)
        assert gathered is None or (gathered == np.repeat(ranks, length)).all()
        dealt = ringdl.scatter(np.repeat(ranks, length)[: None if self.rank == root else 0], root)
        assert (dealt == self.rank).all()
        self.done += 3

    def messages(self) -> None:
        """Around the ring; the receiver may not have come when they are sent."""
        sent = [self.array(self.length(1 << 16)) for _ in range(3)]
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = [ringdl.send_async(x, to, f"message {i}") for i, x in enumerate(sent)]
        for i, x in reversed([*enumerate(sent)]):
            assert (ringdl.recv_(np.zeros_like(x), source, f"message {i}") == 1 + source % 3).all()
        for work in works:
            work.wait()
        self.done += len(sent)

    def groups(self) -> None:
        """Several arrays as one work, compressed ones, operations of other kinds, other ranks."""
        lengths = [self.length(1 << 17) for _ in range(self.random.integers(1, 20))]
        work = ringdl.grouped_allreduce_async_([self.array(n) for n in lengths], ringdl.Sum)
        for each in work.wait():
            self.check_sum(each)
        x = np.full(self.length(), 1 + self.rank % 3, np.float32)
        self.check_sum(ringdl.allreduce(x, ringdl.Sum, compression="bfloat16"))
        alike = np.full(self.length(1 << 16), 3.0)
        np.testing.assert_allclose(ringdl.allreduce(alike, ringdl.Adasum), alike)
        algorithm = self.random.choice(["ring", "doubling", "mpi"])
        self.check_sum(ringdl.allreduce(x[:100], ringdl.Sum, algorithm=algorithm))
        comm = ringdl.get_communicator()
        for ranks in (comm.split(self.rank % 2, -self.rank), comm.group([*range(self.size)])):
            assert ranks is not None
            total = sum(1 + rank % 3 for rank in ranks._numbers())
            assert (ranks.allreduce(self.array(self.length()), ringdl.Sum) == total).all()
        self.done += 6

    def join(self) -> None:
        """Ranks leave, one after the other."""
        length = self.length(1 << 12)
        for number in range(1 + self.rank % 3):
            live = sum(rank % 3 >= number for rank in range(self.size))
            assert (ringdl.allreduce(np.ones(length), ringdl.Sum) == live).all()
        ringdl.join()
        self.done += 1

    def timeline(self) -> None:
        ringdl.start_timeline(self.folder / "timeline.json")
        self.allreduce()
        self.bucket_rounds()
        ringdl.stop_timeline()

    def mismatch(self) -> None:
        wrong = int(self.random.integers(self.size))
        length = self.length(1 << 16)
        expect(
            ringdl.MismatchError,
            lambda: ringdl.allreduce(np.ones(length + (self.rank == wrong)), name=self.name()),
        )
        expect(
            ringdl.MismatchError,
            lambda: ringdl.Buckets([("w", (length + (self.rank == wrong),), "float32")]),
        )

    def wrong_name(self) -> None:
        x = np.ones(3)
        expect(ringdl.MismatchError, lambda: ringdl.allreduce(x, name=f"only on {self.rank}"))

    def timeout(self) -> None:
        """A rank comes only after the others have given up once."""
        late = int(self.random.integers(self.size))
        x = self.array(self.length(1 << 16))
        if self.rank == late:
            ringdl.barrier("given up")
            self.check_sum(ringdl.allreduce_(x, ringdl.Sum, "late"))
            return
        work = ringdl.allreduce_async_(x, ringdl.Sum, "late")
        expect(ringdl.StallError, lambda: work.wait(timeout=0.02))
        ringdl.barrier("given up")
        self.check_sum(work.wait())

    def actions(self) -> dict[Callable[[], None], float]:
        """How often each is done, compared with the others."""
        actions: dict[Callable[[], None], float] = {
            self.allreduce: 100,
            self.small_works: 20,
            self.flight: 60,
            self.gather: 40,
            self.broadcast: 40,
            self.bucket_rounds: 40,
            self.exchange: 40,
            self.groups: 20,
            self.join: 10,
            self.timeline: 1,
        }
        if self.size > 1:
            actions |= {self.messages: 40}
            actions |= {self.mismatch: 10, self.timeout: 10, self.wrong_name: 0.1}
        return actions


def expect(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")
