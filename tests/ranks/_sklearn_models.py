"""Rows, fits and comparisons that the checks of ringdl.sklearn share."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import sklearn.base
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from ringdl import Communicator
from ringdl.sklearn import DistributedEstimator
from tests.ranks.support import assert_same_bits

OWN = {"labels_"}
"""Of a rank's own rows."""

DTYPES_VARY = {"n_samples_seen_0"}
"""With scikit-learn's versions."""


def part_of(rank: int, size: int, count: int) -> slice:
    """A rank's rows, one after the other in rank order: the later the rank, the more."""
    ends = [count * k * (k + 1) // (size * (size + 1)) for k in range(size + 1)]
    return slice(ends[rank], ends[rank + 1])


def own_part(comm: Communicator, count: int) -> slice:
    return part_of(comm.rank, comm.size, count)


def every_nth(comm: Communicator) -> slice:
    return slice(comm.rank, None, comm.size)


def results(model: Any) -> dict[str, Any]:
    """What the model has learned, by name: its public attributes that are arrays or numbers."""
    found: dict[str, Any] = {}
    for name, value in vars(model).items():
        if not name.endswith("_") or name.startswith("_"):
            continue
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            found[f"{name}{index}"] = np.asarray(each)
    return found


def compare(comm: Communicator, found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """The same attributes, dtypes and values as one process with all rows, and the same bits."""
    own, alone = results(found.estimator_), results(expected)
    assert own.keys() >= alone.keys(), (own.keys(), alone.keys())
    for name, value in own.items():
        if name.rstrip("0") in OWN:
            continue
        what = f"{name} of {expected}"
        if value.dtype.kind != "O":
            assert_same_bits(comm, value)
        if name not in alone:
            continue
        other = alone[name]
        assert value.shape == other.shape, (what, value.shape, other.shape)
        if name not in DTYPES_VARY:
            assert value.dtype == other.dtype, (what, value.dtype, other.dtype)
        if value.dtype.kind == "f":
            scale = np.abs(other[np.isfinite(other)]).max(initial=0)
            np.testing.assert_allclose(
                value, other, rtol=tolerance, atol=tolerance * scale, err_msg=what
            )
        else:
            assert (value == other).all(), (what, value, other)


def features(count: int = 240, width: int = 7, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, width)) * np.geomspace(0.1, 10, width) + np.arange(width)


def targets(X: Any, width: int = 0, seed: int = 1) -> Any:
    random = np.random.default_rng(seed)
    coef = random.normal(size=(X.shape[1], width) if width else X.shape[1])
    return X @ coef + random.normal(size=(len(X), width) if width else len(X)) / 2 + 5


def labels(X: Any, count: int = 3) -> Any:
    """In order, so that ranks lack classes."""
    return np.arange(len(X)) * count // len(X)


def weights(X: Any) -> Any:
    """Some are zero, and those of the first rank all, if there are several."""
    its = np.random.default_rng(2).uniform(0.1, 3, size=len(X))
    its[::7] = its[: len(X) // 3] = 0
    return its


def fitted(comm: Communicator, estimator: Any, X: Any, y: Any = None, weight: Any = None) -> Any:
    """By all ranks, each on its part of the rows."""
    part = own_part(comm, X.shape[0])
    own = (each if each is None else each[part] for each in (y, weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return DistributedEstimator(estimator).fit(X[part], *own)


def alone(estimator: Any, X: Any, y: Any = None, weight: Any = None) -> Any:
    """By scikit-learn, on all rows."""
    its = {} if weight is None else {"sample_weight": weight}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sklearn.base.clone(estimator).fit(X, y, **its)


def compare_fits(
    comm: Communicator, estimator: Any, X: Any, y: Any = None, weight: Any = None, **how: Any
) -> None:
    found = fitted(comm, estimator, X, y, weight)
    compare(comm, found, alone(estimator, X, y, weight), **how)


def perceptrons(batch_size: int) -> list[Any]:
    its = {"shuffle": False, "random_state": 0, "batch_size": batch_size, "max_iter": 5}
    return [
        MLPClassifier((8, 6), alpha=0.1, **its),
        MLPClassifier((8,), solver="sgd", learning_rate="invscaling", activation="tanh", **its),
        MLPClassifier(
            (8,), solver="sgd", learning_rate="adaptive", n_iter_no_change=1, tol=1, **its
        ),
        MLPClassifier((8,), solver="lbfgs", activation="logistic", **its),
    ]
