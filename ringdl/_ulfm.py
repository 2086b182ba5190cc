"""MPI that goes on without ranks that have failed: User-Level Failure Mitigation.

See Bland, Bouteilla, Herault, Bosilca and Dongarra, Post-failure recovery of MPI communication
capability (2013). Open MPI 5 has it, under ``mpirun --with-ft ulfm``. MPICH has the functions, and
aborts where a rank has failed.
"""

from __future__ import annotations

import os
from typing import Any

_ASKED_FOR = "OMPI_MCA_mpi_ft_enable"
"""What mpirun tells its ranks by."""


def is_there() -> bool:
    """Whether this MPI and its launcher let ranks go on. MPI is loaded."""
    from mpi4py import MPI

    is_open_mpi = "Open MPI" in MPI.Get_library_version()
    is_asked_for = os.environ.get(_ASKED_FOR, "") in ("1", "true")
    return is_open_mpi and is_asked_for and MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN


def agree(comm: Any, is_well: bool) -> bool:
    """Whether this is so on all ranks that are left: the same answer on each. Collective."""
    from mpi4py import MPI

    try:
        comm.Ack_failed()
        return bool(comm.Agree(int(is_well)))
    except MPI.Exception:  # one has failed since, as all see
        return False
