"""What the engine declares itself of MPI, CUDA, NCCL and XLA, against each header at hand."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.environments import PYTHONS

ROOT = Path(__file__).parents[2]


def _mpi_headers() -> list[Path]:
    """The mpi.h of each environment that the tests run under, and the machine's own."""
    found = [Path(python).parents[1] / "include/mpi.h" for python in PYTHONS.values()]
    found += sorted(Path("/usr/lib").glob("*/openmpi/include/mpi.h"))
    found += sorted(Path("/usr/include").glob("*/mpich/mpi.h"))
    return [path for path in found if path.exists()]


def _cuda_headers() -> list[Path]:
    found = [Path("/usr/include/cuda.h"), *Path("/usr/local").glob("cuda*/include/cuda.h")]
    return [path for path in found if path.exists() and not path.parents[1].is_symlink()]


def _nccl_headers() -> list[Path]:
    """Of the machine, and of pip's wheel."""
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    found = [Path("/usr/include/nccl.h")]
    found += [Path(folder, "nccl/include/nccl.h") for folder in folders]
    return [path for path in found if path.exists()]


def _compile(source: str, headers: Sequence[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    return subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            f"-I{ROOT / 'csrc'}",
            f"-I{ROOT / 'tests/csrc'}",
            *(f"-I{header.parent}" for header in headers),
            *flags,
            str(ROOT / "tests/csrc" / source),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


def _xla_headers() -> list[Path]:
    package = importlib.util.find_spec("jaxlib")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    found = [Path(folder, "include/xla/ffi/api/c_api.h") for folder in folders]
    return [path for path in found if path.exists()]


@pytest.mark.parametrize("header", _mpi_headers(), ids=str)
def test_mpi(header: Path) -> None:
    source = "transport/mpi/mpi_declarations.cc"
    is_open_mpi = "OPEN_MPI" in header.read_text()
    names = ("OpenMpiAbi", "MpichAbi") if is_open_mpi else ("MpichAbi", "OpenMpiAbi")
    right, wrong = (_compile(source, [header], f"-DRINGDL_ABI={abi}") for abi in names)
    assert right.returncode == 0, right.stderr
    assert wrong.returncode != 0


@pytest.mark.parametrize("header", _cuda_headers(), ids=str)
def test_cuda(header: Path) -> None:
    compiled = _compile("cuda/driver_declarations.cc", [header])
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.skipif(not _cuda_headers(), reason="nccl.h includes CUDA's")
@pytest.mark.parametrize("header", _nccl_headers(), ids=str)
def test_nccl(header: Path) -> None:
    compiled = _compile("cuda/nccl_declarations.cc", [header, *_cuda_headers()])
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.parametrize("header", _xla_headers(), ids=str)
def test_xla(header: Path) -> None:
    compiled = _compile("binding/xla_declarations.cc", [header.parents[2]])
    assert compiled.returncode == 0, compiled.stderr
