"""The flags of ``python -m ringdl bench``: nccl-tests' own, and a few more."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ringdl._errors import UsageError

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
OPS = ("sum", "prod", "max", "min", "avg")
PEERS = ("mpi", "gloo", "nccl")
MEMORIES = ("ordinary", "shared")
DEVICES = ("cpu", "cuda")

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_EXAMPLES = """\
examples:
  mpirun -n 2 python -m ringdl bench allreduce
  mpirun -n 2 python -m ringdl bench allreduce --peers mpi,gloo -J result.json --plot result.png
  mpirun -n 4 python -m ringdl bench reducescatter -b 1M -e 16M -i 1M -d bfloat16 -o all
  python -m ringdl run -n 2 -m ringdl bench allreduce        finds the right mpirun
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"bench: {message}; see `python -m ringdl bench --help`")


def make_parser() -> argparse.ArgumentParser:
    """Flags as text and numbers; errors are raised as UsageError."""
    parser = _Parser(
        prog="python -m ringdl bench",
        description="How fast a collective is here, with nccl-tests' columns; start it by mpirun.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "collective", choices=COLLECTIVES, metavar="COLLECTIVE", help=", ".join(COLLECTIVES)
    )
    sizes = parser.add_argument_group("sizes", "in bytes, or with K, M or G")
    for flag, default in (("-b/--minbytes", "1K"), ("-e/--maxbytes", "64M")):
        sizes.add_argument(
            *flag.split("/"),
            type=parse_bytes,
            default=default,
            metavar="SIZE",
            help="(%(default)s)",
        )
    steps = sizes.add_mutually_exclusive_group()
    steps.add_argument("-f", "--stepfactor", type=int, metavar="N", help="factor (4)")
    steps.add_argument(
        "-i", "--stepbytes", type=parse_bytes, metavar="SIZE", help="increment, not a factor"
    )
    what = parser.add_argument_group("what is reduced or moved")
    what.add_argument(
        "-d", "--datatype", default="float32", metavar="DTYPE", help="one or all (%(default)s)"
    )
    what.add_argument(
        "-o",
        "--op",
        choices=(*OPS, "all"),
        metavar="OP",
        default="sum",
        help="of allreduce and reducescatter: sum, prod, max, min, avg, or all (%(default)s)",
    )
    what.add_argument(
        "-r", "--root", default="0", metavar="RANK", help="of broadcast, one or all (%(default)s)"
    )
    what.add_argument(
        "--memory",
        choices=MEMORIES,
        default="ordinary",
        help="NumPy's, or ringdl.empty's segments shared by a host's ranks (%(default)s)",
    )
    what.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where arrays lie; ranks of a host take its CUDA devices by turns (%(default)s)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "-n", "--iters", type=int, default=20, metavar="N", help="timed runs (%(default)s)"
    )
    how.add_argument(
        "-w",
        "--warmup_iters",
        type=int,
        default=5,
        metavar="N",
        help="runs before them, at each size (%(default)s)",
    )
    how.add_argument(
        "-c",
        "--check",
        type=int,
        default=1,
        metavar="N",
        help="runs after them whose results are checked (%(default)s)",
    )
    compared = parser.add_argument_group("what it is compared with, iteration by iteration")
    compared.add_argument("--peers", metavar="mpi,gloo,nccl", help="other libraries, and memcpy")
    compared.add_argument(
        "--algorithm", metavar="NAME,...|all", help="ringdl's own allreduces beside its choice"
    )
    files = parser.add_argument_group("files")
    files.add_argument("-J", "--output_file", metavar="FILE", help="all times, as JSON")
    files.add_argument("--plot", metavar="FILE.png", help="bus bandwidth over size")
    return parser


def parse_bytes(text: str) -> int:
    """``"64M"`` as bytes; the suffixes are K, M and G, powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is no size, or not positive.
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    try:
        count = int(float(digits) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with K, M or G"
        )
    return count
