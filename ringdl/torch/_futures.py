"""Collectives in flight as ``torch.distributed`` waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import ringdl
from ringdl import _engine
from ringdl._training.basics import mpi_threads_supported
from ringdl._work import GroupedWork, Work
from ringdl.torch._flat import Finish, nothing
from ringdl.torch._handles import Handle

Future = torch.futures.Future[list[torch.Tensor]]


class StallError(ringdl.StallError, dist.DistBackendError):
    """A `ringdl.StallError`, for those who expect torch's errors."""


class MismatchError(ringdl.MismatchError, dist.DistBackendError):
    """A `ringdl.MismatchError`, for those who expect torch's errors."""


class RankFailedError(ringdl.RankFailedError, dist.DistBackendError):
    """A `ringdl.RankFailedError`, for those who expect torch's errors."""


def _as_torch_error(error: Exception) -> Exception:
    """The same as one of torch's errors, too; a timeout is called one."""
    if isinstance(error, dist.DistBackendError):
        return error
    if isinstance(error, ringdl.StallError):
        stalled = StallError(f"A timeout is over: {error}")
        stalled.work = error.work
        return stalled
    for known, own in (
        (ringdl.MismatchError, MismatchError),
        (ringdl.RankFailedError, RankFailedError),
    ):
        if isinstance(error, known):
            return own(str(error))
    return error


class Recording:
    """An event of torch's profilers, from the call until the work has ended.

    Another thread than the one that began it ends it, as with Gloo; where there is none, the
    waiting thread does.
    """

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        record = torch.autograd._record_function_with_args_enter(name, *inputs)  # type: ignore[attr-defined]
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # It remembers which profiler this thread is watched by.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._ended)
        self._is_over = threading.Event()

    @classmethod
    def begin(cls, name: str, inputs: Sequence[torch.Tensor]) -> Recording | None:
        """One, if a profiler watches this thread."""
        return cls(name, inputs) if torch.autograd._profiler_enabled() else None  # type: ignore[attr-defined]

    def end(self) -> None:
        """The event ends now. May be called again."""
        if not self._is_over.is_set():
            self._ended.set_result(None)
            self._is_over.set()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._is_over.wait()


def _settled(finish: Finish, results: Sequence[torch.Tensor]) -> Finish:
    """`finish`, and the end of what it copies on devices: results are there for every stream."""
    devices = {tensor.device for tensor in results if tensor.is_cuda}
    if finish is nothing or not devices:
        return finish

    def settle() -> None:
        finish()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    return settle


class DistributedWork(c10d.Work):
    """Collectives that are waited for as one.

    Args:
        works: the collectives.
        finish: puts results into their places, once they have ended.
        results: the tensors that they are in then.
    """

    def __init__(
        self,
        works: Sequence[Work[Any] | GroupedWork[Any] | Handle[Any]],
        finish: Finish,
        results: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self.handle = Handle(works, _settled(finish, results))
        self._results = list(results)
        self._future: Future | None = None
        self._is_awaited = False
        self._is_released = False
        self._recording: Recording | None = None

    def begun(self, timeout: float | None, recording: Recording | None) -> None:
        """Take the call's timeout, in seconds, and the event that ends with the work."""
        _release_ended()
        if timeout is not None:
            for work in _works_of(self.handle):
                work._timeout = timeout
        if recording is None:
            return
        if _may_use_threads():
            _complete_later(self.handle, lambda _: recording.end())
        self._recording = recording

    def __del__(self) -> None:
        if not self._is_awaited:
            _dropped.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there."""
        self._is_awaited = True
        try:
            self.handle.wait(timeout.total_seconds() if timeout else None)
        except ringdl.StallError as error:
            raise _as_torch_error(error) from None
        except ringdl.Error as error:
            self._end_recording()
            raise _as_torch_error(error) from None
        self._end_recording()
        return True

    def _end_recording(self) -> None:
        if self._recording is None:
            return
        if _may_use_threads() and threading.current_thread() not in _completers.values():
            self._recording.wait()
        self._recording.end()

    def is_completed(self) -> bool:
        """Whether the collectives have ended, well or not; results are in their places then."""
        if not self.handle.done():
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        """Whether they have ended well."""
        return self.handle.done() and self._finish() is None

    def exception(self) -> Exception | None:
        """What they have failed with, if they have ended."""
        return self._finish() if self.handle.done() else None

    def _finish(self) -> Exception | None:
        try:
            self.wait()
        except ringdl.Error as error:
            return error
        return None

    def release_if_ended(self) -> None:
        """Keep no tensors any more, if it has ended well: whoever waits for it need not."""
        if not self._is_released and self.handle.done() and self._finish() is None:
            self._is_released = True
            self.handle, self._results = Handle([], nothing), []

    def result(self) -> list[torch.Tensor]:
        """The tensors that results are in."""
        return self._results

    def source_rank(self) -> int:
        """The group's rank that a received message has arrived from.

        Raises:
            UsageError: this is no receive, or it has not ended.
        """
        (work, *others) = _works_of(self.handle)
        if others or work.source is None:
            raise ringdl.UsageError("only a receive has a source, and only once it has ended")
        return work.source

    _source_rank = source_rank

    def get_future(self) -> Future:
        """A future that is done, with the results, once the collectives have ended.

        A thread completes futures, in the order in which their works end, and so runs their
        callbacks. A future that a callback asks for is waited for at once, as is every future where
        MPI does not give MPI_THREAD_MULTIPLE, and one whose work was waited for already.
        """
        is_over = self._is_awaited and self.handle.done()
        self._is_awaited = True
        if self._future is None:
            ended = Future()
            # C++ knows of an error only if it is raised in a callback.
            self._future = ended.then(_value_of)
            results = self._results

            def deliver(error: Exception | None) -> None:
                ended.set_result(results if error is None else error)  # type: ignore[arg-type]

            if is_over or not _may_use_threads():
                _complete(self.handle, deliver)
            else:
                _complete_later(self.handle, deliver)
        return self._future


_dropped: deque[DistributedWork] = deque(maxlen=64)
"""The last works that Python let go of without waiting. C++ may hold them and wait, as DDP's
``join()`` does: without its Python half a work would never end."""


def _release_ended() -> None:
    for work in [*_dropped]:
        work.release_if_ended()


_Deliver = Callable[[Exception | None], None]


class _Completer(threading.Thread):
    """Waits for the works of one engine whose ends others need to know.

    C++ waits for futures in its own way, and polls no work.
    """

    def __init__(self, engine: _engine.Communicator) -> None:
        super().__init__(name="ringdl futures", daemon=True)
        self.engine = engine
        self._new: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._entries: list[_Entry] = []
        self.start()

    def add(self, entry: _Entry | None) -> None:
        """An entry; None ends the thread once it has nothing to wait for."""
        self._new.put(entry)
        self.engine.notify()

    def run(self) -> None:
        """Run until `add` gets None, or the program ends."""
        is_wanted = True
        while is_wanted or self._entries:
            seen = self.engine.notifications
            while not self._new.empty() or not self._entries:
                entry = self._new.get()
                if entry is None:
                    is_wanted = False
                    break
                self._entries.append(entry)
            self._deliver_what_has_ended()
            self._wait_for_more(seen)

    def _deliver_what_has_ended(self) -> None:
        ended = [entry for entry in self._entries if entry.awaited() is None]
        self._entries = [entry for entry in self._entries if entry not in ended]
        for entry in ended:
            _complete(entry.handle, entry.deliver)

    def _wait_for_more(self, seen: int) -> None:
        now = time.monotonic()
        awaited = [
            (entry, work) for entry in self._entries if (work := entry.awaited()) is not None
        ]
        if not awaited or len(awaited) < len(self._entries):
            return
        try:
            stalled = self.engine.wait_any(
                [work._work for _, work in awaited],
                [now - entry.since for entry, _ in awaited],
                [work._timeout for _, work in awaited],
                seen,
            )
        except Exception as error:  # nothing ends any more, as after a shutdown
            given_up, self._entries = self._entries, []
            for entry in given_up:
                entry.deliver(_as_torch_error(error))
            return
        if stalled is not None:
            entry = self._entries.pop(stalled[0])
            entry.deliver(_as_torch_error(ringdl.StallError(stalled[1])))


class _Entry:
    def __init__(self, handle: Handle[Any], deliver: _Deliver) -> None:
        self.handle = handle
        self.deliver = deliver
        self.since = time.monotonic()

    def awaited(self) -> Work[Any] | None:
        """The first of its works that has not ended."""
        return next((work for work in _works_of(self.handle) if not work._work.ended), None)


_completers: dict[int, _Completer] = {}
"""By the engine's id."""


def _complete_later(handle: Handle[Any], deliver: _Deliver) -> None:
    """Have a thread do it; now, if this is that thread."""
    works = [*_works_of(handle)]
    if not works or threading.current_thread() in _completers.values():
        _complete(handle, deliver)
        return
    engine = works[0]._engine
    completer = _completers.get(id(engine))
    if completer is None:
        for number, other in [*_completers.items()]:
            if other.engine.is_shut_down:
                other.add(None)
                del _completers[number]
        completer = _completers[id(engine)] = _Completer(engine)
    completer.add(_Entry(handle, deliver))


def _complete(handle: Handle[Any], deliver: _Deliver) -> None:
    try:
        handle.wait()
    except Exception as error:
        deliver(_as_torch_error(error))
    else:
        deliver(None)


def _works_of(work: Any) -> Iterator[Work[Any]]:
    if isinstance(work, Work):
        yield work
    else:
        for part in work._works:
            yield from _works_of(part)


def _may_use_threads() -> bool:
    return ringdl.get_communicator()._shared.mpi is None or mpi_threads_supported()


def _value_of(ended: Future) -> list[torch.Tensor]:
    value: Any = ended.value()
    if isinstance(value, Exception):
        raise value
    results: list[torch.Tensor] = value
    return results
