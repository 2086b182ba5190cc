"""Forked children of ranks that call ringdl: an error each, and no harm to the job."""

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import ringdl


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ringdl.UsageError as error:
        return "forked process" in str(error)
    return False


def answer(_: int) -> list[bool]:
    """What a worker of a DataLoader gets."""
    return [is_refused(lambda: ringdl.allreduce(np.ones(3))), is_refused(ringdl.barrier)]


def exit_code_of(child: Callable[[], object]) -> int | None:
    """Fork, call `child` there and end as Python ends; None if it had to be killed after 10 s."""
    process = os.fork()
    if process == 0:
        child()
        sys.exit(0)
    for _ in range(1000):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return None


def exit_codes_while_busy() -> set[int | None]:
    """Of children that are forked while another thread and the engine's own are in the engine."""

    def work() -> None:
        for _ in range(300):
            ringdl.allreduce(np.ones(5000, np.float32), name="busy")

    thread = threading.Thread(target=work)
    thread.start()
    codes = {exit_code_of(lambda: None) for _ in range(20)}
    thread.join()
    return codes


def main() -> None:
    ringdl.init()
    busy = exit_codes_while_busy()
    held = {"buckets": ringdl.Buckets([("w", (1000,), "float32")])}
    work = ringdl.allreduce_async(np.full(1 << 16, ringdl.rank(), np.float32), name="in flight")

    def call_everything() -> None:
        refused = {
            "allreduce": is_refused(lambda: ringdl.allreduce(np.ones(3))),
            "barrier": is_refused(ringdl.barrier),
            "ready": is_refused(lambda: held["buckets"].ready(0)),
            "wait for buckets": is_refused(held["buckets"].wait),
            "wait for a work": is_refused(lambda: work.wait(timeout=1)) or work.done(),
            "new buckets": is_refused(lambda: ringdl.Buckets([("v", (3,), "float32")])),
        }
        if not all(refused.values()):
            sys.stderr.write(f"in a forked child: {refused}\n")
            os._exit(9)
        held.clear()
        gc.collect()

    caught = exit_code_of(call_everything)
    uncaught = exit_code_of(ringdl.barrier)
    shut_down = exit_code_of(ringdl.shutdown)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map(answer, range(4))
    total = work.wait(timeout=20)
    held["buckets"].wait(timeout=20)
    assert (total == (ringdl.size() - 1) / 2).all()
    workers = "refused" if all(map(all, answers)) else "not refused"
    sys.stdout.write(
        f"children: {caught}, {uncaught} and {shut_down}; while busy: {busy}; workers: {workers}\n"
    )


if __name__ == "__main__":
    main()
