"""What ranks tell ``ringdl run --elastic``."""

import socket
import time

import pytest

from ringdl import _report
from ringdl._report import RUN_REPORT


def wait_for(listener: _report.Listener, misses: bool) -> None:
    deadline = time.monotonic() + 10
    while listener.misses_an_end(0) != misses:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_end_is_missed_until_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _report.Listener()
    monkeypatch.setenv(RUN_REPORT, str(listener))
    assert not listener.misses_an_end(0), "a script need not use ringdl"
    _report.tell(_report.BEGUN)
    wait_for(listener, True)
    _report.tell(_report.ENDED)
    wait_for(listener, False)
    listener.expect()
    _report.tell(_report.BEGUN)
    time.sleep(0.2)
    assert not listener.misses_an_end(0), "a rank of the job before"
    monkeypatch.setenv(RUN_REPORT, str(listener))
    _report.tell(_report.BEGUN)
    wait_for(listener, True)


def test_a_rank_may_fail_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _report.Listener()
    monkeypatch.setenv(RUN_REPORT, str(listener))
    _report.tell(_report.FAILED)
    wait_for(listener, True)
    assert listener.has_failed()
    _report.tell(_report.ENDED)
    assert listener.misses_an_end(0), "others may have ended well"
    listener.expect()
    assert not listener.has_failed()


def test_strangers_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _report.Listener()
    monkeypatch.setenv(RUN_REPORT, str(listener))
    _report.tell(_report.BEGUN)
    wait_for(listener, True)
    secret, *rest = str(listener).split(",")
    monkeypatch.setenv(RUN_REPORT, ",".join(["0" * len(secret), *rest]))
    _report.tell(_report.ENDED)
    time.sleep(0.2)
    assert listener.misses_an_end(0)


def test_without_a_listener_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_REPORT, raising=False)
    _report.tell(_report.BEGUN)
    monkeypatch.setenv(RUN_REPORT, "secret,1,127.0.0.1")
    _report.tell(_report.BEGUN)


def test_a_caller_that_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _report.Listener()
    monkeypatch.setenv(RUN_REPORT, str(listener))
    _report.tell(_report.BEGUN)
    port = int(str(listener).split(",")[1])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        begin = time.monotonic()
        _report.tell(_report.ENDED)
        assert time.monotonic() - begin < 1
        assert not listener.misses_an_end(0), "told, once it is heard"
        silent.sendall(b"x" * 100_000)
