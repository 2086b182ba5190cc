"""Under the variables of mpi4py's options: says what became of them, the last as the last thing."""

import atexit
import sys


def tell_last() -> None:
    from mpi4py import MPI

    sys.stdout.write(f"finalized {MPI.Is_finalized()}\n")


atexit.register(tell_last)  # which comes after what ringdl registers

import ringdl  # noqa: E402

ringdl.init()
from mpi4py import MPI  # noqa: E402

is_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
sys.stdout.write(f"rank {ringdl.rank()} of {ringdl.size()}, multiple {is_multiple}\n")
