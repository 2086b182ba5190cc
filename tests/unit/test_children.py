"""Who is a child of a rank, told from the environment and /proc."""

import os
import subprocess
import sys

import pytest

from ringdl import _children
from ringdl._errors import UsageError
from ringdl._settings import RANK_PROCESS

OPEN_MPI = {"PMIX_NAMESPACE": "prterun-vm-42@1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
LOOK = (
    "import os; from ringdl import _children;"
    "parent = _children.find_parent(os.environ); print(parent and parent.place, parent)"
)


class Somewhere:
    rank, size, local_rank, local_size, host_rank, host_count = 5, 8, 1, 4, 1, 2


def seen_by_a_child(environ: dict[str, str], before: list[str] | None = None) -> str:
    command = [*(before or []), sys.executable, "-c", LOOK]
    environ = os.environ | environ
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def marked(environ: dict[str, str], communicator: object = Somewhere) -> dict[str, str]:
    environ = dict(environ)
    _children.mark(environ, communicator)
    return environ


def test_a_rank_is_not_its_own_child() -> None:
    assert _children.find_parent(OPEN_MPI) is None
    assert _children.find_parent(marked(OPEN_MPI)) is None  # a second init(), or after os.exec*


@pytest.mark.parametrize("before", [[], ["env"], ["sh", "-c", '"$@"; :', "sh"]])
def test_children_know_their_parent(before: list[str]) -> None:
    seen = seen_by_a_child(marked(OPEN_MPI), before)
    assert seen == f"(5, 8, 1, 4, 1, 2) rank 5 (process {os.getpid()})"


def test_while_init_has_not_returned() -> None:
    assert seen_by_a_child(marked(OPEN_MPI, None)) == f"() a rank (process {os.getpid()})"


@pytest.mark.parametrize(
    "variable", ["PMIX_NAMESPACE", "PMIX_RANK", "PMI_PORT", "PMI_ID", "SLURM_STEP_ID"]
)
def test_a_launcher_that_has_started_the_child_counts(variable: str) -> None:
    assert seen_by_a_child(marked(OPEN_MPI) | {variable: "another"}) == "None None"


@pytest.mark.parametrize("variable", ["RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_RANK"])
def test_a_job_that_a_rank_of_torchrun_starts_counts(variable: str) -> None:
    assert "rank 5" in seen_by_a_child(marked(TORCHRUN))
    assert seen_by_a_child(marked(TORCHRUN) | {variable: "another"}) == "None None"
    assert seen_by_a_child(marked(OPEN_MPI) | TORCHRUN) == "None None"


def test_variables_that_a_rank_sets_do_not_count() -> None:
    later = {"PMIX_MCA_psec": "native", "RANK": "5", "MASTER_PORT": "1234"}
    assert "rank 5" in seen_by_a_child(marked(OPEN_MPI) | later)


@pytest.mark.parametrize("mark", ["", "x", "1", "{pid} 1 {digest}", "999999999 {start} {digest}"])
def test_no_mark_or_that_of_a_process_which_has_ended(mark: str) -> None:
    process, start, digest = marked(OPEN_MPI, None)[RANK_PROCESS].split()
    text = mark.format(pid=process, start=start, digest=digest)
    assert seen_by_a_child(OPEN_MPI | {RANK_PROCESS: text}) == "None None"


def test_a_call_in_a_child() -> None:
    """Those that multiprocessing makes by importing are in tests/jobs/imported.py."""
    for place in ((5, 8, 1, 4, 1, 2), ()):
        parent = _children.Parent(4242, place)
        with pytest.raises(UsageError, match=r"\(process 4242\) and cannot be a rank"):
            _children.stand_in(parent)


def test_what_stands_in() -> None:
    child = _children.Child(_children.Parent(4242, (5, 8, 1, 4, 1, 2)))
    assert (child.rank, child.size, child.host_count) == (5, 8, 2)
    child.shutdown()
    with pytest.raises(UsageError, match=r"called in a child process of rank 5 \(process 4242\)"):
        child.barrier()
    assert not hasattr(child, "__array__")
