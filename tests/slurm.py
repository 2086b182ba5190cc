"""A real Slurm of two hosts on this machine, for tests: its daemons, without accounts or passwords.

A host is a slurmd in namespaces of its own: a host name, processes, shared memory, /tmp of its
daemon. Nothing of a host outlives it. All have this machine's files and network.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests import running

HOSTS = ("alpha", "beta")
CPUS = 8  # of each host, as Slurm shall believe
KILL_WAIT = 5  # seconds after which what does not heed scancel is killed
TIMEOUT = 120
PACKAGES = "slurmctld slurmd slurm-client libpmix-dev libpmi2-0"
PMI2 = "/usr/lib/x86_64-linux-gnu/libpmi2.so.0"

CONFIGURATION = """\
ClusterName=ringdl
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait={kill_wait}
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""Credentials expire soon, as a requeued job waits for that, but not before ranks have started."""


def lack() -> str | None:
    """What keeps this machine from running Slurm, in one sentence."""
    if os.geteuid() != 0:
        return "Slurm's hosts need root: namespaces are made by root alone"
    if any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "srun", "sbatch")):
        return f"Slurm is not installed: apt-get install --no-install-recommends {PACKAGES}"
    has_pmix = any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))  # which srun loads by this name
    if not (has_pmix and Path(PMI2).exists()):
        return f"Slurm has no PMIx or PMI2: apt-get install --no-install-recommends {PACKAGES}"
    tried = subprocess.run(
        ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "hostname", HOSTS[0]],
        capture_output=True,
        check=False,
    )
    return None if tried.returncode == 0 else "this machine does not allow namespaces"


def until(claim: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not claim():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class Slurm:
    """Calls Slurm's programs for one cluster.

    Attributes:
        folder: the cluster's own files.
        settings: the environment in which its programs find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = {"SLURM_CONF": str(folder / "slurm.conf"), "I_MPI_PMI_LIBRARY": PMI2}
        # Slurm's other fence lets Open MPI's ranks go too early on a busy machine: docs/cluster.md
        self.settings |= {"SLURM_PMIX_FENCE": "ring"}
        # Ranks on one machine that shall believe they are on two: over the network.
        self.settings |= {"UCX_TLS": "tcp,self", "OMPI_MCA_pml": "ob1", "FI_PROVIDER": "tcp"}
        # Open MPI 4 has no "sm", and Open MPI 5 knows it by the other name, too.
        self.settings |= {"OMPI_MCA_btl": "tcp,vader,self", "OMPI_MCA_mpi_yield_when_idle": "1"}
        self.settings |= {"I_MPI_FABRICS": "ofi", "I_MPI_PIN": "0", "I_MPI_THREAD_YIELD": "2"}

    def call(
        self, *words: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """See `running.call`."""
        settings = self.settings | environment
        return running.call(*words, timeout=TIMEOUT, cwd=cwd or running.ROOT, **settings)

    def submit(self, script: Path, *options: str, **environment: str) -> str:
        """Queue a batch script in the folder it is in; its job's number."""
        words = ["sbatch", "--parsable", *options, script.name]
        submitted = self.call(*words, cwd=script.parent, **environment)
        assert submitted.returncode == 0, submitted.stdout
        return submitted.stdout.split()[-1]

    def job(self, number: str, name: str) -> str:
        """What Slurm knows about a job: JobState, Restarts, NumNodes, ..."""
        shown = self.call("scontrol", "show", "job", "--oneliner", number).stdout
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found is not None, shown
        return found[1]

    def await_state(self, number: str, *states: str) -> None:
        until(
            lambda: self.job(number, "JobState") in states,
            lambda: f"not {states}: {self.call('scontrol', 'show', 'job', number).stdout}",
        )

    def end_jobs(self) -> None:
        """Cancel what is left."""
        if self.call("squeue", "--noheader").stdout:
            self.call("scancel", f"--user={os.geteuid()}")
            until(lambda: self.call("squeue", "--noheader").stdout == "", lambda: "jobs stay")

    def srun(self, mpi: str, hosts: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as two ranks on each of so many hosts; both outputs in one."""
        return self.call(
            *("srun", "--quiet", f"--nodes={hosts}", "--ntasks-per-node=2"),
            *("--kill-on-bad-exit=1", "--mpi=pmix" if "openmpi" in mpi else "--mpi=pmi2"),
            *command,
        )

    def on_hosts(self, command: str) -> str:
        """What a command of the shell prints on all hosts."""
        done = self.call(
            "srun", "--quiet", f"--nodes={len(HOSTS)}", "--ntasks-per-node=1", "sh", "-c", command
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster; end it with all that runs on it."""
    cluster = Slurm(folder)
    ports = free_ports(1 + len(HOSTS))
    nodes = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
        for name, port in zip(HOSTS, ports[1:], strict=True)
    ]
    for name in ("state", "tmp", *HOSTS):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            machine=socket.gethostname(),
            port=ports[0],
            kill_wait=KILL_WAIT,
            folder=folder,
            nodes="\n".join(nodes),
        )
    )
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(HOSTS)}\n")
    with ExitStack() as stack:
        stack.enter_context(_daemon(cluster, "slurmctld", ["slurmctld", "-D", "-i", "-c"]))
        for name in HOSTS:
            inside = f"hostname {name} && mount -t tmpfs tmpfs /dev/shm"
            inside += f" && mount -t tmpfs tmpfs {folder}/tmp"
            inside += f" && mount --bind {folder}/hosts /etc/hosts"
            inside += f" && mount --bind {folder} /etc/slurm && exec slurmd -D"
            alone = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
            stack.enter_context(_daemon(cluster, name, [*alone, "sh", "-c", inside]))
        until(
            lambda: cluster.call("sinfo", "-h", "-o", "%D %t").stdout.split() == ["2", "idle"],
            lambda: f"the hosts do not come up: {cluster.call('sinfo').stdout}",
        )
        yield cluster


@contextmanager
def _daemon(cluster: Slurm, name: str, command: Sequence[str]) -> Iterator[None]:
    with (cluster.folder / f"{name}.out").open("wb") as output:
        daemon = subprocess.Popen(
            command,
            env=os.environ | cluster.settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            daemon.kill()
            daemon.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
