"""What ranks tell each other past ringdl: over MPI, or, without it, through PyTorch's store."""

from __future__ import annotations

import os
import sys
import time

from ringdl._launch import detect_store_job

IS_MPI = detect_store_job(os.environ) is None


class _Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def gather(self, mine: str) -> list[str]:
        """The texts of all ranks, on all ranks; waiting costs no CPU that the others need."""
        request = self._world.Ibarrier()
        while not request.Test():
            time.sleep(0.001)
        texts: list[str] = self._world.allgather(mine)
        return texts

    def abort(self) -> None:
        if self.rank == 0:
            self._world.Abort(1)
        time.sleep(60)


class _Store:
    def __init__(self) -> None:
        from torch.distributed import rendezvous

        self._store, self.rank, self.size = next(iter(rendezvous("env://")))
        self._times = 0

    def gather(self, mine: str) -> list[str]:
        self._times += 1
        keys = [f"tests/{self._times}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], mine)
        while not self._store.check(keys):
            time.sleep(0.002)
        return [self._store.get(key).decode() for key in keys]

    def abort(self) -> None:
        sys.stdout.flush()
        os._exit(1)


world = _Mpi() if IS_MPI else _Store()
