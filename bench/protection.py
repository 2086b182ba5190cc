"""What protection costs while nothing fails: the flight recorder, and elastic jobs.

    python bench/protection.py --json bench/results/protection.json

Jobs of the same training steps (see train_step.py) take turns: as they are, with
RINGDL_FLIGHT_RECORDER, and under ``ringdl run --elastic``. A ratio is of medians in the same round;
the median over rounds is taken, and their quartiles. What a commit takes is measured by itself, as
scripts choose how often they commit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import hosts
import links
import train_step

PLAIN, *PROTECTED = KINDS = ("ringdl", "recorded", "elastic")


def report(chosen: argparse.Namespace, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all rounds say together."""
    medians = [
        {kind: statistics.median(jobs[kind]["seconds"]) for kind in KINDS} for jobs in rounds
    ]
    ratios = {
        kind: statistics.quantiles([each[kind] / each[PLAIN] for each in medians], n=4)
        for kind in PROTECTED
    }
    first = rounds[0][PLAIN]
    return {
        "machine": links.machine(),
        "mpi": first["mpi"],
        "torch": first["torch"],
        "ranks": chosen.ranks,
        "parameters": first["parameters"],
        "step": statistics.median(each[PLAIN] for each in medians),
        "commit": statistics.median(
            seconds for jobs in rounds for seconds in jobs["elastic"]["commits"]
        ),
        "ratios": ratios,
        "seconds": {kind: [jobs[kind]["seconds"] for jobs in rounds] for kind in KINDS},
    }


def lines(answer: dict[str, Any]) -> list[str]:
    step, commit = answer["step"], answer["commit"]
    said = [f"{answer['parameters'] / 1e6:.1f} M parameters, {answer['ranks']} ranks"]
    said.append(f"a step {1e3 * step:.1f} ms")
    for kind, (lower, middle, upper) in answer["ratios"].items():
        said.append(f"{kind}: {middle - 1:+.1%} (quartiles {lower - 1:+.1%}, {upper - 1:+.1%})")
    said.append(f"a commit {1e3 * commit:.1f} ms: {commit / step / 10:.1%} if every tenth step")
    return said


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    train_step.add_job_options(parser)
    chosen = parser.parse_args(arguments, argparse.Namespace(hosts=None))
    if chosen.rounds < 2:
        parser.error("--rounds: two or more, as their quartiles are told")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        rounds = list(train_step.take_turns(chosen, KINDS))
    except hosts.HostsError as error:
        print(f"protection: {error}", file=sys.stderr)
        return 2
    answer = report(chosen, rounds)
    train_step.tell(chosen, ["bench/protection.py", *arguments], answer, lines(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
