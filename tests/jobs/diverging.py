"""Three ranks, of which rank 1 does not do what the others do.

    diverging.py HOW FOLDER

HOW: "leaves out", "shape", "raises", "killed", "stopped", "busy", "ends", or "well". Where that
leaves the others waiting, rank 1 goes on once the file FOLDER/told is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringdl


def wait_for(told: Path) -> None:
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline, "nobody came"
        time.sleep(0.05)


def main(how: str, told: Path) -> None:
    ringdl.init()
    is_one = ringdl.rank() == 1
    x = np.ones(1000, np.float32)
    for _ in range(1200):
        ringdl.allreduce(x)
    ringdl.allreduce(x, name="first")
    if is_one and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_one and how == "raises":
        raise ValueError("a bad file")
    if is_one and how == "ends":
        return
    if is_one and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_one and how in ("busy", "leaves out"):
        if how == "leaves out":
            ringdl.allreduce_async(x, name="third")
        wait_for(told)
    ringdl.allreduce(x[1:] if is_one and how == "shape" else x, name="second")
    if not (is_one and how == "leaves out"):
        ringdl.allreduce(x, name="third")
    sys.stdout.write("all is well\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) / "told")
