"""The command line: ``ringdl run | doctor | diagnose | bench | simulate | tune | compare``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ringdl import _cores, _doctor, _launch, _mpirun
from ringdl._errors import UsageError
from ringdl._execute import execute
from ringdl._report import RUN_REPORT
from ringdl._settings import read_settings
from ringdl._version import __version__

_EXAMPLES = """\
examples:
  python -m ringdl run -n 2 train.py --epochs 3
  python -m ringdl run -n 8 --hostfile hosts -- train.py   mpirun's own options end with --
  python -m ringdl doctor                                  what is here, and is it usable?
  python -m ringdl diagnose flights                        who hangs, and where did ranks part?
  mpirun -n 2 python -m ringdl bench allreduce             how fast is it here?
  mpirun -n 2 python -m ringdl tune                        choose by what is measured here
  python -m ringdl simulate train --help                   how fast would it be there?
  python -m ringdl compare --tasks digits                  which policy learns how fast?
"""

_RUN_USAGE = (
    "python -m ringdl run -n N [--mpirun PATH] [--elastic [--replacements N]] [--restarts N]"
    " [--dry-run] [mpirun options --] (script.py | -m module) [arguments]"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: the words after ``python -m ringdl``; by default those of this process.

    Returns:
        The exit code: 0, 1 if the doctor found no usable set-up, the benchmark a wrong result, or
        `diagnose` that something is wrong, 2 for a command that cannot be carried out. ``run`` does
        not return if it succeeds: the process becomes mpirun.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringdl",
        description="Averages gradients over MPI.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringdl {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="run | doctor | diagnose | bench | simulate | tune | compare",
    )
    commands.add_parser("run", help="start a script on several ranks", add_help=False)
    commands.add_parser("doctor", help="say what was found and what it means", add_help=False)
    commands.add_parser("diagnose", help="say which rank diverged first", add_help=False)
    commands.add_parser("bench", help="measure a collective", add_help=False)
    commands.add_parser("simulate", help="predict what another cluster takes", add_help=False)
    commands.add_parser("tune", help="measure what allreduces cost and keep it", add_help=False)
    commands.add_parser("compare", help="train by every policy, side by side", add_help=False)
    arguments = sys.argv[1:] if arguments is None else arguments
    known, rest = parser.parse_args(arguments[:1]), list(arguments[1:])
    try:
        return _COMMANDS[known.command](rest)
    except (_mpirun.LaunchError, UsageError) as error:
        print(f"ringdl: {error}", file=sys.stderr)
        return 2


def split_run(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split the arguments of ``run`` into its own options, mpirun's options, and the program.

    Its own options come first. What follows is the program, unless it begins with another option:
    then mpirun's options last until ``--``, and may have options of ``run`` among them.

    Raises:
        LaunchError: if mpirun's options do not end.
    """
    own, rest = _take_own(list(arguments))
    if not rest or rest[0] == "-m" or not rest[0].startswith("-"):
        return own, [], rest
    if "--" not in rest:
        raise _mpirun.LaunchError(
            f"{rest[0]} is taken as an option of mpirun; end these with --, as in `{_RUN_USAGE}`"
        )
    end = rest.index("--")
    options: list[str] = []
    left = rest[:end]
    while left:
        options.append(left.pop(0))
        more, left = _take_own(left)
        own += more
    return own, options, rest[end + 1 :]


def _take_own(words: list[str]) -> tuple[list[str], list[str]]:
    """The options of ``run`` that ``words`` begin with, and what is left."""
    own: list[str] = []
    while words:
        word = words[0]
        if word in ("-n", "-np", "--np", "--mpirun", "--restarts", "--replacements"):
            own += ["-n" if word in ("-np", "--np") else word, *words[1:2]]
            words = words[2:]
        elif word in ("--dry-run", "--elastic", "-h", "--help") or re.fullmatch(
            r"(-n|--np=)\d+|--mpirun=.+|--(restarts|replacements)=\d+", word
        ):
            own.append(word.replace("--np=", "-n"))
            words = words[1:]
        else:
            break
    return own, words


def _run(arguments: list[str]) -> int:
    own, options, program = split_run(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m ringdl run",
        usage=_RUN_USAGE,
        description="Start a Python script on N ranks, by the mpirun of the MPI that mpi4py loads.",
        epilog="Placement options of yours replace ringdl's own.",
    )
    parser.add_argument(
        "-n", type=int, metavar="N", help="number of ranks (in a Slurm job: SLURM_NTASKS)"
    )
    parser.add_argument("--mpirun", metavar="PATH", help="use this mpirun; it must match")
    parser.add_argument(
        "--elastic", action="store_true", help="ranks go on when one fails (ringdl.elastic)"
    )
    parser.add_argument(
        "--replacements",
        type=int,
        metavar="N",
        help="with --elastic: start ranks in place of those that fail, so many at most",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a job that fails again, so many times at most",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    chosen = parser.parse_args(own)

    if chosen.restarts < 0:
        raise _mpirun.LaunchError(f"--restarts {chosen.restarts}: pass 0 or more")
    _check_program(program)
    launcher = _launch.detect_store_job(os.environ) or _launch.detect(os.environ)
    if launcher is not None:
        raise _mpirun.LaunchError(
            f"this process was itself started by {launcher}, and mpirun does not work inside of it:"
            " start the script directly, without `python -m ringdl run`"
        )
    cores = _cores.read_cores()
    ranks = _ranks_of_job(cores) if chosen.n is None else chosen.n
    if ranks < 1:
        raise _mpirun.LaunchError(f"-n {ranks}: at least one rank is needed")
    library = _mpirun.find_library()
    mpirun = _mpirun.find_mpirun(library, chosen.mpirun)
    if chosen.elastic:
        options = ["-x", RUN_REPORT, *options]
    options = [*_replacing(chosen.replacements, chosen.elastic), *options]
    command = _mpirun.compose(
        library,
        mpirun,
        ranks,
        [sys.executable, *program],
        cores=cores,
        environ=os.environ,
        options=options,
        is_root=os.geteuid() == 0,
        elastic=chosen.elastic,
    )
    print("ringdl:", shlex.join(command), file=sys.stderr, flush=True)
    if chosen.dry_run:
        return 0
    return execute(library, command, chosen.restarts, chosen.elastic)


def _replacing(wanted: int | None, elastic: bool) -> list[str]:
    """What mpirun has to be told, if ranks that fail are replaced: `wanted`, else the setting."""
    if wanted is not None and not elastic:
        raise _mpirun.LaunchError("--replacements is for jobs that go on: add --elastic")
    if wanted is not None and wanted < 0:
        raise _mpirun.LaunchError(f"--replacements {wanted}: pass 0 or more")
    count = read_settings(os.environ).replacements if wanted is None and elastic else wanted
    told = [] if wanted is None else ["-x", f"RINGDL_REPLACEMENTS={wanted}"]
    # Else a rank that was started in place of another ends the job by its own end.
    return [*told, "--prtemca", "state_base_recoverable", "1"] if count else told


def _check_program(program: list[str]) -> None:
    if not program or (program[0] == "-m" and len(program) < 2):
        raise _mpirun.LaunchError(f"there is no script to run: `{_RUN_USAGE}`")
    if program[0] != "-m" and not Path(program[0]).exists():
        raise _mpirun.LaunchError(f"there is no script {program[0]} in {Path.cwd()}")


def _ranks_of_job(cores: _cores.Cores) -> int:
    """How many ranks a Slurm job was asked for.

    Raises:
        LaunchError: no number was. A rank per core would be a guess: with a rank's own threads,
            or several hosts, it is wrong.
    """
    tasks = os.environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal():
        raise _mpirun.LaunchError(
            f"-n is missing: say how many ranks; -n {cores.usable} is one per core of this host"
        )
    print(f"ringdl: -n {tasks}, from SLURM_NTASKS", file=sys.stderr)
    return int(tasks)


def _grid_axes(text: str) -> list[int]:
    axes = text.split("x")
    if len(axes) != 3 or not all(axis.isdecimal() for axis in axes):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DATAxPIPELINExMODEL")
    return [int(axis) for axis in axes]


def _doctor_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ringdl doctor", description="Say what was found and what it means."
    )
    parser.add_argument("--quick", action="store_true", help="do not start two ranks as a trial")
    parser.add_argument(
        "--grid",
        type=_grid_axes,
        metavar="DATAxPIPELINExMODEL",
        help="under mpirun: where ranks are in such a grid (ringdl.Grid), as in 4x1x2",
    )
    chosen = parser.parse_args(arguments)
    launcher = _launch.detect_store_job(os.environ) or _launch.detect(os.environ)
    if launcher is None or launcher.size == 1:
        checks = _doctor.examine(trial=not chosen.quick)
        if chosen.grid:
            text = "start the doctor under mpirun, on as many ranks as the grid has"
            checks.append(_doctor.Check("grid", "note", text))
    else:
        from ringdl import _doctor_ranks

        of_all = _doctor_ranks.examine(launcher, chosen.grid)
        if of_all is None:
            return 0
        checks = of_all
    print(_doctor.report(checks))
    return 0 if _doctor.is_usable(checks) else 1


def _diagnose(arguments: list[str]) -> int:
    from ringdl import _diagnose as command  # loads the engine

    return command.main(arguments)


def _bench(arguments: list[str]) -> int:
    from ringdl import bench  # loads NumPy, which `run` and `doctor` do without

    return bench.main(arguments)


def _simulate(arguments: list[str]) -> int:
    from ringdl import simulate  # loads the engine

    return simulate.main(arguments)


def _tune(arguments: list[str]) -> int:
    from ringdl import _tune as command  # loads NumPy, too

    return command.main(arguments)


def _compare(arguments: list[str]) -> int:
    if importlib.util.find_spec("torch") is None:
        raise _mpirun.LaunchError("what is compared is trained by PyTorch: pip install torch")
    from ringdl import compare

    return compare.main(arguments)


_COMMANDS = {
    "run": _run,
    "doctor": _doctor_command,
    "diagnose": _diagnose,
    "bench": _bench,
    "simulate": _simulate,
    "tune": _tune,
    "compare": _compare,
}
