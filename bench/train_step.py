"""A training step in PyTorch: ringdl, DDP over ringdl and Gloo, and the ranks computing alone.

    python bench/train_step.py --json bench/results/step.json
    python bench/train_step.py --hosts 4 --rate 200mbit --inputs 384 --width 384 --layers 16 \
        --batch 1792 --balance 1.15 --json bench/results/step-hosts.json

Each has jobs of its own, as its users would, with one thread per rank; they take turns. (In one
process, what one model frees is what the next one is given: computing alone, which asks the system
for its gradients' memory anew in each step, would then get it for nothing.) SGD and the default
zero_grad(); a step begins for all ranks at once, and its time is that of the slowest. A ratio is of
medians in the same round, and the median over rounds is taken: above 1, ringdl is faster; "ddp" is
that of DistributedDataParallel over the two backends. The parameters that ringdl and both DDP end
with are compared, element by element. How long the gradients take by themselves is measured, too:
what a step takes longer than computing alone is the part of it that computing does not hide.

The default is two ranks on this host and a model of 27 million parameters. With ``--hosts``, one
rank on each of that many simulated hosts (bench/hosts.py; as root): the second command has a model
whose communication takes about as long as computing: ``--balance`` makes batches so large that
computing alone takes this many times as long, whatever the machine. The hosts share this machine's
cores, so TCP, which takes some of them, slows computing down; the slower the links, the less.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hosts
import links
import numpy as np
from numpy.typing import NDArray

KINDS = ("ringdl", "ddp", "gloo", "alone")
Parameters = NDArray[np.float32]


def measure(chosen: argparse.Namespace, kind: str) -> dict[str, Any]:
    """One job.

    Raises:
        HostsError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = [str(Path(__file__).with_name("train_step_ranks.py")), "--kind", kind]
        for name in ("device", "steps", "batch", "inputs", "width", "layers"):
            words += [f"--{name}", str(getattr(chosen, name))]
        learnt = Path(folder, "learnt.npy")
        words += ["--json", str(answer), "--parameters", str(learnt)]
        python = hosts.interpreter(chosen.mpi)
        if chosen.hosts:
            code = hosts.run([1] * chosen.hosts, python, words)
        else:
            launcher = [python, "-m", "ringdl", "run", "-n", str(chosen.ranks)]
            launcher += ["--elastic"] if kind == "elastic" else []
            records = {"RINGDL_FLIGHT_RECORDER": folder} if kind == "recorded" else {}
            code = subprocess.run(
                [*launcher, *words], timeout=600, check=False, env=os.environ | records
            ).returncode
        if code != 0:
            raise hosts.HostsError(f"a job of {kind} ended with exit code {code}")
        return json.loads(answer.read_text()) | {"learnt": np.load(learnt)}


def balanced_batch(chosen: argparse.Namespace) -> int:
    """Rows with which computing alone takes `chosen.balance` times as long as communication."""
    alone = statistics.median(measure(chosen, "alone")["seconds"])
    communication = measure(chosen, "ringdl")["communication"]
    return max(1, round(chosen.batch * chosen.balance * communication / alone / 32)) * 32


def are_same(ours: Parameters, theirs: Parameters) -> bool:
    """Whether both have learnt the same, element by element."""
    return np.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def take_turns(chosen: argparse.Namespace, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rounds of jobs, one of each kind, each time another one first.

    Raises:
        HostsError: one failed.
    """
    for turn in range(chosen.rounds):
        first = turn % len(kinds)
        yield {kind: measure(chosen, kind) for kind in (*kinds[first:], *kinds[:first])}


def tell(
    chosen: argparse.Namespace, words: Sequence[str], answer: dict[str, Any], said: Sequence[str]
) -> None:
    """Print what was measured, and write it to a file if that is wanted.

    Args:
        chosen: `json` is the file.
        words: the command after "python".
        answer: all that was measured.
        said: the lines to print.
    """
    print("\n".join(said))
    if chosen.json:
        whole = {"command": shlex.join(["python", *words])} | answer
        chosen.json.write_text(json.dumps(whole, indent=1) + "\n")


def check_learnt(jobs: dict[str, dict[str, Any]]) -> None:
    """Check that ringdl and both DDP end with the same parameters, and a rank alone with others.

    Raises:
        HostsError: they do not.
    """
    parameters = {kind: job.pop("learnt") for kind, job in jobs.items()}
    for kind in ("ringdl", "ddp"):
        if not are_same(parameters[kind], parameters["gloo"]):
            raise hosts.HostsError(f"{kind} and DDP over Gloo ended with different parameters")
    if are_same(parameters["alone"], parameters["gloo"]):
        raise hosts.HostsError(
            "averaging changed nothing: more steps are needed to see that it did"
        )


def report(chosen: argparse.Namespace, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all rounds say together."""
    medians = {
        kind: [statistics.median(jobs[kind]["seconds"]) for jobs in rounds] for kind in KINDS
    }
    ratios = {
        other: statistics.median(
            theirs / ours for theirs, ours in zip(medians[other], medians["ringdl"], strict=True)
        )
        for other in ("gloo", "alone")
    }
    ratios["ddp"] = statistics.median(
        gloo / ddp for gloo, ddp in zip(medians["gloo"], medians["ddp"], strict=True)
    )
    hidden = [
        1 - (ringdl - alone) / jobs["ringdl"]["communication"]
        for ringdl, alone, jobs in zip(medians["ringdl"], medians["alone"], rounds, strict=True)
    ]
    first = rounds[0]["ringdl"]
    return {
        "machine": links.machine(),
        "mpi": first["mpi"],
        "torch": first["torch"],
        "ranks": chosen.hosts or chosen.ranks,
        "device": chosen.device,
        "batch": chosen.batch,
        "parameters": first["parameters"],
        "ratios": ratios,
        "communication": statistics.median(jobs["ringdl"]["communication"] for jobs in rounds),
        "hidden": statistics.median(hidden),
        "seconds": {kind: [jobs[kind]["seconds"] for jobs in rounds] for kind in KINDS},
    }


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Those of `measure`."""
    parser.add_argument("--ranks", type=int, default=2, help="on this host")
    parser.add_argument("--mpi", default="openmpi", help="as hosts.py takes it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all ranks")
    add_step_options(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """How many steps of which model, and where to write what they take."""
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=15, help="of each job, after three for warming"
    )
    parser.add_argument("--batch", type=int, default=32, help="rows per rank")
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all times to this file")


def lines(answer: dict[str, Any]) -> list[str]:
    said = [f"{answer['parameters'] / 1e6:.1f} M parameters, {answer['ranks']} ranks"]
    for kind, of_rounds in answer["seconds"].items():
        times = [1e3 * second for seconds in of_rounds for second in seconds]
        deciles = statistics.quantiles(times, n=10)
        middle = statistics.median(times)
        said.append(f"{kind:8}{middle:8.1f} ms  (p10 {deciles[0]:.1f}, p90 {deciles[-1]:.1f})")
    ratios = answer["ratios"]
    said += [f"{other} / ringdl = {ratios[other]:.2f}" for other in ("gloo", "alone")]
    said.append(f"DDP over Gloo / DDP over ringdl = {ratios['ddp']:.2f}")
    alone, hidden = 1e3 * answer["communication"], answer["hidden"]
    return [*said, f"communication alone {alone:.1f} ms, of which {hidden:.0%} hidden"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_job_options(parser)
    parser.add_argument("--hosts", type=int, help="simulated ones, one rank on each, instead")
    parser.add_argument("--rate", default="200mbit", help="of their links")
    parser.add_argument("--balance", type=float, help="choose the batch (see above)")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = []
    try:
        if chosen.hosts:
            hosts.check_machine()
            hosts.up(chosen.hosts, chosen.rate)
        try:
            if chosen.balance:
                chosen.batch = balanced_batch(chosen)
            for jobs in take_turns(chosen, KINDS):
                check_learnt(jobs)
                rounds.append(jobs)
        finally:
            if chosen.hosts:
                hosts.down()
    except hosts.HostsError as error:
        print(f"train_step: {error}", file=sys.stderr)
        return 2
    answer = report(chosen, rounds)
    tell(chosen, ["bench/train_step.py", *arguments], answer, lines(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
