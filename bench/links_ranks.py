"""What `links.py` runs on the ranks: allreduces over the links, interleaved, each checked.

Each round and size runs ringdl's allreduce, the same with bfloat16 on the wire, MPI's, and, with
one rank per host, a ring of plain TCP streams that moves as many bytes without adding anything, in
an order that rotates. A time is that of the slowest rank, from a barrier on. Rank 0 writes all
times as JSON.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ringdl
from ringdl._mpirun import identify_library

BUFFERS = 2
"""Arrays that take turns, so that none is in a cache from the round before."""


LEAST_ROUNDS = 3


class TcpRing:
    """One stream to the next rank and one from the previous."""

    def __init__(self, comm: MPI.Comm) -> None:
        listener = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
        addresses = comm.allgather(listener.getsockname())
        self._next = socket.create_connection(addresses[(comm.rank + 1) % comm.size])
        self._previous, _ = listener.accept()
        listener.close()
        self._ranks = comm.size
        self._into = np.empty(1 << 20, np.uint8)

    def move(self, array: np.ndarray) -> None:
        """Send and receive what a ring allreduce of the array must: 2(P-1)/P of it."""
        payload = memoryview(array).cast("B")
        count = 2 * (self._ranks - 1) * len(payload) // self._ranks

        def send() -> None:
            for begin in range(0, count, len(payload)):
                self._next.sendall(payload[: count - begin])

        sender = threading.Thread(target=send)
        sender.start()
        into = memoryview(self._into)
        left = count
        while left:
            received = self._previous.recv_into(into[:left])
            if received == 0:
                raise ConnectionError("the previous rank has closed its stream")
            left -= received
        sender.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True, help="to spend on each size")
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    ringdl.init()
    world = MPI.COMM_WORLD

    def check(array: np.ndarray, expected: np.ndarray, relative_error: float) -> None:
        if not np.allclose(array, expected, rtol=relative_error, atol=0):
            raise AssertionError(f"rank {world.rank}: the sum is wrong")

    runs: dict[str, Callable[[np.ndarray], object]] = {
        "ringdl": lambda array: ringdl.allreduce_(array, op=ringdl.Sum),
        "bf16": lambda array: ringdl.allreduce_(array, ringdl.Sum, compression="bfloat16"),
        "mpi": lambda array: world.Allreduce(MPI.IN_PLACE, array),
    }
    if ringdl.local_size() == 1:
        runs["tcp"] = TcpRing(world).move
    names = list(runs)
    report = []
    for mib in chosen.mib:
        count = int(mib * (1 << 20)) // 4
        pattern = (np.arange(count) % 1021).astype(np.float32)
        expected = world.size * pattern + sum(range(world.size))
        arrays = [ringdl.empty(count) for _ in range(BUFFERS)]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        deadline = time.monotonic() + chosen.seconds
        turn = 0
        while turn < LEAST_ROUNDS or world.bcast(time.monotonic() < deadline):
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                array = arrays[turn % BUFFERS]
                np.add(pattern, world.rank, out=array)
                world.Barrier()
                begin = time.perf_counter()
                runs[name](array)
                mine = time.perf_counter() - begin
                seconds[name].append(world.allreduce(mine, MPI.MAX))
                if name != "tcp":  # bfloat16 is rounded where it is sent: once per host
                    check(array, expected, ringdl.host_count() / 256 if name == "bf16" else 0)
            turn += 1
        report.append({"mib": mib, "seconds": seconds})
    if world.rank == 0:
        library = " ".join(identify_library(MPI.Get_library_version()))
        answer = {"mpi": library, "ranks": world.size, "sizes": report}
        chosen.json.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
