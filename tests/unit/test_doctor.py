"""The doctor's verdicts."""

import importlib.metadata
from pathlib import Path

import pytest

from ringdl import _cores, _doctor, _doctor_ranks, _launch, _mpirun, cli
from ringdl._doctor import Check

TWO = _cores.Cores(cpus=2, cores=2, online=2)


def test_python() -> None:
    assert _doctor.check_python((3, 11, 2)).verdict == "ok"
    assert _doctor.check_python((3, 10, 9)).verdict == "wrong"


def test_launcher() -> None:
    assert "size is 1" in _doctor.check_launcher(None).text
    job = _launch.StoreJob(1, 2, by_torchrun=True)
    assert _doctor.check_launcher(job).text.startswith("2 ranks meet by torchrun: ")
    launched = _doctor.check_launcher(_launch.Launcher("Hydra", 1, 2))
    assert launched.text == "Hydra started 2 ranks"  # the same on all ranks


def test_cores() -> None:
    assert _doctor.check_cores(TWO).verdict == "ok"
    limited = _doctor.check_cores(_cores.Cores(cpus=8, cores=8, online=8, quota=1.5))
    assert limited.verdict == "note"
    assert "quota is 1.5" in limited.text
    one = _cores.Cores(cpus=1, cores=1, online=2)
    assert _doctor.check_cores(one).text == (
        "1 core (1 of the machine's 2 CPUs): up to 1 rank on this host"
    )
    assert _doctor.check_cores(one, is_launched=True).text == (
        "each rank may use 1 core (1 of the machine's 2 CPUs)"
    )


@pytest.mark.parametrize(
    ("threads", "verdict"), [("", "ok"), ("2", "ok"), ("2,9", "ok"), ("3", "note"), ("3,1", "note")]
)
def test_threads(threads: str, verdict: str) -> None:
    assert _doctor.check_threads(TWO, {"OMP_NUM_THREADS": threads}).verdict == verdict


def test_shared_memory(tmp_path: Path) -> None:
    assert _doctor.check_shared_memory(str(tmp_path)).verdict in ("ok", "note")
    absent = _doctor.check_shared_memory(str(tmp_path / "absent"))
    assert absent.verdict == "note"


@pytest.mark.parametrize(
    ("environ", "verdict", "text"),
    [
        ({"PATH": "/bin"}, "ok", "none in the environment"),
        (
            {"RINGDL_TIMEOUT": "9", "RINGDL_ALGORITHM": "ring"},
            "ok",
            "RINGDL_ALGORITHM=ring, RINGDL_TIMEOUT=9",
        ),
        ({"RINGDL_ALGORITM": "ring"}, "note", "RINGDL_ALGORITM is no setting of ringdl"),
        ({"RINGDL_DEBUG": "maybe"}, "wrong", "RINGDL_DEBUG='maybe' is not 0 or 1"),
    ],
)
def test_settings(environ: dict[str, str], verdict: str, text: str) -> None:
    check = _doctor.check_settings(environ)
    assert check.verdict == verdict
    assert check.text.startswith(text)


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


def test_ranks_are_named_where_they_differ() -> None:
    same, here, there = Check("a", "ok", "x"), Check("b", "ok", "y"), Check("b", "wrong", "z")
    only = Check("c", "note", "w")
    assert _doctor.merge([[same, here], [same, here]]) == [same, here]
    assert _doctor.merge([[same, here], [same, there], [same, here], [same, here, only]]) == [
        same,
        Check("b", "ok", "ranks 0, 2-3: y"),
        Check("b", "wrong", "rank 1: z"),
        Check("c", "note", "rank 3: w"),
    ]


@pytest.mark.parametrize(
    ("hosts", "memory_hosts", "threads", "text"),
    [
        ([0, 0], [0, 0], True, "2 on one host have found each other; those of a host share memory"),
        ([0, 1], [0, 1], True, "2 on 2 hosts (1+1) have found each other"),
        (
            [0, 0, 1, 1],
            [0, 0, 6, 7],
            True,
            "4 on 2 hosts (2+2) have found each other; those of a host share memory, but on some "
            "hosts exchange messages",
        ),
        (
            [0, 0, 1],
            [0, 1, 2],
            False,
            "3 on 2 hosts (2+1) have found each other; those of a host exchange messages; without "
            "THREAD_MULTIPLE, so no progress in the background",
        ),
    ],
)
def test_ranks(hosts: list[int], memory_hosts: list[int], threads: bool, text: str) -> None:
    check = _doctor_ranks.check_ranks(hosts, memory_hosts, has_threads=threads)
    assert check == Check("ranks", "ok" if threads else "note", text)


def test_what_is_missing_comes_with_a_command_that_every_shell_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    torch = _doctor.check_torch(trial=False)
    assert "`pip install torch --index-url https://download.pytorch.org/whl/cpu`" in torch.text
    for path in (Path(_doctor.__file__).parent).rglob("*.py"):
        assert "install ringdl[" not in path.read_text(), path


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


@pytest.mark.parametrize(
    ("devices", "hosts", "verdict", "text"),
    [
        ([0, 1], [0, 0], "ok", "rank 0 has device 0, rank 1 has device 1; no MPI"),
        ([0, 0, 0], [0, 0, 1], "note", "ranks 0-1 share device 0, rank 2 has device 0; no MPI"),
        ([0, None], [0, 1], "ok", "rank 0 has device 0, rank 1 has no device; no MPI"),
    ],
)
def test_devices_of_ranks(
    devices: list[int | None], hosts: list[int], verdict: str, text: str
) -> None:
    check = _doctor_ranks.check_devices(devices, hosts, "no MPI")
    assert (check.verdict, check.text) == (verdict, text)


def test_examine_never_loads_mpi() -> None:
    import sys

    loaded = "mpi4py.MPI" in sys.modules
    checks = _doctor.examine(trial=False)
    assert ("mpi4py.MPI" in sys.modules) == loaded
    texts = {check.name: check.text for check in checks}
    assert {"Python", "ringdl", "cores", "MPI", "PyTorch", "CUDA"} <= set(texts)
    assert "arrays" in texts["CUDA"]


def test_the_backend_is_tried_with_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    works = _doctor.check_torch(trial=True)
    assert works.verdict == "ok"
    assert 'init_process_group("ringdl") works with it' in works.text
    monkeypatch.setattr(_doctor, "_BACKEND_TRIAL", "raise RuntimeError('no backend type 0')")
    fails = _doctor.check_torch(trial=True)
    assert fails.verdict == "note"
    assert "does not work with it (RuntimeError: no backend type 0)" in fails.text
    assert "does not work" not in _doctor.check_torch(trial=False).text
