"""A rank that maps and unmaps memory, and whose threads end, without any message meanwhile.

Prints a line of JSON: what the process holds after a warm-up and in the end.
"""

import json
import mmap
import sys
import threading

from measure import held

import ringdl

WARM_UP = 10_000
TIMES = 50_000


def unmap(times: int) -> None:
    for _ in range(times):
        mmap.mmap(-1, 160 << 10).close()
    for _ in range(times // 20):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


ringdl.init()
unmap(WARM_UP)
before = held()
unmap(TIMES)
sys.stdout.write(json.dumps([before, held()]) + "\n")
