"""Which mpirun belongs to a library, the command lines that are built, and the `run` command."""

import stat
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ringdl import _launch, _mpirun, cli
from ringdl._cores import Cores
from ringdl._mpirun import LaunchError, Library, compose, find_mpirun
from ringdl._version import __version__

EIGHT = Cores(cpus=8, cores=8, online=8)
OPEN_MPI = Library(_mpirun.OPEN_MPI, "4.1.4", Path("/opt/lib/libmpi.so.40"), "4.1.2")
MPICH = Library(_mpirun.MPICH, "5.0.2", Path("/opt/lib/libmpi.so.12"), "4.1.2")
INTEL = Library(_mpirun.INTEL_MPI, "2021.9", Path("/opt/lib/libmpi.so.12"), "4.1.2")
CRAY = Library("MPI VERSION CRAY MPICH", "", Path("/opt/cray/libmpi.so.12"), "4.1.2")
PROGRAM = ["python", "train.py", "--epochs", "3"]


def started(library: Library, ranks: int, cores: Cores = EIGHT, **rest: object) -> str:
    arguments: dict[str, object] = {"cores": cores, "environ": {}} | rest
    command = compose(library, Path("mpirun"), ranks, PROGRAM, **arguments)  # type: ignore[arg-type]
    assert command[-4:] == PROGRAM
    return " ".join(command[:-4])


def fake_mpirun(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


OPEN_MPI_5_SAYS = "mpirun (Open MPI) 5.0.11\n\nReport bugs to the Open MPI project"
OPEN_MPI_4_SAYS = "mpirun (Open MPI) 4.1.4"
HYDRA_SAYS = "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc"
INTEL_SAYS = "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4\0", ("Open MPI", "4.1.4")),
        ("Open MPI v5.0.3rc1, package: x", ("Open MPI", "5.0.3rc1")),
        ("MPICH Version:      5.0.2\nMPICH Release date: x", ("MPICH", "5.0.2")),
        ("Intel(R) MPI Library 2021.9 for Linux* OS\n", ("Intel MPI", "2021.9")),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)",
            ("MPI VERSION CRAY MPICH", ""),
        ),
    ],
)
def test_library_is_identified(text: str, expected: tuple[str, str]) -> None:
    assert _mpirun.identify_library(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_5_SAYS, ("Open MPI", "5.0.11")),
        ("mpiexec (OpenRTE) 4.1.4", ("Open MPI", "4.1.4")),
        (HYDRA_SAYS, ("MPICH", "5.0.2")),
        (INTEL_SAYS, ("Intel MPI", "2021.9")),
        ("usage: mpirun", None),
    ],
)
def test_mpirun_is_identified(text: str, expected: tuple[str, str] | None) -> None:
    assert _mpirun.identify_mpirun(text) == expected


def test_command_binds_each_rank_to_its_share() -> None:
    assert started(OPEN_MPI, 2) == (
        "mpirun -n 2 --map-by slot:PE=4 --bind-to core -x OMP_NUM_THREADS=4"
    )
    assert started(OPEN_MPI, 3) == (
        "mpirun -n 3 --map-by slot:PE=2 --bind-to core -x OMP_NUM_THREADS=2"
    )
    assert started(MPICH, 8) == "mpirun -n 8 -bind-to core:1 -genv OMP_NUM_THREADS 1"
    assert started(INTEL, 2) == "mpirun -n 2 -genv OMP_NUM_THREADS 4"


def test_command_for_more_ranks_than_cores() -> None:
    assert started(OPEN_MPI, 9) == (
        "mpirun -n 9 --map-by :OVERSUBSCRIBE --bind-to none -x OMP_NUM_THREADS=1"
    )
    assert started(MPICH, 9) == "mpirun -n 9 -genv OMP_NUM_THREADS 1"
    assert started(INTEL, 9) == "mpirun -n 9 -genv I_MPI_THREAD_YIELD 2 -genv OMP_NUM_THREADS 1"
    assert started(INTEL, 9, environ={"I_MPI_THREAD_YIELD": "0"}) == (
        "mpirun -n 9 -genv OMP_NUM_THREADS 1"
    )


def test_command_binds_nothing_if_not_all_cores_are_ours() -> None:
    masked = Cores(cpus=4, cores=4, online=8)
    assert started(OPEN_MPI, 2, masked) == ("mpirun -n 2 --bind-to none -x OMP_NUM_THREADS=2")
    assert started(MPICH, 2, masked) == "mpirun -n 2 -genv OMP_NUM_THREADS 2"
    limited = Cores(cpus=8, cores=8, online=8, quota=2.0)
    assert started(OPEN_MPI, 2, limited) == "mpirun -n 2 --bind-to none -x OMP_NUM_THREADS=1"


def test_command_for_root_and_set_threads() -> None:
    assert started(OPEN_MPI, 8, is_root=True, environ={"OMP_NUM_THREADS": "3"}) == (
        "mpirun --allow-run-as-root -n 8 --map-by slot:PE=1 --bind-to core"
    )
    assert started(MPICH, 8, is_root=True, environ={"OMP_NUM_THREADS": "3"}) == (
        "mpirun -n 8 -bind-to core:1"
    )


def test_placement_is_left_to_the_user_and_to_jobs_of_several_hosts() -> None:
    assert started(OPEN_MPI, 16, options=["--hostfile", "hosts"]) == (
        "mpirun -n 16 --hostfile hosts"
    )
    assert started(MPICH, 16, options=["-hosts=a,b"]) == "mpirun -n 16 -hosts=a,b"
    assert started(OPEN_MPI, 16, environ={"SLURM_JOB_NUM_NODES": "2"}) == "mpirun -n 16"
    assert started(OPEN_MPI, 16, environ={"PBS_NODEFILE": "/var/nodes"}) == "mpirun -n 16"
    assert started(OPEN_MPI, 8, options=["--mca", "btl", "self,tcp"]) == (
        "mpirun -n 8 --map-by slot:PE=1 --bind-to core -x OMP_NUM_THREADS=1 --mca btl self,tcp"
    )


def test_command_leaves_out_what_starts_slowly() -> None:
    """Open MPI 5's ofi, unless the user has chosen among its kind."""
    five = Library(_mpirun.OPEN_MPI, "5.0.11", Path("/opt/lib/libmpi.so.40"), "4.1.2")
    placed = "mpirun -n 8 --map-by slot:PE=1 --bind-to core -x OMP_NUM_THREADS=1"
    assert started(five, 8) == f"{placed} --mca btl ^ofi"
    assert started(five, 8, options=["--mca", "btl", "self,tcp"]) == f"{placed} --mca btl self,tcp"
    assert started(five, 8, environ={"OMPI_MCA_btl": "self,tcp"}) == placed
    assert started(five, 8, environ={"SLURM_JOB_NUM_NODES": "2"}) == "mpirun -n 8"


def test_mpirun_beside_the_library_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", f"{tmp_path}/other/bin:/usr/bin:/bin")
    fake_mpirun(tmp_path / "other/bin/mpirun", OPEN_MPI_5_SAYS)
    library = Library(_mpirun.OPEN_MPI, "5.0.11", tmp_path / "mpi/lib/x86_64/libmpi.so", "4.1.2")
    assert find_mpirun(library) == tmp_path / "other/bin/mpirun"
    own = fake_mpirun(tmp_path / "mpi/bin/mpirun", OPEN_MPI_5_SAYS)
    assert find_mpirun(library) == own


def test_mpirun_of_another_mpi_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", f"{tmp_path}/old:{tmp_path}/hydra:/usr/bin:/bin")
    fake_mpirun(tmp_path / "old/mpirun", OPEN_MPI_4_SAYS)
    hydra = fake_mpirun(tmp_path / "hydra/mpiexec.hydra", HYDRA_SAYS)
    library = Library(_mpirun.MPICH, "5.0.2", tmp_path / "mpi/lib/libmpi.so.12", "4.1.2")
    assert find_mpirun(library) == hydra
    hydra.unlink()
    with pytest.raises(LaunchError, match=r"MPICH 5\.0\.2 .*there is no mpirun of that"):
        find_mpirun(library)


def test_chosen_mpirun_must_match(tmp_path: Path) -> None:
    old = fake_mpirun(tmp_path / "mpirun", OPEN_MPI_4_SAYS)
    with pytest.raises(LaunchError, match=r"belongs to Open MPI 4\.1\.4, but mpi4py loads MPICH"):
        find_mpirun(MPICH, str(old))
    with pytest.raises(LaunchError, match="there is no program"):
        find_mpirun(MPICH, str(tmp_path / "absent"))
    longer = fake_mpirun(tmp_path / "mpiexec", INTEL_SAYS.replace("2021.9", "2021.9.0"))
    assert find_mpirun(INTEL, str(longer)) == longer


def test_unknown_mpi_needs_a_chosen_mpirun(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"srun -n 2 python train\.py"):
        find_mpirun(CRAY)
    chosen = fake_mpirun(tmp_path / "aprun", "aprun")
    assert find_mpirun(CRAY, str(chosen)) == chosen


def test_missing_mpi4py_is_one_sentence(tmp_path: Path) -> None:
    python = fake_mpirun(tmp_path / "python", "")
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mpi4py'\" >&2\nexit 1\n"
    )
    with pytest.raises(LaunchError, match=r"mpi4py is not installed .* 'ringdl\[openmpi\]'"):
        _mpirun.find_library(str(python))
    python.write_text("#!/bin/sh\necho 'RuntimeError: cannot load MPI library' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match=r"cannot load an MPI library .*RuntimeError"):
        _mpirun.find_library(str(python))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py -n 3", ([], [], ["train.py", "-n", "3"])),
        ("-n 2 train.py", (["-n", "2"], [], ["train.py"])),
        ("-n2 train.py", (["-n2"], [], ["train.py"])),
        ("-np 2 train.py -- x", (["-n", "2"], [], ["train.py", "--", "x"])),
        ("--np=2 --dry-run -m pkg.train a", (["-n2", "--dry-run"], [], ["-m", "pkg.train", "a"])),
        (
            "--mpirun m -n 4 --hostfile h -- train.py -- x",
            (["--mpirun", "m", "-n", "4"], ["--hostfile", "h"], ["train.py", "--", "x"]),
        ),
        ("-n 4", (["-n", "4"], [], [])),
        ("--hostfile h --dry-run -- x", (["--dry-run"], ["--hostfile", "h"], ["x"])),
        (
            "--mca btl tcp -n 4 -x A --mpirun m -- -m x",
            (["-n", "4", "--mpirun", "m"], ["--mca", "btl", "tcp", "-x", "A"], ["-m", "x"]),
        ),
    ],
)
def test_run_arguments(words: str, expected: tuple[list[str], list[str], list[str]]) -> None:
    assert cli.split_run(words.split()) == expected


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "detect", lambda environ: None)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run -n 2", "there is no script to run"),
        ("run -n 2 absent.py", "there is no script absent.py in "),
        ("run -n 0 -m site", "at least one rank"),
        ("run -m site", "-n is missing: say how many ranks"),
        ("run --hostfile h -- -m site", "-n is missing: say how many ranks"),
        ("run --hostfile h train.py", "--hostfile is taken as an option of mpirun"),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_run_says_what_is_wrong(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("ringdl: ")
    assert message in said
    assert said.count("\n") == 1


def test_run_inside_mpirun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert cli.main(["run", "-n", "2", "-m", "site"]) == 2
    assert "itself started by Open MPI (rank 0 of 2)" in capsys.readouterr().err


@pytest.mark.usefixtures("no_launcher")
def test_run_starts_what_slurm_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_mpirun, "find_library", lambda: MPICH)
    monkeypatch.setattr(_mpirun, "find_mpirun", lambda library, chosen: Path("/opt/bin/mpirun"))
    monkeypatch.setenv("SLURM_NTASKS", "12")
    assert cli.main(["run", "--dry-run", "-m", "site"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "ringdl: -n 12, from SLURM_NTASKS"
    assert said[1].startswith("ringdl: /opt/bin/mpirun -n 12 ")


def test_the_command_ringdl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    command = EntryPoint("ringdl", project["scripts"]["ringdl"], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["ringdl", "--version"])
    with pytest.raises(SystemExit) as end:
        command()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ringdl {__version__}\n"


@pytest.mark.usefixtures("no_launcher")
def test_run_becomes_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "my train.py"
    script.touch()
    became: list[list[str]] = []
    monkeypatch.setattr(_mpirun, "find_library", lambda: MPICH)
    monkeypatch.setattr(_mpirun, "find_mpirun", lambda library, chosen: Path("/opt/bin/mpirun"))
    allowed: list[int] = []

    def become(_: Library, command: list[str], restarts: int, elastic: bool) -> None:
        became.append(command)
        assert not elastic
        allowed.append(restarts)

    monkeypatch.setattr(cli, "execute", become)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cli.main(["run", "-n", "999", "--restarts=2", str(script), "--lr", "0.1"])
    expected = ["/opt/bin/mpirun", "-n", "999", sys.executable, str(script), "--lr", "0.1"]
    assert became == [expected]
    assert allowed == [2]
    assert capsys.readouterr().err.endswith(f"{sys.executable} '{script}' --lr 0.1\n")


def test_only_elastic_jobs_replace_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Library(_mpirun.OPEN_MPI, "5.0.11", Path("/opt/lib/libmpi.so.40"), "4.1.2")
    monkeypatch.setattr(_mpirun, "find_library", lambda: library)
    monkeypatch.setattr(_mpirun, "find_mpirun", lambda library, chosen: Path("/opt/bin/mpirun"))
    script = tmp_path / "train.py"
    script.touch()
    words = ["run", "-n", "2", "--dry-run", "--replacements", "3"]
    assert cli.main([*words, str(script)]) == 2
    assert "--replacements is for jobs that go on: add --elastic" in capsys.readouterr().err
    assert cli.main(["run", "-n2", "--elastic", "--replacements=-1", str(script)]) == 2
    capsys.readouterr()
    assert cli.main([*words, "--elastic", str(script)]) == 0
    told = capsys.readouterr().err
    assert " -x RINGDL_REPLACEMENTS=3 " in told
    assert " --prtemca state_base_recoverable 1 " in told
    monkeypatch.setenv("RINGDL_REPLACEMENTS", "2")
    assert cli.main(["run", "-n2", "--dry-run", "--elastic", str(script)]) == 0
    assert " --prtemca state_base_recoverable 1 " in capsys.readouterr().err
    assert cli.main(["run", "-n2", "--dry-run", "--elastic", "--replacements=0", str(script)]) == 0
    told = capsys.readouterr().err
    assert " -x RINGDL_REPLACEMENTS=0 " in told
    assert "recoverable" not in told


def test_elastic_is_for_open_mpi_5() -> None:
    newer = Library(_mpirun.OPEN_MPI, "5.0.11", Path("/opt/lib/libmpi.so.40"), "4.1.2")

    def compose_elastic(library: Library) -> list[str]:
        where = Path("/opt/bin/mpirun")
        return compose(library, where, 2, ["x"], cores=EIGHT, environ={}, elastic=True)

    assert compose_elastic(newer)[1:6] == ["--with-ft", "ulfm", "--mca", "coll_han_priority", "-1"]
    for library in (MPICH, OPEN_MPI):
        with pytest.raises(LaunchError, match=r"--elastic needs Open MPI 5 or newer"):
            compose_elastic(library)


def test_arguments_that_mpirun_takes_are_refused() -> None:
    newer = Library(_mpirun.OPEN_MPI, "5.0.11", Path("/opt/lib/libmpi.so.40"), "4.1.2")
    for library, word in ((newer, ":"), (MPICH, ":"), (newer, "--map-by")):
        with pytest.raises(LaunchError, match=f"takes the script's argument '{word}'"):
            compose(library, Path("mpirun"), 2, ["x", word, "y"], cores=EIGHT, environ={})
    assert compose(MPICH, Path("mpirun"), 2, ["x", "--map-by"], cores=EIGHT, environ={})


def test_real_ranks_find_each_other(mpi_python: str, tmp_path: Path) -> None:
    script = tmp_path / "size.py"
    script.write_text("from mpi4py import MPI\nprint(f'size {MPI.COMM_WORLD.allreduce(1)}')\n")
    run = [mpi_python, "-m", "ringdl", "run", "-n", "3"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    dry = subprocess.run([*run, "--dry-run", str(script)], **options)  # type: ignore[call-overload]
    assert dry.stdout == ""
    assert dry.stderr.startswith("ringdl: /")
    wet = subprocess.run([*run, str(script)], **options)  # type: ignore[call-overload]
    assert wet.stdout.count("size 3") == 3
