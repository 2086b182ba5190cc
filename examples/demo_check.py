"""Checks that two ranks learn the same as one, and at least 1.6 times as fast.

    python examples/demo_check.py                 # about five minutes on two idle cores
    python examples/demo_check.py --steps 100     # shorter; the losses compared are then higher

Trains torch_gpt.py twice on the same global batches for the same number of steps, one thread per
rank: alone, then on two ranks through ``python -m ringdl run``. Validation losses must agree within
2% (sums are rounded in another order, so the bits differ), and the median tokens per second must be
in a ratio of at least 1.6. Exits with 0 if both hold.

Needs two cores that nobody else is using: busy ones make the ratio meaningless. So it also prints
what share of one core per rank the runs got, from start to end; it is near 100% on idle cores.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOSS_TOLERANCE = 0.02
SPEEDUP = 1.6
SCRIPT = Path(__file__).with_name("torch_gpt.py")


def train(launcher: list[str], folder: Path, steps: int, timeout: float) -> dict[str, float]:
    """Run the training to its end, its output shown; its final figures, and its share of cores."""
    figures = folder / "figures.json"
    command = [sys.executable, *launcher, str(SCRIPT), f"--steps={steps}", f"--json={figures}"]
    command.append(f"--checkpoint={folder / 'checkpoint.safetensors'}")
    print("+", *command, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started, cpu_before = time.perf_counter(), cpu_seconds_of_children()
    subprocess.run(command, check=True, env=environment, timeout=timeout)
    result = json.loads(figures.read_text())
    wall_seconds = time.perf_counter() - started
    cpu_seconds = cpu_seconds_of_children() - cpu_before
    return result | {"core_share": cpu_seconds / wall_seconds / result["ranks"]}


def cpu_seconds_of_children() -> float:
    """CPU time of all processes below this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each training")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        one = train([], Path(name), arguments.steps, arguments.timeout)
        launcher = ["-m", "ringdl", "run", "-n", "2"]
        two = train(launcher, Path(name), arguments.steps, arguments.timeout)

    print("\nranks  threads  steps  validation loss  tokens/s  waiting  of a core")
    for run in (one, two):
        print(
            f"{run['ranks']:>5} {run['threads']:>8} {run['steps']:>6} "
            f"{run['validation_loss']:>16.4f} {run['tokens_per_second']:>9.0f} "
            f"{run['waiting_share']:>8.1%} {run['core_share']:>10.0%}"
        )
    difference = two["validation_loss"] / one["validation_loss"] - 1
    speedup = two["tokens_per_second"] / one["tokens_per_second"]
    is_same_loss = abs(difference) <= LOSS_TOLERANCE
    is_fast = speedup >= SPEEDUP
    verdict = {True: "passed", False: "FAILED"}
    print(f"loss: {difference:+.2%} (within {LOSS_TOLERANCE:.0%}): {verdict[is_same_loss]}")
    print(f"speed: {speedup:.2f} times (at least {SPEEDUP}): {verdict[is_fast]}")
    are_two = one["ranks"] == 1 and two["ranks"] == 2
    if not are_two:
        print(f"FAILED: the runs had {one['ranks']} and {two['ranks']} ranks, not 1 and 2")
    return 0 if is_same_loss and is_fast and are_two else 1


if __name__ == "__main__":
    sys.exit(main())
