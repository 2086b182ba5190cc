"""A rank of a job that makes runs.

Its arguments are two files of rank 0, of JSON lines: runs, and where their curves go.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import ringdl
from ringdl.compare._run import Run, Runner


def main(runs: str, results: str) -> None:
    """Make runs, and write each curve as soon as it is there."""
    communicator = ringdl.init()
    torch.set_num_threads(1)
    runner = Runner(communicator)
    # Other hosts do not see the file.
    asked = Path(runs).read_text().splitlines() if communicator.rank == 0 else None
    for line in communicator.broadcast_object(asked):
        curve = runner.carry_out(Run(**json.loads(line)))
        if communicator.rank == 0:
            with Path(results).open("a") as file:
                file.write(json.dumps(curve.to_json()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
