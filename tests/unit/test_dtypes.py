"""What an array's elements are is read off the array, whatever else is imported."""

import subprocess
import sys

_SCRIPT = """
import sys, threading
import numpy as np
from ringdl import Sum, _engine
from ringdl._communicator import communicator_over

results = [None, None]
engines = _engine.loopback(2)

def run(rank):
    comm = communicator_over(engines[rank])
    results[rank] = [
        comm.allreduce(np.array([3 + rank], dtype), Sum).item()
        for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1")
    ]
    comm.shutdown()

threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert "ml_dtypes" not in sys.modules
assert results == [[7] * 8] * 2, results
"""


def test_without_ml_dtypes() -> None:
    """np.dtype("float64") == None is True: a missing bfloat16 must not be taken for a float64."""
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
