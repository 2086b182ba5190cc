"""One allreduce, or what keeps it from happening."""

import sys

if "--without-mpi4py" in sys.argv:
    sys.modules["mpi4py"] = None  # importing it raises ImportError

import numpy as np

import ringdl

ringdl.init()
total = ringdl.allreduce(np.full(3, ringdl.rank() + 1), op=ringdl.Sum)
sys.stdout.write(f"rank {ringdl.rank()} of {ringdl.size()}: {total.tolist()}\n")
