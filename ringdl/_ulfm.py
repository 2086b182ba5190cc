"""MPI that goes on without ranks that have failed: User-Level Failure Mitigation.

See Bland, Bouteilla, Herault, Bosilca and Dongarra, Post-failure recovery of MPI communication
capability (2013). Open MPI 5 has it, under ``mpirun --with-ft ulfm``. MPICH has the functions, and
aborts where a rank has failed.

MPI says who is left, by agreements that no failure disturbs. No communicator is made of those: up
to 5.0.11 Open MPI crashes if a rank fails while MPI_Comm_shrink makes one. The engine's messages go
through sockets (`Connections`), as such an Open MPI ends a process, one of whose sends fails, with
"Send error after request freed" (https://github.com/open-mpi/ompi/pull/13494).
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringdl import _engine, _sockets
from ringdl._errors import Error, UsageError
from ringdl._sockets import SECRET_BYTES, Endpoint

_ASKED_FOR = "OMPI_MCA_mpi_ft_enable"
"""What mpirun tells its ranks by."""

_BITS = 31
"""Of the number that an agreement is about."""

_NETWORK = "OMPI_MCA_btl_tcp_if_include"
"""What users tell Open MPI by which networks to use."""


def is_there() -> bool:
    """Whether this MPI and its launcher let ranks go on. MPI is loaded."""
    from mpi4py import MPI

    is_open_mpi = "Open MPI" in MPI.Get_library_version()
    is_asked_for = os.environ.get(_ASKED_FOR, "") in ("1", "true")
    return is_open_mpi and is_asked_for and MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN


def agree(comm: Any, flags: int) -> int:
    """Those flags that all ranks that are left have: the same on each. Collective over them."""
    from mpi4py import MPI

    while True:
        try:
            comm.Ack_failed()
            return int(comm.Agree(flags))
        except MPI.Exception:  # a rank has failed that not all knew of: all see that, and repeat
            continue


def survivors(comm: Any) -> list[int]:
    """The ranks that none of them knows to have failed: the same on each. Collective over them."""
    from mpi4py import MPI

    size = comm.Get_size()
    while True:
        comm.Ack_failed()
        failed = failed_ranks(comm)
        alive: list[int] = []
        try:
            for begin in range(0, size, _BITS):
                ranks = range(begin, min(size, begin + _BITS))
                own = sum(1 << (rank - begin) for rank in ranks if rank not in failed)
                agreed = int(comm.Agree(own))
                alive += [rank for rank in ranks if agreed >> (rank - begin) & 1]
            return alive
        except MPI.Exception:  # as in `agree`
            continue


def failed_ranks(comm: Any) -> set[int]:
    """Those of a communicator that this rank knows to have failed."""
    from mpi4py import MPI

    failed, everyone = comm.Get_failed(), comm.Get_group()
    ranks = set(MPI.Group.Translate_ranks(failed, None, everyone))
    failed.Free()
    everyone.Free()
    return ranks


class Connections:
    """Where the ranks of a job listen, from its start to its end. Collective.

    Args:
        comm: the mpi4py communicator of all ranks.
        hosts: the number of each rank's host.

    Raises:
        UsageError: on every rank: no network leads from some host to that of rank 0.
    """

    def __init__(self, comm: Any, hosts: Sequence[int]) -> None:
        address = "127.0.0.1" if len(set(hosts)) == 1 else _own_address(comm)
        self._comm = comm
        self._listener, own = _sockets.listen(address)
        self._endpoints: list[Endpoint] = comm.allgather(own)
        self._rounds = 0

    def connect(self, members: Sequence[int], timeout: float) -> _engine.Communicator:
        """The engine of some of these ranks. Collective over them.

        Args:
            members: which ones.
            timeout: in seconds.

        Raises:
            Error: one of them has failed.
            StallError: they have not all called in time.
        """
        from mpi4py import MPI

        def check() -> None:
            with contextlib.suppress(MPI.Exception):
                self._comm.Iprobe()  # has MPI look for what its launcher says
            lost = failed_ranks(self._comm).intersection(members)
            if lost:
                raise Error(f"rank {min(lost)} of those at the start has failed meanwhile")

        self._rounds += 1  # calls that are on their way from the last one know other secrets
        endpoints = [_for_round(self._endpoints[rank], self._rounds) for rank in members]
        rank = members.index(self._comm.Get_rank())
        sockets = _sockets.connect(rank, endpoints, self._listener.dup(), timeout, check)
        return _engine.over_sockets(rank, sockets)


def _own_address(comm: Any) -> str:
    """By which others reach this host: the one on the way to rank 0's. Collective."""
    wanted = [each for each in os.environ.get(_NETWORK, "").split(",") if each]
    addresses = comm.bcast(_sockets.networks(wanted), root=0)
    own = next(iter(addresses), None) if comm.Get_rank() == 0 else _sockets.way_to(addresses)
    found: list[str | None] = comm.allgather(own)
    if None in found:
        raise UsageError(
            f"rank {found.index(None)} finds no network to the host of rank 0, which has the "
            f"addresses {addresses}: name one that all hosts are on by {_NETWORK}"
        )
    return str(own)


def _for_round(endpoint: Endpoint, number: int) -> Endpoint:
    secret = hmac.digest(endpoint.secret, str(number).encode(), "sha256")[:SECRET_BYTES]
    return replace(endpoint, secret=secret)
