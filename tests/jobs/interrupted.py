"""Ranks that are busy in different ways until Ctrl-C ends them: the argument says how rank 0 is."""

import sys
import time

import numpy as np

import ringdl


def main(how: str) -> None:
    ringdl.init()
    buckets = ringdl.Buckets([("w", (1000,), "float32")])
    sys.stdout.write("here\n")
    sys.stdout.flush()
    if ringdl.rank() == 0:
        if how == "shutdown":
            ringdl.shutdown()
        if how == "async":
            ringdl.allreduce_async_(np.ones(3), name="never").wait()
        if how == "buckets":
            buckets.ready(0)
            buckets.wait()
        ringdl.allreduce(np.ones(3), name="never")
    elif ringdl.rank() == 1:
        time.sleep(60)
    else:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass
    print("was not interrupted")


if __name__ == "__main__":
    main(sys.argv[1])
