"""That the simulator finds what is wrong with the engine: faults that are put into it.

Each is found within a thousand seeds of tests/csrc/simulation/seeds_test.cc.
"""

from __future__ import annotations

import re
import shlex
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


def run(*words: str | Path) -> str:
    """Run a program where the engine is built; what it prints."""
    ended = call(*NICE, *map(str, words), timeout=1200, cwd=ROOT / "build/engine")
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


class Build:
    """How `make test-csrc` builds: one file is compiled again, and linked before what it built."""

    def __init__(self) -> None:
        run(PROGRAMS / "cmake", "--build", ".", "--target", "seeds_test")
        commands = run(PROGRAMS / "ninja", "-t", "commands", "tests/seeds_test")
        self._commands = commands.splitlines()

    def seeds_test_with(self, file: str, text: str, folder: Path) -> Path:
        """The test of seeds with this text in place of a file of csrc/."""
        source, changed = folder / "changed.cc", folder / "changed.o"
        source.write_text(text)
        (compiles,) = (c for c in self._commands if c.endswith(f" -c {ROOT / 'csrc' / file}"))
        words = shlex.split(compiles)
        run(*words[: words.index("-MD")], "-c", source, "-o", changed)
        links = shlex.split(self._commands[-1].removeprefix(": && ").removesuffix(" && :"))
        output = links.index("-o")
        test = folder / "seeds_test"
        # Of a library a linker takes only what is still missing, so not the file as it was.
        run(*links[:output], changed, "-o", test, *links[output + 2 :])
        return test


def run_seeds(test: Path) -> tuple[int, str]:
    """The test's exit status, and what it prints."""
    ended = call(*NICE, str(test), timeout=900, RINGDL_TEST_SEEDS=str(SEEDS))
    return ended.returncode, ended.stdout


@pytest.fixture(scope="module")
def build() -> Build:
    if not EVERYTHING:
        pytest.skip("takes minutes: make test-all")
    return Build()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(build: Build, name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    text = (ROOT / "csrc" / fault.file).read_text()
    assert text.count(fault.right) == 1
    wrong = text.replace(fault.right, fault.wrong)
    status, output = run_seeds(build.seeds_test_with(fault.file, wrong, tmp_path))
    seeds = re.findall(r"RINGDL_TEST_SEED=(\d+): (.*)", output)
    assert status != 0, output
    print(f"{name}: seed {seeds[0][0] if seeds else 'of a crash'}: {seeds[0][1] if seeds else ''}")


def test_without_a_fault(build: Build, tmp_path: Path) -> None:
    """Built in the same way."""
    file = next(iter(FAULTS.values())).file
    text = (ROOT / "csrc" / file).read_text()
    status, output = run_seeds(build.seeds_test_with(file, text, tmp_path))
    assert status == 0, output
