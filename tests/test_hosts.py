"""Ranks on several hosts, simulated on this machine: see bench/hosts.py.

Where it cannot make hosts (they need root and iproute2), the tests that need them are skipped.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench import hosts
from tests import running
from tests.environments import ELASTIC, PYTHONS

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "tests/jobs"
HOSTS = [sys.executable, str(ROOT / "bench/hosts.py")]
COUNT = 4
TIMEOUT = 120
PAUSE_SECONDS = 30 if running.EVERYTHING else 5

with_and_without_mpi = pytest.mark.parametrize(
    "mpi", [*PYTHONS.values(), "none"], ids=[*PYTHONS, "none"]
)


def call(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return running.call(*words, timeout=TIMEOUT, **settings)


def traces() -> list[str]:
    """What of simulated hosts is on this machine."""
    places = ("/run/netns", "/sys/class/net", "/etc/netns")
    return [str(path) for place in places for path in Path(place).glob("ringdl*")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Four hosts; afterwards nothing of them may be left."""
    try:
        hosts.check_machine()
    except hosts.HostsError as lack:
        pytest.skip(str(lack))
    if not any(hosts.processes(name) for name in hosts.hosts()):
        hosts.down()  # a test run that was killed left them
    network = set(os.listdir("/sys/class/net"))
    made = call(*HOSTS, "up", "--hosts", str(COUNT))
    if "Operation not permitted" in made.stdout:  # a container's root
        pytest.skip(made.stdout.strip())
    assert made.returncode == 0, made.stdout
    assert set(os.listdir("/sys/class/net")) == network, "other jobs would take it, and lose it"
    yield
    removed = call(*HOSTS, "down")
    assert removed.returncode == 0, removed.stdout
    assert traces() == []


def run_on_hosts(python: str, *arguments: str) -> str:
    """Run a script on hosts; what the ranks print. Its checks have limits of their own."""
    ended = running.call(*HOSTS, "run", "--mpi", python, *arguments, timeout=300)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def until(claim: Callable[[], bool], what: str, seconds: float = TIMEOUT / 2) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_ranks_are_spread_over_hosts() -> None:
    assert hosts.spread(4, 4, None) == [1, 1, 1, 1]
    assert hosts.spread(6, 4, None) == [2, 2, 1, 1]
    assert hosts.spread(2, 4, None) == [1, 1]
    assert hosts.spread(5, 4, 2) == [2, 2, 1]
    with pytest.raises(hosts.HostsError, match="5 ranks at 1 per host need 5 hosts"):
        hosts.spread(5, 4, 1)


@pytest.mark.parametrize(
    ("is_root", "message"),
    [(False, "simulated hosts need root"), (True, "the program ip: install iproute2")],
)
def test_what_a_machine_lacks_is_said(
    is_root: bool, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    monkeypatch.setenv("PATH", "")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert hosts.main(["up"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_messages_over_the_network_are_not_lost(mpi_python: str) -> None:
    """MPI's network between ranks of one machine, which needs no simulated hosts."""
    ended = call(
        *(mpi_python, "-m", "ringdl", "run", "-n", "3", str(JOBS / "flooded.py")),
        MPIR_CVAR_NOLOCAL="1",
        UCX_TLS="tcp,self",
        OMPI_MCA_pml="ob1",
        OMPI_MCA_btl="tcp,self",
    )
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("none was lost") == 3


@pytest.mark.usefixtures("cluster")
def test_hosts_are_made_once() -> None:
    again = call(*HOSTS, "up")
    assert again.returncode == 2
    assert again.stdout.startswith("hosts: there are simulated hosts on this machine already")
    assert again.stdout.count("\n") == 1
    assert len(hosts.hosts()) == COUNT


@pytest.mark.usefixtures("cluster")
@with_and_without_mpi
@pytest.mark.parametrize("layout", [[1, 1, 1, 1], [3, 1]], ids=["1+1+1+1", "3+1"])
def test_hosts_are_told_apart(mpi: str, layout: list[int]) -> None:
    words = ["--layout", "+".join(map(str, layout)), "--", str(JOBS / "hosts_apart.py")]
    found = re.findall(r"report: (\{.*?\})", run_on_hosts(mpi, *words))
    reports = sorted((json.loads(text) for text in found), key=lambda report: report["rank"])
    places = [(host, rank) for host, ranks in enumerate(layout) for rank in range(ranks)]
    assert len(reports) == len(places), found
    for report, (host, local_rank) in zip(reports, places, strict=True):
        assert report["hostname"] == hosts.HOST.format(host)
        assert report["host"] == [host, len(layout)]
        assert report["local"] == [local_rank, layout[host]]
        assert report["messages"] == 48  # 6 steps, each of 256 KiB in segments of 32


LAYOUTS = [
    ("1+1+1+1", ["collectives", "mismatches"], 14),
    ("3+1", ["mismatches"], 7),
    ("2+2", ["buckets", "shared", "shared_exchanges"], 29),
    ("1+2+3", ["buckets", "shared_exchanges"], 17),
    ("2+1+1", ["parameter_servers", "policies", "torch_policies"], 12),
    ("2+1", ["joining", "torch_joining", "torch_timeline"], 9),
][: None if running.EVERYTHING else 5]


@pytest.mark.usefixtures("cluster")
@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("layout", "modules", "least"), LAYOUTS, ids=[layout for layout, *_ in LAYOUTS]
)
def test_checks_hold_on_hosts(
    mpi_python: str, layout: str, modules: list[str], least: int, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    checks = [*modules, "--quick", f"--json={report}"]
    run_on_hosts(mpi_python, "--layout", layout, "--", "-m", "tests.ranks", *checks)
    assert len(json.loads(report.read_text())["seconds"]) >= least


@pytest.mark.usefixtures("cluster")
def test_checks_hold_on_hosts_without_mpi(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    modules = ["collectives", "mismatches", "buckets", "parameter_servers"]
    checks = [*modules, "--quick", f"--json={report}"]
    run_on_hosts("none", "--layout", "2+1", "--", "-m", "tests.ranks", *checks)
    assert len(json.loads(report.read_text())["seconds"]) >= 34


@pytest.mark.usefixtures("cluster")
@with_and_without_mpi
def test_a_cut_link_stalls_and_a_mended_one_goes_on(mpi: str, tmp_path: Path) -> None:
    def told(event: str) -> list[Path]:
        return sorted(tmp_path.glob(f"[0-{COUNT - 1}].{event}"))

    job = subprocess.Popen(
        [*HOSTS, "run", "--mpi", mpi, "--", str(JOBS / "link_cut.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(told("ready")) == COUNT, "the ranks do not arrive")
        hosts.set_link(2, "down")
        (tmp_path / "cut").touch()
        until(lambda: len(told("stalled")) == COUNT, "the ranks do not stall")
        hosts.set_link(2, "up")
        (tmp_path / "mended").touch()
        assert job.wait(TIMEOUT) == 0
    finally:
        job.terminate()
        job.wait()
        hosts.set_link(2, "up")
    assert len(told("done")) == COUNT
    for rank, path in enumerate(told("stalled")):
        seconds, _, error = path.read_text().partition(" s: ")
        assert 3 <= float(seconds) < 10
        assert f"'over the link' did not end within 3.0 s on rank {rank}" in error
        missing = "ranks 0, 1 and 3" if rank == 2 else "rank 2"
        assert f"{missing} did not answer" in error


@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(not running.EVERYTHING, reason="takes two minutes: make test-all")
def test_a_link_that_stays_cut(tmp_path: Path) -> None:
    """Without MPI that is found after a minute and a half, though data is on its way."""
    job = subprocess.Popen(
        [*HOSTS, "run", "--mpi", "none", "--", str(JOBS / "link_cut.py"), str(tmp_path), "lost"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    try:
        until(lambda: len([*tmp_path.glob("*.ready")]) == COUNT, "the ranks do not arrive")
        hosts.set_link(2, "down")
        (tmp_path / "cut").touch()
        until(lambda: len([*tmp_path.glob("*.lost")]) == COUNT, "the ranks wait on", 150)
    finally:
        job.terminate()
        job.wait()
        hosts.set_link(2, "up")
    for path in tmp_path.glob("*.lost"):
        seconds, _, error = path.read_text().partition(" s: ")
        assert 80 <= float(seconds) < 110, error
        assert re.match(r"RankFailedError: rank \d cannot be reached any more", error), error
        assert re.search("its host has not answered for 90.0 s|timed out", error), error


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_job_leaves_nothing(
    mpi_python: str, by: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import pathlib, ringdl, sys, time\nringdl.init()\n"
        "pathlib.Path(sys.argv[1], f'{ringdl.rank()}.here').touch()\ntime.sleep(100)\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    job = subprocess.Popen(
        [*HOSTS, "run", "-n", "2", "--mpi", mpi_python, "--", str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        until(lambda: len(list(tmp_path.glob("*.here"))) == 2, "the ranks do not arrive")
        if by == signal.SIGINT:
            os.killpg(job.pid, by)  # as a terminal does
        else:
            job.send_signal(by)
        assert job.wait(TIMEOUT) == 128 + by
    finally:
        job.kill()
        job.wait()
    for host in hosts.hosts():
        assert hosts.call("ip", "netns", "pids", host) == ""
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("cluster")
def test_hosts_that_do_not_exist_are_refused() -> None:
    assert "there is no host 4: hosts 0 to 3 are up" in call(*HOSTS, "cut", "4").stdout
    for words, message in (
        (["--layout", "1+1+1+1+1"], "5 hosts are needed: hosts 0 to 3 are up"),
        (["--layout", "3+x"], "write the ranks of each host"),
    ):
        ended = call(*HOSTS, "run", *words, "--", str(JOBS / "hello.py"))
        assert ended.returncode == 2
        assert message in ended.stdout


needs_ulfm = pytest.mark.parametrize("python", ELASTIC)


def elastic(python: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HOSTS, "run", "--elastic", "--mpi", python, "--", str(JOBS / "elastic.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@pytest.mark.usefixtures("cluster")
@needs_ulfm
@pytest.mark.parametrize("rank", range(COUNT))
def test_ranks_go_on_without_that_of_another_host(python: str, rank: int) -> None:
    with elastic(python, "40", f"{rank}:20:kill", RINGDL_REPLACEMENTS="1") as job:
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "ranks that fail are not replaced, as the job is on several hosts" in output
    moments = re.findall(r"goes on as . of 3 at step 20 after (\S+) s", output)
    assert len(moments) == 3, output
    assert max(map(float, moments)) < running.SOON, output
    assert len(set(re.findall(r"has ended with (\w+) on 3", output))) == 1, output


def processes_of_ranks(host: int) -> list[int]:
    """Those of a host that run the script; mpirun only has it among its arguments."""
    found = []
    for process in hosts.processes(hosts.HOST.format(host)):
        words = [b""]
        with suppress(OSError):  # it has ended
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if words[1:] and words[1].endswith(b"elastic.py"):
            found.append(process)
    return found


@pytest.mark.usefixtures("cluster")
@needs_ulfm
@pytest.mark.parametrize("what", ["paused", "cut"])
def test_a_host_that_does_not_answer(python: str, what: str, tmp_path: Path) -> None:
    """It is waited for, and training goes on; or all ranks end, and say who was missing."""
    settings = {"RINGDL_TIMEOUT": "5" if what == "cut" else "60", "RINGDL_WATCHDOG": "1"}
    settings["ELASTIC_FOLDER"] = str(tmp_path)
    with elastic(python, "1500", "", **settings) as job:
        assert job.stdout is not None
        try:
            until(lambda: len(list(tmp_path.glob("*.trains"))) == COUNT, "the ranks do not train")
            if what == "cut":
                hosts.set_link(2, "down")
                # mpirun itself waits for the host.
                until(lambda: not any(map(processes_of_ranks, range(COUNT))), "ranks do not end")
                hosts.set_link(2, "up")
            else:
                stopped = processes_of_ranks(2)
                for process in stopped:
                    os.kill(process, signal.SIGSTOP)
                time.sleep(PAUSE_SECONDS)
                for process in stopped:
                    os.kill(process, signal.SIGCONT)
            output, _ = job.communicate(timeout=TIMEOUT)
        finally:
            hosts.set_link(2, "up")
            job.terminate()
    assert "has been in flight" in output
    if what == "cut":
        assert re.search(r"StallError: .* rank 2 did not answer", output), output
    else:
        assert output.count("has ended with") == COUNT, output
