"""What `import ringdl` loads, and what it costs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ringdl

FOREIGN = ("numpy", "torch", "jax", "mpi4py", "ml_dtypes", "numba", "cupy")
MEASURE = "import time; begin = time.process_time(); import {}; print(time.process_time() - begin)"


def output_of(program: str, **variables: str) -> str:
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_nothing_foreign_is_loaded() -> None:
    program = f"import sys, ringdl; print(*set({FOREIGN}).intersection(sys.modules))"
    assert output_of(program).split() == []


def test_nothing_foreign_is_loaded_by_one_rank_alone() -> None:
    program = (
        "import sys, ringdl; ringdl.init(); ringdl.barrier(); ringdl.shutdown();"
        f"print(*set({FOREIGN}).intersection(sys.modules))"
    )
    assert output_of(program).split() == []


def test_sources_without_engine_say_so(tmp_path: Path) -> None:
    """As in the root of a clone, where Python finds them before what is installed."""
    package = Path(ringdl.__file__).parent
    shutil.copytree(package, tmp_path / "ringdl", ignore=shutil.ignore_patterns("_engine*"))
    command = [sys.executable, "-c", "import ringdl"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    last = ended.stderr.splitlines()[-1]
    expected = f"ImportError: {tmp_path}/ringdl has ringdl's sources without the compiled engine: "
    assert last.startswith(expected), ended.stderr
    assert "During handling" not in ended.stderr


def test_importing_takes_less_time_than_importing_numpy(tmp_path: Path) -> None:
    """CPU time, in turns, the best of as many as it takes: noise only ever adds to a time.

    Both come from bytecode: what pip installs has it, but a clone's sources would be compiled at
    each import wherever PYTHONDONTWRITEBYTECODE is set.
    """
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    seconds = {"ringdl": 10.0, "numpy": 10.0}
    for _ in range(40):
        for module, best in seconds.items():
            seconds[module] = min(best, float(output_of(MEASURE.format(module), **bytecode)))
        if seconds["ringdl"] < min(0.2, 0.75 * seconds["numpy"]):
            return
    raise AssertionError(seconds)


def test_threads_that_call_while_another_shuts_down() -> None:
    """The short way keeps the communicator alive for as long as it is in it."""
    output_of(
        "import sys, threading, time, numpy, ringdl\n"
        "sys.setswitchinterval(1e-6)\n"
        "x, end = numpy.ones(8), time.monotonic() + 2\n"
        "def call():\n"
        "    while time.monotonic() < end:\n"
        "        try: ringdl.allreduce_(x)\n"
        "        except ringdl.Error: pass\n"
        "threads = [threading.Thread(target=call) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "while time.monotonic() < end:\n"
        "    ringdl.init(); time.sleep(0.0002); ringdl.shutdown()\n"
        "for thread in threads: thread.join()\n"
    )


def test_threads_whose_first_calls_meet() -> None:
    """The first call looks at NumPy by an import, which may let another thread run."""
    output_of(
        "import builtins, threading, time, numpy, ringdl\n"
        "ringdl.init()\n"
        "load = builtins.__import__\n"
        "def load_slowly(name, *arguments):\n"
        "    if name == 'numpy': time.sleep(0.1)\n"
        "    return load(name, *arguments)\n"
        "builtins.__import__ = load_slowly\n"
        "arrays = [numpy.ones(3) for _ in range(3)]\n"
        "threads = [threading.Thread(target=ringdl.allreduce_, args=[x]) for x in arrays]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
