"""The command: it starts jobs of ranks that make runs, and reports."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from ringdl._errors import UsageError
from ringdl._files import write_text
from ringdl._interpreter import finding_ringdl
from ringdl.bench._plan import check_writable
from ringdl.compare._policies import BASE, CHOICES
from ringdl.compare._report import draw, for_json, table
from ringdl.compare._run import SNAPSHOTS, Curve, Run
from ringdl.compare._summary import Row, best_rates, summarize
from ringdl.compare._tasks import TASKS

_LEGEND = """\
loss, accuracy: of the test's data, after as many examples as AllReduce has had, each policy at its
best learning rate (!: the lowest or highest that was tried); medians over seeds. examples: to
AllReduce's accuracy less 0.01, as a share of all that it has had. As shares of what AllReduce took:
to loss: examples to its loss, but for 2% of how far that comes down; step, time: seconds of a step,
and to that loss; time, slow: the same where one rank sleeps in each step, in both, so that its
steps are {slow} times as long as AllReduce's without. -: not reached with twice the examples.
KB/step: what each rank sends where ranks share no memory. distance: of the parameters from
AllReduce's, as a share of how far these have moved, and guesses: how many of the test's differ. Of
ParameterServer without staleness, and of EASGD, rank 0's parameters are shown, as they are between
two exchanges; of others the mean of all ranks', each as far on in its run."""


@dataclass(frozen=True)
class Effort:
    """How much is done for a task.

    Args:
        ranks: on how many.
        octaves: of the learning rate, on either side of the task's.
        seeds: how many.
        shorter: divides the task's steps.
    """

    ranks: tuple[int, ...]
    octaves: int
    seeds: int
    shorter: float = 1.0


_SHORT = {  # on two cores at most 20 minutes in all
    "digits": Effort((4,), 1, 2),
    "shifted-digits": Effort((2,), 1, 1, 2.0),
    "gpt": Effort((2,), 1, 1, 4.0),
}
_LONG = {name: Effort((1, 2, 4, 8), 3, 5) for name in TASKS}
_FIRST_SEED = 1000
"""Of the runs by which rates are chosen: others than those that are shown."""
_WIDENED = 2
"""How often rates are sought further out."""


def main(arguments: Sequence[str]) -> int:
    """Compare.

    Args:
        arguments: the words after ``python -m ringdl compare``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringdl compare",
        description="Train the same tasks by every policy of ringdl.policies, side by side.",
    )
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--policies", nargs="+", metavar="NAME", help="whose names contain these")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="numbers of ranks")
    parser.add_argument("--seeds", type=int, metavar="N")
    parser.add_argument("--octaves", type=int, metavar="N", help="of learning rates, to each side")
    parser.add_argument(
        "--slow", type=float, default=4.0, help="how many times longer the slow rank's steps are"
    )
    parser.add_argument(
        "--shorter",
        type=float,
        metavar="N",
        help="divides steps; by default 1, but without --long 2 for shifted-digits and 4 for gpt",
    )
    parser.add_argument("--long", action="store_true", help="more ranks, rates and seeds: hours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all curves there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw; needs matplotlib")
    parser.add_argument(
        "--start",
        metavar="COMMAND",
        help="what starts N ranks, with {ranks} for N, before '-m module': by default "
        "'python -m ringdl run -n {ranks}'; on slow links another one",
    )
    its = parser.parse_args(arguments)
    _check(parser, its)
    begin = time.monotonic()
    chosen = [
        name
        for name in CHOICES
        if name == BASE or not its.policies or any(part in name for part in its.policies)
    ]
    found = []
    for task in its.tasks:
        effort = (_LONG if its.long else _SHORT)[task]
        effort = Effort(
            tuple(its.ranks or effort.ranks),
            effort.octaves if its.octaves is None else its.octaves,
            its.seeds or effort.seeds,
            its.shorter or effort.shorter,
        )
        for ranks in effort.ranks:
            comparison = Comparison(task, ranks, effort, chosen, its)
            rows, curves, slowed, apart = comparison.carry_out()
            name = f"{task} on {ranks} rank{'s' * (ranks > 1)}"
            print(
                f"\n{name}, {(time.monotonic() - begin) / 60:.1f} minutes\n{table(rows)}",
                flush=True,
            )
            found.append(
                {
                    "task": task,
                    "ranks": ranks,
                    "rows": [asdict(row) for row in rows],
                    "curves": [each.to_json() for each in (*curves, *slowed, *apart)],
                }
            )
            if its.json:  # what is there, should the next one not end
                write_text(its.json, json.dumps(for_json(found), allow_nan=False) + "\n")
            if its.plots:
                firsts = [curve for curve in curves if curve.run.seed == 0]
                draw(its.plots, name, firsts, apart)
                firsts = [curve for curve in slowed if curve.run.seed == 0]
                draw(its.plots, f"{name}, one slow", firsts, apart)
    print("\n" + _LEGEND.format(slow=f"{its.slow:g}"))
    return 0


def _check(parser: argparse.ArgumentParser, its: argparse.Namespace) -> None:
    """End with a sentence, before anything is trained, if it cannot be carried out."""
    for part in its.policies or ():
        if not any(part in name for name in CHOICES):
            parser.error(f"--policies {part}: there are {', '.join(CHOICES)}")
    for name in ("seeds", "octaves", "slow", "shorter", "ranks"):
        given = getattr(its, name)
        each = given if name == "ranks" else [given]
        if given is not None and not all(0 < number < math.inf for number in each):
            parser.error(f"--{name}: pass a positive number")
    if its.slow < 1:
        parser.error("--slow: pass how many times longer the slow rank's steps are, at least 1")
    try:
        program = shlex.split(its.start)[:1] if its.start is not None else [sys.executable]
    except ValueError as error:  # a quotation that does not end
        parser.error(f"--start {its.start}: {error}")
    if not program or shutil.which(program[0]) is None:
        parser.error(f"--start {its.start}: there is no such program")
    if its.ranks and max(its.ranks) > min(TASKS[name].batch for name in its.tasks):
        parser.error(f"--ranks {max(its.ranks)}: there are more ranks than samples in a step")
    if any("digits" in name for name in its.tasks) and importlib.util.find_spec("sklearn") is None:
        parser.error("the digits are scikit-learn's: pip install scikit-learn, or --tasks gpt")
    if its.plots and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install matplotlib")
    try:
        if its.json:
            check_writable("--json", its.json)
        if its.plots:
            its.plots.mkdir(parents=True, exist_ok=True)
    except UsageError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--plots {its.plots}: {error.strerror}")


class Comparison:
    """Of policies, for a task on so many ranks."""

    def __init__(
        self,
        task: str,
        ranks: int,
        effort: Effort,
        chosen: Sequence[str],
        its: argparse.Namespace,
    ) -> None:
        self._task, self._ranks, self._effort, self._chosen = task, ranks, effort, chosen
        self._slow, self._start = its.slow, its.start
        self._steps = max(SNAPSHOTS, round(TASKS[task].steps / effort.shorter))

    def carry_out(self) -> tuple[list[Row], list[Curve], list[Curve], list[Curve]]:
        """Find each policy's best rate; then train at that, also with a slow rank, and apart."""
        rates, at_end = self._best_rates()
        curves = self._job(
            [
                self._run(name, rates[name], seed)
                for seed in range(self._effort.seeds)
                for name in self._chosen
            ]
        )
        slowed: list[Curve] = []
        apart: list[Curve] = []
        if self._ranks > 1:
            step = median(
                curve.seconds[-1] / curve.run.steps for curve in curves if curve.run.policy == BASE
            )
            slowness = self._slow, self._slow * step
            slowed = self._job(
                [
                    self._run(name, rates[name], seed, *slowness)
                    for seed in range(self._effort.seeds)
                    for name in self._chosen
                ]
            )
            steps = 2 * SNAPSHOTS
            few = [Run(self._task, name, rates[name], 0, steps, steps) for name in self._chosen]
            apart = self._job(few, RINGDL_SHARED_MEMORY="0")
        return summarize(curves, slowed, apart, at_end), curves, slowed, apart

    def _run(
        self, name: str, rate: float, seed: int, slow: float = 1.0, period: float = 0.0
    ) -> Run:
        steps = self._steps * (1 if name == BASE else 2)
        return Run(self._task, name, rate, seed, steps, self._steps, slow, period)

    def _best_rates(self) -> tuple[dict[str, float], set[str]]:
        """Powers of two around the task's; further, where the best one is at the end.

        Returns:
            For each policy its rate, and those where that is at the end all the same.
        """
        tried: dict[str, set[int]] = {name: set() for name in self._chosen}
        curves: list[Curve] = []
        wanted = {
            name: {*range(-self._effort.octaves, self._effort.octaves + 1)} for name in self._chosen
        }
        for _ in range(_WIDENED + 1):
            runs = []
            for name, octaves in wanted.items():
                tried[name] |= octaves
                for octave, seed in product(sorted(octaves), range(self._effort.seeds)):
                    rate = self._rate(name, octave)
                    its = self._task, name, rate, _FIRST_SEED + seed, self._steps, self._steps
                    runs.append(Run(*its, is_shown=False))
            curves += self._job(runs)
            best = best_rates(curves)
            wanted = {}
            for name, octaves in tried.items():
                for end, next_ in ((min(octaves), -1), (max(octaves), 1)):
                    if best[name] == self._rate(name, end):
                        further = {end + next_, end + 2 * next_}
                        wanted[name] = wanted.get(name, set()) | further
            if not wanted:
                break
        return best, {*wanted}

    def _rate(self, name: str, octave: int) -> float:
        rate: float = TASKS[self._task].rate * 2.0**octave
        return rate / self._ranks if CHOICES[name].adds_up else rate

    def _job(self, runs: Sequence[Run], **settings: str) -> list[Curve]:
        start = [sys.executable, "-m", "ringdl", "run", "-n", "{ranks}"]
        if self._start is not None:
            start = shlex.split(self._start)
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder, "runs"), Path(folder, "results")
            asked.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
            words = [word.replace("{ranks}", str(self._ranks)) for word in start]
            words += ["-m", "ringdl.compare._worker"]
            ended = subprocess.run(
                [*words, str(asked), str(answered)],
                env=finding_ringdl(os.environ) | {"OMP_NUM_THREADS": "1"} | settings,
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode != 0:
                sys.stderr.write(ended.stdout + ended.stderr)
                raise SystemExit(f"ringdl: {' '.join(words)} has ended with {ended.returncode}")
            return [Curve.from_json(json.loads(line)) for line in answered.read_text().splitlines()]
