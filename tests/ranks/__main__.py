"""Runs the checks on the ranks that MPI, or torchrun, has started, all in the same order.

A check that fails on one rank must not hang the others: whoever then waits for that rank gets a
StallError after 20 s. After each check the ranks gather what went wrong, past ringdl, and go on
with a new communicator.

With RINGDL_TEST_DEVICE=cuda, torch makes tensors on that device unless it is told otherwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HANG_SECONDS = 100
"""A check that takes longer hangs: the rank prints its threads' stacks and takes the job down."""

os.environ.setdefault("RINGDL_TIMEOUT", "20")

import ringdl  # noqa: E402
from ringdl import _startup  # noqa: E402
from tests.ranks._outside import IS_MPI, world  # noqa: E402

_given_up: list[object] = []


def checks_of(names: list[str], pattern: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """The checks of the named modules in the order of their source, with their full names."""
    for name in names:
        module = importlib.import_module(f"tests.ranks.{name}")
        for key, value in list(vars(module).items()):
            if key.startswith("check_") and value.__module__ == module.__name__:
                full_name = f"{name}.{key}"
                if pattern in full_name:
                    yield full_name, value


def run_check(check: Callable[..., None]) -> str:
    """What went wrong on this rank, or nothing."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        if inspect.signature(check).parameters:
            check(ringdl.init())
        else:
            ringdl.init()
            check()
    except Exception:
        text = traceback.format_exc()
        if world.size > 1:  # others may wait for this rank, and nothing be gathered
            print(f"on rank {world.rank}: {text}", file=sys.stderr, flush=True)
        return text
    finally:
        faulthandler.cancel_dump_traceback_later()
    return ""


def start_afresh() -> None:
    """Leave a communicator behind on which ranks are out of step."""
    if _startup._default is not None:
        _given_up.append(_startup._default._engine)
        _startup._default = _startup._last = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ranks", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules of tests.ranks (default: all)")
    parser.add_argument("--json", type=Path, help="write the seconds per check to this file")
    parser.add_argument("--quick", action="store_true", help="no checks that wait for seconds")
    parser.add_argument("--slow", action="store_true", help="only those")
    parser.add_argument(
        "-k", dest="pattern", default="", help="only checks with this in their name"
    )
    chosen = parser.parse_args()
    if device := os.environ.get("RINGDL_TEST_DEVICE"):
        import torch

        torch.set_default_device(device)
        plain = torch.Generator

        class Generator(plain):  # type: ignore[valid-type, misc]
            def __new__(cls, device: str = device) -> torch.Generator:
                return plain.__new__(cls, device=device)

        torch.Generator = Generator  # type: ignore[misc]
    faulthandler.register(signal.SIGUSR1)  # tells where a job is that takes too long
    rank, size = world.rank, world.size
    here = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names = chosen.modules or sorted(name for name in here if not name.startswith("_"))

    seconds: dict[str, float] = {}
    failed: list[str] = []
    for name, check in checks_of(names, chosen.pattern):
        is_slow = getattr(check, "seconds", False)
        if getattr(check, "mpi", False) and not IS_MPI:
            continue
        if getattr(check, "ranks", 1) > size or (chosen.quick if is_slow else chosen.slow):
            continue
        begin = time.monotonic()
        texts = world.gather(run_check(check))
        seconds[name] = round(time.monotonic() - begin, 3)
        if not any(texts):
            continue
        failed.append(name)
        start_afresh()
        if rank == 0:
            for text in dict.fromkeys(filter(None, texts)):
                ranks = ", ".join(str(other) for other in range(size) if texts[other] == text)
                print(f"{name} failed on rank {ranks} of {size}:\n{text}", flush=True)
    if rank == 0:
        report: dict[str, Any] = {"size": size, "failed": failed, "seconds": seconds}
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1))
        print(f"{len(seconds)} checks on {size} ranks, {len(failed)} failed", *failed, flush=True)
    if failed:  # works are stuck for good: only an abort ends them
        world.gather("")
        world.abort()
    return 1 if failed or not seconds else 0


if __name__ == "__main__":
    sys.exit(main())
