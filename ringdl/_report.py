"""What ranks tell ``ringdl run --elastic``: that they have begun, and that they have ended well.

Open MPI's mpirun reports success when ranks that it was told to outlive have all been killed, and
when it ends a job that has lost a host. So `run` waits for mpirun, and asks whether rank 0 has said
that all is well.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading

from ringdl import _sockets

RUN_REPORT = "RINGDL_RUN_REPORT"
"""Where, and by which secret: `run` sets it for the ranks."""

BEGUN, ENDED = b"begun", b"ended"
_SECONDS = 2.0
"""For a call: a network that does not answer within it leads elsewhere."""


class Listener:
    """Takes the reports of a job's ranks, in a thread."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0))
        self._secret = secrets.token_hex(16)
        self._heard: set[bytes] = set()
        threading.Thread(target=self._listen, daemon=True, name="ringdl-report").start()

    def __str__(self) -> str:
        """The variable's value."""
        port = self._socket.getsockname()[1]
        return ",".join([self._secret, str(port), "127.0.0.1", *_sockets.networks()])

    @property
    def misses_an_end(self) -> bool:
        """Whether ranks have begun, as far as is known, and have not ended well."""
        return BEGUN in self._heard and ENDED not in self._heard

    def expect(self) -> None:
        """Another job begins."""
        self._heard = set()

    def _listen(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            with caller:
                caller.settimeout(_SECONDS)
                try:
                    secret, _, word = caller.makefile("rb").read().partition(b" ")
                except OSError:
                    continue
                if hmac.compare_digest(secret, self._secret.encode()):
                    self._heard.add(word)


def tell(word: bytes) -> None:
    """Report to who has started this rank, if it wants to know and can be reached."""
    secret, port, *addresses = os.environ.get(RUN_REPORT, ",0").split(",")
    for address in addresses:
        try:
            with socket.create_connection((address, int(port)), timeout=_SECONDS) as called:
                called.sendall(secret.encode() + b" " + word)
                return
        except OSError:
            continue
