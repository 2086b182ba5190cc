"""Who tells Intel MPI which ranks share a host: MPICH's Hydra does so in a way that it misreads."""

import os
from types import SimpleNamespace

import pytest

from ringdl import _launch, _mpi

INTEL = "Intel(R) MPI Library 2021.18.0 for Linux* OS\n"
SETTING = "I_MPI_NODEMAP_ALGORITHM"
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("library", "environ", "chosen"),
    [
        (INTEL, HYDRA, "pmi_alltoall"),
        (INTEL, HYDRA | {"I_MPI_FABRICS": "ofi"}, "pmi_alltoall"),
        (INTEL, HYDRA | {SETTING: "slurm"}, "slurm"),
        (INTEL, HYDRA | {"I_MPI_HYDRA_UUID": "96710000"}, None),
        (INTEL, {}, None),
        ("MPICH Version:\t4.0.2\n", HYDRA, None),
    ],
)
def test_it_asks_where_another_hydra_has_started_it(
    library: str, environ: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(environ))
    mpi = SimpleNamespace(Get_library_version=lambda: library)
    _mpi._choose_node_map(mpi, _launch.detect(environ))
    assert os.environ.get(SETTING) == chosen
