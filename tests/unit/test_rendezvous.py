"""How ranks find each other in a store, here a dictionary; what they say where they do not."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringdl import StallError, UsageError, _rendezvous
from ringdl._launch import StoreJob
from ringdl._mpi import check_versions
from ringdl._rendezvous import Member, _master, _Meeting, find_hosts, meet, own_machine
from ringdl._sockets import Endpoint


class Store:
    """What `meet` uses of torch.distributed.Store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def job(rank: int, size: int) -> StoreJob:
    return StoreJob(rank, size, True)


def member(host: str, cpus: tuple[int, ...] = (0,), quota: float | None = None) -> Member:
    return Member(Endpoint("10.0.0.1", 4711, bytes(range(16))), (host, "pid"), cpus, quota)


@pytest.mark.parametrize("size", [2, 5])
def test_all_hear_the_same(size: int) -> None:
    store = Store()
    with ThreadPoolExecutor(size) as pool:
        heard = pool.map(lambda r: meet(store, "a", job(r, size), f"I am {r}", 20), range(size))
        assert list(heard) == [[f"I am {rank}" for rank in range(size)]] * size


def test_the_ranks_that_have_not_come_are_named() -> None:
    with pytest.raises(StallError, match=r"rank 1 of 3 .* the ranks \[0, 2\] have not arrived"):
        meet(Store(), "a", job(1, 3), "x", 0.05)


def test_a_second_process_of_a_rank_is_refused() -> None:
    """It may be a child that has inherited RANK; all others have met by then."""
    store = Store()
    with pytest.raises(StallError):
        meet(store, "a", job(1, 2), "x", 0.01)
    with pytest.raises(UsageError, match="another process is rank 1 of 2 already"):
        meet(store, "a", job(1, 2), "x", 0.01)


def test_ranks_that_are_started_again_meet_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same store, with what those before have left; also if they were more, and not all."""
    store = Store()

    def meet_all(size: int, text: str) -> list[list[str]]:
        with ThreadPoolExecutor(size) as pool:
            return [
                *pool.map(lambda r: meet(store, "a", job(r, size), f"{text} {r}", 20), range(size))
            ]

    monkeypatch.setattr(_rendezvous, "_own_process", lambda: [*own_machine(), 0, "0"])
    assert meet_all(4, "first") == [[f"first {rank}" for rank in range(4)]] * 4
    with pytest.raises(StallError):  # those before have arrived, and do not answer
        meet(store, "a", job(2, 3), "second", 0.05)
    with pytest.raises(StallError, match=r"the ranks \[1, 2\] have not arrived"):
        meet(store, "a", job(0, 3), "second", 0.05)
    for _ in range(20):
        assert meet_all(3, "third") == [[f"third {rank}" for rank in range(3)]] * 3


@pytest.mark.parametrize("collects_before", [False, True])
def test_two_processes_of_a_rank_at_once(
    monkeypatch: pytest.MonkeyPatch, collects_before: bool
) -> None:
    """The later one meets, and the other is told, also where rank 0 has read its place before."""
    monkeypatch.setattr(_rendezvous, "_own_process", lambda: ["elsewhere", 0, "0"])
    store = Store()
    zero = _Meeting(store, "a", job(0, 2), "I am 0")
    first = _Meeting(store, "a", job(1, 2), "I am the first")
    if collects_before:
        zero.collect()
    second = _Meeting(store, "a", job(1, 2), "I am the second")
    if not collects_before:
        zero.collect()
    with pytest.raises(UsageError, match=r"another process is rank 1 of 2 already"):
        first.hear()
    while not second.hear():
        zero.collect()
    assert zero.texts == second.texts == ["I am 0", "I am the second"]


def test_a_member_is_told_as_text() -> None:
    told = member("n017", (0, 3), 1.5)
    assert Member.from_json(told.to_json()) == told


def test_hosts_are_ordered_by_their_lowest_rank() -> None:
    members = [member("b"), member("a", (1, 2)), member("a", (2, 3)), member("b", (0, 1), 1.5)]
    found = [find_hosts(rank, members) for rank in range(4)]
    assert all(hosts.numbers == [0, 1, 1, 0] for hosts in found)
    assert [hosts.local_rank for hosts in found] == [0, 0, 1, 1]
    assert [hosts.local_size for hosts in found] == [2, 2, 2, 2]
    assert [hosts.cores for hosts in found] == [1, 3, 3, 1]


def test_this_machine_is_itself() -> None:
    assert own_machine() == own_machine()


def test_other_versions_are_refused() -> None:
    other = Member(member("a").endpoint, ("a",), (0,), None, version="0.0.1")
    versions = [each.version for each in (member("a"), Member.from_json(other.to_json()))]
    with pytest.raises(UsageError, match=r"rank 1 has ringdl 0.0.1, and rank 0 has .*; install"):
        check_versions(versions)


@pytest.mark.parametrize("port", [{}, {"MASTER_PORT": ""}, {"MASTER_PORT": "x"}])
def test_a_job_without_a_place_to_meet(port: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"rank 1 of 2.*MASTER_ADDR and MASTER_PORT.*mpirun -n 2"):
        _master(job(1, 2), {"MASTER_ADDR": "n017"} | port)
