"""Whole jobs of ranks that no MPI has started: by torchrun, or with RANK and the like set by hand.

With RINGDL_TEST_ALL=1, compared with every MPI, also in shared memory, and in all ways to end.
"""

import re
import socket
import sys
from pathlib import Path

import pytest

from tests.environments import PYTHONS
from tests.running import EVERYTHING, JOBS, SOON, Ended, pretended_cuda, run_job, run_ranks
from tests.test_jobs import SAID

pytest.importorskip("torch")

PYTHON = next(iter(PYTHONS.values()))
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
TORCH_ENDS = 5
"""Seconds that Python and torchrun may take to end where PyTorch is loaded, beside other tests."""


def torchrun(ranks: int, *command: str, folder: Path, **settings: str) -> Ended:
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *command)
    return run_job([*command], folder, timeout=150, **settings)


def by_hand(ranks: int, script: str, *arguments: str, folder: Path, **settings: str) -> Ended:
    """No launcher: each rank ends by itself."""
    command = [PYTHON, str(JOBS / "by_hand.py"), str(ranks), str(JOBS / script), *arguments]
    return run_job(command, folder, **settings)


def test_ranks_by_messages(tmp_path: Path) -> None:
    """What mpirun's ranks are checked for; see tests/ranks."""
    modules = ("buckets", "exchanges", "joining", "groups", "mismatches", "protocol", "restarts")
    modules += ("parameter_servers", "policies")
    command = ("-m", "tests.ranks", *modules, "--quick")
    ended = torchrun(3, *command, folder=tmp_path, RINGDL_SHARED_MEMORY="0")
    assert ended.code == 0, ended.text
    assert re.search(r"[4-9]\d checks on 3 ranks, 0 failed", ended.output), ended.text


def test_torch_in_shared_memory(tmp_path: Path) -> None:
    modules = ("torch_backend", "torch_names", "torch_training")
    ended = torchrun(2, "-m", "tests.ranks", *modules, folder=tmp_path)
    assert ended.code == 0, ended.text
    assert re.search(r"[3-9]\d checks on 2 ranks, 0 failed", ended.output), ended.text


@pytest.mark.parametrize("shared", ["1", "0"] if EVERYTHING else ["0"])
@pytest.mark.parametrize("mpi", list(PYTHONS)[: None if EVERYTHING else 1])
def test_the_same_bits_as_under_mpirun(mpi: str, shared: str, tmp_path: Path) -> None:
    """In shared memory, and by messages alone."""
    jobs = [
        run_ranks(PYTHONS[mpi], 2, "digest.py", folder=tmp_path, RINGDL_SHARED_MEMORY=shared),
        torchrun(2, str(JOBS / "digest.py"), folder=tmp_path, RINGDL_SHARED_MEMORY=shared),
    ]
    digests = [re.findall(r"rank \d of 2: (\w{64})", job.output) for job in jobs]
    assert [len(found) for found in digests] == [2, 2], [job.text for job in jobs]
    assert len({*digests[0], *digests[1]}) == 1, digests


@pytest.mark.parametrize("how", list(SAID) if EVERYTHING else ["kill", "raise", "exit"])
def test_a_rank_that_ends_is_named_by_the_others(how: str, tmp_path: Path) -> None:
    """Nobody takes them down: they end by themselves, as soon as they wait for it."""
    ended = by_hand(3, "endings.py", how, folder=tmp_path)
    assert ended.seconds_since("ends") < SOON + TORCH_ENDS, ended.text
    codes = re.search(r"exit codes: \[(.*)\]", ended.output)
    assert codes is not None, ended.text
    first, _, last = codes[1].split(", ")
    assert (first, last) == ("1", "1"), ended.text
    assert "the allreduce has ended" not in ended.output
    words = [text for text in SAID[how] if text != ", in end"]
    if how not in ("exit", "return", "stall", "stop", "version"):
        words.append("RankFailedError: rank 1 has ended without shutdown()")
    missing = [text for text in words if text not in ended.errors]
    assert not missing, f"{missing} not in:\n{ended.text}"


def test_a_rank_that_is_killed_is_missed_at_the_end(tmp_path: Path) -> None:
    ended = by_hand(3, "endings.py", "kill", "late", folder=tmp_path)
    assert "exit codes: [1, -9, 1]" in ended.output, ended.text
    assert "RankFailedError: rank 1 has ended" in ended.errors


@pytest.mark.parametrize("way", ["direct", "nccl", "staged"][: None if EVERYTHING else 2])
def test_others_go_on_with_devices(way: str, tmp_path: Path) -> None:
    """Pretended ones, whose memory the killed rank had mapped."""
    settings = {"LD_LIBRARY_PATH": pretended_cuda(), "RINGDL_PRETENDED_DEVICES": "3"}
    settings["RINGDL_CUDA_PEERS"] = "0" if way == "staged" else "1"
    ended = by_hand(3, "killed_on_device.py", way, folder=tmp_path, **settings)
    assert ended.output.count("has gone on") == 2, ended.text
    assert ended.seconds_since("ends") < SOON + TORCH_ENDS, ended.text
    assert "exit codes: [1, -9, 1]" in ended.output, ended.text


@pytest.mark.parametrize(
    "settings", [("3", "1"), ("1", "0")], ids=["its_shard_is_there", "by_messages"]
)
def test_others_go_on_with_a_parameter_server(settings: tuple[str, str], tmp_path: Path) -> None:
    """What the killed rank has pushed stays, and nobody waits for it."""
    servers, shared = settings
    ended = by_hand(3, "server_killed.py", servers, folder=tmp_path, RINGDL_SHARED_MEMORY=shared)
    assert ended.output.count("has gone on") == 2, ended.text
    assert "exit codes: [1, -9, 1]" in ended.output, ended.text


def test_a_sender_that_is_killed_in_a_message(tmp_path: Path) -> None:
    """The receive, which names no rank, fails, and so the job does not hang in its end."""
    ended = by_hand(2, "killed_sender.py", folder=tmp_path)
    assert ended.output.count("was told") == 1, ended.text
    assert "exit codes: [1, -9]" in ended.output, ended.text


def test_torchrun_ends_with_a_rank(tmp_path: Path) -> None:
    ended = torchrun(2, str(JOBS / "endings.py"), "kill", folder=tmp_path)
    assert ended.code != 0, ended.text
    assert ended.seconds_since("ends") < SOON + TORCH_ENDS, ended.text


def test_torchrun_starts_ranks_again(tmp_path: Path) -> None:
    """They do not meet those of the time before."""
    ended = torchrun(2, "--max-restarts", "1", str(JOBS / "restarted.py"), folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("has ended well") == 2, ended.text


def two_torchruns(ranks: int, *words: str, folder: Path) -> Ended:
    """As on two hosts, one of them on each, with so many ranks each."""
    start = (
        f"{' '.join(TORCHRUN)} --nnodes 2 --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-id 7 "
        f"--rdzv-endpoint 127.0.0.1:PORT {' '.join(words)}"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        start = start.replace("PORT", str(free.getsockname()[1]))
    return run_job(["sh", "-c", f"{start} & {start}; wait"], folder, timeout=150)


def test_several_torchruns_are_one_job(tmp_path: Path) -> None:
    ended = two_torchruns(2, str(JOBS / "hello.py"), folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count(" of 4: [10, 10, 10]") == 4, ended.text


def test_several_torchruns_start_ranks_again(tmp_path: Path) -> None:
    """One of them has a rank that failed, and counts that; the other one does not."""
    script = (str(JOBS / "restarted_elsewhere.py"), str(tmp_path / "ended"))
    ended = two_torchruns(1, "--max-restarts", "2", *script, folder=tmp_path)
    assert ended.output.count("has ended well") == 2, ended.text


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_meets_at_the_same_port(when: str, tmp_path: Path) -> None:
    ended = by_hand(3, "beside_gloo.py", when, folder=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("both worked") == 3


def test_bench_and_doctor(tmp_path: Path) -> None:
    """Where ringdl's sources lie, without the engine; and what needs MPI is said once."""
    (tmp_path / "ringdl").mkdir()
    (tmp_path / "ringdl/__init__.py").write_text("raise ImportError('it was not compiled')\n")
    script = tmp_path / "elsewhere/ringdl_of_now.py"
    script.parent.mkdir()
    script.write_text("import sys\nfrom ringdl.cli import main\nsys.exit(main())\n")
    words = ("bench", "allreduce", "-b", "1K", "-e", "2K", "-n", "5")
    ended = torchrun(2, str(script), *words, folder=tmp_path)
    assert ended.code == 0, ended.text
    ended = torchrun(2, str(script), *words, "--peers", "mpi", folder=tmp_path)
    assert ended.code != 0
    assert ended.errors.count("--peers mpi needs ranks that an MPI has started") == 1, ended.text
    assert "AttributeError" not in ended.errors, ended.text
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script), "doctor"]
    ended = run_job(command, tmp_path, cwd=tmp_path, timeout=150)
    assert "it was not compiled" not in ended.text
    assert "2 on one host" in ended.output, ended.text


def test_spawned_ranks(tmp_path: Path) -> None:
    ended = run_job([PYTHON, str(JOBS / "spawned.py")], tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("has trained") == 2


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}
    hello = [sys.executable, str(JOBS / "hello.py")]
    ended = run_job(hello, tmp_path, **environment, MASTER_PORT="0", RINGDL_TIMEOUT="2")
    assert ended.code != 0
    assert "StallError: rank 0" in ended.errors, ended.text
