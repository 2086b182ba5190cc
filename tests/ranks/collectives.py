"""Allgather, broadcast, barrier and objects."""

from __future__ import annotations

import time

import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import DTYPES, random_array
from tests.ranks.support import assert_same_bits, bits, expect, needs, segments

SEGMENTS = (64, 4096, 256 << 10)


def check_allgather(comm: Communicator) -> None:
    """Uneven along axis 0, every dtype; some ranks have no rows."""
    for segment_bytes in SEGMENTS:
        with segments(comm, segment_bytes):
            for dtype in DTYPES:
                for rows in (lambda r: 1, lambda r: r, lambda r: 400 - r, lambda r: 700 * (r == 1)):
                    blocks = [
                        random_array(rank, 3 * rows(rank), dtype, ringdl.Sum, 3).reshape(-1, 3)
                        for rank in range(comm.size)
                    ]
                    mine = blocks[comm.rank]
                    before = mine.copy()
                    result = comm.allgather(mine)
                    assert result.dtype == dtype
                    assert result.shape == (sum(map(len, blocks)), 3)
                    assert bits(result) == bits(np.concatenate(blocks)), dtype
                    assert bits(mine) == bits(before), "the argument was changed"
                    result[...] = 0  # it belongs to the caller


def check_allgather_shapes(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    assert comm.allgather(np.array(rank)).tolist() == list(range(size)), "no axes: one row"
    rows = size * (size + 1) // 2
    assert comm.allgather(np.zeros((rank + 1, 0), np.float32)).shape == (rows, 0), "no columns"
    assert comm.allgather(np.zeros((rank, 2, 0, 3))).shape == (rows - size, 2, 0, 3)
    assert comm.allgather(np.zeros((0, 4), np.int8)).shape == (0, 4), "no rows anywhere"
    assert comm.allgather(np.zeros(0), name="empty").shape == (0,)
    tall = np.arange(24 * (rank + 1)).reshape(-1, 2, 3, 4)
    expected = np.concatenate([np.arange(24 * (r + 1)).reshape(-1, 2, 3, 4) for r in range(size)])
    assert np.array_equal(comm.allgather(tall), expected)
    assert np.array_equal(comm.allgather(np.asfortranarray(tall)), expected), "other order"
    wide = np.repeat(tall, 2, axis=-1)
    assert np.array_equal(comm.allgather(wide[..., ::2], name="strided"), expected)
    read_only = tall.copy()
    read_only.flags.writeable = False
    assert np.array_equal(comm.allgather(read_only), expected), "reading is enough"


def check_broadcast(comm: Communicator) -> None:
    """From every root, every dtype (all from the last root), sizes up to many segments."""
    for segment_bytes in SEGMENTS:
        with segments(comm, segment_bytes):
            for root in range(comm.size):
                for dtype in DTYPES if root == comm.size - 1 else DTYPES[root % 5 :: 5]:
                    for count in (0, 1, 5, 2003):
                        mine = random_array(comm.rank, count, dtype, ringdl.Sum, 9)
                        before = mine.copy()
                        expected = random_array(root, count, dtype, ringdl.Sum, 9)
                        copy = comm.broadcast(mine, root)
                        assert bits(copy) == bits(expected), (root, dtype, count)
                        assert bits(mine) == bits(before), "the argument was changed"
                        assert comm.broadcast_(mine, root=root, name="in place") is mine
                        assert bits(mine) == bits(expected), (root, dtype, count)


def check_broadcast_large(comm: Communicator) -> None:
    for root in {0, comm.size - 1}:
        mine = np.random.default_rng(comm.rank).random(300_001)
        expected = np.random.default_rng(root).random(300_001)
        assert np.array_equal(comm.broadcast_(mine, root), expected)


def check_broadcast_object(comm: Communicator) -> None:
    large = {"epoch": 3, "state": [b"x" * 1_500_000, np.arange(1000)], "lr": 0.1}
    for root in range(comm.size):
        mine = large if comm.rank == root else {"ignored": object}
        result = comm.broadcast_object(mine, root)
        assert result["state"][0] == large["state"][0]
        assert np.array_equal(result["state"][1], large["state"][1])
        assert comm.rank != root or result is mine
        for small in (None, "", 7, ("a", {"b": {1, 2}})):
            given = small if comm.rank == root else "ignored"
            assert comm.broadcast_object(given, root, name="small") == small


@needs(ranks=2)
def check_barrier(comm: Communicator) -> None:
    """Nobody leaves before the last one has arrived, whoever that is."""
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        comm.barrier(name=f"late {late}" if late % 2 else None)
        left = time.monotonic()
        came_all = comm.allgather(np.array([came]))
        assert left >= came_all.max(), "clocks of one host"


def check_wrong_root(comm: Communicator) -> None:
    for root in (-1, comm.size):
        with expect(ringdl.UsageError, f"root {root}"):
            comm.broadcast_(np.zeros(3), root)
        with expect(ringdl.UsageError, f"root {root}"):
            comm.broadcast_object(1, root)
    assert_same_bits(comm, comm.broadcast(np.full(3, comm.rank), comm.size - 1))


def check_who_is_who(comm: Communicator) -> None:
    assert comm.allgather(np.array(comm.rank)).tolist() == list(range(comm.size))
    assert 0 <= comm.local_rank < comm.local_size
    assert 0 <= comm.host_rank < comm.host_count
    assert f"rank {comm.rank} of {comm.size}" in repr(comm)
