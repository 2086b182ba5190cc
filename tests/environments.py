"""Where whole jobs are launched from: one Python per MPI."""

import os
import sys

PYTHONS = dict(
    entry.split("=", 1)
    for entry in os.environ.get("RINGDL_TEST_PYTHONS", f"default={sys.executable}").split()
)
"""RINGDL_TEST_PYTHONS names them, as in "openmpi=/path/to/python mpich=/path/to/python"; without
it, this Python. Tests get one after the other as `mpi_python`."""
