"""Reduces over a link that is cut, says so, and reduces on once it is mended.

The ranks and whoever cuts the link tell each other where they are by files in the folder given, as
what a rank prints may have to pass the link: it tells `R.ready` and awaits `cut`; `R.stalled` holds
its error; it awaits `mended` and tells `R.done`. With another argument the link stays cut: `R.lost`
holds the error of the rank that waits on.
"""

import sys
import time
from pathlib import Path

import numpy as np

import ringdl

STALL_SECONDS = 3
MENDED_SECONDS = 40
LOST_SECONDS = 200

ringdl.init()
comm = ringdl.get_communicator()
folder = Path(sys.argv[1])


def tell(event: str, text: str = "") -> None:
    unfinished = folder / f"{comm.rank}.unfinished"
    unfinished.write_text(text)
    unfinished.rename(folder / f"{comm.rank}.{event}")


def expect(event: str) -> None:
    deadline = time.monotonic() + MENDED_SECONDS
    while not (folder / event).exists():
        assert time.monotonic() < deadline, f"rank {comm.rank} waits for {event}"
        time.sleep(0.01)


array = np.ones(1 << 20, np.float32)
ringdl.allreduce_(array)
ringdl.barrier()
tell("ready")
expect("cut")
work = ringdl.allreduce_async_(array, op=ringdl.Sum, name="over the link")
begin = time.monotonic()
try:
    work.wait(timeout=STALL_SECONDS)
except ringdl.StallError as error:
    tell("stalled", f"{time.monotonic() - begin:.2f} s: {error}")
else:
    tell("stalled", "no StallError")
if len(sys.argv) > 2:
    try:
        work.wait(timeout=LOST_SECONDS)
    except ringdl.Error as error:
        tell("lost", f"{time.monotonic() - begin:.2f} s: {type(error).__name__}: {error}")
        raise
expect("mended")
work.wait(timeout=MENDED_SECONDS)
assert (array == comm.size).all()
tell("done")
