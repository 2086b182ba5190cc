"""The doctor's verdicts."""

from pathlib import Path

import pytest

from ringdl import _cores, _doctor, _launch, _mpirun, cli
from ringdl._doctor import Check

TWO = _cores.Cores(cpus=2, cores=2, online=2)


def test_python() -> None:
    assert _doctor.check_python((3, 11, 2)).verdict == "ok"
    assert _doctor.check_python((3, 10, 9)).verdict == "wrong"


def test_launcher() -> None:
    assert "size is 1" in _doctor.check_launcher(None).text
    assert "Hydra (rank 1 of 2)" in _doctor.check_launcher(_launch.Launcher("Hydra", 1, 2)).text


def test_cores() -> None:
    assert _doctor.check_cores(TWO).verdict == "ok"
    limited = _doctor.check_cores(_cores.Cores(cpus=8, cores=8, online=8, quota=1.5))
    assert limited.verdict == "note"
    assert "quota is 1.5" in limited.text


@pytest.mark.parametrize(("threads", "verdict"), [("", "ok"), ("2", "ok"), ("3", "note")])
def test_threads(threads: str, verdict: str) -> None:
    assert _doctor.check_threads(TWO, {"OMP_NUM_THREADS": threads}).verdict == verdict


def test_shared_memory(tmp_path: Path) -> None:
    assert _doctor.check_shared_memory(str(tmp_path)).verdict in ("ok", "note")
    absent = _doctor.check_shared_memory(str(tmp_path / "absent"))
    assert absent.verdict == "note"


def test_no_mpi_means_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> _mpirun.Library:
        raise _mpirun.LaunchError("mpi4py is not installed")

    monkeypatch.setattr(_mpirun, "find_library", refuse)
    (check,) = _doctor.check_mpi(trial=True, cores=TWO)
    assert check == Check("MPI", "note", "only one rank is possible: mpi4py is not installed")


@pytest.mark.parametrize(
    ("code", "out", "err", "verdict", "words"),
    [
        (0, "ringdl: [2, 3, 2, 3]\n", "", "ok", "2 on this host, threads MULTIPLE"),
        (0, "ringdl: [2, 3, 1, 0]\n", "", "note", "threads SINGLE"),
        (0, "ringdl: [1, 1, 1, 3]\nringdl: [1, 1, 1, 3]\n", "", "wrong", "of another MPI"),
        (1, "", "-----\nno slots\n-----\n", "wrong", "exit code 1: no slots"),
        (0, "", "", "wrong", "no output"),
    ],
)
def test_trial(code: int, out: str, err: str, verdict: str, words: str) -> None:
    check = _doctor.judge_trial(code, out, err)
    assert check.verdict == verdict
    assert words in check.text


def test_report_sums_up() -> None:
    fine = [Check("a", "ok", "x"), Check("bb", "note", "y")]
    assert _doctor.is_usable(fine)
    assert _doctor.report(fine).splitlines() == [
        "ok     a   x",
        "note   bb  y",
        "",
        "ringdl can be used here",
    ]
    bad = [*fine, Check("c", "wrong", "z")]
    assert not _doctor.is_usable(bad)
    assert "1 to mend" in _doctor.report(bad)


def test_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for verdict, code in (("note", 0), ("wrong", 1)):
        monkeypatch.setattr(_doctor, "examine", lambda trial, v=verdict: [Check("a", v, "x")])
        assert cli.main(["doctor", "--quick"]) == code
        assert verdict in capsys.readouterr().out


def test_examine_never_loads_mpi() -> None:
    import sys

    loaded = "mpi4py.MPI" in sys.modules
    checks = _doctor.examine(trial=False)
    assert ("mpi4py.MPI" in sys.modules) == loaded
    assert {"Python", "ringdl", "cores", "MPI", "PyTorch", "CUDA"} <= {c.name for c in checks}
