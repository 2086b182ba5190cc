"""Collectives in flight as ``torch.distributed`` waits for them."""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import ringdl
from ringdl._work import GroupedWork, Work
from ringdl.torch._basics import mpi_threads_supported
from ringdl.torch._flat import Finish
from ringdl.torch._handles import Handle

Future = torch.futures.Future[list[torch.Tensor]]


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
        self.handle = Handle(works, finish)
        self._results = list(results)
        self._future: Future | None = None
        self._is_awaited = False

    def __del__(self) -> None:
        if not self._is_awaited:
            _dropped.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the results are there."""
        self._is_awaited = True
        self.handle.wait(timeout.total_seconds() if timeout else None)
        return True

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
            self.handle.wait()
        except ringdl.Error as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that results are in."""
        return self._results

    def get_future(self) -> Future:
        """What is done, with the results, once the collectives have ended.

        Futures are completed by a thread, in the order in which they were asked for, and so run
        their callbacks; what a callback asks for is waited for at once, as is everything where MPI
        does not give MPI_THREAD_MULTIPLE, and what was waited for already.
        """
        is_over = self._is_awaited and self.handle.done()
        self._is_awaited = True
        if self._future is None:
            ended = Future()
            # C++ knows of an error only if it is raised in a callback.
            self._future = ended.then(_value_of)
            entry = (self.handle, self._results, ended)
            thread = _completer() if _may_use_threads() and not is_over else None
            if thread is None or thread is threading.current_thread():
                _complete(*entry)
            else:
                thread.entries.put(entry)
        return self._future


_dropped: deque[DistributedWork] = deque(maxlen=64)
"""The last works that Python let go of without waiting. C++ may hold them and wait, as DDP's
``join()`` does: without its Python half a work would never end."""

_Entry = tuple[Handle[Any], list[torch.Tensor], Future]


class _Completer(threading.Thread):
    """Waits for what others have futures of: C++ waits for these in its own way."""

    def __init__(self) -> None:
        super().__init__(name="ringdl futures", daemon=True)
        self.entries: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Until the program ends."""
        while True:
            _complete(*self.entries.get())


@functools.cache
def _completer() -> _Completer:
    return _Completer()


def _may_use_threads() -> bool:
    return ringdl.get_communicator()._shared.mpi is None or mpi_threads_supported()


def _complete(handle: Handle[Any], results: list[torch.Tensor], ended: Future) -> None:
    try:
        handle.wait()
    except Exception as error:
        ended.set_result(error)  # type: ignore[arg-type]
    else:
        ended.set_result(results)


def _value_of(ended: Future) -> list[torch.Tensor]:
    value: Any = ended.value()
    if isinstance(value, Exception):
        raise value
    results: list[torch.Tensor] = value
    return results
