"""Children of ranks that call init(): a sentence each, and no harm to the ranks.

As "nested" with an mpirun: rank 0 starts a job of its own, whose processes are ranks.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import ringdl

INIT = [sys.executable, "-c", "import ringdl; ringdl.init()"]


def sentence_of_init() -> str:
    try:
        ringdl.init()
    except ringdl.UsageError as error:
        return str(error)
    return "none"


def sentence_of(command: list[str]) -> str:
    child = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return child.stderr.strip().splitlines()[-1].partition(": ")[2] if child.returncode else "none"


def sentence_of_fork() -> str:
    """Of a child that is forked while there is no default communicator."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, sentence_of_init().encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 1000).decode()


def main() -> None:
    ringdl.init()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(sentence_of_init)
    sentences = {
        "spawn": spawned,
        "subprocess": sentence_of(INIT),
        "shell": sentence_of(["sh", "-c", '"$@"; exit $?', "sh", *INIT]),
    }
    rank = ringdl.rank()
    assert ringdl.allreduce(np.ones(3), op=ringdl.Sum).tolist() == [ringdl.size()] * 3
    ringdl.shutdown()
    sentences["fork"] = sentence_of_fork()
    ringdl.init()
    expected = (
        f"this process is a child of rank {rank} (process {os.getpid()}) and cannot be a rank: "
    )
    accepted = {how: text for how, text in sentences.items() if not text.startswith(expected)}
    sys.stdout.write(f"accepted: {accepted}\n")


def nest(mpirun: str) -> None:
    from mpi4py import MPI

    ringdl.init()
    if ringdl.rank() == 0:
        hello = Path(__file__).with_name("hello.py")
        job = [mpirun, "-n", "2", sys.executable, str(hello)]
        environment = dict(os.environ)
        if MPI.Get_library_version().startswith("Open MPI v4"):
            # Its mpirun refuses to be called by a rank, which it knows by these.
            told = [name for name in environment if name.startswith(("OMPI_", "PMIX_"))]
            for name in told:
                if "ALLOW_RUN" not in name:
                    del environment[name]
        ended = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=40)
        sys.stdout.write(ended.stdout)
        sys.stderr.write(ended.stderr)
    ringdl.barrier()
    sys.stdout.write("outer ranks have met\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["nested"]:
        nest(sys.argv[2])
    else:
        main()
