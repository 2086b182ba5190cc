"""Connections between ranks that know each other's addresses: one TCP socket per pair.

Each rank listens, and calls all ranks below it. A caller sends the secret of the rank that it
calls, and gets its own back; without the secret, the connection is closed.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringdl._errors import Error, StallError, UsageError

SECRET_BYTES = 16
_MAGIC = b"ringdl 1"
_CALL = struct.Struct(f"<8s{SECRET_BYTES}sI")
"""A caller sends: this, the secret of the rank that it calls, its own rank."""

_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""Seconds, seconds, times: a host without power is found after a minute and a half; a cable may be
out for as long."""

_SPARE_FILES = 512
"""What the script itself may want to open."""

_NOWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737). Nothing is sent there."""

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (netdevice(7))."""


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens.

    Attributes:
        address: numeric, IPv4 or IPv6.
        port: of TCP.
        secret: random; what a caller has to know.
    """

    address: str
    port: int
    secret: bytes


def listen(address: str) -> tuple[socket.socket, Endpoint]:
    """Open a socket that other ranks may call."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    return listener, Endpoint(address, listener.getsockname()[1], os.urandom(SECRET_BYTES))


def own_address(master: str, port: int) -> str:
    """This host's address for the others, if they reach it as it reaches `master`.

    Where `master` resolves to a loopback address, as /etc/hosts may make it on the host of that
    name, it is the address of the way out, or of some interface.

    Raises:
        UsageError: `master` is not known.
    """
    try:
        found = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR={master!r} is no host that is known here ({error}); correct it"
        ) from error
    own = next((way for *_, target in found if (way := _way_to(str(target[0]), port))), None)
    if own is None:
        raise UsageError(
            f"no network leads from here to MASTER_ADDR={master!r}; correct the one or the other"
        )
    if _is_loopback(own) and master != "localhost" and not _is_loopback(master):
        return next(iter(networks()), own)
    return own


def _way_to(address: str, port: int) -> str | None:
    """This host's address on the way there. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def networks(wanted: Sequence[str] = ()) -> list[str]:
    """This host's IPv4 addresses that others may reach: on the way out first, then by interface.

    Args:
        wanted: names of interfaces, or networks as 10.1.0.0/16: only those, if there are any.
    """
    found = {way: ""} if (way := _way_to(_NOWHERE, 9)) else {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = interface
    others = [address for address in found if not _is_loopback(address)]
    chosen = [address for address in others if _is_in(address, found[address], wanted)]
    return chosen or others


def _is_in(address: str, interface: str, wanted: Sequence[str]) -> bool:
    networks = [ipaddress.ip_network(each, strict=False) for each in wanted if "/" in each]
    return interface in wanted or any(ipaddress.ip_address(address) in each for each in networks)


def way_to(addresses: Sequence[str]) -> str | None:
    """This host's address on the way to the first of another one's that it has a way to."""
    return next((way for address in addresses if (way := _way_to(address, 9))), None)


def connect(
    rank: int,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    timeout: float,
    check: Callable[[], object] = lambda: None,
) -> list[int]:
    """Connect this rank with all others. Collective.

    Args:
        rank: this one's.
        endpoints: of all ranks, by rank.
        listener: this rank's; closed in any case.
        timeout: in seconds.
        check: called now and then while others are waited for; may raise.

    Returns:
        A connected socket to each rank, by rank; -1 for this one. They belong to the caller.

    Raises:
        StallError: not all have called in time.
        Error: a rank cannot be reached.
    """
    _allow_files(len(endpoints))
    deadline = time.monotonic() + timeout
    sockets: dict[int, socket.socket] = {}
    try:
        with listener:
            for other in range(rank):
                sockets[other] = _call(rank, other, endpoints[other], deadline)
            _answer(rank, endpoints, listener, sockets, deadline, check)
        for other in range(rank):
            _hear(rank, other, endpoints, sockets[other], deadline, check)
        for each in sockets.values():
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                each.setsockopt(socket.IPPROTO_TCP, option, value)
    except BaseException:
        for each in sockets.values():
            each.close()
        raise
    return [-1 if other == rank else sockets[other].detach() for other in range(len(endpoints))]


def _allow_files(count: int) -> None:
    """Let this process open `count` more files, if it may: the limit is often 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + count + _SPARE_FILES
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _rest(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _call(rank: int, other: int, endpoint: Endpoint, deadline: float) -> socket.socket:
    where = (endpoint.address, endpoint.port)
    try:
        called = socket.create_connection(where, timeout=_rest(deadline))
        called.sendall(_CALL.pack(_MAGIC, endpoint.secret, rank))
    except OSError as error:
        raise Error(
            f"rank {rank} cannot reach rank {other} at {where[0]}, port {where[1]} ({error}): "
            "hosts must let each other's TCP through on all ports; look for a firewall, or whether "
            "MASTER_ADDR leads over a network that all hosts are on"
        ) from error
    return called


def _hear(
    rank: int,
    other: int,
    endpoints: Sequence[Endpoint],
    called: socket.socket,
    deadline: float,
    check: Callable[[], object],
) -> None:
    """Take the answer of a rank that was called."""
    answer = b""
    try:
        while len(answer) < SECRET_BYTES:
            check()
            called.settimeout(min(0.1, _rest(deadline)))
            try:
                more = called.recv(SECRET_BYTES - len(answer))
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                continue
            if not more:
                raise ConnectionResetError("it has hung up")
            answer += more
    except OSError as error:
        raise Error(
            f"rank {other} does not answer rank {rank} ({error}); look what has ended it"
        ) from error
    if not hmac.compare_digest(answer, endpoints[rank].secret):
        where = endpoints[other]
        raise Error(f"whoever answers at {where.address}, port {where.port} is not rank {other}")


def _answer(
    rank: int,
    endpoints: Sequence[Endpoint],
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    deadline: float,
    check: Callable[[], object],
) -> None:
    """Accept the calls of all ranks above this one. Strangers keep nobody waiting."""
    missing = set(range(rank + 1, len(endpoints)))
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        callers: dict[socket.socket, bytes] = {}
        try:
            while missing:
                check()
                if time.monotonic() > deadline:
                    raise StallError(
                        f"rank {rank} was not called by the ranks {sorted(missing)} in time; look "
                        "what they do, and whether a firewall is between"
                    )
                for key, _ in selector.select(min(0.1, _rest(deadline))):
                    if key.fileobj is listener:
                        _accept(listener, selector, callers)
                        continue
                    caller: socket.socket = key.fileobj  # type: ignore[assignment]
                    said = callers[caller]
                    try:
                        more = caller.recv(_CALL.size - len(said))
                        said += more
                    except BlockingIOError:
                        continue
                    except OSError:
                        more = b""
                    if more and len(said) < _CALL.size:
                        callers[caller] = said
                        continue
                    selector.unregister(caller)
                    del callers[caller]
                    other = _identify(said, endpoints[rank].secret)
                    if other not in missing or not _reply(caller, endpoints[other].secret):
                        caller.close()
                        continue
                    sockets[other] = caller
                    missing.remove(other)
        finally:
            for caller in callers:
                caller.close()


def _accept(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    callers: dict[socket.socket, bytes],
) -> None:
    try:
        caller, _ = listener.accept()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # the caller has gone again
            return
        raise Error(
            f"a rank needs a connection to each other one, and may not open as many ({error}); "
            "raise the limit of open files (`ulimit -n`)"
        ) from error
    caller.setblocking(False)
    callers[caller] = b""
    selector.register(caller, selectors.EVENT_READ)


def _identify(said: bytes, secret: bytes) -> int | None:
    """The rank of a caller that knows the secret."""
    if len(said) < _CALL.size:
        return None
    magic, shown, other = _CALL.unpack(said)
    if magic != _MAGIC or not hmac.compare_digest(shown, secret):
        return None
    return int(other)


def _reply(caller: socket.socket, secret: bytes) -> bool:
    try:
        caller.sendall(secret)
    except OSError:
        return False
    return True
