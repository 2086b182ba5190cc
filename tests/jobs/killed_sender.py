"""Rank 1 is killed in the middle of a message that rank 0 receives from whoever sends first."""

import os
import signal
import threading
import time

import numpy as np

import ringdl
from tests.ranks.support import expect

COUNT = 1 << 24
MESSAGES = 50


def main() -> None:
    comm = ringdl.init()
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(MESSAGES):
            comm.send(np.ones(COUNT, np.float32), 0, "message")
        time.sleep(60)

    received = np.empty(COUNT, np.float32)
    with expect(ringdl.RankFailedError, "rank 1 has ended", within=20):
        for _ in range(MESSAGES + 1):
            comm.recv_(received, name="message")
    print("was told", flush=True)


if __name__ == "__main__":
    main()
