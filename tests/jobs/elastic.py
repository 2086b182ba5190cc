"""Trains on ranks that are killed: those that are left go on from the last commit.

    elastic.py STEPS KILLS [COMMIT]

KILLS says who ends when, as "rank:step:how,...": by its number at the start, at this step, with how
"kill" (by SIGKILL), "fork" (the same, after a child of it has ended), "raise" or "exit". Each rank
has a part of the moments of its own. At the end each prints its parameters' digest. With COMMIT, a
file that such a job has written, training begins there.
"""

import hashlib
import os
import signal
import sys
import time

import going_on
import numpy as np

import ringdl
from ringdl import elastic
from ringdl._parts import split

ROWS = 10_007


def gradient(step: int) -> np.ndarray:
    """Of this rank's samples: other ones for another number of ranks."""
    rows = np.random.default_rng((step, ringdl.rank(), ringdl.size())).normal(size=ROWS)
    return rows.astype(np.float32)


def main(steps: int, kills: str, commit: str = "") -> None:
    ringdl.init()
    number = going_on.number()
    ends = {
        (rank, int(step)): how
        for rank, step, how in (kill.split(":") for kill in kills.split(",") if kill)
    }
    begin, end = part_of(ROWS)
    state = elastic.State(
        w=np.zeros(ROWS, np.float32),
        step=0,
        own={"m": np.zeros(end - begin, np.float32)},
        copies=2,
    )
    if commit:
        saved = np.load(commit)
        state.w[:], state.step = saved["w"], int(saved["step"])
        state.own["m"] = saved["m"][begin:end]
    failed_at = time.monotonic()

    def tell() -> None:
        m = ringdl.allgather(state.own["m"])
        going_on.tell(
            number,
            f"at step {state.step}",
            failed_at,
            ".npz",
            lambda file: np.savez(file, w=state.w, m=m, step=state.step),
        )

    state.register_reset_callbacks([tell])

    def train(state: elastic.State) -> None:
        nonlocal failed_at
        while state.step < steps:
            going_on.wait(state.step, state.commit)
            if state.step == 20:
                going_on.tell_of_training()
            how = ends.pop((str(number), state.step), None)
            if how is not None:
                sys.stdout.write(f"rank {number} ends at {time.monotonic()}\n")
                sys.stdout.flush()
            if how == "fork":
                child = os.fork()
                if child == 0:
                    sys.exit()
                os.waitpid(child, 0)
            if how in ("kill", "fork"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(0)
            if how == "raise":
                raise ZeroDivisionError("on purpose")
            failed_at = time.monotonic()
            mean = ringdl.allreduce(gradient(state.step), name="gradient")
            begin, end = part_of(ROWS)
            state.own["m"] = 0.9 * state.own["m"] + mean[begin:end]
            state.w -= 0.1 * ringdl.allgather(state.own["m"], name="moments")
            state.step += 1
            state.commit()

    elastic.run(train, state)
    digest = hashlib.sha256(state.w.tobytes()).hexdigest()
    sys.stdout.write(f"rank {number} has ended with {digest} on {ringdl.size()}\n")


def part_of(rows: int) -> tuple[int, int]:
    begin, count = split(rows, ringdl.size(), ringdl.rank())
    return begin, begin + count


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *sys.argv[3:])
