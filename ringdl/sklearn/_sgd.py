"""Linear models by stochastic gradient descent: each rank's own epoch, then the models' average.

Updates follow one another row by row, and no sum over rows stands for them: so these models are not
those of one process that has all rows. After each epoch, coefficients are averaged by rows
(parameter mixing; McDonald, Hall and Mann 2010), and all ranks stop by the objective of the
average on all rows. On one rank the model is scikit-learn's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

import ringdl
from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows, Strategy, changed

_SMALLEST_RATE = 1e-6
"""Where ``learning_rate="adaptive"`` ends."""

_LOSSES: dict[str, Callable[[Any, Any, float], Any]] = {
    "hinge": lambda y, p, _: np.maximum(0, 1 - y * p),
    "squared_hinge": lambda y, p, _: np.maximum(0, 1 - y * p) ** 2,
    "perceptron": lambda y, p, _: np.maximum(0, -y * p),
    "log_loss": lambda y, p, _: np.logaddexp(0, -y * p),
    "modified_huber": lambda y, p, _: np.where(
        y * p < -1, -4 * y * p, np.maximum(0, 1 - y * p) ** 2
    ),
    "squared_error": lambda y, p, _: (y - p) ** 2 / 2,
    "huber": lambda y, p, e: np.where(abs(y - p) <= e, (y - p) ** 2 / 2, e * abs(y - p) - e**2 / 2),
    "epsilon_insensitive": lambda y, p, e: np.maximum(0, abs(y - p) - e),
    "squared_epsilon_insensitive": lambda y, p, e: np.maximum(0, abs(y - p) - e) ** 2,
}
"""Of a target (a class is 1 or -1), a prediction and epsilon."""


def _fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    if ranks.size == 1:
        estimator.fit(rows.X, rows.y, sample_weight=rows.weights)
        return
    if estimator.early_stopping:
        raise ringdl.UsageError(
            "early_stopping is for one rank; with several all ranks stop by the objective: pass "
            "early_stopping=False"
        )
    its = {"random_state": _own_random_state(estimator, ranks), "eta0": estimator.eta0}
    if getattr(estimator, "class_weight", None) == "balanced":
        its["class_weight"] = _balanced(rows, ranks)
    estimator.t_ = 1.0
    with changed(estimator, **its):
        _descend(estimator, rows, ranks)


def _descend(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    best, unimproved = np.inf, 0
    for done in range(1, estimator.max_iter + 1):
        _epoch(estimator, rows, ranks)
        estimator.n_iter_ = done
        if estimator.tol is None:
            continue
        objective = _objective(estimator, rows, ranks)
        if not np.isfinite(objective):
            raise ValueError(
                "the objective has overflowed; scale the features by StandardScaler, or lower eta0"
            )
        unimproved = unimproved + 1 if objective > best - estimator.tol else 0
        best = min(best, objective)
        if unimproved < estimator.n_iter_no_change:
            continue
        if estimator.learning_rate != "adaptive" or estimator.eta0 <= _SMALLEST_RATE:
            break
        estimator.eta0 /= 5
        unimproved = 0
    else:
        if estimator.tol is not None:
            warnings.warn(
                f"max_iter={estimator.max_iter} epochs have not been enough; increase max_iter",
                ConvergenceWarning,
                stacklevel=2,
            )


def _partial_fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    if ranks.size == 1:
        _epoch(estimator, rows, ranks)
        return
    with changed(estimator, random_state=_own_random_state(estimator, ranks)):
        _epoch(estimator, rows, ranks)


def _epoch(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    """One epoch of each rank's rows, and the average of the models. Collective."""
    X, y, weights = rows.padded()
    count = rows.counts[ranks.rank]
    if not rows.have_weight:  # what comes of it does not count
        count, weights = 0, None
    classes = {"classes": rows.classes} if is_classifier(estimator) else {}
    begin = getattr(estimator, "t_", 1.0)

    def weighted() -> list[Any]:
        estimator.partial_fit(X, y, sample_weight=weights, **classes)
        late = count if estimator.average and estimator.average <= estimator.t_ - 1 else 0
        return [
            *(count, *(count * each for each in _parameters(estimator))),
            *(late, *(late * each for each in _averages(estimator))),
        ]

    totals = ranks.sums(weighted)
    for its in (_parameters(estimator), _averages(estimator)):
        (total_count, *sums), totals = totals[: 1 + len(its)], totals[1 + len(its) :]
        for own, total in zip(its, sums, strict=True):
            own[...] = total / max(1, total_count)
    if estimator.average:  # each rank has taken one or the other, by how many rows it has had
        names = ("_average_coef", "_average_intercept")
        if total_count == 0:
            names = ("_standard_coef", "_standard_intercept")
        coef, intercept = (getattr(estimator, name) for name in names)
        estimator.coef_ = coef.reshape(estimator.coef_.shape)
        estimator.intercept_ = intercept.reshape(estimator.intercept_.shape)
    estimator.t_ = begin + max(rows.counts)


def _parameters(estimator: Any) -> list[Array]:
    """What each step changes, in memory that the estimator holds."""
    names = ["coef_", "intercept_"]
    if estimator.average:
        names = ["_standard_coef", "_standard_intercept"]
    return [getattr(estimator, name) for name in names]


def _averages(estimator: Any) -> list[Array]:
    """What `average` keeps once a rank has had so many rows."""
    names = ["_average_coef", "_average_intercept"] if estimator.average else []
    return [getattr(estimator, name) for name in names]


def _objective(estimator: Any, rows: Rows, ranks: Ranks) -> float:
    """What the model minimizes, of all ranks' rows; of several classes the sum. Collective."""

    def local() -> list[float]:
        loss = _penalty(estimator) * rows.total if ranks.rank == 0 else 0.0
        if rows.X.shape[0] > 0:
            loss += float(_loss_of_rows(estimator, rows).sum())
        return [loss]

    with np.errstate(over="ignore", invalid="ignore"):
        (total,) = ranks.sums(local)
    return float(total) / rows.total


def _loss_of_rows(estimator: Any, rows: Rows) -> Array:
    y = rows.y
    if is_classifier(estimator):
        classes = estimator.classes_
        positive = classes[1:] if len(classes) == 2 else classes
        y = np.where(y[:, None] == positive, 1.0, -1.0)
        predicted = estimator.decision_function(rows.X).reshape(y.shape)
    else:
        predicted = estimator.predict(rows.X)
    loss: Array = _LOSSES[estimator.loss](y, predicted, estimator.epsilon)
    return loss


def _penalty(estimator: Any) -> float:
    if estimator.penalty is None or estimator.learning_rate in ("pa1", "pa2"):
        return 0.0
    ratio = {"l2": 0.0, "l1": 1.0}.get(estimator.penalty, estimator.l1_ratio)
    coef = estimator.coef_
    return float(estimator.alpha * ((1 - ratio) / 2 * (coef**2).sum() + ratio * np.abs(coef).sum()))


def _balanced(rows: Rows, ranks: Ranks) -> dict[Any, float]:
    """The weights of ``class_weight="balanced"``, of all ranks' rows."""
    classes = rows.classes
    assert classes is not None
    (counts,) = ranks.sums(lambda: [(rows.y[:, None] == classes).sum(axis=0)])
    return dict(zip(classes, rows.total / (len(classes) * counts), strict=True))


def _own_random_state(estimator: Any, ranks: Ranks) -> np.random.RandomState:
    """What this rank shuffles by: otherwise than the others."""
    seed = check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max)
    return np.random.RandomState([seed, ranks.rank])


_X_CHECKS = {
    "accept_sparse": "csr",
    "accept_large_sparse": False,
    "dtype": [np.float64, np.float32],
    "order": "C",
}
SGD = Strategy(fit=_fit, partial_fit=_partial_fit, x_checks=_X_CHECKS, y_checks={})
