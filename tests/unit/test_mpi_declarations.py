"""The MPI functions that the engine declares by itself, held against each mpi.h at hand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments import PYTHONS

ROOT = Path(__file__).parents[2]


def _headers() -> list[Path]:
    """The mpi.h of each environment that the tests run under, and the machine's own."""
    found = [Path(python).parents[1] / "include/mpi.h" for python in PYTHONS.values()]
    found += sorted(Path("/usr/lib").glob("*/openmpi/include/mpi.h"))
    found += sorted(Path("/usr/include").glob("*/mpich/mpi.h"))
    return [path for path in found if path.exists()]


def _compile(header: Path, abi: str) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    return subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            f"-I{ROOT / 'csrc'}",
            f"-I{header.parent}",
            f"-DRINGDL_ABI={abi}",
            str(ROOT / "tests/csrc/transport/mpi/mpi_declarations.cc"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("header", _headers(), ids=str)
def test_declarations_are_those_of_the_header(header: Path) -> None:
    is_open_mpi = "OPEN_MPI" in header.read_text()
    names = ("OpenMpiAbi", "MpichAbi") if is_open_mpi else ("MpichAbi", "OpenMpiAbi")
    right = _compile(header, names[0])
    assert right.returncode == 0, right.stderr
    assert _compile(header, names[1]).returncode != 0
