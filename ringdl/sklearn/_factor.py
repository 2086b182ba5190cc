"""The triangular factor of all ranks' rows: what linear models and principal components need.

``R`` with ``R.T @ R == A.T @ A`` stands for the tall matrix A in every least-squares problem and in
its singular value decomposition. It comes from QR factorizations of blocks of rows, stacked and
factorized again up a tree (TSQR; Demmel, Grigori, Hoemmen and Langou 2012), so the condition number
of A is not squared, as it is by the sums of products of columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows

_BLOCK_ELEMENTS = 1 << 20
"""Of a block that is factorized at once: 8 MiB, about what caches hold."""


def factorized(rows: Rows, ranks: Ranks, is_centred: bool) -> tuple[Array, Array]:
    """Factorize the columns of X, and of y behind them if there is one. Collective.

    Args:
        rows: with k columns; each is multiplied with the root of its weight.
        ranks: who takes part.
        is_centred: whether the weighted means over all ranks are subtracted first.

    Returns:
        The means of the k columns (zeros where they are not subtracted), and on rank 0 the factor,
        in float64 and of shape (min(k, number of all rows), k); elsewhere a part of it.
    """
    means = np.zeros(rows.X.shape[1] + _target_count(rows))
    if is_centred:
        weight, total = ranks.sums(lambda: _sums(rows, len(means)))
        means = total / weight
    own = ranks.together(lambda: _factor_of_rows(rows, means))
    return means, ranks.merged(own, lambda first, second: _factor(np.vstack([first, second])))


def _factor(block: Array) -> Array:
    factor: Array = np.linalg.qr(block, mode="r")  # type: ignore[assignment]
    return factor


def _factor_of_rows(rows: Rows, means: Array) -> Array:
    factor = np.empty((0, len(means)))
    for block, weights in _blocks(rows):
        block -= means
        if weights is not None:
            block *= np.sqrt(weights)[:, None]
        factor = _factor(np.vstack([factor, block]))
    return factor


def _sums(rows: Rows, column_count: int) -> tuple[float, Array]:
    weight, total = 0.0, np.zeros(column_count)
    for block, weights in _blocks(rows):
        weight += len(block) if weights is None else weights.sum()
        total += block.sum(axis=0) if weights is None else weights @ block
    return weight, total


def _blocks(rows: Rows) -> Iterator[tuple[Array, Array | None]]:
    """Copies of the columns, some rows at a time, dense and in float64; and their weights."""
    column_count = rows.X.shape[1] + _target_count(rows)
    step = max(4 * column_count, _BLOCK_ELEMENTS // column_count)
    for begin in range(0, rows.X.shape[0], step):
        X = rows.X[begin : begin + step]
        dense = X.toarray() if sparse.issparse(X) else X
        parts = [dense] if rows.y is None else [dense, rows.y[begin : begin + step]]
        weights = None if rows.weights is None else rows.weights[begin : begin + step]
        yield np.column_stack(parts).astype(np.float64, copy=False), weights


def _target_count(rows: Rows) -> int:
    return 0 if rows.y is None else int(np.prod(rows.y.shape[1:]))
