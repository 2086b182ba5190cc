"""A file of trace events that is complete at any time."""

from __future__ import annotations

import contextlib
import os

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_JOINT = b",\n"
_TAIL = b"\n]}\n"


class TraceFile:
    """Trace events as JSON, which is complete after each `append`.

    So a process that is killed leaves a file that can be read, with all that was appended. What
    cannot be written is kept and tried again with the next events. One thread at a time.

    Args:
        path: the file, which is emptied.
        elsewhere: keep the events in memory if there can be no such file.

    Raises:
        OSError: there can be no such file.
    """

    def __init__(self, path: str, *, elsewhere: bool = False) -> None:
        self._path: str | None = os.path.abspath(path)  # the process may change its directory
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(self._path, flags, 0o666)
        except OSError:
            if not elsewhere:
                raise
            self._path = None
            self._file = os.memfd_create("ringdl.timeline")
        self._end = 0  # of what has been written, without the tail
        self._kept = b""
        self._problem: OSError | None = None

    def append(self, events: bytes) -> None:
        """Add events: objects of JSON with commas between them. Never raises."""
        if not events:
            return
        joint = _JOINT if self._end or self._kept else _HEAD
        self._kept += joint + events
        text = self._kept + _TAIL
        written = 0
        try:
            while written < len(text):
                written += os.pwrite(self._file, text[written:], self._end + written)
        except OSError as error:
            self._problem = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.pwrite(self._file, _TAIL, self._end)
            return
        self._end += len(self._kept)
        self._kept, self._problem = b"", None

    def events(self) -> bytes:
        """All that was appended, with commas between the events."""
        parts, begin = [], 0
        while begin < self._end:
            part = os.pread(self._file, self._end - begin, begin)
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return b"".join([*parts, self._kept])[len(_HEAD) :]

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: something could not be written.
        """
        os.close(self._file)
        if self._problem is not None:
            raise self._problem

    def remove(self) -> None:
        """Close and delete the file."""
        os.close(self._file)
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
