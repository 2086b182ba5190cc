"""One rank gets a signal in the third step: all stop after the same one, as in docs/cluster.md."""

import os
import signal
import sys

import numpy as np

import ringdl

is_asked_to_stop = False


def ask_to_stop(number: int, frame: object) -> None:
    global is_asked_to_stop
    is_asked_to_stop = True


ringdl.init()
signal.signal(signal.SIGUSR2, ask_to_stop)
for step in range(100):
    if step == 3 and ringdl.rank() == ringdl.size() - 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    if ringdl.allreduce(np.array([is_asked_to_stop]), op=ringdl.Max)[0]:
        sys.stdout.write(f"stopped after step {step}\n")
        sys.exit()
