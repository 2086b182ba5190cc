"""Where whole jobs are launched from: one Python per MPI."""

import os
import sys


def _pythons(setting: str, default: str) -> dict[str, str]:
    entries = os.environ.get(setting, default).split()
    return dict(entry.split("=", 1) for entry in entries)


PYTHONS = _pythons("RINGDL_TEST_PYTHONS", f"default={sys.executable}")
"""RINGDL_TEST_PYTHONS names them, as in "openmpi=/path/to/python mpich=/path/to/python"; without
it, this Python. Tests get one after the other as `mpi_python`."""

ELASTIC = [python for name, python in PYTHONS.items() if name == "openmpi"]
"""Of these, the ones whose MPI goes on without a rank."""

TORCHES = _pythons("RINGDL_TEST_TORCHES", "")
"""RINGDL_TEST_TORCHES names Pythons with other versions of torch, as in "2.15=/path/to/python";
they find ringdl and the tests by PYTHONPATH. `make test-all` makes such environments."""
