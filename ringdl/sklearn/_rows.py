"""The rows that each rank brings: checked there by scikit-learn, and agreed on by all ranks."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils import check_array
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_non_negative, has_fit_parameter, validate_data

import ringdl
from ringdl._steps import ranks_text
from ringdl.sklearn._ranks import Array, Ranks

_LOCAL = {"random_state", "verbose", "n_jobs", "copy", "copy_X"}
"""Parameters that may differ from rank to rank."""

_COMPARED = (bool, int, float, str, type(None), tuple, list, dict, np.ndarray)
"""Parameters of other types only have to be of the same one."""

Fit = Callable[[Any, "Rows", Ranks], None]
"""Fits an estimator in place, the same on all ranks. Collective."""


@dataclass(frozen=True)
class Strategy:
    """How estimators of a class are fitted on the rows of all ranks.

    Attributes:
        fit: what ``fit`` does, to a new estimator.
        partial_fit: what ``partial_fit`` does, to a new one or to that of the call before.
        x_checks: what X may be like, as `sklearn.utils.check_array` takes it.
        y_checks: what y may be like, as `sklearn.utils.check_X_y` takes it; None: there is no y.
        refuses_negative_weights: whether negative sample weights are refused.
    """

    fit: Fit
    partial_fit: Fit | None = None
    x_checks: Mapping[str, Any] = field(default_factory=dict)
    y_checks: Mapping[str, Any] | None = None
    refuses_negative_weights: bool = False


@dataclass
class Rows:
    """One rank's rows, and what all ranks know of them.

    Attributes:
        X: an array or a sparse one, of a dtype that is the same on all ranks.
        y: the targets; None where there are none.
        weights: None if no rank has any.
        counts: how many rows each rank has; some may have none.
        begin: the number of this rank's first row, if all are counted in rank order.
        classes: for ``fit`` the labels of all ranks' rows; for ``partial_fit`` what was passed, by
            default those of the call before.
        labels: of all ranks' rows; None where there are none.
        names: of the features, where X has some.
    """

    X: Any
    y: Any
    weights: Array | None
    counts: list[int]
    begin: int
    classes: Array | None
    labels: Array | None
    names: Array | None

    @property
    def total(self) -> int:
        """How many rows there are on all ranks."""
        return sum(self.counts)

    def without_weightless(self) -> Rows:
        """None of this rank's rows, where all of them have the weight zero."""
        if self.have_weight or self.X.shape[0] == 0:
            return self
        weights = None if self.weights is None else self.weights[:0]
        return replace(self, X=self.X[:0], y=self.y[:0], weights=weights)

    def padded(self) -> tuple[Any, Any, Array | None]:
        """X, y and weights: on a rank without rows one of zeros, for calls that refuse none."""
        if self.X.shape[0] > 0:
            return self.X, self.y, self.weights
        y = np.zeros((1, *self.y.shape[1:]), self.y.dtype)
        if self.classes is not None and y.ndim == 1:
            y = self.classes[:1]
        weights = None if self.weights is None else np.ones(1, self.weights.dtype)
        return np.zeros((1, self.X.shape[1]), self.X.dtype), y, weights

    @property
    def have_weight(self) -> bool:
        """Whether there are rows on this rank, and not all of weight zero."""
        return self.X.shape[0] > 0 and (self.weights is None or bool(self.weights.any()))

    @contextmanager
    def without_names(self, estimator: Any) -> Iterator[None]:
        """Within the block the estimator expects rows without names, as X is; then with them."""
        vars(estimator).pop("feature_names_in_", None)
        try:
            yield
        finally:
            if self.names is not None:
                estimator.feature_names_in_ = self.names


@dataclass
class _Facts:
    """What one rank tells the others of its rows."""

    call: str
    rows: int
    features: int
    names: list[str] | None
    dtype: np.dtype[Any]
    target: tuple[tuple[int, ...], np.dtype[Any]] | None
    labels: Array | None
    weight: float | None
    classes: list[Any] | None
    parameters: dict[str, str]


def agreed(
    ranks: Ranks,
    strategy: Strategy,
    estimator: Any,
    given: Sequence[Any],
    classes: Any,
    is_partial: bool,
) -> Rows:
    """Check each rank's rows, and what has to be alike on all ranks. Collective.

    Args:
        ranks: who takes part.
        strategy: what there has to be.
        estimator: gets ``n_features_in_`` and ``feature_names_in_``, or has them.
        given: X, y and the sample weights, as the caller has passed them.
        classes: as passed to ``partial_fit``.
        is_partial: whether this is for ``partial_fit``.

    Raises:
        ValueError: scikit-learn's, on the rank whose rows or parameters it refuses; or there are
            no rows on any rank.
        MismatchError: on the others then; and on all, if columns, targets, classes or parameters
            differ.
    """
    is_first = not (is_partial and hasattr(estimator, "n_features_in_"))
    with ranks.telling():
        X, y, weights = _checked(strategy, estimator, given, classes, is_first, ranks.size == 1)
        facts = _facts(estimator, X, y, weights, classes, is_partial)
    every = ranks.gathered(lambda: facts)
    _refuse_differences(every)
    filled = [its for its in every if its.rows > 0]
    if not filled:
        raise ValueError(f"none of {ranks.size} ranks has any rows; one at least has to pass some")
    if all(its.weight is None for its in every):
        weights = None
    elif not any(its.weight for its in every):
        raise ValueError("sample_weight is zero for all rows of all ranks; give some a weight")
    elif weights is None:
        weights = np.ones(X.shape[0], X.dtype)
    X = X.astype(np.result_type(*(its.dtype for its in filled)), copy=False)
    if y is None and filled[0].target is not None:
        shape, dtype = filled[0].target
        y = np.empty((0, *shape), dtype)
    names = None if filled[0].names is None else np.asarray(filled[0].names, object)
    estimator.n_features_in_ = X.shape[1]
    found = [its.labels for its in every if its.labels is not None]
    labels = unique_labels(*found) if found else None
    known = labels
    if is_partial:
        before = getattr(estimator, "classes_", None)
        known = before if classes is None else unique_labels(classes)
    counts = [its.rows for its in every]
    return Rows(X, y, weights, counts, sum(counts[: ranks.rank]), known, labels, names)


def _checked(
    strategy: Strategy,
    estimator: Any,
    given: Sequence[Any],
    classes: Any,
    is_first: bool,
    is_alone: bool,
) -> tuple[Any, Any, Array | None]:
    estimator._validate_params()
    if classes is not None and not is_classifier(estimator):
        raise ringdl.UsageError(
            f"{type(estimator).__name__} takes no classes; pass sample_weight by its name"
        )
    X, y, sample_weight = given
    x_checks = dict(strategy.x_checks)
    if not is_alone and getattr(X, "shape", (1,))[0] == 0:
        X = validate_data(estimator, X, reset=is_first, ensure_min_samples=0, **x_checks)
        return X, None, None
    if strategy.y_checks is None:
        X, y = validate_data(estimator, X, reset=is_first, **x_checks), None
    else:
        checks = {**x_checks, **strategy.y_checks}
        X, y = validate_data(estimator, X, y, reset=is_first, **checks)
    if sample_weight is None:
        return X, y, None
    if not has_fit_parameter(estimator, "sample_weight"):
        raise ringdl.UsageError(
            f"{type(estimator).__name__} takes no sample_weight; leave it out on all ranks"
        )
    return X, y, _weights(sample_weight, X, strategy.refuses_negative_weights)


def _weights(given: Any, X: Any, are_positive: bool) -> Array:
    count = X.shape[0]
    if isinstance(given, numbers.Number):
        given = np.full(count, given)
    dtype = X.dtype if X.dtype in (np.float64, np.float32) else np.float64
    weights: Array = check_array(
        given, ensure_2d=False, dtype=dtype, order="C", input_name="sample_weight"
    )
    if weights.ndim != 1:
        raise ValueError(
            f"sample_weight has {weights.ndim} axes; pass a number, or one weight for each row"
        )
    if len(weights) != count:
        raise ValueError(f"sample_weight has {len(weights)} weights, X has {count} rows")
    if are_positive:
        check_non_negative(weights, "`sample_weight`")
    return weights


def _facts(
    estimator: Any, X: Any, y: Any, weights: Array | None, classes: Any, is_partial: bool
) -> _Facts:
    labels = None
    if y is not None and is_classifier(estimator):
        check_classification_targets(y)
        labels = unique_labels(y)
    names = getattr(estimator, "feature_names_in_", None)
    return _Facts(
        call=f"{type(estimator).__name__}.{'partial_fit' if is_partial else 'fit'}",
        rows=X.shape[0],
        features=X.shape[1],
        names=None if names is None else [*names],
        dtype=X.dtype,
        target=None if y is None else (y.shape[1:], y.dtype),
        labels=labels,
        weight=None if weights is None else float(np.abs(weights).sum()),
        classes=None if classes is None else np.asarray(classes).tolist(),
        parameters={
            name: repr(value) if isinstance(value, _COMPARED) else type(value).__name__
            for name, value in estimator.get_params(deep=False).items()
            if name not in _LOCAL
        },
    )


def _refuse_differences(every: Sequence[_Facts]) -> None:
    calls = {rank: its.call for rank, its in enumerate(every)}
    _refuse(calls, "call", "make the same calls in the same order on all ranks")
    filled = [rank for rank, its in enumerate(every) if its.rows > 0]
    columns = "pass the same columns on all ranks"
    _refuse({rank: its.features for rank, its in enumerate(every)}, "features of X", columns)
    _refuse({rank: every[rank].names for rank in filled}, "names of features", columns)
    shapes = {rank: its.target[0] for rank in filled if (its := every[rank]).target is not None}
    _refuse(shapes, "shape of y beyond its rows", "pass y alike on all ranks")
    _refuse(
        {rank: its.classes for rank, its in enumerate(every)},
        "classes",
        "pass those of all ranks' rows, the same on all ranks",
    )
    for name in every[0].parameters:
        values = {rank: its.parameters.get(name) for rank, its in enumerate(every)}
        _refuse(values, f"parameter {name}", "construct the estimator alike on all ranks")


def _refuse(by_rank: Mapping[int, Any], what: str, advice: str) -> None:
    versions: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        versions.setdefault(str(value), []).append(rank)
    if len(versions) > 1:
        texts = " and ".join(f"{value} on {ranks_text(its)}" for value, its in versions.items())
        raise ringdl.MismatchError(f"the ranks differ in the {what}: {texts}; {advice}")


def set_fitted(estimator: Any, attributes: Mapping[str, Any], rows: Rows) -> None:
    """Set what was found in float64: single-precision numbers if the rows are."""
    is_single = rows.X.dtype == np.float32
    for name, value in attributes.items():
        is_floating = isinstance(value, np.ndarray | np.floating) and value.dtype.kind == "f"
        setattr(estimator, name, value.astype(np.float32) if is_single and is_floating else value)


@contextmanager
def changed(estimator: Any, **values: Any) -> Iterator[None]:
    """Within the block some of the estimator's parameters have other values."""
    before = {name: getattr(estimator, name) for name in values}
    vars(estimator).update(values)
    try:
        yield
    finally:
        vars(estimator).update(before)
