"""The command as a whole: agree on a plan, measure case by case, report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import ringdl
from ringdl import _cuda, _engine
from ringdl._errors import UsageError
from ringdl._files import write_text
from ringdl.bench import _machine, _peers, _plot, _report
from ringdl.bench._arrays import (
    ASSUMED_CACHE_BYTES,
    CACHE_MULTIPLE,
    Rotation,
    make_slots,
    slot_count,
)
from ringdl.bench._collectives import (
    Case,
    by_algorithm,
    in_place,
    numpy_dtype,
    out_of_place,
    shape_of,
)
from ringdl.bench._plan import Plan, parse
from ringdl.bench._progress import Progress
from ringdl.bench._timing import Contender, Measured, meeting_of, settling_runs, timed
from ringdl.bench._values import Values

if TYPE_CHECKING:
    from ringdl import Communicator


OUT_OF_PLACE = "ringdl out of place"
IN_PLACE = "ringdl in place"


@dataclass(frozen=True)
class _Ending:
    """Why nothing is measured: the exit code, and what rank 0 says."""

    code: int
    sentence: str = ""


def main(words: Sequence[str]) -> int:
    """Run ``python -m ringdl bench`` on this rank. Collective.

    Args:
        words: the command line after ``bench``.

    Returns:
        The exit code, the same on all ranks: 0; 1 if a result was wrong; 2 if the command cannot
        be carried out, which rank 0 has explained on stderr.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # nothing here computes with threads
    try:
        communicator = ringdl.init()
    except UsageError as error:  # this rank is alone with it
        print(f"ringdl: {error}", file=sys.stderr)
        return 2
    planned = _agree(communicator, words)
    if isinstance(planned, Plan):
        bench = _Bench(communicator, planned)
        code = bench.run()
        bench.close()  # not after an error: it would wait for the others
        return code
    if communicator.rank == 0 and planned.sentence:
        print(f"ringdl: {planned.sentence}", file=sys.stderr, flush=True)
    return planned.code


def _agree(communicator: Communicator, words: Sequence[str]) -> Plan | _Ending:
    """Rank 0 reads the command line and checks its files; each rank says what it lacks."""
    own = _plan(words, communicator.size) if communicator.rank == 0 else None
    planned: Plan | _Ending = communicator.broadcast_object(own)
    if isinstance(planned, _Ending):
        return planned
    lacks = communicator.allgather_object(_lacks(planned, communicator))
    return next((_Ending(2, sentence) for sentence in lacks if sentence), planned)


def _plan(words: Sequence[str], ranks: int) -> Plan | _Ending:
    try:
        return parse(words, ranks)
    except UsageError as error:
        return _Ending(2, str(error))
    except SystemExit as end:  # --help
        return _Ending(int(end.code or 0))


def _lacks(plan: Plan, communicator: Communicator) -> str:
    """What keeps this rank from it; empty if nothing does."""
    try:
        device = _device(plan, communicator)
    except UsageError as error:
        return str(error)
    size, memory_bytes = plan.sizes[-1], _memory_share(communicator, device)
    if slot_count(_slot_bytes(plan, size), 1, 0, memory_bytes) == 0:
        return (
            f"arrays of {_report.binary(size)} do not fit: a rank needs several, and may take "
            f"{_report.binary(memory_bytes)}, half of its share of the free memory; lower -e"
        )
    return _peers.missing(plan.peers, communicator, device)


def _device(plan: Plan, communicator: Communicator) -> int | None:
    """The number of this rank's device.

    Raises:
        UsageError: there is none.
    """
    if plan.device == "cpu":
        return None
    return _cuda.number_of("cuda", communicator)


def _memory_share(communicator: Communicator, device: int | None) -> int:
    """Bytes that this rank's arrays may take where they lie."""
    if device is None:
        return _machine.available_memory() // (2 * communicator.local_size)
    devices = _engine.cuda_devices()
    ranks = -(-communicator.local_size // len(devices))
    return devices[device].byte_count // (2 * ranks)


def _slot_bytes(plan: Plan, size: int) -> int:
    return size * (2 if plan.peers else 1)


class _Bench:
    """A plan on its way: what its cases share. Collective to make, to run, and to close.

    Args:
        communicator: of all ranks.
        plan: what is to be measured.
    """

    def __init__(self, communicator: Communicator, plan: Plan) -> None:
        self._plan = plan
        self._communicator = communicator
        world = communicator._shared.mpi
        self._device = _device(plan, communicator)
        self._machine = _machine.describe(communicator, world, self._device)
        self._cache_bytes = max(self._machine.cache_bytes.values(), default=ASSUMED_CACHE_BYTES)
        self._memory_bytes = min(
            communicator.allgather_object(_memory_share(communicator, self._device))
        )
        self._peers = _peers.open_peers(plan.peers, communicator, world, self._device)
        self._world = None if world is None else world.Dup()
        self._meeting = meeting_of(self._world, communicator)

    def close(self) -> None:
        """Give back what was opened."""
        for peer in self._peers:
            peer.close()
        if self._world is not None:
            self._world.Free()

    def run(self) -> int:
        """Measure everything, print and save it; returns the exit code."""
        plan, cases = self._plan, list(self._cases())
        self._say(_report.head(plan, self._machine, self._cache_bytes) + _report.table_head())
        progress = Progress(self._communicator.rank == 0, len(cases), plan.iterations)
        rows = []
        for case in cases:
            progress.begin(case)
            rows.append(self._measure(case, progress))
            progress.clear()
            self._say([_report.table_line(rows[-1])])
        summary = _report.summary_of(rows)
        self._say(_report.comparison(rows) + _report.foot(summary, rows))
        is_first = self._communicator.rank == 0
        lack = self._communicator.broadcast_object(self._save(rows) if is_first else "")
        if lack and is_first:
            print(f"ringdl: {lack}", file=sys.stderr, flush=True)
        return 1 if summary.wrong else 2 if lack else 0

    def _cases(self) -> Iterator[Case]:
        plan, ranks = self._plan, self._communicator.size
        for name, op, root, size in product(plan.dtypes, plan.ops, plan.roots, plan.sizes):
            dtype = numpy_dtype(name)
            shape = shape_of(plan.collective, size, dtype.itemsize, ranks)
            yield Case(plan.collective, dtype, op, root, ranks, shape)

    def _measure(self, case: Case, progress: Progress) -> _report.Row:
        """Measure one case."""
        plan = self._plan
        values = Values(case, self._communicator.rank, self._device)
        number = self._slot_count(case.shape.size)
        slots = make_slots(
            case, number, plan.memory, with_targets=bool(plan.peers), device=self._device
        )
        rotation = Rotation(slots, values.write)
        contenders, results = self._contenders(case, rotation)
        timed(contenders, rotation, self._meeting, plan.warmups, settling=0)
        settling = settling_runs(case.shape.size)
        seconds = timed(
            contenders, rotation, self._meeting, plan.iterations, settling, progress.tick
        )
        for contender, times in zip(contenders, seconds, strict=True):
            measured = results[contender.name]
            measured.seconds = times.tolist()
            if contender.checked and plan.checks:
                wrong = 0
                for _ in range(plan.checks):
                    wrong += values.count_wrong(contender.run(rotation.next()), rotation.run)
                measured.wrong = self._meeting.total(wrong)
        out, within = results.pop(OUT_OF_PLACE), results.pop(IN_PLACE, None)
        return _report.Row(case, out, within, list(results.values()))

    def _contenders(
        self, case: Case, rotation: Rotation
    ) -> tuple[list[Contender], dict[str, Measured]]:
        """What takes turns in a case, and room for the results, also of what refuses."""
        contenders = [Contender(OUT_OF_PLACE, out_of_place(self._communicator, case))]
        within = in_place(self._communicator, case)
        if within is not None:
            contenders.append(Contender(IN_PLACE, within))
        results = {contender.name: Measured(contender.name) for contender in contenders}
        for name, make in self._others(case).items():
            results[name] = Measured(name)
            try:
                contender = make()
                contender.run(rotation.next())
                contenders.append(contender)
            except UsageError as error:  # on all ranks alike, before anything was sent
                results[name].refusal = str(error)
        return contenders, results

    def _others(self, case: Case) -> dict[str, Callable[[], Contender]]:
        """What is compared, by name, and how to make it."""
        others: dict[str, Callable[[], Contender]] = {}
        for algorithm in self._plan.algorithms:
            name = f"ringdl:{algorithm}"
            run = by_algorithm(self._communicator, case, algorithm)
            others[name] = partial(Contender, name, run)
        for peer in self._peers:
            others[peer.name] = partial(peer.contender, case)
        if self._peers:
            others |= {copy.name: partial(replace, copy) for copy in _peers.copies(self._device)}
        return others

    def _slot_count(self, size: int) -> int:
        plan = self._plan
        forms = 2 + len(plan.algorithms) + len(plan.peers) + len(_peers.COPIES)
        timed_runs = plan.iterations * (1 + settling_runs(size))
        runs = forms * (1 + plan.warmups + timed_runs + plan.checks)
        cache_bytes = CACHE_MULTIPLE * self._cache_bytes
        return slot_count(_slot_bytes(plan, size), runs, cache_bytes, self._memory_bytes)

    def _say(self, lines: Sequence[str]) -> None:
        if self._communicator.rank == 0:
            print(*lines, sep="\n", flush=True)

    def _save(self, rows: Sequence[_report.Row]) -> str:
        """Why files could not be written; empty if they were."""
        plan = self._plan
        try:
            if plan.output_file is not None:
                report = _report.as_json(plan, self._machine, rows)
                write_text(Path(plan.output_file), json.dumps(report, indent=1) + "\n")
            if plan.plot is not None:
                _plot.draw(plan.plot, rows, self._machine)
        except (UsageError, OSError) as error:
            return str(error)
        return ""
