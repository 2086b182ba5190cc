"""The adapters of frameworks: their checks on ranks, where the framework is installed.

`make test` has JAX, Keras and scikit-learn, `make test-all` has all of them, on 1 to 3 ranks under
Open MPI and MPICH, on 2 under other MPIs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.environments import PYTHONS
from tests.running import EVERYTHING, ROOT
from tests.test_run import any_python, start_job

DOCS = ROOT / "docs"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}

_KERAS = "_keras _keras_policies"
_TENSORFLOW = "_tensorflow _tensorflow_training _tensorflow_wrong_use"

COMPILES_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Programs are the same under each MPI, and JAX compiles for longer than all else takes.

The size has no limit: with one, JAX locks the folder for each program, and looks at all files there
meanwhile, so that jobs side by side wait for each other for minutes. Without it a program may be
read half written: zlib notices, JAX warns and compiles.
"""

IN_DOUBLE = COMPILES_ONCE | {"JAX_ENABLE_X64": "1"}

CHECKS = {
    "jax": ("jax", "_jax_compiled _jax_memory", COMPILES_ONCE),
    "jax-devices": ("jax", "_jax_devices", {}),
    "jax-policies": ("jax", "_jax_policies", IN_DOUBLE),
    "jax-models": ("flax", "_jax_models", COMPILES_ONCE),
    "sklearn": ("sklearn", "_sklearn _sklearn_training _sklearn_wrong_use", {}),
    "tensorflow": ("tensorflow", _TENSORFLOW, {}),
    "keras-torch": ("keras", _KERAS, {"KERAS_BACKEND": "torch"}),
    "keras-jax": ("keras", _KERAS, {"KERAS_BACKEND": "jax"} | IN_DOUBLE),
    "keras-2": ("tf_keras", "_keras_2", {"TF_USE_LEGACY_KERAS": "1"}),
    "keras-tensorflow": ("tensorflow", _KERAS, {"KERAS_BACKEND": "tensorflow"}),
}
"""What has to be installed, the modules in tests/ranks, and their environment."""


def need(package: str) -> None:
    """Skip the test where a package is not installed, but where all of them have to be."""
    if not EVERYTHING and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-all does)")


FIRST, OTHERS = [*PYTHONS][:2], [*PYTHONS][2:]
JOBS = (
    [
        *itertools.product(CHECKS, FIRST, (1, 2, 3)),
        *itertools.product(CHECKS, OTHERS, (2,)),
    ]
    if EVERYTHING
    else zip(CHECKS, itertools.cycle(PYTHONS), itertools.repeat(2), strict=False)
)
"""MPIs and numbers of ranks: an adapter hardly notices which MPI it is."""


@pytest.mark.parametrize(("adapter", "mpi", "ranks"), [*JOBS])
def test_adapter(adapter: str, mpi: str, ranks: int) -> None:
    package, module, settings = CHECKS[adapter]
    need(package)
    code, output = start_job(PYTHONS[mpi], ranks, *module.split(), **QUIET, **settings)
    assert code == 0, output


SCRIPT = re.compile(r"```python\n(?=# (train_\w+)\.py\n)(.*?)```", re.DOTALL)
SCRIPTS = {
    f"{page.stem}-{name}": text
    for page in sorted(DOCS.glob("*.md"))
    if page.stem != "trainers"  # tests/test_trainers.py
    for name, text in SCRIPT.findall(page.read_text())
}
"""The complete scripts of the pages."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_a_page(name: str, tmp_path: Path) -> None:
    text = SCRIPTS[name]
    packages = "equinox|flax|jax|keras|optax|sklearn|tensorflow"
    for package in re.findall(rf"^(?:import|from) ({packages})\b", text, re.MULTILINE):
        need(package)
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = subprocess.run(
        [any_python(), "-m", "ringdl", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | QUIET | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
