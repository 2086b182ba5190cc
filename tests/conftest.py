"""Which environments whole jobs are launched from, and threads that are ranks."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ringdl import Communicator, _engine
from ringdl._communicator import communicator_over
from ringdl._settings import Settings
from ringdl._window import share_memory

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import tests`

from tests import running
from tests.environments import PYTHONS

os.environ["RINGDL_TUNING"] = "default"  # not what was measured on this machine

RunRanks = Callable[..., list[object]]


TOGETHER = ("test_faults", "test_hosts", "test_scripts", "test_slurm")
"""Files whose tests share what is made once, and so a worker."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers of pytest-xdist get test by test: one file takes a third of the time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if Path(file).stem in TOGETHER else nodeid

    return ByTest(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` runs while no other does; those that begin later wait for it."""
    alone = item.get_closest_marker("alone") is not None
    # Two files that are there: who waits to begin locks the one, who runs the other.
    with open(running.__file__, "r+") as turn, open(__file__, "r+") as cores:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(cores, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(cores, fcntl.LOCK_UN)  # children of fork() may hold the file open


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mpi_python" in metafunc.fixturenames:
        metafunc.parametrize("mpi_python", PYTHONS.values(), ids=list(PYTHONS), scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `any_mpi` run under one MPI each: the first, if marked so, else by turns.

    With RINGDL_TEST_ALL=1 only those marked `any_mpi(always=True)`, which take minutes, do so.
    """
    alike = defaultdict(list)
    take_first = set()
    for item in items:
        mark = item.get_closest_marker("any_mpi")
        if mark is None or (running.EVERYTHING and not mark.kwargs.get("always")):
            continue
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if any(parameters.pop(name, None) for name in ("mpi_python", "mpi")):
            key = item.path, item.originalname, repr(parameters)
            alike[key].append(item)
            take_first |= {key} if mark.kwargs.get("first") else set()
    left_out = []
    for turn, (key, group) in enumerate(alike.items()):
        taken = 0 if key in take_first else turn % len(group)
        left_out += [item for index, item in enumerate(group) if index != taken]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def run_ranks() -> RunRanks:
    """Runs a function on so many ranks that are threads; returns what they return, by rank.

    If it fails anywhere, the test fails with the tracebacks of all ranks. A rank that has failed
    shuts down like the others, so whoever waits for it hears of it.
    """

    def run(
        size: int, function: Callable[[Communicator], object], shares_memory: bool = False
    ) -> list[object]:
        results: list[object] = [None] * size
        failures = [""] * size

        def rank(communicator: Communicator) -> None:
            try:
                if shares_memory:
                    share_memory(communicator, [0] * size)
                    assert len(set(communicator.memory_hosts())) == 1
                results[communicator.rank] = function(communicator)
            except BaseException:
                failures[communicator.rank] = traceback.format_exc()
            communicator.shutdown()

        settings = Settings(timeout=20)
        communicators = [communicator_over(e, settings) for e in _engine.loopback(size)]
        threads = [threading.Thread(target=rank, args=(c,), daemon=True) for c in communicators]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        for thread in threads:
            thread.join(timeout=max(0, deadline - time.monotonic()))
        texts = [f"rank {r}:\n{text}" for r, text in enumerate(failures) if text]
        hanging = [r for r, thread in enumerate(threads) if thread.is_alive()]
        assert not texts, "\n".join(texts)
        assert not hanging, f"ranks {hanging} hang"
        return results

    return run
