"""Means and variances of features: `StandardScaler` and `GaussianNB`.

scikit-learn takes them of each rank's rows; they are merged in pairs (Chan, Golub and LeVeque
1983), in rank order. Moments are arrays of weights, means and sums of squared deviations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.preprocessing._data import _handle_zeros_in_scale, _is_constant_feature
from sklearn.utils.multiclass import _check_partial_fit_first_call

from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows, Strategy, set_fitted


def _merge(first: Array, second: Array) -> Array:
    weight = first[0] + second[0]
    share = np.divide(second[0], weight, out=np.zeros_like(weight), where=weight > 0)
    change = second[1] - first[1]
    deviations = first[2] + second[2] + change**2 * (first[0] * share)
    return np.stack([weight, first[1] + change * share, deviations])


def _moments(weight: Any, mean: Any, variance: Any, shape: tuple[int, ...]) -> Array:
    """Of such arrays, or numbers or None for all features; without any weight they are zeros."""
    found = np.zeros((3, *shape))
    found[0] = weight
    for part, values in zip(found[1:], (mean, variance), strict=True):
        if values is not None:
            part[...] = np.where(found[0] > 0, values, 0.0)
    found[2] *= found[0]
    return found


def _variance(moments: Array, without: float) -> Array:
    """The variances; where there is no weight, `without`."""
    variance: Array = np.full_like(moments[0], without)
    np.divide(moments[2], moments[0], out=variance, where=moments[0] > 0)
    return variance


def _scale(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    shape = (rows.X.shape[1],)

    def of(scaler: Any) -> Array:
        if not hasattr(scaler, "n_samples_seen_"):
            return np.zeros((3, *shape))
        return _moments(scaler.n_samples_seen_, scaler.mean_, scaler.var_, shape)

    def of_rows() -> Array:
        own = clone(estimator)
        if rows.have_weight:
            with np.errstate(divide="ignore", invalid="ignore"):  # other ranks may have values
                own.partial_fit(rows.X, sample_weight=rows.weights)
        return of(own)

    def completed() -> dict[str, Any]:
        weight, mean, _ = moments = _merge(of(estimator), merged)
        mean[weight == 0] = np.nan
        variance = _variance(moments, np.nan)
        seen = weight.astype(np.int64 if rows.weights is None else rows.X.dtype)
        its: dict[str, Any] = {"mean_": None, "var_": None, "scale_": None}
        its["n_samples_seen_"] = seen[0] if seen.min() == seen.max() else seen
        if estimator.with_mean or estimator.with_std:
            its["mean_"] = mean
        if estimator.with_std:
            is_constant = _is_constant_feature(variance, mean, weight)
            its["var_"] = variance
            with np.errstate(invalid="ignore"):
                scale = np.sqrt(variance)
            its["scale_"] = _handle_zeros_in_scale(scale, copy=False, constant_mask=is_constant)
        return its

    merged = ranks.merged(ranks.together(of_rows), _merge)
    vars(estimator).update(ranks.from_rank_0(completed))


def _classify(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    """Moments of each class, and behind them of all rows, without weights, for the smoothing."""
    features = rows.X.shape[1]

    def of_classes(model: Any, epsilon: float) -> Array:
        shape = (len(model.classes_), features)
        return _moments(model.class_count_[:, None], model.theta_, model.var_ - epsilon, shape)

    def of_rows() -> Array:
        _check_partial_fit_first_call(estimator, rows.classes)
        found = np.zeros((3, len(estimator.classes_) + 1, features))
        if rows.have_weight:
            own = clone(estimator)
            own.partial_fit(rows.X, rows.y, estimator.classes_, rows.weights)
            found[:, :-1] = of_classes(own, own.epsilon_)
        if rows.X.shape[0] > 0:
            X = rows.X.astype(np.float64, copy=False)
            found[:, -1:] = _moments(len(X), X.mean(axis=0), X.var(axis=0), (1, features))
        return found

    def completed() -> dict[str, Any]:
        moments, all_rows = np.split(merged, [-1], axis=1)
        epsilon = estimator.var_smoothing * _variance(all_rows, 0.0).max()
        if hasattr(estimator, "theta_"):
            moments = _merge(of_classes(estimator, epsilon), moments)
        counts = moments[0, :, 0]
        priors = estimator.priors
        return {
            "epsilon_": epsilon,
            "theta_": moments[1],
            "var_": _variance(moments, 0.0) + epsilon,
            "class_count_": counts,
            "class_prior_": counts / counts.sum() if priors is None else np.array(priors, float),
        }

    merged = ranks.merged(ranks.together(of_rows), _merge)
    set_fitted(estimator, ranks.from_rank_0(completed), rows)


SCALER = Strategy(
    fit=_scale,
    partial_fit=_scale,
    x_checks={
        "accept_sparse": ("csr", "csc"),
        "dtype": [np.float64, np.float32],
        "ensure_all_finite": "allow-nan",
    },
)
NAIVE_BAYES = Strategy(fit=_classify, partial_fit=_classify, y_checks={})
