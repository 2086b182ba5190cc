"""Rank 1 calls init() once the file FOLDER/told is there: MPI cannot connect the ranks before.

starts_late.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import ringdl
from ringdl._launch import detect


def main(folder: Path) -> None:
    launcher = detect(os.environ)
    assert launcher is not None
    deadline = time.monotonic() + 60
    while launcher.rank == 1 and not (folder / "told").exists():
        assert time.monotonic() < deadline, "nothing was told"
        time.sleep(0.05)
    ringdl.init()
    sys.stdout.write("all is well\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
