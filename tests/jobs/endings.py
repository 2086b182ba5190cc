"""Rank 1 ends in the way the argument names, while the others wait for it in an allreduce.

    endings.py HOW [late | again]

With "late", they have reached their end and wait for it there; with "again", they call once more
after a RankFailedError.
"""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import time

import numpy as np

import ringdl
from ringdl import _launch, _mpi, _rendezvous


def hook_like_torch() -> None:
    """As torch.distributed.init_process_group does, to add the rank to each line."""
    before = sys.excepthook

    def hook(*error: object) -> None:
        real, sys.stderr = sys.stderr, io.StringIO()
        try:
            before(*error)  # type: ignore[arg-type]
            text = sys.stderr.getvalue()
        finally:
            sys.stderr = real
        real.write(f"[rank1]: {text}")

    sys.excepthook = hook


def end(how: str) -> None:
    print(f"ends at {time.monotonic()}", flush=True)
    if how == "hooked":
        hook_like_torch()
    if how in ("raise", "hooked"):
        raise ValueError("the data are gone")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(7)  # by which a shell may know it
    if how == "segfault":
        ctypes.string_at(0)
    by_hand = "MASTER_PORT" in os.environ  # nobody ends this rank: it does, later
    if how == "stop":
        if by_hand:
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("stall", "stop") and by_hand:
        time.sleep(0 if how == "stop" else 4)
        raise TimeoutError("nobody waits for this rank any more")
    if how in ("stall", "wait"):
        time.sleep(60)
    if how == "mismatch":
        ringdl.allreduce(np.zeros(7), name="awaited")
    assert how == "return"


def main(how: str, when: str) -> None:
    started = _launch.detect_store_job(os.environ) or _launch.detect(os.environ)
    if how == "version" and started is not None and started.rank == 1:
        print(f"ends at {time.monotonic()}", flush=True)
        _mpi.__version__ = "0.0.1"
        _rendezvous.Member.__init__.__defaults__ = ("0.0.1",)
    ringdl.init()
    x = np.full(1000, ringdl.rank(), np.float32)
    ringdl.allreduce(x)
    if ringdl.rank() == 1:
        time.sleep(0.3)  # the others wait by now
        end(how)
    elif when == "again":
        with contextlib.suppress(ringdl.RankFailedError):
            ringdl.allreduce(x, name="awaited")
        time.sleep(1)
        ringdl.allreduce_(x)
    elif when != "late":
        ringdl.allreduce(x, name="awaited", timeout=1 if how in ("stall", "stop") else None)
        print("the allreduce has ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "".join(sys.argv[2:]))
