"""float32 that travels as 16-bit floats."""

from __future__ import annotations

from typing import Literal, get_args

import ml_dtypes
import numpy as np

import ringdl
from ringdl import Communicator
from tests.ranks.reference import random_array
from tests.ranks.support import LARGE, assert_same_bits, bits, expect, needs, segments

Wire = Literal["float16", "bfloat16"]
WIRES: tuple[Wire, ...] = get_args(Wire)


def is_representable(x: np.ndarray, wire: Wire) -> bool:
    return bool((x == x.astype(ml_dtypes.bfloat16 if wire == "bfloat16" else wire)).all())


@needs(ranks=2)
def check_sums_are_close_and_equal(comm: Communicator) -> None:
    """Each hop rounds what it sends, and the owner of a chunk what it keeps."""
    for wire in WIRES:
        unit = 2.0 ** (-8 if wire == "bfloat16" else -11)
        for count, segment_bytes in ((1, 64), (comm.size - 1, 64), (2003, 256), (70_001, 4096)):
            with segments(comm, segment_bytes):
                for op in (ringdl.Sum, ringdl.Average):
                    arrays = [
                        random_array(r, count, np.dtype(np.float32), op, 11)
                        for r in range(comm.size)
                    ]
                    mine = arrays[comm.rank].copy()
                    comm.allreduce_(mine, op, algorithm="ring", compression=wire)
                    scale = comm.size if op == ringdl.Average else 1
                    wide = [x.astype(np.float64) for x in arrays]
                    bound = comm.size * unit * sum(np.abs(x) for x in wide) / scale + 1e-6
                    assert (np.abs(mine - sum(wide) / scale) <= 1.01 * bound).all()
                    assert is_representable(mine, wire)
                    assert_same_bits(comm, mine)
                    again = comm.allreduce(
                        arrays[comm.rank], op, algorithm="ring", compression=wire
                    )
                    assert bits(again) == bits(mine)


@needs(ranks=2)
def check_half_as_many_bytes(comm: Communicator) -> None:
    sent = {}
    for wire in (None, *WIRES):
        x = np.ones(1 << 18, np.float32)
        comm.barrier()
        before = comm.stats()["data_bytes_sent"]
        comm.allreduce_(x, ringdl.Sum, algorithm="ring", compression=wire)
        sent[wire] = comm.stats()["data_bytes_sent"] - before
        assert (x == comm.size).all()
    assert sent[None] > 0
    assert [sent[wire] * 2 for wire in WIRES] == [sent[None]] * 2


@needs(ranks=2)
def check_buckets(comm: Communicator) -> None:
    """Gradients of other dtypes travel as they are; which are missing is still known."""
    specs = [("a", (LARGE,), "float32"), ("b", (7,), "float64"), ("c", (5, 3), "float32")]
    for wire in WIRES:
        buckets = ringdl.Buckets(specs, compression=wire, communicator=comm)
        views = buckets.views()
        for step in range(4):
            views[0][...] = comm.rank + step
            views[1][...] = 1 / 3
            buckets.ready(0)
            if comm.rank == 0:
                buckets.ready(1)
            assert buckets.wait() == [True, True, False]
            assert (views[0] == (comm.size - 1) / 2 + step).all()
            assert np.allclose(views[1], 1 / 3 / comm.size, rtol=1e-14)
            assert (views[2] == 0).all()


@needs(ranks=2)
def check_refused(comm: Communicator) -> None:
    with expect(ringdl.UsageError, "compression", "float32", "leave it out"):
        comm.allreduce(np.ones(3), compression="bfloat16")
    with expect(ringdl.UsageError, "compression"):
        comm.allreduce(np.ones(3, np.float32), ringdl.Max, compression="float16")
    with expect(ringdl.UsageError, "'int8'", "bfloat16"):
        comm.allreduce(np.ones(3, np.float32), compression="int8")  # type: ignore[arg-type]
    with expect(ringdl.UsageError, "'int8'"):
        ringdl.Buckets([("a", (3,), "float32")], compression="int8", communicator=comm)  # type: ignore[arg-type]
    wrong = comm.size - 1
    with expect(ringdl.MismatchError, "compression", "float16", f"rank {wrong}", within=5):
        comm.allreduce(
            np.ones(LARGE, np.float32), compression="float16" if comm.rank == wrong else None
        )
    with expect(ringdl.MismatchError, "compression", within=5):
        ringdl.Buckets(
            [("a", (3,), "float32")],
            compression="float16" if comm.rank == wrong else "bfloat16",
            communicator=comm,
        )
