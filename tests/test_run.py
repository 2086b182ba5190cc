"""The checks of tests/ranks under mpirun: one job per MPI and number of ranks.

With RINGDL_TEST_ALL=1, all checks run on 1 to 8 ranks.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.environments import PYTHONS, TORCHES
from tests.running import EVERYTHING, pretended_cuda

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.stem for path in (ROOT / "tests/ranks").glob("[!_]*.py"))
TORCH = [name for name in MODULES if name.startswith("torch_")]
CORE = [name for name in MODULES if name not in TORCH]

CORE_SIZES = range(1, 9) if EVERYTHING else (1, 2, 3, 8)
TORCH_SIZES = (1, 2, 3, 4) if EVERYTHING else (3,)
SLOW_SIZES = range(2, 9) if EVERYTHING else (3,)
"""Of checks that wait for seconds."""


def start_job(
    python: str, ranks: int, *arguments: str, timeout: float = 300, **settings: str
) -> tuple[int, str]:
    """Start a job of tests.ranks; its exit code and its output, if it ends in time.

    Each check has a limit of its own, so the job's only has to be beyond what a busy machine needs.
    """
    command = [python, "-m", "ringdl", "run", "-n", str(ranks), "-m", "tests.ranks", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    environment.pop("RINGDL_TIMEOUT", None)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = ""
            for ending in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):  # mpirun passes them on
                job.send_signal(ending)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = job.communicate(timeout=5)
                    break
            pytest.fail(f"the job did not end within {timeout} s:\n{output}")
    return job.returncode, output


def run_job(python: str, ranks: int, *arguments: str, **settings: str) -> None:
    """The same for a job that is to succeed."""
    code, output = start_job(python, ranks, *arguments, **settings)
    assert code == 0, f"exit code {code}:\n{output}"


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.any_mpi(always=n > 3)) for n in CORE_SIZES]
)
def test_core(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_job(mpi_python, ranks, *CORE, "--quick", f"--json={report}")
    figures = json.loads(report.read_text())
    assert figures["size"] == ranks
    assert len(figures["seconds"]) >= (40 if ranks > 1 else 25)


@pytest.mark.any_mpi
def test_core_without_shared_memory(mpi_python: str) -> None:
    modules = ("allreduces", "buckets", "mismatches", "protocol", "reductions", "shared")
    modules += ("parameter_servers", "policies")
    code, output = start_job(mpi_python, 3, *modules, "--quick", RINGDL_SHARED_MEMORY="0")
    assert code == 0, output


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_core_on_a_device(mpi_python: str, ranks: int) -> None:
    """Three ranks have one each, two share one."""
    run_job(mpi_python, ranks, "_devices", "_cupy", **pretended_devices(3 if ranks == 3 else 1))


@pytest.mark.parametrize(
    "setting", ["RINGDL_CUDA_PEERS", "RINGDL_SHARED_MEMORY"][: None if EVERYTHING else 1]
)
def test_core_on_a_device_without(setting: str) -> None:
    """What they share is turned off."""
    run_job(any_python(), 3, "_devices", "_cupy", **pretended_devices(2), **{setting: "0"})


@pytest.mark.any_mpi
@pytest.mark.parametrize("settings", [{}, {"RINGDL_SHARED_MEMORY": "0"}], ids=["shared", "apart"])
def test_nccl(mpi_python: str, settings: dict[str, str]) -> None:
    """A pretended one, by ranks with a device each."""
    run_job(mpi_python, 2, "_nccl", **pretended_devices(2), **settings)


def test_nccl_where_ranks_share_a_device() -> None:
    run_job(any_python(), 2, "_nccl", **pretended_devices(1))


def pretended_devices(count: int) -> dict[str, str]:
    settings = {"LD_LIBRARY_PATH": pretended_cuda(), "RINGDL_PRETENDED_SEED": str(count)}
    return settings | {"RINGDL_PRETENDED_DEVICES": str(count)}


def any_python() -> str:
    """One MPI's, for what does not depend on which."""
    return next(iter(PYTHONS.values()))


def test_jax() -> None:
    pytest.importorskip("jax")
    devices = "--xla_force_host_platform_device_count=2"
    run_job(any_python(), 2, "_jax", XLA_FLAGS=devices)


def test_doctor_names_devices() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ringdl", "doctor", "--quick"],
        env=os.environ | {"LD_LIBRARY_PATH": pretended_cuda(), "RINGDL_PRETENDED_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "device 1 is pretended device (0000:02:00.0), 512 MiB, compute capability 9.0" in (
        ended.stdout
    ), ended.stdout


@pytest.mark.parametrize("ranks", SLOW_SIZES)
def test_core_that_waits(ranks: int) -> None:
    """Under all MPIs, several at once; many ranks under one of them, by turns."""
    pythons = [*PYTHONS.values()]
    if ranks > 4:
        pythons = [pythons[ranks % len(pythons)]]
    with ThreadPoolExecutor(max(1, 9 // ranks)) as pool:
        list(pool.map(lambda python: run_job(python, ranks, *CORE, "--slow"), pythons))


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.any_mpi(always=n in (1, 4))) for n in TORCH_SIZES]
)
def test_torch(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run_job(mpi_python, ranks, *TORCH, f"--json={tmp_path / 'report.json'}")


@pytest.mark.parametrize("version", TORCHES)
def test_the_backend_with_other_torches(version: str) -> None:
    modules = ("torch_backend", "torch_backend_calls")
    run_job(TORCHES[version], 2, *modules, PYTHONPATH=str(ROOT))


def test_failures_are_told_and_hang_nobody(mpi_python: str) -> None:
    # Not less: MPI has to connect the ranks within it, too, beside other tests.
    code, output = start_job(mpi_python, 3, "_failing", timeout=60, RINGDL_TIMEOUT="10")
    assert code != 0
    assert re.search(r"check_fails_on_one_rank failed on rank 1 of 3:\nTrace", output), output
    assert re.search(r"check_fails_on_one_rank failed on rank (0|2|0, 2) of 3:\nTrace", output), (
        output
    )
    assert "StallError" in output
    assert re.search(r"check_wrong_reference failed on rank 0, 1, 2 of 3:\nTrace", output), output
    assert "3 checks on 3 ranks, 2 failed" in output
