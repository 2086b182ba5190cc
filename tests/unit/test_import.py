"""What `import ringdl` loads, and what it costs."""

import subprocess
import sys

FOREIGN = ("numpy", "torch", "jax", "mpi4py", "ml_dtypes", "numba", "cupy")
MEASURE = "import time; begin = time.process_time(); import {}; print(time.process_time() - begin)"


def output_of(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_nothing_foreign_is_loaded() -> None:
    program = f"import sys, ringdl; print(*set({FOREIGN}).intersection(sys.modules))"
    assert output_of(program).split() == []


def test_nothing_foreign_is_loaded_by_one_rank_alone() -> None:
    program = (
        "import sys, ringdl; ringdl.init(); ringdl.barrier(); ringdl.shutdown();"
        f"print(*set({FOREIGN}).intersection(sys.modules))"
    )
    assert output_of(program).split() == []


def test_importing_takes_less_time_than_importing_numpy() -> None:
    """CPU time, in turns, the best of several: what else the machine does hardly matters."""
    seconds = {"ringdl": 10.0, "numpy": 10.0}
    for _ in range(7):
        for module, best in seconds.items():
            seconds[module] = min(best, float(output_of(MEASURE.format(module))))
    assert seconds["ringdl"] < 0.75 * seconds["numpy"], seconds
    assert seconds["ringdl"] < 0.2, seconds
