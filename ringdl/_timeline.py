"""What happened when, on all ranks, as a file that Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringdl._errors import UsageError

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

_EXCHANGES = 8
MOST_SPANS = 1_000_000
"""Later ones are dropped, as works and waits are."""
_FOREVER = 1e9


class Recording:
    """What a rank records. Collective to make: its clock is compared with rank 0's.

    Args:
        communicator: of all ranks.
        path: the file, on rank 0.

    Raises:
        UsageError: on every rank, if rank 0 cannot write it.
    """

    def __init__(self, communicator: Communicator, path: str | os.PathLike[str]) -> None:
        self._communicator = communicator
        self._path = os.fspath(path)
        self._process = os.getpid()
        self.spans: list[tuple[str, str, int, int, int]] = []
        """Name, category, begin and end by time.monotonic_ns(), and the thread."""
        problem = None
        if communicator.rank == 0:
            try:
                with open(self._path, "w"):
                    pass
            except OSError as error:
                problem = _cannot_write(self._path, error)
        problem = communicator.broadcast_object(problem, name="ringdl.timeline")
        if problem is not None:
            raise UsageError(problem)
        self._lead = _lead_of_rank_0(communicator)
        begin = communicator.broadcast_object(time.monotonic_ns(), name="ringdl.timeline")
        self._begin: int = begin - self._lead
        communicator._engine.start_trace()

    def write(self) -> None:
        """Gather what all ranks have recorded in rank 0's file. Collective."""
        import json

        import numpy as np

        events = [*self._metadata()]
        for number, event in enumerate(self._communicator._engine.stop_trace()):
            events += self._work_or_wait(number, *event)
        for name, category, begin, end, thread in self.spans:
            events.append(self._span(name, category, begin, end, thread))
        text = "".join(json.dumps(event) + ",\n" for event in events)
        own = np.frombuffer(bytearray(text.encode()), np.uint8)
        work = self._communicator.gather_async(own, root=0, name="ringdl.timeline")
        # Others may have much to do yet; but who waits here does nothing else.
        self._communicator._engine.wait(work._work, _FOREVER, for_good=True)
        gathered = work.wait()
        if self._communicator.rank == 0:
            text = gathered.tobytes().decode().rstrip(",\n")
            try:
                with open(self._path, "w") as file:
                    file.write(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{text}\n]}}\n')
            except OSError as error:
                raise UsageError(_cannot_write(self._path, error)) from error

    def is_of_this_process(self) -> bool:
        """Whether it was begun here, not in a parent."""
        return os.getpid() == self._process

    def _metadata(self) -> Iterator[dict[str, Any]]:
        rank = self._communicator.rank
        host = self._communicator.host_rank
        common = {"ph": "M", "pid": rank}
        yield {**common, "name": "process_name", "args": {"name": f"rank {rank} (host {host})"}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": rank}}

    def _work_or_wait(
        self,
        number: int,
        name: str,
        algorithm: str,
        byte_count: int,
        begin: int,
        end: int,
        thread: int,
    ) -> Iterator[dict[str, Any]]:
        if not algorithm:
            yield self._span(f"wait for {name}", "wait", begin, end, thread)
            return
        rank = self._communicator.rank
        common = {"cat": "work", "name": name, "id": f"{rank}.{number}", "pid": rank, "tid": rank}
        arguments: dict[str, Any] = {"algorithm": algorithm}
        if byte_count:
            arguments["bytes"] = byte_count
        yield {**common, "ph": "b", "ts": self._microseconds(begin), "args": arguments}
        yield {**common, "ph": "e", "ts": self._microseconds(end)}

    def _span(self, name: str, category: str, begin: int, end: int, thread: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": self._communicator.rank,
            "tid": thread,
            "ts": self._microseconds(begin),
            "dur": (end - begin) / 1000,
        }

    def _microseconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._begin) / 1000


recording: Recording | None = None
"""What is recorded now."""


@contextmanager
def span(category: str, name: str) -> Iterator[None]:
    """The block takes as long as is recorded, if anything is."""
    if recording is None:
        yield
        return
    spans, begin = recording.spans, time.monotonic_ns()
    try:
        yield
    finally:
        if len(spans) < MOST_SPANS:
            spans.append((name, category, begin, time.monotonic_ns(), threading.get_native_id()))


def start(communicator: Communicator, path: str | os.PathLike[str]) -> None:
    """Record from now on; see `ringdl.start_timeline`."""
    global recording
    if recording is not None:
        raise UsageError("a timeline is being recorded already; call stop_timeline() first")
    recording = Recording(communicator, path)


def stop() -> None:
    """Write what was recorded; see `ringdl.stop_timeline`."""
    global recording
    if recording is None:
        raise UsageError("no timeline is being recorded; call start_timeline() first")
    ended, recording = recording, None
    ended.write()


def stop_if_recording() -> None:
    """At the end of the default communicator; in a forked child there is nothing to write."""
    if recording is not None and recording.is_of_this_process():
        stop()


def _cannot_write(path: str, error: OSError) -> str:
    return f"rank 0 cannot write the timeline {path!r}: {error.strerror}"


def _lead_of_rank_0(communicator: Communicator) -> int:
    """By how many nanoseconds rank 0's clock is ahead of this one's. Collective.

    The same clock within a host. Between hosts half of the shortest of a few exchanges is taken
    for the way of a message (Cristian 1989, "Probabilistic clock synchronization").
    """
    import numpy as np

    hosts = communicator._hosts()
    stamp = np.zeros(1, np.int64)
    lead = 0
    for rank in range(1, communicator.size):
        if hosts[rank] == hosts[0]:
            continue
        if communicator.rank == 0:
            for _ in range(_EXCHANGES):
                communicator.recv_(stamp, rank, "ringdl.clock")
                stamp[0] = time.monotonic_ns()
                communicator.send(stamp, rank, "ringdl.clock")
        elif communicator.rank == rank:
            shortest = None
            for _ in range(_EXCHANGES):
                begin = time.monotonic_ns()
                communicator.send(stamp, 0, "ringdl.clock")
                communicator.recv_(stamp, 0, "ringdl.clock")
                end = time.monotonic_ns()
                if shortest is None or end - begin < shortest:
                    shortest = end - begin
                    lead = int(stamp[0]) - (begin + end) // 2
    return lead
