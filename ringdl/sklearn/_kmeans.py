"""`MiniBatchKMeans`: scikit-learn's steps, of which each rank takes the rows that it has.

Rank 0 draws the random numbers, from the stream that scikit-learn draws from where all rows, in
rank order, are in one process. So the centers are those that it finds there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.cluster._kmeans import _labels_inertia_threadpool_limit as labels_and_inertia
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array, check_random_state
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from sklearn.utils.extmath import row_norms

from ringdl.sklearn._moments import SCALER
from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows, Strategy, changed


class _Clusters:
    """The clusters of an estimator, and what all ranks do with them. Every method is collective.

    Rows of all ranks have numbers, counted in rank order. `random` is used on rank 0 alone.
    """

    def __init__(
        self, estimator: Any, rows: Rows, ranks: Ranks, random: np.random.RandomState
    ) -> None:
        self.estimator, self.rows, self.ranks, self.random = estimator, rows, ranks, random
        self.weights = np.ones(rows.X.shape[0], rows.X.dtype)
        if rows.weights is not None:
            self.weights = rows.weights.astype(rows.X.dtype, copy=False)

    def prepare(self) -> None:
        """Settle what depends on how many rows all ranks have."""
        its, rows = self.estimator, self.rows
        stand_in = np.broadcast_to(rows.X.dtype.type(0), (rows.total, rows.X.shape[1]))
        with changed(its, tol=0.0):
            its._check_params_vs_input(stand_in)
        if its.tol > 0:
            scaler = StandardScaler(with_mean=False)
            SCALER.fit(scaler, replace(rows, weights=None), self.ranks)
            its._tol = scaler.var_.mean() * its.tol
        its._n_threads = _openmp_effective_n_threads()
        its._counts = np.zeros(its.n_clusters, rows.X.dtype)
        its._n_since_last_reassign = 0

    def initial(self, attempts: int | None) -> Array:
        """Centers from a sample of all rows: of so many attempts the best, by another sample.

        None is for one attempt and no comparison.
        """
        its, total = self.estimator, self.rows.total
        init = its.init
        if not isinstance(init, str) and not callable(init):
            init = check_array(init, dtype=self.rows.X.dtype, copy=True, order="C")
            its._validate_center_shape(self.rows.X, init)

        def drawn() -> Any:
            return self.random.randint(0, total, its._init_size)

        def attempt(X: Any, weights: Array) -> tuple[Array, float]:
            norms = row_norms(X, squared=True)
            centers = its._init_centroids(X, norms, init, self.random, weights)
            return centers, 0.0 if held_out is None else self._assigned(*held_out, centers)[1]

        held_out = None
        if attempts is not None:
            held_out = self.collected(self.ranks.from_rank_0(drawn))
        found = []
        for _ in range(attempts or 1):
            numbers = np.arange(total)
            if its._init_size < total:
                numbers = self.ranks.from_rank_0(drawn)
            found.append(self.ranks.from_rank_0(partial(attempt, *self.collected(numbers))))
        return min(found, key=lambda its: its[1])[0]

    def draws(self, size: int) -> tuple[Callable[[bool], Array | None], float]:
        """What draws the numbers of a batch on rank 0, None after the last; and all weights."""
        rows = self.rows
        weights = np.ones(rows.total if self.ranks.rank == 0 else 1, rows.X.dtype)
        total = float(rows.total)
        if rows.weights is not None:
            weights = np.concatenate(self.ranks.gathered(lambda: self.weights))
            total = weights.sum()
        chances = np.cumsum((weights / total).astype(np.float64))
        chances /= chances[-1]

        def draw(is_last: bool) -> Array | None:
            if is_last:
                return None
            return chances.searchsorted(self.random.random_sample(size), side="right")

        return draw, total

    def step(self, X: Any, weights: Array, centers: Array, numbers: Array) -> tuple[Array, float]:
        """Move the centers by a batch.

        Args:
            X: this rank's rows of it.
            weights: theirs.
            centers: before.
            numbers: those of all its rows.

        Returns:
            The centers, and the inertia of all its rows before.
        """
        its = self.estimator
        is_due = its._random_reassign() and its.reassignment_ratio > 0

        def local() -> tuple[Any, Array, float]:
            if X.shape[0] == 0:
                return np.zeros(centers.shape), np.zeros(len(centers)), 0.0
            labels, inertia = self._assigned(X, weights, centers)
            wide, places = weights.astype(np.float64), (labels, np.arange(X.shape[0]))
            sums = sparse.csr_array((wide, places), shape=(len(centers), X.shape[0])) @ X
            return _dense(sums), np.bincount(labels, wide, minlength=len(centers)), inertia

        sums, added, inertia = self.ranks.sums(local)
        counts, has, moved = its._counts + added, added > 0, centers.copy()
        before = centers[has] * its._counts[has, None]
        moved[has] = (before + sums[has]) / counts[has, None]
        if is_due:
            self._reassign(moved, counts, numbers)
        its._counts = counts.astype(self.rows.X.dtype)
        return moved, float(inertia)

    def _reassign(self, centers: Array, counts: Array, numbers: Array) -> None:
        """Put rows of the batch in place of centers that have few."""

        def drawn() -> tuple[Array, Array]:
            is_new = counts < self.estimator.reassignment_ratio * counts.max()
            if is_new.sum() > 0.5 * len(numbers):
                is_new[np.argsort(counts)[int(0.5 * len(numbers)) :]] = False
            if not is_new.any():
                return is_new, numbers[:0]
            return is_new, numbers[self.random.choice(len(numbers), is_new.sum(), replace=False)]

        is_new, drawn_numbers = self.ranks.from_rank_0(drawn)
        if len(drawn_numbers) > 0:
            centers[is_new] = _dense(self.collected(drawn_numbers)[0])
            counts[is_new] = counts[~is_new].min()

    def complete(self, centers: Array) -> None:
        """Set what the estimator has after a fit: labels are of this rank's rows."""
        its, X = self.estimator, self.rows.X
        its.cluster_centers_, its._n_features_out = centers, len(centers)
        if not its.compute_labels:
            return

        def local() -> list[float]:
            its.labels_, inertia = np.empty(0, np.int32), 0.0
            if X.shape[0] > 0:
                its.labels_, inertia = self._assigned(X, self.weights, centers)
            return [inertia]

        its.inertia_ = float(self.ranks.sums(local)[0])

    def own(self, numbers: Array) -> Array:
        """Which of the rows of these numbers this rank has."""
        begin = self.rows.begin
        is_own: Array = (numbers >= begin) & (numbers < begin + self.rows.X.shape[0])
        return is_own

    def collected(self, numbers: Array) -> tuple[Any, Array]:
        """The rows of these numbers, in their order, and their weights; on all ranks."""

        def local() -> tuple[Any, Array, Array]:
            is_own = self.own(numbers)
            places = numbers[is_own] - self.rows.begin
            return self.rows.X[places], self.weights[places], np.flatnonzero(is_own)

        parts, weights, positions = zip(*self.ranks.gathered(local), strict=True)
        order = np.argsort(np.concatenate(positions))
        if any(map(sparse.issparse, parts)):  # of a rank without rows it may be a dense array
            rows = sparse.vstack([sparse.csr_matrix(each) for each in parts], "csr")
        else:
            rows = np.concatenate(parts)
        return rows[order], np.concatenate(weights)[order]

    def _assigned(self, X: Any, weights: Array, centers: Array) -> tuple[Array, float]:
        found: tuple[Array, float] = labels_and_inertia(
            X, weights, centers, n_threads=self.estimator._n_threads
        )
        return found


def _dense(X: Any) -> Array:
    array: Array = X.toarray() if sparse.issparse(X) else X
    return array


def _fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    clusters = _Clusters(estimator, rows, ranks, check_random_state(estimator.random_state))
    clusters.prepare()
    centers = clusters.initial(estimator._n_init)
    estimator._ewa_inertia = estimator._ewa_inertia_min = None
    estimator._no_improvement = 0
    draw, weight = clusters.draws(estimator._batch_size)
    most = estimator.max_iter * rows.total // estimator._batch_size
    done, is_done = 0, False
    while (numbers := ranks.from_rank_0(partial(draw, is_done or done == most))) is not None:
        X = rows.X[numbers[clusters.own(numbers)] - rows.begin]
        before = centers
        centers, inertia = clusters.step(X, np.ones(X.shape[0], X.dtype), before, numbers)
        change = ((centers - before) ** 2).sum() if estimator._tol > 0 else 0.0
        is_done = estimator._mini_batch_convergence(done, most, rows.total, change, inertia)
        done += 1
    estimator.n_steps_ = done
    estimator.n_iter_ = int(np.ceil(done * estimator._batch_size / rows.total))
    if estimator._ewa_inertia is not None:
        estimator.inertia_ = estimator._ewa_inertia * weight
    clusters.complete(centers)


def _partial_fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    if not hasattr(estimator, "_random_state"):
        estimator._random_state = check_random_state(estimator.random_state)
    clusters = _Clusters(estimator, rows, ranks, estimator._random_state)
    if not hasattr(estimator, "cluster_centers_"):
        clusters.prepare()
        estimator.cluster_centers_ = clusters.initial(None)
        estimator.n_steps_ = 0
    before, numbers = estimator.cluster_centers_, np.arange(rows.total)
    centers, _ = clusters.step(rows.X, clusters.weights, before, numbers)
    estimator.n_steps_ += 1
    clusters.complete(centers)


def _printing_once(fit: Callable[[Any, Rows, Ranks], None]) -> Callable[[Any, Rows, Ranks], None]:
    """The same, where only rank 0 is verbose."""

    def call(estimator: Any, rows: Rows, ranks: Ranks) -> None:
        with changed(estimator, verbose=estimator.verbose if ranks.rank == 0 else 0):
            fit(estimator, rows, ranks)

    return call


KMEANS = Strategy(
    fit=_printing_once(_fit),
    partial_fit=_printing_once(_partial_fit),
    x_checks={
        "accept_sparse": "csr",
        "accept_large_sparse": False,
        "dtype": [np.float64, np.float32],
        "order": "C",
    },
)
