"""How a rank ends without MPI_Finalize under MPICH 4.0 over UCX."""

import os
import socket
import threading
import time

import pytest

from ringdl import _launch, _pmi
from ringdl._launch import Launcher

LIBRARY = "MPICH Version:\t4.0.2\nMPICH Release date:\tx\nMPICH Device:\tch4:ucx\n"
TWO_HOSTS = Launcher("Hydra", 1, 4, 1, 2)
SOCKET = {"PMI_FD": "7"}


@pytest.mark.parametrize("setting", [{}, {"I_MPI_FABRICS": "ofi"}])
def test_where_mpi_finalize_may_not_return(setting: dict[str, str]) -> None:
    """Also where a site has settings for another MPI, too."""
    ranks = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    launcher = _launch.detect(ranks | setting)
    assert _pmi.find_descriptor(launcher, LIBRARY, SOCKET) == 7


def test_where_srun_starts_the_ranks() -> None:
    """Slurm's pmi2 speaks PMI-1, too."""
    ranks = {"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    hosts = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    launcher = _launch.detect(ranks | hosts)
    assert _pmi.find_descriptor(launcher, LIBRARY, SOCKET) == 7


@pytest.mark.parametrize("transports", ["tcp,self", "tcp"])
def test_one_host_over_a_network(transports: str) -> None:
    launcher = Launcher("Hydra", 1, 4, 1, 4)
    environ = SOCKET | {"UCX_TLS": transports}
    assert _pmi.find_descriptor(launcher, LIBRARY, environ) == 7


@pytest.mark.parametrize(
    ("launcher", "library", "environ"),
    [
        (None, LIBRARY, SOCKET),
        (Launcher("Hydra", 1, 4, 1, 4), LIBRARY, SOCKET),  # one host
        (Launcher("Slurm", 1, 4, 1, 4), LIBRARY, SOCKET),
        (Launcher("Hydra", 1, 4, 1, 4), LIBRARY, SOCKET | {"UCX_TLS": "tcp,sm,self"}),
        (Launcher("Hydra", 1, 4, None, None), LIBRARY, SOCKET),  # nobody knows
        (Launcher("PMIx", 1, 4), LIBRARY, SOCKET),  # another protocol
        (TWO_HOSTS, LIBRARY.replace("4.0.2", "4.1"), SOCKET),
        (TWO_HOSTS, LIBRARY.replace("ucx", "ofi"), SOCKET),
        (TWO_HOSTS, "Open MPI v4.0.2, package: x", SOCKET),
        (TWO_HOSTS, LIBRARY, {}),
    ],
)
def test_where_it_returns(launcher: Launcher | None, library: str, environ: dict[str, str]) -> None:
    assert _pmi.find_descriptor(launcher, library, environ) is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"cmd=finalize_ack\n"], True),
        ([b"cmd=final", b"ize_ack\n"], True),
        ([b"cmd=finalize_ack rc=0\n"], True),
        ([b"cmd=abort\n"], False),
        ([b"\n"], False),
        ([b""], False),  # it is gone
    ],
)
def test_leave(parts: list[bytes], expected: bool) -> None:
    ours, theirs = socket.socketpair()
    heard = []

    def launcher() -> None:
        heard.append(theirs.recv(100))
        for part in parts:
            theirs.sendall(part)
            time.sleep(0.01)
        theirs.close()

    thread = threading.Thread(target=launcher)
    thread.start()
    assert _pmi.leave(ours.fileno()) is expected
    thread.join()
    assert heard == [b"cmd=finalize\n"]
    ours.close()


def test_a_launcher_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pmi, "_ANSWER_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    assert not _pmi.leave(ours.fileno())
    theirs.close()
    ours.close()


def test_a_descriptor_that_is_closed() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert not _pmi.leave(write)
