"""That the simulator finds what is wrong with the engine: faults that are put into a copy of it.

Each is found within a thousand seeds of tests/csrc/simulation/seeds_test.cc.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.running import EVERYTHING, ROOT, call

PROGRAMS = ROOT / ".venv/bin"
SEEDS = 1000
NICE = ("nice", "-n", "19")
"""They compute for minutes, and what runs beside them has a clock: ranks that exchange small
messages would wait for a slice of the compiler's at each."""


class Fault(NamedTuple):
    """Some lines of a file in csrc/, and what stands in their place."""

    file: str
    right: str
    wrong: str


FAULTS = {
    "a lost grant": Fault(
        "engine/channels.cc",
        "    context_.control.send(rank, grant);\n",
        "    if (static int grants = 0; ++grants % 50 != 0) context_.control.send(rank, grant);\n",
    ),
    "a missing comparison": Fault(
        "engine/wire.cc",
        "theirs.dimensions != ours.dimensions || theirs.shape_hash != ours.shape_hash ||\n"
        "      theirs.count != ours.count",
        "theirs.dimensions != ours.dimensions",
    ),
    "an early reuse of a tag": Fault(
        "engine/channels.cc",
        "    edge.tag = context_.tags.of(rank).take();\n",
        "    auto& pool = context_.tags.of(rank);\n    edge.tag = pool.take();\n"
        "    static int tags = 0;\n"
        "    if (++tags % 50 == 0 && edge.tag >= 0) pool.give_back(edge.tag);\n",
    ),
    "an early reuse of a slot": Fault(
        "collective/shared/slots.cc",
        "instance < kSlots ? 0 : instance - kSlots + 1",
        "instance < kSlots ? 0 : instance - kSlots",
    ),
    "a wrong segment": Fault(
        "collective/messages/ring_allreduce.cc",
        "  const int chunk = reduces(message) ? rank_ - step - 2 :",
        "  const int chunk = reduces(message) ? rank_ - step - 2 - (step == 3) :",
    ),
}


class Copy:
    """The engine's sources and the test of seeds, which are built again after each change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("csrc", "tests/csrc"):
            shutil.copytree(ROOT / name, folder / name)
        self.build(
            *("-S", "csrc", "-B", "build", "-G", "Ninja", "--log-level=ERROR"),
            *(f"-DCMAKE_MAKE_PROGRAM={PROGRAMS / 'ninja'}", "-DRINGDL_TESTS=ON"),
            *("-DRINGDL_PYTHON=OFF", "-DRINGDL_CUDA_TARGETS=90"),
        )

    def build(self, *words: str) -> None:
        ended = call(*NICE, str(PROGRAMS / "cmake"), *words, timeout=1200, cwd=self.folder)
        assert ended.returncode == 0, ended.stdout

    def seeds(self) -> tuple[int, str]:
        """The test's exit status, and what it prints."""
        self.build("--build", "build", "--target", "seeds_test")
        test = str(self.folder / "build/tests/seeds_test")
        ended = call(*NICE, test, timeout=900, RINGDL_TEST_SEEDS=str(SEEDS))
        return ended.returncode, ended.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    if not EVERYTHING:
        pytest.skip("takes minutes: make test-all")
    made = Copy(tmp_path_factory.mktemp("faults"))
    yield made
    shutil.rmtree(made.folder)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(copy: Copy, name: str) -> None:
    fault = FAULTS[name]
    file = copy.folder / "csrc" / fault.file
    text = file.read_text()
    assert text.count(fault.right) == 1
    file.write_text(text.replace(fault.right, fault.wrong))
    try:
        status, output = copy.seeds()
    finally:
        file.write_text(text)
    seeds = re.findall(r"RINGDL_TEST_SEED=(\d+): (.*)", output)
    assert status != 0, output
    print(f"{name}: seed {seeds[0][0] if seeds else 'of a crash'}: {seeds[0][1] if seeds else ''}")


def test_without_a_fault(copy: Copy) -> None:
    status, output = copy.seeds()
    assert status == 0, output
