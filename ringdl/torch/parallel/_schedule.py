"""In which order a pipeline's ranks do what. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """A forward or backward pass of one microbatch through one of a rank's chunks of layers."""

    is_forward: bool
    chunk: int
    microbatch: int


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Task]:
    """What a rank does: forward passes until the pipeline is full, then one of each, then backward.

    Narayanan and others 2021: with several chunks per rank a microbatch passes all ranks once for
    each, in rounds of as many microbatches as there are ranks.

    Args:
        rank: which one.
        ranks: how many.
        microbatches: with several chunks, a multiple of ``ranks``.
        chunks: how many each rank has.
    """
    total = microbatches * chunks
    if chunks == 1:
        warm_up = min(ranks - 1 - rank, total)
    else:
        warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    forward = [_task(True, number, ranks, chunks) for number in range(total)]
    backward = [_task(False, number, ranks, chunks) for number in range(total)]
    tasks = forward[:warm_up]
    for first, second in zip(forward[warm_up:], backward, strict=False):
        tasks += [first, second]
    return tasks + backward[total - warm_up :]


def _task(is_forward: bool, number: int, ranks: int, chunks: int) -> Task:
    if chunks == 1:
        return Task(is_forward, 0, number)
    round_, place = divmod(number, ranks * chunks)
    chunk, microbatch = divmod(place, ranks)
    return Task(
        is_forward, chunk if is_forward else chunks - 1 - chunk, round_ * ranks + microbatch
    )


def utilization(ranks: int, microbatches: int, chunks: int) -> float:
    """The share of time in which ranks compute, if all passes of a kind take equally long."""
    return microbatches * chunks / (microbatches * chunks + ranks - 1)
