"""Rank 1 comes late to two allreduces: once the file FOLDER/told is there.

    watched.py FOLDER HOW

HOW is empty, "signal" or "end". With "signal", rank 0 sends itself SIGUSR1 while it waits. With
"end", the others end without them, and rank 1 comes late to that.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ringdl


def main(folder: Path, how: str) -> None:
    ringdl.init()
    x = np.full(50_000, ringdl.rank(), np.float32)
    if ringdl.rank() == 1:
        deadline = time.monotonic() + 60
        while not (folder / "told").exists():
            assert time.monotonic() < deadline, "nothing was told"
            time.sleep(0.05)
    if ringdl.rank() == 0 and how == "signal":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    if how != "end":
        earlier = ringdl.allreduce_async(x, name="earlier")
        for result in (ringdl.allreduce(x, name="late"), earlier.wait()):
            assert (result == (ringdl.size() - 1) / 2).all()
    sys.stdout.write("all is well\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
