"""A process that is started in place of a rank, before it has met the others."""

import signal
import subprocess
import sys
import time


def start(script: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *words])


def test_it_does_not_outlive_all_that_start_it() -> None:
    """Even in a call that does not return, with the interpreter's lock: MPI_Init may be one."""
    starters = [start("import time; time.sleep(60)") for _ in range(2)]
    script = """
import ctypes
import sys
from ringdl._newcomer import _ends_with
with _ends_with(sys.argv[1:]):
    ctypes.PyDLL(None).sleep(60)
"""
    newcomer = start(script, *(str(each.pid) for each in starters))
    try:
        starters[0].kill()
        starters[0].wait()
        time.sleep(2)
        assert newcomer.poll() is None
        starters[1].kill()
        starters[1].wait()
        assert newcomer.wait(30) == -signal.SIGKILL
    finally:
        for each in (*starters, newcomer):
            each.kill()
            each.wait()


def test_it_goes_on_once_it_has_met_them() -> None:
    script = """
import time
from ringdl._newcomer import _ends_with
with _ends_with(["0"]):
    pass
time.sleep(1)
print("goes on")
"""
    assert subprocess.check_output([sys.executable, "-c", script], timeout=30) == b"goes on\n"
