"""What ranks tell ``ringdl run --elastic``: that they have begun, have ended well, or have failed.

Open MPI's mpirun reports success when ranks that it was told to outlive have all been killed, and
when it ends a job that has lost a host. So `run` waits for mpirun, and asks whether rank 0 has said
that all is well.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time

from ringdl import _sockets

RUN_REPORT = "RINGDL_RUN_REPORT"
"""Where, and by which secret: `run` sets it for the ranks."""

BEGUN, ENDED, FAILED = b"begun", b"ended", b"failed"
_HEARD = b"heard"
_MOST_BYTES = 64
_SECONDS = 2.0
"""For a call: a network that does not answer within it leads elsewhere."""


class Listener:
    """Takes the reports of a job's ranks, in a thread."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0))
        self.expect()
        threading.Thread(target=self._listen, daemon=True, name="ringdl-report").start()

    def __str__(self) -> str:
        """The variable's value."""
        port = self._socket.getsockname()[1]
        return ",".join([self._secret, str(port), "127.0.0.1", *_sockets.networks()])

    def misses_an_end(self, within: float = _SECONDS) -> bool:
        """Whether a rank has failed for all, or ranks have begun, and have not ended well.

        Args:
            within: so many seconds, for a report that is on its way.
        """
        deadline = time.monotonic() + within
        while self.has_failed() or (BEGUN in self._heard and ENDED not in self._heard):
            if self.has_failed() or time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    def expect(self) -> None:
        """Another job begins, with another secret: what is left of the one before is not heard."""
        self._secret = secrets.token_hex(16)
        self._heard: set[bytes] = set()

    def has_failed(self) -> bool:
        """Whether a rank has said that the job has to end."""
        return FAILED in self._heard

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # too many files are open
                time.sleep(0.1)
                continue
            # Whoever calls and says nothing keeps nobody waiting.
            threading.Thread(target=self._hear, args=(caller,), daemon=True).start()

    def _hear(self, caller: socket.socket) -> None:
        deadline = time.monotonic() + _SECONDS
        said = b""
        with caller, contextlib.suppress(OSError):
            while len(said) <= _MOST_BYTES:
                caller.settimeout(max(0.001, deadline - time.monotonic()))
                more = caller.recv(_MOST_BYTES)
                said += more
                if not more:
                    break
            secret, _, word = said.partition(b" ")
            if hmac.compare_digest(secret, self._secret.encode()) and word in (
                BEGUN,
                ENDED,
                FAILED,
            ):
                self._heard.add(word)
                caller.sendall(_HEARD)


def tell(word: bytes) -> bool:
    """Report to who has started this rank, if it wants to know and can be reached.

    Returns:
        Whether it has heard.
    """
    secret, port, *addresses = os.environ.get(RUN_REPORT, ",0").split(",")
    for address in addresses:
        try:
            with socket.create_connection((address, int(port)), timeout=_SECONDS) as called:
                called.sendall(secret.encode() + b" " + word)
                called.shutdown(socket.SHUT_WR)
                if called.recv(len(_HEARD)) == _HEARD:
                    return True
        except OSError:
            continue
    return False
