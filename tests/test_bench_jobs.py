"""`python -m ringdl bench` as whole jobs: what it says, saves and ends with."""

import json
from pathlib import Path

import pytest

from tests.environments import PYTHONS
from tests.running import Ended, pretended_cuda, run_job, run_ranks

SMALL = ("-b", "512", "-e", "8K", "-n", "3", "-w", "1")


def bench(python: str, folder: Path, *words: str, ranks: int = 2, **environment: str) -> Ended:
    command = [python, "-m", "ringdl", "run", "-n", str(ranks), "-m", "ringdl", "bench", *words]
    return run_job(command, folder, **environment)


def test_every_collective_is_right(mpi_python: str, tmp_path: Path) -> None:
    """One job under each MPI: the ranks are started once."""
    program = tmp_path / "all.py"
    program.write_text(
        "import sys\nfrom ringdl import cli\n"
        "for name in sys.argv[2].split(','):\n"
        "    words = ['bench', name, *sys.argv[3:], '-J', sys.argv[1] + name]\n"
        "    code = cli.main(words)\n"
        "    assert code == 0, (name, code)\n"
    )
    names = ["allreduce", "reducescatter", "allgather", "broadcast", "alltoall"]
    words = ["run", "-n", "2", str(program), f"{tmp_path}/", ",".join(names), *SMALL]
    command = [mpi_python, "-m", "ringdl", *words, "--peers", "mpi", "-r", "all"]
    ended = run_job(command, tmp_path)
    assert ended.code == 0, ended.text
    assert ended.output.count("# Out of bounds values : 0 OK\n") == len(names), ended.text
    for name in names:
        report = json.loads((tmp_path / name).read_text())
        assert report["machine"]["ranks"] == 2
        assert report["out_of_bounds"] == {"count": 0, "okay": True}
        sizes = [512, 2048, 8192] * (2 if name == "broadcast" else 1)
        assert [row["size"] for row in report["results"]] == sizes
        for row in report["results"]:
            forms = [row["out_of_place"], row["others"]["mpi"]]
            forms += [row["in_place"]] if name in ("allreduce", "broadcast") else []
            for form in forms:
                assert form["nwrong"] == 0
                assert len(form["times_us"]) == 3
                assert 0 < form["p10"] <= form["time"] <= form["p90"]
                assert min(form["times_us"]) <= form["time"] <= max(form["times_us"])
            assert row["others"]["copyto"]["time"] > 0


def test_algorithms_and_gloo_stand_beside_it(tmp_path: Path) -> None:
    """Under one MPI only, as importing torch takes seconds."""
    pytest.importorskip("torch")
    python = next(iter(PYTHONS.values()))
    words = ("allreduce", "-f", "1024", "-e", "1M", "-n", "2", "-w", "0", "-d", "bfloat16")
    ended = bench(python, tmp_path, *words, "--peers", "gloo", "--algorithm", "ring,doubling")
    assert ended.code == 0, ended.text
    lines = ended.output.splitlines()
    [names] = [line for line in lines if "ringdl:ring" in line]
    assert names.split()[2:] == ["ringdl", "ringdl:ring", "ringdl:doubling", "gloo", "memcpy"]
    last = lines[lines.index(names) + 3].split()
    assert last[0] == "1048576"
    assert float(last[4]) > 0, "doubling takes large arrays, too, in several messages"
    assert "# Out of bounds values : 0 OK" in lines


@pytest.mark.parametrize("memory", ["ordinary", "shared"])
@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_arrays_on_a_device(collective: str, memory: str, tmp_path: Path) -> None:
    """A pretended one, which both ranks share."""
    python = next(iter(PYTHONS.values()))
    words = (collective, *SMALL, "--device", "cuda", "--memory", memory)
    ended = bench(python, tmp_path, *words, LD_LIBRARY_PATH=pretended_cuda())
    assert ended.code == 0, ended.text
    assert f"memory: {memory} of pretended device" in ended.output, ended.text
    assert "# Out of bounds values : 0 OK" in ended.output, ended.text
    assert ended.errors.count("2 ranks of this host share 1 CUDA device") == 1, ended.text


def test_no_device(tmp_path: Path) -> None:
    python = next(iter(PYTHONS.values()))
    ended = bench(python, tmp_path, "allreduce", "--device", "cuda")
    if "Out of bounds values" in ended.output:
        pytest.skip("there is one")
    assert ended.code == 2, ended.text
    assert ended.errors.count("device is 'cuda', but ") == 1, ended.text
    assert "Traceback" not in ended.errors, ended.text


def test_wrong_results_are_counted(mpi_python: str, tmp_path: Path) -> None:
    words = ("allreduce", *SMALL, "-c", "2")
    ended = run_ranks(mpi_python, 2, "wrong_results.py", *words, folder=tmp_path)
    assert ended.code == 1, ended.text
    # in place and out of place, which is a copy reduced in place; 3 sizes, 2 checks, 2 elements
    assert "# Out of bounds values : 24 FAILED" in ended.output, ended.text
    rows = [line.split() for line in ended.output.splitlines() if not line.startswith("#")]
    assert [(row[8], row[14]) for row in rows] == [("4", "4")] * 3, ended.text


def test_what_cannot_be_done_is_said_once(mpi_python: str, tmp_path: Path) -> None:
    ended = bench(mpi_python, tmp_path, "allreduce", "-J", str(tmp_path / "no" / "x.json"))
    assert ended.code == 2, ended.text
    sentence = "x.json cannot be written: No such file or directory"
    assert ended.errors.count(sentence) == 1, ended.text
    assert "Traceback" not in ended.errors, ended.text
    assert ended.output == ""
