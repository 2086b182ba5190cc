"""The scripts for batch systems, and the image: what can be checked without a cluster."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples/cluster"
SCRIPTS = [path for path in sorted(CLUSTER.iterdir()) if path.suffix in (".sbatch", ".pbs", ".lsf")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script: Path) -> None:
    """Valid for the shell, and they start examples that are there."""
    checked = subprocess.run(
        ["bash", "-n", str(script)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr == ""
    started = [word for word in script.read_text().split() if word.endswith(".py")]
    assert started
    for name in started:
        assert (ROOT / "examples" / name).is_file(), name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_option_is_explained(script: Path) -> None:
    """Above it, or above the options that belong together."""
    lines = script.read_text().splitlines()
    above = ""
    for line in lines:
        if line.startswith(("#SBATCH", "#PBS", "#BSUB")):
            assert above.startswith(("# ", line.split()[0])), line
        above = line


def test_image(tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not there")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker does not run")
    build = ["docker", "build", "-f", str(CLUSTER / "Dockerfile"), "-t", "ringdl-test", str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=1800, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    words = ["docker", "run", "--rm", "-v", f"{tmp_path}:/data", "ringdl-test"]
    ran = subprocess.run(
        [*words, "ringdl", "run", "-n", "2", "/examples/first.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("holds") == 2
