"""``python -m ringdl simulate allreduce | train``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringdl import _engine
from ringdl._errors import Error, UsageError
from ringdl._files import write_text
from ringdl.bench._arguments import parse_bytes
from ringdl.bench._plan import check_writable
from ringdl.bench._report import binary
from ringdl.simulate._cluster import Cluster, Prediction, parse_rate, parse_seconds, predict
from ringdl.simulate._models import MODELS, gradients_of
from ringdl.simulate._train import buckets_of, predict_step

_EXAMPLES = """\
examples:
  python -m ringdl simulate allreduce --ranks 4096 --hosts 512 --link 200gbit --latency 2us
  python -m ringdl simulate allreduce --ranks 64 --hosts 8 --link 10gbit --algorithm all --scaling
  python -m ringdl simulate train --model gpt2 --compute 400ms --ranks 64 --hosts 8 --link 10gbit
"""


_DRAWN = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str]) -> int:
    """Simulate.

    Args:
        arguments: the words after ``python -m ringdl simulate``.

    Returns:
        0, or 2 if that cannot be simulated.
    """
    chosen = _parser().parse_args(arguments)
    try:
        _check_files(chosen)
        run: Callable[[argparse.Namespace], None] = chosen.run
        run(chosen)
        if sys.stdout is not None:  # else it was closed
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read this has seen enough
        _say_no_more()
    except (UsageError, Error) as error:
        print(f"ringdl simulate: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("ringdl simulate: so much does not fit in this machine's memory", file=sys.stderr)
        return 2
    return 0


def _say(chosen: argparse.Namespace, line: str) -> None:
    """Print a line. Files are still wanted by whoever has read enough."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        if not (chosen.output_file or chosen.plot):
            raise
        _say_no_more()


def _say_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_files(chosen: argparse.Namespace) -> None:
    """Before anything is simulated.

    Raises:
        UsageError: a file cannot be written, or not drawn.
    """
    if chosen.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "--plot needs matplotlib, which is not installed: pip install 'ringdl[bench]'"
            )
        if Path(chosen.plot).suffix not in _DRAWN:
            raise UsageError(f"--plot {chosen.plot}: write a name with {', '.join(_DRAWN)}")
        check_writable("--plot", Path(chosen.plot))
    if chosen.output_file:
        check_writable("-J", Path(chosen.output_file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringdl simulate",
        description="Predicts what a cluster takes: ringdl's own engine, over a simulated network.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="allreduce | train")
    allreduce = commands.add_parser("allreduce", help="one allreduce")
    allreduce.set_defaults(run=_allreduce)
    allreduce.add_argument(
        "--size", type=parse_bytes, default=100_000_000, help="of the array (100 MB of float32)"
    )
    allreduce.add_argument(
        "--algorithm",
        metavar="NAME,...|all",
        help="by default the one that the cost model of this cluster says is fastest",
    )
    train = commands.add_parser("train", help="a step of synchronous training")
    train.set_defaults(run=_train)
    train.add_argument(
        "--model",
        required=True,
        metavar=f"{'|'.join(MODELS)}|FILE",
        help="a safetensors file, or JSON: a list of each gradient's number of elements",
    )
    train.add_argument(
        "--compute",
        type=parse_seconds,
        required=True,
        help="what a rank takes for a step without the others, forward and backward",
    )
    train.add_argument(
        "--bucket",
        type=parse_bytes,
        help="bytes of a bucket; by default as in jobs for which `ringdl tune` has measured it",
    )
    for command in (allreduce, train):
        _add_cluster(command)
    return parser


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("the cluster")
    where.add_argument("--ranks", type=int, required=True)
    where.add_argument("--hosts", type=int, required=True)
    where.add_argument(
        "--link", type=parse_rate, required=True, help="of each host, in each direction: 200gbit"
    )
    where.add_argument(
        "--latency", type=parse_seconds, default=20e-6, help="from host to host (20us)"
    )
    where.add_argument(
        "--message", type=parse_seconds, default=5e-7, help="of a processor, per message (500ns)"
    )
    where.add_argument(
        "--eager",
        type=parse_bytes,
        default=64 << 10,
        help="longer messages are announced first, and answered (64K)",
    )
    where.add_argument("--copy", type=parse_rate, default=8e9, help="of a rank, in memory (8GB)")
    where.add_argument(
        "--reduce", type=parse_rate, default=6e9, help="of an array that a rank adds (6GB)"
    )
    where.add_argument(
        "--segment", type=parse_bytes, default=32 << 10, help="as RINGDL_SEGMENT_BYTES (32K)"
    )
    where.add_argument(
        "--apart", action="store_true", help="ranks of a host share no memory, but send messages"
    )
    files = parser.add_argument_group("more")
    files.add_argument(
        "--scaling", action="store_true", help="the same for 2, 4, 8, ... ranks, as many per host"
    )
    files.add_argument("--plot", metavar="FILE.png", help="of --scaling")
    files.add_argument("-J", "--output_file", metavar="FILE", help="all figures, as JSON")


def _cluster(chosen: argparse.Namespace) -> Cluster:
    return Cluster(
        chosen.ranks,
        chosen.hosts,
        chosen.link,
        chosen.latency,
        memory=chosen.copy,
        memory_latency=1e-6,
        message=chosen.message,
        eager=chosen.eager,
        copy=chosen.copy,
        reduce=chosen.reduce,
        segment_bytes=chosen.segment,
        shares_memory=not chosen.apart,
    )


def _clusters(chosen: argparse.Namespace, least: int) -> Iterator[Cluster]:
    """The one that is asked for; with --scaling, smaller ones before it."""
    whole = _cluster(chosen)
    ranks = least
    while (chosen.scaling or chosen.plot) and ranks < whole.ranks:
        yield whole.with_ranks(ranks)
        ranks *= 2
    yield whole


def _allreduce(chosen: argparse.Namespace) -> None:
    _refuse_impossible(chosen)
    _say(chosen, f"allreduce of {binary(chosen.size)} of float32, {_described(_cluster(chosen))}")
    titles = ("ranks", "hosts", "algorithm", "simulated", "model", "link carries", "of bound")
    _say(chosen, f"{_line(*titles)}  limited by")
    rows: list[dict[str, Any]] = []
    for cluster in _clusters(chosen, least=2):
        for algorithm in _algorithms(chosen, cluster):
            predicted = predict(cluster, [(chosen.size, 0.0)], algorithm)
            ran = _engine.Algorithm[predicted.algorithms[0]]
            model = cluster.engine().modelled_seconds(ran, chosen.size)
            times = (_time(predicted.seconds), _time(model), _megabytes(predicted.link_bytes))
            share = f"{predicted.share_of_bound:.2f}"
            line = _line(str(cluster.ranks), str(cluster.hosts), ran.name, *times, share)
            _say(chosen, f"{line}  {predicted.limited_by}")
            rows.append(_row(cluster, predicted) | {"model_seconds": model})
    _write(chosen, rows)
    if chosen.plot:
        from ringdl.simulate._plot import draw_allreduce

        draw_allreduce(chosen.plot, rows, f"allreduce of {binary(chosen.size)}")


def _train(chosen: argparse.Namespace) -> None:
    counts = gradients_of(chosen.model)
    size = f"{sum(counts) / 1e6:.1f} million parameters"
    compute = f"{_time(chosen.compute)} of computing"
    _say(chosen, f"{chosen.model}: {size}, {compute}; {_described(_cluster(chosen))}")
    titles = ("ranks", "hosts", "buckets", "step", "efficiency", "link carries")
    _say(chosen, f"{_line(*titles)}  limited by")
    rows: list[dict[str, Any]] = []
    for cluster in _clusters(chosen, least=1):
        buckets = buckets_of(counts, chosen.compute, chosen.bucket or cluster.bucket_bytes())
        step = predict_step(cluster, buckets, chosen.compute)
        words = (_time(step.seconds), f"{step.efficiency:.2f}")
        carried = _megabytes(step.averaging.link_bytes)
        line = _line(str(cluster.ranks), str(cluster.hosts), str(len(buckets)), *words, carried)
        _say(chosen, f"{line}  {step.limited_by}")
        rows.append(
            _row(cluster, step.averaging)
            | {
                "buckets": len(buckets),
                "step_seconds": step.seconds,
                "efficiency": step.efficiency,
            }
        )
    _write(chosen, rows)
    if chosen.plot:
        from ringdl.simulate._plot import draw_train

        draw_train(chosen.plot, rows, chosen.model)


def _algorithms(chosen: argparse.Namespace, cluster: Cluster) -> Iterator[_engine.Algorithm | None]:
    """Those that are possible there; None: the one that is chosen there."""
    if chosen.algorithm is None:
        yield None
        return
    for each in _named(chosen):
        why_not = _why_not(each, chosen.size, cluster)
        if not why_not:
            yield each
        elif chosen.algorithm != "all":
            line = _line(str(cluster.ranks), str(cluster.hosts), each.name)
            _say(chosen, f"{line} left out, as it is for {why_not}")


def _named(chosen: argparse.Namespace) -> Sequence[_engine.Algorithm]:
    if chosen.algorithm == "all":
        return [*_engine.Algorithm]
    known = [each.name for each in _engine.Algorithm]
    names = chosen.algorithm.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"--algorithm {name}: known are {', '.join(known)}")
    return [_engine.Algorithm[name] for name in names]


def _refuse_impossible(chosen: argparse.Namespace) -> None:
    if chosen.algorithm is None:
        return
    reasons = {each: _why_not(each, chosen.size, _cluster(chosen)) for each in _named(chosen)}
    if all(reasons.values()):
        why_not = "; ".join(f"{each.name} is for {why}" for each, why in reasons.items())
        raise UsageError(f"--algorithm {chosen.algorithm} is not possible here: {why_not}")


def _why_not(algorithm: _engine.Algorithm, size: int, cluster: Cluster) -> str:
    """What it is for, if that is something else; empty if it is possible."""
    hosts, segment = cluster.memory_hosts(), cluster.segment_bytes
    if _engine.is_possible_allreduce(algorithm, size, hosts, segment):
        return ""
    if _engine.is_possible_allreduce(algorithm, 4, hosts, segment):
        return "smaller arrays"
    return _engine.ranks_of_allreduce(algorithm)


def _line(ranks: str, hosts: str, name: str, *columns: str) -> str:
    return f"{ranks:>6} {hosts:>6}  {name:<12}" + "".join(f"{word:>14}" for word in columns)


def _described(cluster: Cluster) -> str:
    return f"links of {cluster.link * 8 / 1e9:g} Gbit/s, latency {cluster.latency * 1e6:g} us"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _megabytes(byte_count: int) -> str:
    return f"{byte_count / 1e6:.1f} MB"


def _row(cluster: Cluster, predicted: Prediction) -> dict[str, Any]:
    return {
        "ranks": cluster.ranks,
        "hosts": cluster.hosts,
        **dataclasses.asdict(predicted),
        "bound_seconds": predicted.bound_seconds,
    }


def _write(chosen: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    if not chosen.output_file:
        return
    what = ("size", "model", "compute", "bucket")
    given = {name: getattr(chosen, name) for name in what if hasattr(chosen, name)}
    content = given | {"cluster": dataclasses.asdict(_cluster(chosen)), "rows": rows}
    write_text(Path(chosen.output_file), json.dumps(content, indent=1) + "\n")
