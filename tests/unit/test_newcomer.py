"""A process that is started in place of a rank, before it has met the others."""

import signal
import subprocess
import sys
import time


def start(script: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *words])


def test_it_does_not_outlive_who_has_started_it() -> None:
    """Even in a call that does not return, with the interpreter's lock: MPI_Init may be one.

    Nobody waits for the one that has ended: it is a zombie.
    """
    starter = start("import time; time.sleep(60)")
    script = """
import ctypes
import sys
from ringdl._newcomer import _ends_with
with _ends_with(sys.argv[1]):
    ctypes.PyDLL(None).sleep(60)
"""
    newcomer = start(script, str(starter.pid))
    try:
        time.sleep(2)
        assert newcomer.poll() is None
        starter.kill()
        assert newcomer.wait(30) == -signal.SIGKILL
    finally:
        for each in (starter, newcomer):
            each.kill()
            each.wait()


def test_it_does_not_begin_after_who_has_started_it() -> None:
    starter = start("")
    starter.wait()
    script = """
import sys
from ringdl._newcomer import _ends_with
with _ends_with(sys.argv[1]):
    print("has begun", flush=True)
"""
    command = [sys.executable, "-c", script, str(starter.pid)]
    ended = subprocess.run(command, timeout=30, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_it_goes_on_once_it_has_met_them() -> None:
    script = """
import subprocess
import sys
import time
from ringdl._newcomer import _ends_with
starter = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with _ends_with(str(starter.pid)):
    pass
starter.kill()
starter.wait()
time.sleep(1)
print("goes on")
"""
    assert subprocess.check_output([sys.executable, "-c", script], timeout=30) == b"goes on\n"
