"""What happened when, on all ranks, as a file that Perfetto (https://ui.perfetto.dev) opens.

While recording, each rank writes what has happened to a file of its own, ten times a second: rank 0
to FILE.json, rank 1 to FILE.rank1.json. So a job that fails, or is killed, leaves its events. At a
clean end rank 0 gathers the others' events in its file, and theirs are removed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ringdl._errors import MismatchError, UsageError
from ringdl._trace_file import TraceFile

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

_EXCHANGES = 8
MOST_SPANS = 1_000_000
"""Later ones are dropped, as works and waits are."""
_FOREVER = 1e9
_END = "timeline, in shutdown() or stop_timeline()"  # errors name it
# A rank that raises waits for twice as long before it takes the others down: they have written all.
_WRITE_SECONDS = 0.1


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
        self.spans: deque[tuple[str, str, int, int, int]] = deque()
        """Name, category, begin and end by time.monotonic_ns(), and the thread; not yet written."""
        self.span_count = 0
        problem = None
        if communicator.rank == 0:
            try:
                self._file = TraceFile(self._path)
            except (OSError, ValueError) as error:
                problem = _cannot_write(self._path, error)
        problem = communicator.broadcast_object(problem, name="ringdl.timeline")
        if problem is not None:
            raise UsageError(problem)
        if communicator.rank != 0:
            base, extension = os.path.splitext(self._path)
            self._file = TraceFile(f"{base}.rank{communicator.rank}{extension}", elsewhere=True)
        self._file.append(_text(self._metadata()))
        self._lead = _lead_of_rank_0(communicator)
        begin = communicator.broadcast_object(time.monotonic_ns(), name="ringdl.timeline")
        self._begin: int = begin - self._lead
        communicator._engine.start_trace()
        self._ended = threading.Event()
        self._writer = threading.Thread(
            target=self._write_now_and_then, name="ringdl.timeline", daemon=True
        )
        self._writer.start()

    def leave(self) -> None:
        """Write what this rank has recorded. Not collective."""
        self._ended.set()
        self._writer.join()
        self._append(self._communicator._engine.take_trace(self._begin))

    def finish(self) -> None:
        """Gather what all ranks have recorded in rank 0's file. Collective."""
        import numpy as np

        self._ended.set()
        self._writer.join()
        self._append(self._communicator._engine.stop_trace(self._begin))
        is_first = self._communicator.rank == 0
        own = b"" if is_first else b",\n" + self._file.events()
        array = np.frombuffer(bytearray(own), np.uint8)
        work = self._communicator.gather_async(array, root=0, name=_END)
        # Others may still be busy, but a rank that waits here does nothing else.
        self._communicator._engine.wait(work._work, _FOREVER, for_good=True)
        gathered = work.wait()
        if gathered is None:  # rank 0 has it
            self._file.remove()
            return
        self._file.append(gathered.tobytes().removeprefix(b",\n"))
        try:
            self._file.close()
        except OSError as error:
            raise UsageError(_cannot_write(self._path, error)) from error

    def _write_now_and_then(self) -> None:
        while not self._ended.wait(_WRITE_SECONDS):
            self._append(self._communicator._engine.take_trace(self._begin))

    def _append(self, works_and_waits: bytes) -> None:
        self._file.append(works_and_waits)
        spans = []
        while self.spans:
            spans.append(self._span(*self.spans.popleft()))
        self._file.append(_text(spans))

    def is_of_this_process(self) -> bool:
        """Whether it was begun here, not in a parent."""
        return os.getpid() == self._process

    def _metadata(self) -> Iterator[dict[str, Any]]:
        rank = self._communicator.rank
        host = self._communicator.host_rank
        common = {"ph": "M", "pid": rank}
        yield {**common, "name": "process_name", "args": {"name": f"rank {rank} (host {host})"}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": rank}}

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
    """Record how long the block takes, if a timeline is being recorded."""
    if recording is None:
        yield
        return
    recorder, begin = recording, time.monotonic_ns()
    try:
        yield
    finally:
        if recorder.span_count < MOST_SPANS:
            recorder.span_count += 1
            thread = threading.get_native_id()
            recorder.spans.append((name, category, begin, time.monotonic_ns(), thread))


def path_in_epoch(path: str, epoch: int) -> str:
    """A file for each generation of ranks: FILE.json, FILE.epoch2.json."""
    base, extension = os.path.splitext(path)
    return path if epoch == 1 else f"{base}.epoch{epoch}{extension}"


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
    ended.finish()


def stop_if_recording() -> None:
    """End the recording with the default communicator; a forked child has nothing to write.

    Where other ranks have not reached theirs, and never will, each rank's own file stays.
    """
    if recording is not None and recording.is_of_this_process():
        with suppress(MismatchError):
            stop()


def leave_if_recording() -> None:
    """Complete this process's own file before it fails; nothing is gathered."""
    global recording
    if recording is not None and recording.is_of_this_process():
        ended, recording = recording, None
        ended.leave()


def _text(events: Iterable[dict[str, Any]]) -> bytes:
    return ",\n".join(map(json.dumps, events)).encode()


def _cannot_write(path: str, error: OSError | ValueError) -> str:
    return f"rank 0 cannot write the timeline {path!r}: {getattr(error, 'strerror', error)}"


def _lead_of_rank_0(communicator: Communicator) -> int:
    """By how many nanoseconds rank 0's clock is ahead of this one's. Collective.

    Ranks of a host have one clock. Between hosts half of the shortest of a few exchanges is taken
    for the time of a message (Cristian 1989, "Probabilistic clock synchronization").
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
