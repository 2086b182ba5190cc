"""The launcher is told from the environment: whole environments as the launchers set them."""

import importlib.util
from types import SimpleNamespace

import pytest

from ringdl import _mpi
from ringdl._launch import Launcher, StoreJob, detect, detect_store_job

SHELL = {
    "HOME": "/home/ada",
    "HOSTNAME": "login1",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "4",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "USER": "ada",
}

# Recorded from rank 1 of `mpirun -n 2 env`, each.
OPEN_MPI_5 = {
    "OMPI_ARGV": "",
    "OMPI_COMMAND": "env",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FILE_LOCATION": "/tmp/ompi.4376/1/1",
    "OMPI_MCA_cpu_type": "x86_64",
    "OMPI_MCA_initial_wdir": "/home/ada",
    "OMPI_MCA_num_procs": "2",
    "OMPI_NUM_APP_CTX": "1",
    "OMPI_TOOL_NAME": "mpirun",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_BFROP_BUFFER_TYPE": "PMIX_BFROP_BUFFER_NON_DESC",
    "PMIX_GDS_MODULE": "shmem2,hash",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-4376@1",
    "PMIX_PARAM_FILE_PASSED": "1",
    "PMIX_RANK": "1",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.4376",
    "PMIX_SERVER_URI41": "prterun-vm-4376@0.0;tcp4://127.0.0.1:44807",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
    "PRTE_SHARED_FS": "FALSE",
}
OPEN_MPI_4 = {
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMMAND": "env",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_ess": "^singleton",
    "OMPI_MCA_ess_base_jobid": "2092498945",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_ess_num_procs": "2",
    "OMPI_MCA_orte_launch": "1",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_MCA_pmix": "^s1,s2,cray,isolated",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_ID": "2092498945.1",
    "PMIX_NAMESPACE": "2092498945",
    "PMIX_RANK": "1",
    "PMIX_VERSION": "4.2.2rc2",
}
HYDRA = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# Recorded from a child of a process that called MPI_Init without mpirun (Open MPI 4.1).
OPEN_MPI_4_ALONE = {
    "OMPI_APP_CTX_NUM_PROCS": "1",
    "OMPI_MCA_ess": "singleton",
    "OMPI_MCA_orte_ess_num_procs": "1",
    "OMPI_MCA_orte_launch": "1",
    "OMPI_MCA_pmix": "^s1,s2,cray,isolated",
    "PMIX_NAMESPACE": "2088828929",
    "PMIX_RANK": "0",
    "PMIX_VERSION": "4.2.2rc2",
}
# Written after the documentation and sources of Intel MPI and Slurm.
INTEL_MPI = HYDRA | {
    "I_MPI_HYDRA_BOOTSTRAP": "ssh",
    "I_MPI_MPIRUN": "mpirun",
    "I_MPI_ROOT": "/opt/intel/oneapi/mpi/2021.9.0",
    "MPIR_CVAR_CH4_OFI_ENABLE_ATOMICS": "-1",
}
SLURM_JOB = {
    "SLURMD_NODENAME": "n017",
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_JOBID": "901593",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NODELIST": "n[017-018]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "batch",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[017-018]",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_SUBMIT_DIR": "/home/ada",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SLURM_BATCH = SLURM_JOB | {
    "ENVIRONMENT": "BATCH",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "12345",
}
SLURM_STEP = SLURM_JOB | {
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_SRUN_COMM_PORT": "33360",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "33360",
    "SLURM_STEP_NODELIST": "n[017-018]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASK_PID": "12345",
}
SLURM_ONE_HOST = SLURM_STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}
SLURM_SALLOC_STEP = SLURM_STEP | {
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}
# mpirun in a batch script: its daemons are a Slurm step with one task per host.
SLURM_DAEMON = SLURM_STEP | {
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
}

OPEN_MPI = Launcher("Open MPI", 1, 2, 1, 2)
SRUN = Launcher("Slurm", 5, 8, 1, None)

ONE_TASK = SHELL | SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
CASES = {
    "nothing": ({}, None),
    "the only task of a step": (ONE_TASK, None),
    "the same with PMIx": (
        ONE_TASK | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.901593.0"},
        None,
    ),
    "the same with PMI2": (ONE_TASK | {"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
    "login node": (SHELL, None),
    "Open MPI 5": (SHELL | OPEN_MPI_5, OPEN_MPI),
    "Open MPI 4": (SHELL | OPEN_MPI_4, OPEN_MPI),
    "Open MPI 4, child of one alone": (SHELL | OPEN_MPI_4_ALONE, None),
    "MPICH": (SHELL | HYDRA, Launcher("Hydra", 1, 2, 1, 2)),
    "Intel MPI": (SHELL | INTEL_MPI, Launcher("Intel MPI", 1, 2, 1, 2)),
    "Cray PALS": (
        {"PALS_APID": "7b4c", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "3"}
        | {"PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        Launcher("Cray PALS", 3, 4, 1, 2),
    ),
    "PMIx": (
        {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prte-n017-55@2", "PMIX_VERSION": "4.2.9"},
        Launcher("PMIx", 3),
    ),
    "batch script": (SHELL | SLURM_BATCH, None),
    "salloc": (SHELL | SLURM_JOB, None),
    "salloc on a compute node": (SHELL | SLURM_SALLOC_STEP, None),
    "srun": (SHELL | SLURM_STEP, SRUN),
    "srun on one host": (SHELL | SLURM_ONE_HOST, Launcher("Slurm", 5, 8, 1, 8)),
    "srun --mpi=pmix": (
        SLURM_STEP | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.901593.0"},
        SRUN,
    ),
    "srun --mpi=pmi2": (
        SLURM_STEP | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "12", "PMI_JOBID": "901593.0"},
        SRUN,
    ),
    "Open MPI in a batch script": (SHELL | SLURM_DAEMON | OPEN_MPI_4, OPEN_MPI),
    "Hydra in a batch script": (
        SHELL | SLURM_DAEMON | HYDRA | {"PMI_RANK": "5", "PMI_SIZE": "8"},
        Launcher("Hydra", 5, 8, 1, 2),
    ),
    "no numbers": ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, None),
}


@pytest.mark.parametrize(("environ", "expected"), CASES.values(), ids=CASES.keys())
def test_detect(environ: dict[str, str], expected: Launcher | None) -> None:
    assert detect(environ) == expected


def test_messages_name_rank_and_size() -> None:
    assert str(OPEN_MPI) == "Open MPI (rank 1 of 2)"
    assert str(Launcher("PMIx", 3)) == "PMIx (rank 3 of an unknown number)"


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        (OPEN_MPI, "Start with `python -m ringdl run`, which"),
        (
            SRUN,
            "Start with `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH), or without "
            "srun, `python -m ringdl run`, which",
        ),
    ],
)
def test_a_launcher_that_the_library_does_not_know(launcher: Launcher, advice: str) -> None:
    mpi = SimpleNamespace(Get_library_version=lambda: "MPICH Version:      5.0.2")
    error = str(_mpi._not_together(mpi, launcher))
    assert error.startswith(f"{launcher} has started this process, but mpi4py loads the library of")
    assert "MPICH 5.0.2" in error
    assert advice in error


BY_HAND = {"MASTER_ADDR": "n017", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
# Recorded from rank 1 of `torchrun --nproc-per-node 4`.
TORCHRUN = BY_HAND | {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM_PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
STORE_CASES = {
    "nothing": ({}, None),
    "torchrun": (SHELL | TORCHRUN, StoreJob(1, 4, True)),
    "by hand": (SHELL | BY_HAND, StoreJob(1, 4, False)),
    "torchrun, one rank": (SHELL | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
    "no rank": (SHELL | {"WORLD_SIZE": "4"}, None),
    "no size": (SHELL | {"RANK": "1"}, None),
    "no such rank": (SHELL | {"RANK": "4", "WORLD_SIZE": "4"}, None),
    "mpirun of Open MPI in a shell that keeps them": (SHELL | BY_HAND | OPEN_MPI_5, None),
    "mpirun of MPICH in a shell that keeps them": (SHELL | BY_HAND | HYDRA, None),
    "srun, from a batch script that sets them": (SHELL | BY_HAND | SLURM_STEP, None),
    "srun without PMI, whose script sets them": (
        SHELL | BY_HAND | SLURM_STEP | {"RANK": "5", "WORLD_SIZE": "8"},
        StoreJob(5, 8, False),
    ),
    "the same, not where": (SHELL | SLURM_STEP | {"RANK": "5", "WORLD_SIZE": "8"}, None),
    "srun with PMIx, whose script sets them": (
        SHELL | BY_HAND | SLURM_STEP | SLURM_PMIX | {"RANK": "5", "WORLD_SIZE": "8"},
        None,
    ),
    "srun, one torchrun per host": (SLURM_DAEMON | TORCHRUN, StoreJob(1, 4, True)),
    "mpirun, one torchrun per host": (OPEN_MPI_5 | TORCHRUN, StoreJob(1, 4, True)),
}


@pytest.mark.parametrize(("environ", "expected"), STORE_CASES.values(), ids=STORE_CASES.keys())
def test_detect_store_job(environ: dict[str, str], expected: StoreJob | None) -> None:
    assert detect_store_job(environ) == expected


@pytest.mark.parametrize(
    ("launcher", "rank", "expected"),
    [
        (SLURM_STEP | SLURM_PMIX, "5", StoreJob(5, 8, False)),
        (SLURM_STEP | SLURM_PMIX, "4", None),  # a shell's, not the script's
        (OPEN_MPI_5, "1", StoreJob(1, 2, False)),
    ],
)
def test_detect_store_job_without_mpi4py(
    launcher: dict[str, str],
    rank: str,
    expected: StoreJob | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = str(detect(launcher).size)  # type: ignore[union-attr]
    environ = SHELL | BY_HAND | launcher | {"RANK": rank, "WORLD_SIZE": size}
    assert detect_store_job(environ) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert detect_store_job(environ) == expected
