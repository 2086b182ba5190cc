"""Simulated hosts on this machine, with links of a chosen speed to one switch.

    python bench/hosts.py up --hosts 4 --rate 1gbit
    python bench/hosts.py run -n 4 -- train.py           one rank on each
    python bench/hosts.py run --layout 3+1 -- train.py   three ranks on host 0, one on host 1
    python bench/hosts.py cut 2                          pull the cable of host 2, also during a job
    python bench/hosts.py join 2                         and plug it in again
    python bench/hosts.py down

A host is a network namespace; a job gives each its own host name, shared memory and System V
objects too, so MPI finds separate hosts, which reach each other over their links alone. The switch
has a namespace of its own, too: other jobs on this machine do not see a network that comes and
goes. With --mpi none, ranks are started there by hand, as torchrun would. They share the machine's
cores and files. Needs Linux, root, and the programs of iproute2; where hosts cannot be made, the
exit code is 2.

A job lives in a process namespace of its own, so nothing of it outlives its mpirun, and its
temporary files in one folder, which is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringdl._mpirun import Library

SWITCH = "ringdl-switch"
"""The namespace of the bridge. It is made first and removed last: where it is, there are hosts."""

BRIDGE = "bridge"

HOST = "ringdl{}"
"""What a host and its namespace are called; its number is also in its address."""

ADDRESS = "10.77.0.{}"
MOST_HOSTS = 250
GRACE_SECONDS = 3

# Called by the launchers in place of ssh. iproute2 lays the files of /etc/netns/HOST over /etc.
AGENT = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts --ipc sh -c '
  echo "$0" >/proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && eval "$*"
' "$host" "$@"
"""


class HostsError(RuntimeError):
    """Something cannot be done; the message says what and why, in one sentence."""


def check_machine() -> None:
    """Say what the machine lacks.

    Raises:
        HostsError: not root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise HostsError("simulated hosts need root: network namespaces are made by root alone")
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            raise HostsError(
                f"simulated hosts need the program {program}: install {package} (apt-get install"
                f" {package})"
            )


def call(*words: str) -> str:
    """Run a program and return its output.

    Raises:
        HostsError: it failed; with its last words.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise HostsError(f"`{shlex.join(words)}` failed: {said}")
    return done.stdout


def cable(number: int) -> str:
    """The switch's end of a host's link."""
    return f"host{number}"


def namespaces() -> set[str]:
    """All of this machine."""
    return {line.split()[0] for line in call("ip", "netns", "list").splitlines()}


def hosts() -> list[str]:
    """The hosts that are up, in order."""
    names = namespaces()
    numbers = sorted(n for n in range(MOST_HOSTS) if HOST.format(n) in names)
    return [HOST.format(number) for number in numbers]


def up(count: int, rate: str) -> None:
    """Make hosts.

    Args:
        count: how many.
        rate: of each link in each direction, as tc writes it: "1gbit", "200mbit".

    Raises:
        HostsError: there are some already, or the machine does not allow it; nothing is left then.
    """
    if not 1 <= count <= MOST_HOSTS:
        raise HostsError(f"--hosts {count}: between 1 and {MOST_HOSTS} hosts can be made")
    if SWITCH in namespaces():
        raise HostsError(
            "there are simulated hosts on this machine already: end what runs on them and remove"
            " them with `python bench/hosts.py down`"
        )
    call("ip", "netns", "add", SWITCH)
    try:
        call("ip", "-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
        call("ip", "-n", SWITCH, "link", "set", BRIDGE, "up")
        for number in range(count):
            _make_host(number, count, rate)
    except BaseException:
        down()
        raise


def _make_host(number: int, count: int, rate: str) -> None:
    name = HOST.format(number)
    call("ip", "netns", "add", name)
    call(
        *("ip", "-n", SWITCH, "link", "add", cable(number), "type", "veth"),
        *("peer", "name", "eth0", "netns", name),
    )
    call("ip", "-n", SWITCH, "link", "set", cable(number), "master", BRIDGE, "up")
    call("ip", "-n", name, "addr", "add", ADDRESS.format(number + 1) + "/24", "dev", "eth0")
    call("ip", "-n", name, "link", "set", "eth0", "up")
    call("ip", "-n", name, "link", "set", "lo", "up")
    # A burst below 64 KiB would take the packets apart that the kernel hands over in one piece, and
    # a core could not keep up with the link.
    limit = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms")
    call("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
    call("tc", "-n", SWITCH, "qdisc", "add", "dev", cable(number), *limit)
    # BBR, some machines' default, slows each flow for 0.2 s every 10 s, and with it the whole ring;
    # reno is in every kernel and may be chosen in every namespace.
    control = "/proc/sys/net/ipv4/tcp_congestion_control"
    call("ip", "netns", "exec", name, "sh", "-c", f"echo reno >{control}")
    files = Path("/etc/netns", name)
    files.mkdir(parents=True, exist_ok=True)
    lines = [f"{ADDRESS.format(n + 1)} {HOST.format(n)}" for n in range(count)]
    files.joinpath("hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def processes(host: str) -> list[int]:
    """What runs on a host."""
    return [int(process) for process in call("ip", "netns", "pids", host).split()]


def down() -> None:
    """Remove all hosts, and end what runs on them."""
    for name in hosts():
        for process in processes(name):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        call("ip", "netns", "del", name)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
    if Path("/etc/netns").is_dir() and not os.listdir("/etc/netns"):
        os.rmdir("/etc/netns")
    if SWITCH in namespaces():
        call("ip", "netns", "del", SWITCH)


def set_link(number: int, state: str) -> None:
    """Take a host's link down, or bring it up.

    Connections outlive a cut: TCP sends again, after pauses that grow with the time it has waited.

    Raises:
        HostsError: there is no such host.
    """
    if HOST.format(number) not in hosts():
        raise HostsError(f"there is no host {number}: {_who_is_up()}")
    call("ip", "-n", SWITCH, "link", "set", cable(number), state)


def _who_is_up() -> str:
    count = len(hosts())
    return (
        f"hosts 0 to {count - 1} are up" if count else "make some with `python bench/hosts.py up`"
    )


def spread(ranks: int, host_count: int, per_host: int | None) -> list[int]:
    """How many ranks each host gets.

    Neighbouring ranks share a host. Without `per_host` the first hosts take one more if the number
    of ranks is no multiple of the hosts'; with it, the last one in use may take fewer.

    Raises:
        HostsError: there are not enough hosts.
    """
    if per_host is None:
        small, larger = divmod(ranks, host_count)
        layout = [small + (host < larger) for host in range(host_count)]
        return [count for count in layout if count > 0]
    layout = [min(per_host, ranks - first) for first in range(0, ranks, per_host)]
    if len(layout) > host_count:
        raise HostsError(
            f"{ranks} ranks at {per_host} per host need {len(layout)} hosts: {_who_is_up()}"
        )
    return layout


def launcher_options(library: Library, layout: Sequence[int], agent: Path) -> list[str]:
    """Options of mpirun that start ranks on the hosts and use their links.

    Args:
        library: the MPI.
        layout: ranks per host.
        agent: the program to call in place of ssh.
    """
    places = ",".join(f"{HOST.format(host)}:{count}" for host, count in enumerate(layout))
    if library.vendor == "Open MPI":
        # Each daemon takes the machine's cores for its own, so ranks must be set to share them.
        is_4 = library.version.startswith("4.")
        launcher = ["--mca", "plm_rsh_agent"] if is_4 else ["--prtemca", "plm_ssh_agent"]
        options = [*launcher, str(agent), "--host", places, "--bind-to", "none"]
        for key, value in (
            ("pml", "ob1"),
            ("btl", "tcp,vader,self" if is_4 else "tcp,sm,self"),
            ("mpi_yield_when_idle", "1"),
        ):
            options += ["--mca", key, value]
        return options
    if library.vendor == "MPICH":
        # UCX identifies hosts by the machine's number, which they share here.
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", places]
        options += ["-genv", "UCX_TLS", os.environ.get("UCX_TLS", "tcp,self")]
        if library.version.startswith("4.0"):
            # Its MPI_Finalize over UCX may never return. ringdl leaves it out; with this it does so
            # in scripts, too, that have initialized MPI before.
            options += ["-genv", "MPI4PY_RC_FINALIZE", "0"]
        return options
    if library.vendor == "Intel MPI":
        machines = agent.with_name("machines")
        machines.write_text(places.replace(",", "\n") + "\n")
        options = [
            "-bootstrap",
            "ssh",
            "-bootstrap-exec",
            str(agent),
            "-machinefile",
            str(machines),
        ]
        for key, value in (
            ("I_MPI_FABRICS", "ofi"),
            ("FI_PROVIDER", "tcp"),
            ("I_MPI_PIN", "0"),
            ("I_MPI_THREAD_YIELD", "2"),  # waiting ranks leave the core, as above
        ):
            options += ["-genv", key, os.environ.get(key, value)]
        return options
    raise HostsError(
        "ranks are started on simulated hosts by Open MPI, MPICH or Intel MPI, not by "
        f"{library.vendor}"
    )


def interpreter(mpi: str | None) -> str:
    """The Python whose mpi4py loads the wanted MPI."""
    if mpi is None:
        return sys.executable
    known = Path(__file__).parents[1] / ".venv/mpi" / mpi / "bin/python"
    found = str(known) if known.exists() else shutil.which(mpi)
    if found is None:
        raise HostsError(f"--mpi {mpi}: there is no {known}, and no interpreter of that name")
    return found


def _at_once(commands: Sequence[str]) -> str:
    """A command of the shell that runs some at once, and fails if one does."""
    starts = " ".join(f'{command} & pids="$pids $!";' for command in commands)
    return f"pids=; {starts} code=0; for pid in $pids; do wait $pid || code=1; done; exit $code"


def by_hand(layout: Sequence[int], agent: Path, command: Sequence[str]) -> str:
    """A command of the shell that starts ranks on the hosts without MPI, as torchrun would.

    Args:
        layout: ranks per host.
        agent: the program to call in place of ssh.
        command: of each rank.
    """
    meeting = f"WORLD_SIZE={sum(layout)} MASTER_ADDR={HOST.format(0)} MASTER_PORT=29500"
    ranks = iter(range(sum(layout)))
    return _at_once(
        [
            shlex.join([str(agent), HOST.format(host), _at_once(commands)])
            for host, count in enumerate(layout)
            for commands in [
                [f"RANK={next(ranks)} {meeting} {shlex.join(command)}" for _ in range(count)]
            ]
        ]
    )


def run(
    layout: Sequence[int], python: str | None, program: Sequence[str], elastic: bool = False
) -> int:
    """Run a script with `layout` ranks per host; mpirun's exit code, or, without MPI, 1 for any.

    mpirun runs on host 0. If this is interrupted, by Ctrl-C or SIGTERM, the whole job ends.

    Args:
        layout: ranks per host.
        python: the Python whose mpi4py loads the wanted MPI; None: no MPI.
        program: the script, or -m and a module, and its arguments.
        elastic: whether ranks go on when one fails.

    Raises:
        HostsError: there are not enough hosts, or no MPI.
    """
    from ringdl import _cores, _mpirun

    if len(layout) > len(hosts()):
        raise HostsError(f"{len(layout)} hosts are needed: {_who_is_up()}")
    if python is not None:
        try:
            library = _mpirun.find_library(python)
            mpirun = _mpirun.find_mpirun(library)
            if elastic:
                _mpirun.refuse_inelastic(library)
        except _mpirun.LaunchError as error:
            raise HostsError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="ringdl-hosts-") as folder:
        agent = Path(folder, "agent")
        agent.write_text(AGENT)
        agent.chmod(0o755)
        if python is None:
            command = ["sh", "-c", by_hand(layout, agent, [sys.executable, *program])]
        else:
            mpi_command = _mpirun.compose(
                library,
                mpirun,
                sum(layout),
                [python, *program],
                cores=_cores.read_cores(),
                environ=os.environ,
                options=launcher_options(library, layout, agent),
                is_root=True,
                elastic=elastic,
            )
            print("hosts:", shlex.join(mpi_command), file=sys.stderr, flush=True)
            command = [str(agent), HOST.format(0), shlex.join(mpi_command)]
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TMPDIR": folder}
        job = subprocess.Popen([*alone, *command], env=environment)
        try:
            return job.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(GRACE_SECONDS)  # mpirun has the terminal's Ctrl-C too
            raise
        finally:
            _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    """Kill what unshare has started, and wait until nothing of it is left.

    That is the first process of a namespace, and does not end before all others in it have. Of
    unshare's own end they would only be told.
    """
    if job.poll() is None:
        inside = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for process in inside or [job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    job.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python bench/hosts.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("up", help="make hosts")
    make.add_argument("--hosts", type=int, default=4, metavar="N")
    make.add_argument("--rate", default="1gbit", help="of each link, as tc writes it (%(default)s)")
    commands.add_parser("down", help="remove them")
    start = commands.add_parser("run", help="run a script on them")
    start.add_argument("-n", type=int, metavar="N", help="ranks (default: one per host)")
    start.add_argument("--per-host", type=int, metavar="K", help="fill hosts with K ranks each")
    start.add_argument("--layout", metavar="A+B+...", help="ranks of host 0, host 1, ...")
    start.add_argument(
        "--mpi",
        help="openmpi, mpich or intel, as make installs them, a Python (default: this), or none",
    )
    start.add_argument("--elastic", action="store_true", help="ranks go on when one fails")
    start.add_argument("program", nargs="+", help="-- script.py or -m module, and its arguments")
    for name, text in (("cut", "cut a host's link"), ("join", "mend it")):
        commands.add_parser(name, help=text).add_argument("host", type=int, metavar="HOST")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_machine()
        if chosen.command == "up":
            up(chosen.hosts, chosen.rate)
        elif chosen.command == "down":
            down()
        elif chosen.command == "run":
            python = None if chosen.mpi == "none" else interpreter(chosen.mpi)
            return run(_layout_of(chosen), python, chosen.program, chosen.elastic)
        else:
            set_link(chosen.host, {"cut": "down", "join": "up"}[chosen.command])
    except HostsError as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _layout_of(chosen: argparse.Namespace) -> list[int]:
    if chosen.layout is not None:
        layout = [int(part) if part.isdigit() else 0 for part in chosen.layout.split("+")]
        if 0 in layout or chosen.per_host is not None or chosen.n not in (None, sum(layout)):
            raise HostsError(
                f"--layout {chosen.layout}: write the ranks of each host, as in 3+1; -n and"
                " --per-host are not needed then"
            )
        return layout
    host_count = len(hosts())
    if host_count == 0:
        raise HostsError(_who_is_up())
    ranks = host_count * (chosen.per_host or 1) if chosen.n is None else chosen.n
    if ranks < 1 or (chosen.per_host is not None and chosen.per_host < 1):
        raise HostsError("-n and --per-host are at least 1")
    return spread(ranks, host_count, chosen.per_host)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
