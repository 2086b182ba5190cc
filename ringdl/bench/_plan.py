"""What is to be measured, from the words after ``bench``, and whether that can be done."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringdl._engine import Algorithm, DType
from ringdl._errors import UsageError
from ringdl.bench._arguments import OPS, PEERS, make_parser

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

# nccl-tests' names for what NumPy calls otherwise.
ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "char": "int8",
    "int": "int32",
}


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        collective: one of `COLLECTIVES`.
        sizes: bytes, growing.
        step: how they grow, for people: ``"4(factor)"``.
        dtypes: NumPy's names.
        ops: of `OPS`; for collectives that reduce nothing, only None.
        roots: ranks; for collectives without a root, only None.
        iterations: timed runs.
        warmups: runs before them.
        checks: runs after them, whose results are checked.
        peers: of `PEERS`.
        algorithms: ringdl's own, to be compared with its choice.
        memory: of `MEMORIES`.
        device: of `DEVICES`.
        output_file: where the JSON goes; None: nowhere.
        plot: where the plot goes; None: nowhere.
        command: the command, for people; of its files only the names.
    """

    collective: str
    sizes: tuple[int, ...]
    step: str
    dtypes: tuple[str, ...]
    ops: tuple[str | None, ...]
    roots: tuple[int | None, ...]
    iterations: int
    warmups: int
    checks: int
    peers: tuple[str, ...]
    algorithms: tuple[str, ...]
    memory: str
    device: str
    output_file: str | None
    plot: str | None
    command: str


def parse(words: Sequence[str], ranks: int) -> Plan:
    """Read the words after ``bench``, and check that the plan can be carried out.

    Args:
        words: the collective and the flags.
        ranks: how many there are.

    Raises:
        UsageError: the plan cannot be carried out; says why in one sentence.
        SystemExit: ``--help`` was asked for and printed.
    """
    chosen = make_parser().parse_args(words)
    reduces = chosen.collective in ("allreduce", "reducescatter")
    factor, step = chosen.stepfactor, chosen.stepbytes
    if factor is None and step is None:
        factor = 4
    plan = Plan(
        collective=chosen.collective,
        sizes=size_list(chosen.minbytes, chosen.maxbytes, factor=factor, step=step),
        step=f"{step}(bytes)" if step else f"{factor}(factor)",
        dtypes=dtype_names(chosen.datatype),
        ops=(OPS if chosen.op == "all" else (chosen.op,)) if reduces else (None,),
        roots=_roots(chosen.root, ranks) if chosen.collective == "broadcast" else (None,),
        iterations=_at_least(1, chosen.iters, "-n"),
        warmups=_at_least(0, chosen.warmup_iters, "-w"),
        checks=_at_least(0, chosen.check, "-c"),
        peers=_some_of(PEERS, chosen.peers, "--peers"),
        algorithms=_algorithms(chosen.algorithm),
        memory=chosen.memory,
        device=chosen.device,
        output_file=chosen.output_file,
        plot=chosen.plot,
        command=_command(words, (chosen.output_file, chosen.plot)),
    )
    _check_comparisons(plan, ranks)
    _check_files(plan)
    return plan


def size_list(
    smallest: int, largest: int, *, factor: int | None = None, step: int | None = None
) -> tuple[int, ...]:
    """The sizes from ``smallest`` to at most ``largest``, in bytes.

    Args:
        smallest: the first.
        largest: none is larger.
        factor: of each to the one before; used if ``step`` is None.
        step: how many bytes each is larger.

    Raises:
        UsageError: there are none, or they do not grow.
    """
    if smallest > largest:
        raise UsageError(
            f"-b {smallest} is larger than -e {largest}: there is no size between them; swap them"
        )
    if step is not None:
        return tuple(range(smallest, largest + 1, step))
    if factor is None or factor <= 1:
        raise UsageError(f"-f {factor}: sizes only grow by a factor of at least 2; or use -i")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def dtype_names(text: str) -> tuple[str, ...]:
    """The dtypes that a user names, by NumPy's names.

    Args:
        text: one of ringdl's, or nccl-tests' name for one, or ``all``.

    Raises:
        UsageError: ringdl has no such dtype.
    """
    if text == "all":
        return tuple(DType.__members__)
    name = ALIASES.get(text, text)
    if name not in DType.__members__:
        raise UsageError(
            f"-d {text}: there is no such dtype; take one of {', '.join(DType.__members__)}, "
            f"{', '.join(ALIASES)}, or all"
        )
    return (name,)


def _at_least(least: int, number: int, flag: str) -> int:
    if number < least:
        raise UsageError(f"{flag} {number}: at least {least}")
    return number


def _some_of(known: Sequence[str], text: str | None, flag: str) -> tuple[str, ...]:
    """The known words of a list with commas, each once."""
    words = dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip())
    for word in words:
        if word not in known:
            raise UsageError(f"{flag}: there is no {word!r}; take some of {', '.join(known)}")
    return tuple(words)


def _algorithms(text: str | None) -> tuple[str, ...]:
    names = tuple(Algorithm.__members__)
    if text == "all":
        return tuple(name for name in names if name != "nccl")  # which few arrays are for
    return _some_of(names, text, "--algorithm")


def _roots(text: str, ranks: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(ranks))
    if not text.isdecimal() or int(text) >= ranks:
        raise UsageError(f"-r {text} is not a rank; ranks are 0 to {ranks - 1}, or say all")
    return (int(text),)


def _check_comparisons(plan: Plan, ranks: int) -> None:
    if plan.algorithms and plan.collective != "allreduce":
        raise UsageError(f"--algorithm: only allreduce has several, not {plan.collective}")
    if plan.peers and ranks == 1:
        raise UsageError(
            "--peers compares what goes between ranks, and this is one rank alone; start several, "
            "as in `python -m ringdl run -n 2 -m ringdl bench allreduce --peers mpi`"
        )
    elsewhere = {"cpu": "nccl", "cuda": "gloo"}[plan.device]
    if elsewhere in plan.peers:
        raise UsageError(
            f"--peers {elsewhere}: it reduces no arrays in the memory of --device {plan.device}"
        )


def _check_files(plan: Plan) -> None:
    """Refuse before measuring for minutes.

    Raises:
        UsageError: a file cannot be written, or there is nothing to draw a plot with.
    """
    if plan.plot is not None:
        if not plan.plot.lower().endswith(PLOT_SUFFIXES):
            raise UsageError(f"--plot {plan.plot}: end it with {', '.join(PLOT_SUFFIXES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "--plot needs matplotlib, which is not installed: pip install 'ringdl[bench]'"
            )
    for flag, name in (("-J", plan.output_file), ("--plot", plan.plot)):
        if name is not None:
            check_writable(flag, Path(name))


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        UsageError: it cannot.
    """
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if not existed:
        path.unlink()


def _command(words: Sequence[str], files: Sequence[str | None]) -> str:
    """The command as it can be published: without folders, which reveal a machine and a user."""
    words = list(words)
    for file in files:
        if file:
            words = [
                word.removesuffix(file) + Path(file).name if word.endswith(file) else word
                for word in words
            ]
    return shlex.join(["python", "-m", "ringdl", "bench", *words])
