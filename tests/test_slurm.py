"""Jobs under Slurm: a real one, of two hosts on this machine (tests/slurm.py)."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.environments import PYTHONS
from tests.running import EVERYTHING, SOON
from tests.slurm import Slurm, until

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "tests/jobs"
EXAMPLES = ROOT / "examples"
TWO_HOSTS = ("--nodes=2", "--ntasks-per-node=2")
SMALL = "--layers 1 --heads 1 --width 24 --context 32 --save-every 5"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    lack = slurm.lack()
    if lack:
        pytest.skip(lack)
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(autouse=True)
def _jobs_end(cluster: Slurm) -> Iterator[None]:
    """Those of a test that has failed, too: the next one needs the hosts."""
    yield
    cluster.end_jobs()


def assert_same_bits(output: str, ranks: int) -> None:
    found = re.findall(rf"rank (\d+) of {ranks}: (\w+)", output)
    assert sorted(int(rank) for rank, _ in found) == list(range(ranks)), output
    assert len({digest for _, digest in found}) == 1, output


def hosts_by_srun(mpi: str) -> int:
    """What MPICH 5 tells Slurm of ranks on several hosts is sometimes too long: docs/cluster.md."""
    return 1 if mpi == "mpich" else 2


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_srun(cluster: Slurm, mpi: str) -> None:
    """Ranks train to the same bits."""
    hosts = hosts_by_srun(mpi)
    ended = cluster.srun(mpi, hosts, PYTHONS[mpi], str(JOBS / "digest.py"))
    assert ended.returncode == 0, ended.stdout
    assert_same_bits(ended.stdout, 2 * hosts)


def test_srun_of_what_ddp_takes(cluster: Slurm) -> None:
    """Scripts for DDP set these; no MPI is needed then."""
    settings = {"MASTER_ADDR": slurm.HOSTS[0], "MASTER_PORT": str(slurm.free_ports(1)[0])}
    python = next(iter(PYTHONS.values()))
    ended = cluster.call(
        *("srun", "--quiet", *TWO_HOSTS, "--mpi=none", "sh", "-c"),
        f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {python} {JOBS / 'digest.py'}",
        **settings,
    )
    assert ended.returncode == 0, ended.stdout
    assert_same_bits(ended.stdout, 4)


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_run_in_a_batch_job(cluster: Slurm, mpi: str, tmp_path: Path) -> None:
    """mpirun takes the ranks and the hosts from Slurm."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {PYTHONS[mpi]} -m ringdl run {JOBS / 'digest.py'}\n")
    number = cluster.submit(script, *TWO_HOSTS, "--output=output")
    cluster.await_state(number, "COMPLETED", "FAILED")
    assert_same_bits((tmp_path / "output").read_text(), 4)


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_doctor_sees_the_hosts(cluster: Slurm, mpi: str) -> None:
    hosts = hosts_by_srun(mpi)
    ended = cluster.srun(mpi, hosts, PYTHONS[mpi], "-m", "ringdl", "doctor")
    assert ended.returncode == 0, ended.stdout
    assert ("2 hosts" if hosts == 2 else "2 on one host") in ended.stdout, ended.stdout


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_a_killed_rank_ends_the_step(cluster: Slurm, mpi: str) -> None:
    ended = cluster.srun(mpi, hosts_by_srun(mpi), PYTHONS[mpi], str(JOBS / "endings.py"), "kill")
    seconds = time.monotonic() - float(re.findall(r"ends at (\S+)", ended.stdout)[-1])
    assert ended.returncode != 0, ended.stdout
    assert seconds < SOON, ended.stdout
    assert_clean(cluster)


def assert_clean(cluster: Slurm) -> None:
    """Nothing of a job is left on the hosts but what MPICH leaves, and dead processes."""
    left = cluster.on_hosts(
        "ls /dev/shm | grep -v ^mpich_shm; ps -e -o args | grep [p]ython | grep -v defunct; true"
    )
    assert left == "", left


def example(folder: Path, mpi: str, script: str, changes: dict[str, str]) -> Path:
    """A batch script of examples/cluster, changed, in a new folder, with what it starts.

    By srun, if it starts Open MPI's ranks; by mpirun, which Slurm understands, if others.
    """
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").write_text(f"PATH={Path(PYTHONS[mpi]).parent}:$PATH\n")
    shutil.copy(EXAMPLES / "torch_gpt.py", folder)
    text = (EXAMPLES / "cluster" / script).read_text()
    here = {"module load openmpi\n": "", "$HOME": str(folder)}
    if "openmpi" not in mpi:
        command = text[text.index("srun --mpi=pmix") : text.rindex("torch_gpt.py")]
        here[command] = "python -m ringdl run "
    for before, after in (here | changes).items():
        assert before in text
        text = text.replace(before, after)
    (folder / script).write_text(text)
    return folder / script


def starts(folder: Path) -> list[tuple[int, int]]:
    """The ranks and the first step of each start of an example."""
    output = folder / "output"
    text = output.read_text() if output.exists() else ""
    found = re.findall(r"ranks: (\d+), .* from step (\d+)", text)
    return [(int(ranks), int(step)) for ranks, step in found]


def end_time(cluster: Slurm, number: str, checkpoint: Path, start: int) -> None:
    """Tell a job that its time is over, once it has started so often and written a checkpoint."""

    def shown() -> str:
        output = checkpoint.parent / "output"
        text = output.read_text() if output.exists() else "no output"
        return f"{cluster.call('scontrol', 'show', 'job', number).stdout}\n{text}"

    until(lambda: len(starts(checkpoint.parent)) == start, shown)
    started = time.time()
    until(lambda: checkpoint.exists() and checkpoint.stat().st_mtime > started, shown)
    signalled = cluster.call("scancel", "--batch", "--signal=USR2", number)
    assert signalled.returncode == 0, signalled.stdout


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_a_job_goes_on_when_its_time_is_over(cluster: Slurm, mpi: str, tmp_path: Path) -> None:
    """It continues from its checkpoint and ends with the bits of one that ran through."""
    small = {"--steps 20000": f"--steps 400 {SMALL}"}
    digests = []
    for name in ("interrupted", "through"):
        script = example(tmp_path / name, mpi, "train.sbatch", small)
        number = cluster.submit(script, *TWO_HOSTS, "--cpus-per-task=1", "--output=output")
        if name == "interrupted":
            end_time(cluster, number, script.parent / "gpt.safetensors", 1)
            cluster.await_state(number, "PENDING")
        cluster.await_state(number, "COMPLETED", "FAILED")
        output = (script.parent / "output").read_text()
        assert cluster.job(number, "JobState") == "COMPLETED", output
        digests += re.findall(r"all 4 ranks hold the same bits: (\w+)", output)
    first, second = starts(tmp_path / "interrupted")
    assert first == (4, 0)
    assert second[0] == 4
    assert second[1] > 0
    assert starts(tmp_path / "through") == [(4, 0)]
    assert len(digests) == 2
    assert digests[0] == digests[1]


@pytest.mark.any_mpi
@pytest.mark.parametrize("mpi", PYTHONS)
def test_scancel(cluster: Slurm, mpi: str, tmp_path: Path) -> None:
    script = example(
        tmp_path / "job", mpi, "train.sbatch", {"--steps 20000": f"--steps 20000 {SMALL}"}
    )
    number = cluster.submit(script, *TWO_HOSTS, "--cpus-per-task=1", "--output=output")
    until((script.parent / "gpt.safetensors").exists, lambda: "no checkpoint")
    cancelled = time.monotonic()
    assert cluster.call("scancel", number).returncode == 0
    until(lambda: cluster.call("squeue", "--noheader").stdout == "", lambda: "it does not end")
    assert time.monotonic() - cancelled < slurm.KILL_WAIT + SOON
    assert cluster.job(number, "JobState") == "CANCELLED"
    assert_clean(cluster)


@pytest.mark.skipif(not EVERYTHING, reason="takes a minute: make test-all")
@pytest.mark.any_mpi
def test_an_array_grows_and_shrinks(cluster: Slurm, mpi_python: str, tmp_path: Path) -> None:
    """Each time that a part starts, it takes the hosts that are free."""
    mpi = next(name for name, python in PYTHONS.items() if python == mpi_python)
    small = {
        "--array=0-2%2": "--array=1",
        "--nodes=1-4": "--nodes=1-2",
        "--ntasks-per-node=4": "--ntasks-per-node=2",
        "--cpus-per-task=8": "--cpus-per-task=4",
        "--output=sweep-%A-%a.out": "--output=output",
        "(192 384 768)": "(192 24 768)",
        "--steps 20000 --width": f"--steps 100000 {SMALL} --width",
    }
    script = example(tmp_path / "sweep", mpi, "sweep.sbatch", small)
    checkpoint = script.parent / "gpt-24.safetensors"
    (tmp_path / "sleep.sh").write_text("#!/bin/bash\nsleep 600\n")

    def another_job() -> str:
        """It needs one of the hosts, alone."""
        words = ("--nodelist=beta", "--exclusive", "--output=/dev/null")
        return cluster.submit(tmp_path / "sleep.sh", *words)

    def newest() -> str:
        words = ("squeue", "--noheader", "--name=sweep", "--sort=-i", "--format=%A")
        return cluster.call(*words).stdout.split()[0]

    def is_idle(host: str) -> bool:
        words = ("sinfo", "--noheader", f"--nodes={host}", "--format=%t")
        return cluster.call(*words).stdout.strip() == "idle"

    other = another_job()
    cluster.await_state(other, "RUNNING")
    cluster.submit(script)
    until(lambda: len(starts(script.parent)) == 1, lambda: "it does not start")
    assert cluster.call("scancel", other).returncode == 0
    until(lambda: is_idle("beta"), lambda: "its host does not get free")
    end_time(cluster, newest(), checkpoint, 1)
    until(lambda: len(starts(script.parent)) == 2, lambda: "it does not start again")
    other = another_job()  # begins first
    end_time(cluster, newest(), checkpoint, 2)
    until(lambda: len(starts(script.parent)) == 3, lambda: "it does not start again")
    assert cluster.call("scancel", newest(), other).returncode == 0
    until(lambda: cluster.call("squeue", "--noheader").stdout == "", lambda: "they do not end")
    ranks, steps = zip(*starts(script.parent), strict=True)
    assert ranks == (2, 4, 2)
    assert 0 == steps[0] < steps[1] < steps[2]
