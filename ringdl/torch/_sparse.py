"""Sums of sparse gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

import ringdl
from ringdl._work import Work


def begin_sparse(
    gradient: torch.Tensor | None,
    like: torch.Tensor,
    sparse_dim: int,
    op: ringdl.Reduction,
    communicator: ringdl.Communicator,
    name: str,
) -> tuple[list[Work[torch.Tensor]], Callable[[], torch.Tensor | None]]:
    """Start the average or sum of a sparse gradient over all ranks. Collective.

    An allgather of the rows' indices, one of their values, and then the sum of each row in the
    order of the ranks; 16-bit values are added in fp32 and rounded once.

    Args:
        gradient: this rank's, of any layout; None counts as zeros.
        like: has its shape and dtype.
        sparse_dim: how many leading axes have indices; the same on all ranks.
        op: Average or Sum.
        communicator: the ranks.
        name: what the allgathers are matched by.

    Returns:
        The allgathers, and a function that waits for them, and returns a coalesced tensor, the same
        bits on all ranks, or None if no rank has a gradient.
    """
    shape, dtype = tuple(like.shape), like.dtype
    if gradient is None:
        indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=like.device)
        values = torch.empty(0, *shape[sparse_dim:], dtype=dtype, device=like.device)
    else:
        gradient = gradient.detach()
        if not gradient.is_sparse or gradient.sparse_dim() != sparse_dim:
            gradient = gradient.to_dense().to_sparse(sparse_dim)
        gradient = gradient.coalesce()
        indices, values = gradient.indices().t(), gradient.values()
    # A first row for each rank: how many follow, or -1 for no gradient.
    if dtype.is_complex:  # pairs of real numbers on the way
        values = torch.view_as_real(values)
    head = indices.new_full((1, sparse_dim), -1 if gradient is None else len(indices))
    of_rows = communicator.allgather_async(torch.cat([head, indices]), name=f"{name}.indices")
    of_values = communicator.allgather_async(values.contiguous(), name=f"{name}.values")

    def end() -> torch.Tensor | None:
        rows, all_values = of_rows.wait(), of_values.wait()
        if dtype.is_complex:
            all_values = torch.view_as_complex(all_values)
        blocks: list[torch.Tensor] = []  # by rank
        is_produced = False
        first = 0
        while first < len(rows):
            count = int(rows[first, 0])
            is_produced |= count >= 0
            blocks.append(rows[first + 1 : first + 1 + max(count, 0)])
            first += 1 + max(count, 0)
        if not is_produced:
            return None
        divisor = communicator.size if op == ringdl.Average else 1
        return _sum_rows(blocks, all_values, shape, divisor)

    return [of_rows, of_values], end


def _sum_rows(
    blocks: list[torch.Tensor], values: torch.Tensor, shape: tuple[int, ...], divisor: int
) -> torch.Tensor:
    """Add the rows of equal indices one after the other: in an order that is no sort's choice.

    Rank by rank, as a rank's rows are different ones: a device adds equal ones in any order.
    """
    indices = torch.cat(blocks)
    sparse_shape = shape[: indices.shape[1]]
    numbers = indices.new_zeros(len(indices))
    for axis, extent in enumerate(sparse_shape):
        numbers = numbers * extent + indices[:, axis]
    unique, inverse = torch.unique(numbers, return_inverse=True)
    is_short = values.element_size() < 4
    sums = values.new_zeros(
        (len(unique), *values.shape[1:]), dtype=torch.float32 if is_short else values.dtype
    )
    counts = [len(block) for block in blocks]
    for places, rows in zip(torch.split(inverse, counts), torch.split(values, counts), strict=True):
        sums.index_add_(0, places, rows.to(sums.dtype))
    if divisor > 1:
        is_exact = sums.is_floating_point() or sums.is_complex()
        sums.div_(divisor, rounding_mode=None if is_exact else "trunc")
    return torch.sparse_coo_tensor(
        torch.stack(torch.unravel_index(unique, sparse_shape)),
        sums.to(values.dtype),
        shape,
        is_coalesced=True,
        check_invariants=False,
    )
