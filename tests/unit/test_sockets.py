"""Connections between ranks: whom they let in, and what they say where they cannot connect."""

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringdl import Error, StallError, UsageError, _sockets
from ringdl._sockets import Endpoint, connect, listen, own_address


def connect_all(size: int, timeout: float = 20) -> list[list[int]]:
    """The sockets of so many ranks, which are threads."""
    listening = [listen("127.0.0.1") for _ in range(size)]
    endpoints = [endpoint for _, endpoint in listening]
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(
                lambda rank: connect(rank, endpoints, listening[rank][0], timeout), range(size)
            )
        )


def close(sockets: list[int]) -> None:
    for each in sockets:
        if each >= 0:
            os.close(each)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_each_pair_is_connected(size: int) -> None:
    sockets = connect_all(size)
    for rank in range(size):
        assert sockets[rank][rank] == -1
        for other in range(size):
            if other != rank:
                os.write(sockets[rank][other], bytes([rank, other]))
    for rank in range(size):
        for other in range(size):
            if other != rank:
                os.set_blocking(sockets[rank][other], True)
                assert os.read(sockets[rank][other], 9) == bytes([other, rank])
    for each in sockets:
        close(each)


def test_all_start_at_once_again_and_again() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for sockets in connect_all(5):
            close(sockets)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_may_be_more_than_files_that_a_process_may_open_unasked() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        for sockets in connect_all(9):
            close(sockets)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sockets, "_allow_files", lambda _: None)
    (listener, own), (unused, other) = listen("127.0.0.1"), listen("127.0.0.1")
    unused.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection((own.address, own.port)):
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # the selector's
        try:
            with pytest.raises(Error, match="ulimit -n"):
                connect(0, [own, other], listener, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CALLS = {
    "silent": b"",
    "half a call": _sockets._CALL.pack(_sockets._MAGIC, b"", 1)[:10],
    "no secret": _sockets._CALL.pack(_sockets._MAGIC, bytes(16), 1),
    "another program": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_strangers_are_refused_and_keep_nobody_waiting(call: bytes) -> None:
    (listener, own), (other_listener, other) = listen("127.0.0.1"), listen("127.0.0.1")
    strangers = [socket.create_connection((own.address, own.port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(call)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, 0, [own, other], listener, 20)
        time.sleep(0.1)
        second = pool.submit(connect, 1, [own, other], other_listener, 20)
        sockets = [first.result(), second.result()]
    os.set_blocking(sockets[1][0], True)
    os.write(sockets[0][1], b"to rank 1")
    assert os.read(sockets[1][0], 99) == b"to rank 1"
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(99) == b""
        stranger.close()
    for each in sockets:
        close(each)


def test_a_secret_of_another_rank_is_no_use() -> None:
    """A rank that knows one secret is not let in by another rank."""
    (listener, own), (unused, other) = listen("127.0.0.1"), listen("127.0.0.1")
    unused.close()
    with socket.create_connection((own.address, own.port)) as stranger:
        stranger.sendall(_sockets._CALL.pack(_sockets._MAGIC, other.secret, 1))
        with pytest.raises(StallError, match=r"rank 0 was not called by the ranks \[1\]"):
            connect(0, [own, other], listener, 0.5)


def test_who_answers_without_the_secret_is_not_taken_for_a_rank() -> None:
    listener, own = listen("127.0.0.1")
    impostor = socket.create_server(("127.0.0.1", 0))
    endpoints = [Endpoint("127.0.0.1", impostor.getsockname()[1], bytes(16)), own]

    def answer() -> None:
        caller, _ = impostor.accept()
        with caller:
            caller.recv(99)
            caller.sendall(bytes(16))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(Error, match="is not rank 0"):
        connect(1, endpoints, listener, 5)
    thread.join()
    impostor.close()


def test_a_rank_that_is_not_there() -> None:
    listener, own = listen("127.0.0.1")
    gone, endpoint = listen("127.0.0.1")
    gone.close()
    with pytest.raises(Error, match=r"rank 1 cannot reach rank 0 at 127.0.0.1, port \d+.*firewall"):
        connect(1, [endpoint, own], listener, 5)


def test_own_address() -> None:
    assert own_address("localhost", 80) in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"MASTER_ADDR='no.such.host.invalid' is no host"):
        own_address("no.such.host.invalid", 80)


def test_own_name_may_mean_this_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the host's own name 127.0.1.1, which others cannot reach."""
    target = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 80))]
    ways = {"127.0.1.1": "127.0.0.1", _sockets._NOWHERE: "10.0.0.7"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: target)
    monkeypatch.setattr(_sockets, "_way_to", lambda address, _: ways[address])
    assert own_address("n017", 80) == "10.0.0.7"
    ways[_sockets._NOWHERE] = None  # no way out
    monkeypatch.setattr(_sockets, "networks", lambda: ["10.1.0.3", "10.2.0.3"])
    assert own_address("n017", 80) == "10.1.0.3"
    monkeypatch.setattr(_sockets, "networks", list)  # no network at all
    assert own_address("n017", 80) == "127.0.0.1"
