"""Rank 1 ends while rank 0 computes: two torchruns start both again, and only one counts that.

restarted_elsewhere.py FILE
"""

import os
import sys
import time
from pathlib import Path

import ringdl

ringdl.init()
ended = Path(sys.argv[1])
if not ringdl.broadcast_object(ended.exists()):
    ringdl.barrier()
    if ringdl.rank() == 1:
        ended.touch()
        os._exit(1)
    time.sleep(100)
ringdl.barrier()
sys.stdout.write(f"rank {ringdl.rank()} has ended well\n")
