"""Rank 1 fails once after the ranks have met; torchrun starts all of them again."""

import os
import sys

import numpy as np

import ringdl

ringdl.init()
assert ringdl.allreduce(np.ones(3), ringdl.Sum)[0] == 2
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and ringdl.rank() == 1:
    raise ValueError("the data are gone")
ringdl.barrier()
sys.stdout.write(f"rank {ringdl.rank()} has ended well\n")
