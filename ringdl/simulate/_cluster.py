"""A cluster as the command line describes it, and what is predicted for it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence

from ringdl import _engine
from ringdl._errors import UsageError
from ringdl._tuning import Tuning, costs_of

_RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "kB": 1e3, "mB": 1e6, "gB": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """``"200gbit"`` or ``"25GB"``, each per second, as bytes per second.

    Raises:
        argparse.ArgumentTypeError: it is no rate, or less than a byte per second; or bits that
            are written as bytes are ("10Gb").
    """
    return _with_unit(
        text, _RATES, 1.0, "a rate: write a number and kbit, mbit, gbit, KB, MB or GB"
    )


def parse_seconds(text: str) -> float:
    """``"2us"`` as seconds.

    Raises:
        argparse.ArgumentTypeError: it is no time, or less than a nanosecond.
    """
    return _with_unit(
        text, _TIMES, 1e-9, "a time: write a number and ns, us, ms or s, at least 1ns"
    )


def _with_unit(text: str, units: dict[str, float], least: float, what: str) -> float:
    found = re.fullmatch(r"([\d.]+(?:[eE]-?\d+)?)\s*([a-zA-Z]+?)(?:/s)?", text.strip())
    try:
        unit = found[2] if found else ""  # a prefix in either case, but not the B of bytes
        value = float(found[1]) * units[unit[:1].lower() + unit[1:]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, which are as full as can be alike.

    Attributes:
        link: bytes per second of a host's link, in each direction.
        latency: seconds from one host to another.
        memory: bytes per second of a message between ranks of a host.
        memory_latency: its seconds.
        message: seconds of a rank's processor for each message that it sends or receives.
        eager: longer messages are announced first, and answered.
        copy: bytes per second that a rank copies.
        reduce: bytes per second of one array that it adds to another.
        segment_bytes: as RINGDL_SEGMENT_BYTES.
        shares_memory: whether ranks of a host use one another's memory.
    """

    ranks: int
    hosts: int
    link: float
    latency: float
    memory: float
    memory_latency: float
    message: float
    eager: int
    copy: float
    reduce: float
    segment_bytes: int
    shares_memory: bool

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks:
            raise UsageError(f"{self.ranks} ranks are not on {self.hosts} hosts")

    def with_ranks(self, ranks: int) -> Cluster:
        """As many ranks on each host, or one host that is less full."""
        hosts = -(-ranks * self.hosts // self.ranks)
        return dataclasses.replace(self, ranks=ranks, hosts=hosts)

    def host_of_rank(self) -> list[int]:
        return [rank * self.hosts // self.ranks for rank in range(self.ranks)]

    def memory_hosts(self) -> list[int]:
        """As of `Communicator.memory_hosts`: without shared memory, as many as ranks."""
        return self.host_of_rank() if self.shares_memory else list(range(self.ranks))

    def link_seconds(self, byte_count: int) -> float:
        """The least in which a host's link carries its share of an allreduce."""
        return 2 * (self.hosts - 1) / self.hosts * byte_count / self.link

    def bucket_bytes(self) -> int:
        """Of gradient buckets, in jobs for which `ringdl tune` has measured these links."""
        costs = costs_of(self.engine().costs)
        return Tuning(costs, self.segment_bytes).bucket_bytes(self.memory_hosts())

    def engine(self) -> _engine.ImaginedCluster:
        return _engine.ImaginedCluster(
            self.host_of_rank(),
            link=(self.link, self.latency),
            memory=(self.memory, self.memory_latency),
            message_seconds=self.message,
            eager_bytes=self.eager,
            copy_rate=self.copy,
            reduce_rate=self.reduce,
            segment_bytes=self.segment_bytes,
            shares_memory=self.shares_memory,
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of allreduces that are simulated.

    Attributes:
        seconds: until the last rank has the last sum.
        busiest_seconds: for which the busiest rank's processor computes and handles messages.
        link_seconds: the least in which a host's link carries their bytes, by any algorithm.
        link_bytes: that a host's link carries away from it.
        link_busy_seconds: in which it does.
        messages: of all ranks.
        algorithms: the names of those that ran, each once.
    """

    seconds: float
    busiest_seconds: float
    link_seconds: float
    link_bytes: int
    link_busy_seconds: float
    messages: int
    algorithms: list[str]

    @property
    def bound_seconds(self) -> float:
        """Less is not possible: the busiest link or processor works for so long."""
        return max(self.busiest_seconds, self.link_seconds)

    @property
    def share_of_bound(self) -> float:
        return self.bound_seconds / self.seconds if self.seconds > 0 else 1.0

    @property
    def limited_by(self) -> str:
        """What is busy for half of the time; latency, if nothing is."""
        if max(self.busiest_seconds, self.link_busy_seconds) < self.seconds / 2:
            return "latency"
        return "processors" if self.busiest_seconds > self.link_busy_seconds else "links"


def predict(
    cluster: Cluster,
    arrays: Sequence[tuple[int, float]],
    algorithm: _engine.Algorithm | None = None,
) -> Prediction:
    """Simulate allreduces of float32.

    Args:
        cluster: where.
        arrays: the bytes of each, and when all ranks have it, in seconds.
        algorithm: by default, by the cost model of that cluster.

    Raises:
        UsageError: the algorithm is not for these ranks.
        Error: it takes longer than a day.
    """
    seconds, busiest, link_bytes, messages, algorithms = cluster.engine().predict_allreduces(
        list(arrays), algorithm
    )
    least = sum(cluster.link_seconds(byte_count) for byte_count, _ in arrays)
    names = list(dict.fromkeys(each.name for each in algorithms))
    busy = link_bytes / cluster.link
    return Prediction(seconds, busiest, least, link_bytes, busy, messages, names)
