"""Where jobs take what algorithms are chosen by from, and what measures it."""

from pathlib import Path

import pytest

from ringdl._tuning import Tuning, default_tuning, parse_tuning
from tests.environments import PYTHONS
from tests.running import pretended_cuda, run_job, run_ranks

TABLE = Tuning(
    {"inside": {"ring": (0.0, 0.0), "direct": (1.0, 1.0)}, "between": {"ring": (0.0, 0.0)}}, 4096
)


@pytest.mark.parametrize(
    ("settings", "tuning", "messages"),
    [
        ({}, default_tuning(1), "none"),
        ({"RINGDL_TUNING": TABLE.to_json()}, TABLE, "many"),
        ({"RINGDL_ALGORITHM": "ring"}, default_tuning(1), "many"),
    ],
    ids=["default", "table", "ring"],
)
def test_what_jobs_choose_by(
    mpi_python: str, settings: dict[str, str], tuning: Tuning, messages: str, tmp_path: Path
) -> None:
    settings = {"XDG_CACHE_HOME": str(tmp_path), "RINGDL_TUNING": "", **settings}
    ended = run_ranks(mpi_python, 3, "tuned.py", folder=tmp_path, **settings)
    assert ended.code == 0, ended.text
    assert ended.output.count(f"table {tuning.hash}, messages: {messages}") == 3, ended.text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"RINGDL_ALGORITHM": "hierarchical"},
            "cannot be followed: hierarchical is for several hosts",
        ),
        ({"RINGDL_TUNING": "nowhere.json"}, "RINGDL_TUNING='nowhere.json' cannot be read"),
    ],
    ids=["algorithm", "table"],
)
def test_what_cannot_be_followed_is_said(
    settings: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    python = next(iter(PYTHONS.values()))
    ended = run_ranks(python, 2, "tuned.py", folder=tmp_path, **settings)
    assert ended.code != 0
    assert f"UsageError: {next(iter(settings))}" in ended.errors, ended.text
    assert sentence in ended.errors, ended.text


def test_what_was_measured_is_taken_by_the_next_job(mpi_python: str, tmp_path: Path) -> None:
    settings = {"XDG_CACHE_HOME": str(tmp_path), "RINGDL_TUNING": ""}
    command = [mpi_python, "-m", "ringdl", "run", "-n", "2", "-m", "ringdl", "tune"]
    ended = run_job(command, tmp_path, **settings)
    assert ended.code == 0, ended.text
    (path,) = tmp_path.glob("ringdl/*-2-*.json")
    hash_ = ended.output.rpartition("hash ")[2].partition(")")[0]
    assert f"written to {path} (hash {hash_})" in ended.output
    ended = run_ranks(mpi_python, 2, "tuned.py", folder=tmp_path, **settings)
    assert ended.output.count(f"table {hash_},") == 2, ended.text


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (2, " 67,108,864 "),
        (1, "there is nothing to choose: "),
        (0, "there is nothing to choose: rank 0 has no CUDA device"),
    ],
)
def test_nccl_is_compared(devices: int, said: str, tmp_path: Path) -> None:
    """A pretended one, which is slow: the table goes on without it."""
    python = next(iter(PYTHONS.values()))
    settings = {"LD_LIBRARY_PATH": pretended_cuda(), "RINGDL_PRETENDED_DEVICES": str(devices)}
    command = [python, "-m", "ringdl", "run", "-n", "2", "-m", "ringdl", "tune"]
    command += ["--device", "cuda", "-o", str(tmp_path / "table.json")]
    ended = run_job(command, tmp_path, XDG_CACHE_HOME=str(tmp_path), RINGDL_TUNING="", **settings)
    assert said in ended.output, ended.text
    assert (ended.code == 0) == (devices == 2)
    if devices == 2:
        table = parse_tuning((tmp_path / "table.json").read_text(), "here")
        assert table == default_tuning(1)
