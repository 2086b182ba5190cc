"""`init` without MPI: whom the environment makes it expect."""

import os
import subprocess
import sys


def init_with(*before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process that initializes ringdl and prints its size."""
    program = "\n".join([*before, "import ringdl", "ringdl.init()", "print(ringdl.size())"])
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ranks_that_would_be_alone_are_refused() -> None:
    """Not trained alone: the sentence names who starts ranks that find each other."""
    result = init_with(RANK="1", WORLD_SIZE="2")
    assert result.returncode != 0
    for words in ("UsageError", "rank 1 of 2", "mpirun -n 2", "ringdl run -n 2", "WORLD_SIZE"):
        assert words in result.stderr, result.stderr


def test_they_are_refused_where_mpi_sees_one_rank_too() -> None:
    result = init_with("from mpi4py import MPI", RANK="1", WORLD_SIZE="2")
    assert result.returncode != 0
    assert "UsageError" in result.stderr


def test_a_communicator_that_knows_of_one_rank_is_refused() -> None:
    """Of the program's own `ringdl.init()` nothing is left to run."""
    for call in ("ringdl.init(MPI.COMM_WORLD)", "import ringdl.torch as hvd; hvd.init([0, 1])"):
        result = init_with("from mpi4py import MPI; import ringdl", call, RANK="1", WORLD_SIZE="2")
        assert result.returncode != 0
        assert "UsageError" in result.stderr, result.stderr
        assert "mpirun" in result.stderr
        assert "MASTER_ADDR" not in result.stderr


def test_what_is_no_communicator_is_refused() -> None:
    result = init_with("import ringdl; ringdl.init([0, 1])")
    assert result.returncode != 0
    assert "UsageError: init([0, 1]): pass an mpi4py communicator" in result.stderr


def test_one_task_of_slurm_needs_no_mpi() -> None:
    """As in `srun --pty bash`."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        step[name] = "1"
    hidden = "import sys; sys.modules['mpi4py'] = None"
    ended = init_with(hidden, **step)
    assert ended.stdout == "1\n", ended.stderr


def test_a_size_without_a_rank_means_nothing() -> None:
    assert init_with(WORLD_SIZE="2").stdout == "1\n"


def test_a_job_of_one_rank_is_alone() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert init_with(**environment).stdout == "1\n"
