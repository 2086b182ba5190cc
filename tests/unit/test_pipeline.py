"""In which order a pipeline's ranks do what: everything once, nothing before what it needs."""

import pytest

from ringdl.torch.parallel._schedule import Task, one_forward_one_backward, utilization

SHAPES = [
    (ranks, microbatches, chunks)
    for ranks in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 4, 8, 12)
    for chunks in (1, 2, 3)
    if chunks == 1 or microbatches % ranks == 0
]


def simulate(ranks: int, microbatches: int, chunks: int) -> tuple[int, int]:
    """Carry it out, each pass in one unit of time.

    Returns:
        When it is over, and how many microbatches a rank has kept at most.
    """
    tasks = [one_forward_one_backward(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    stages = ranks * chunks
    ends: dict[tuple[bool, int, int], int] = {}
    at, free = [0] * ranks, [0] * ranks
    kept, most = [0] * ranks, 0

    def begins(rank: int, task: Task) -> int | None:
        stage = task.chunk * ranks + rank
        needs = []
        if task.is_forward:
            if stage > 0:
                needs.append((True, stage - 1, task.microbatch))
        else:
            needs.append((True, stage, task.microbatch))
            if stage < stages - 1:
                needs.append((False, stage + 1, task.microbatch))
        if any(need not in ends for need in needs):
            return None
        return max([free[rank], *(ends[need] for need in needs)])

    while any(at[rank] < len(tasks[rank]) for rank in range(ranks)):
        ready = [
            (begin, rank)
            for rank in range(ranks)
            if at[rank] < len(tasks[rank])
            and (begin := begins(rank, tasks[rank][at[rank]])) is not None
        ]
        assert ready, "every rank waits for another one"
        begin, rank = min(ready)
        task = tasks[rank][at[rank]]
        key = (task.is_forward, task.chunk * ranks + rank, task.microbatch)
        assert key not in ends
        ends[key] = free[rank] = begin + 1
        at[rank] += 1
        kept[rank] += 1 if task.is_forward else -1
        most = max(most, kept[rank])
    assert len(ends) == 2 * stages * microbatches
    return max(free), most


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), SHAPES)
def test_schedule(ranks: int, microbatches: int, chunks: int) -> None:
    end, most = simulate(ranks, microbatches, chunks)
    assert 2 * microbatches * chunks / end == utilization(ranks, microbatches, chunks)
    if chunks == 1:
        assert most <= min(ranks, microbatches)
    else:
        assert most <= 2 * (ranks - 1) + (chunks - 1) * ranks + 1
