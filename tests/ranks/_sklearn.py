"""ringdl.sklearn: fitted on the rows of all ranks, against scikit-learn on all rows at once."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from typing import Any

import numpy as np
import sklearn.base
from scipy import sparse
from sklearn.cluster import MiniBatchKMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl import Communicator
from ringdl.sklearn import DistributedEstimator
from tests.ranks.support import assert_same_bits, expect, needs

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


def check_least_squares(comm: Communicator) -> None:
    X = features()
    many = features(10, 30)
    tall = features(3000, 60, seed=3)
    deficient = X @ np.random.default_rng(4).normal(size=(7, 4)) @ np.ones((4, 9)) + X[:, :1]
    for estimator in (
        LinearRegression(),
        LinearRegression(fit_intercept=False),
        LinearRegression(positive=True),
        Ridge(),
        Ridge(alpha=3.0, fit_intercept=False),
        Ridge(solver="svd"),
        Ridge(positive=True, tol=1e-14),
    ):
        for width in (0, 1, 3):
            y = targets(X, width)
            for weight in (None, weights(X)):
                is_iterative = estimator.positive and isinstance(estimator, Ridge)
                compare_fits(
                    comm, estimator, X, y, weight, tolerance=1e-6 if is_iterative else 1e-9
                )
    for estimator in (LinearRegression(), Ridge(solver="svd")):
        compare_fits(comm, estimator, many, targets(many))
        compare_fits(comm, estimator, many, targets(many, 2), weights(many))
        compare_fits(comm, estimator, tall, targets(tall, 2))
        compare_fits(comm, estimator, X + 1e3, targets(X))
        compare_fits(comm, estimator, deficient, targets(X))
    compare_fits(comm, Ridge(alpha=np.array([0.5, 5.0])), X, targets(X, 2))


def check_ill_conditioned(comm: Communicator) -> None:
    """Where products of columns would have lost half of the digits."""
    base = features(200, 5)
    X = np.column_stack([base, base[:, 0] + 1e-6 * features(200, 1, seed=5)[:, 0]])
    y = X @ np.arange(1.0, 7.0)
    model = DistributedEstimator(LinearRegression(tol=1e-15))
    part = own_part(comm, len(X))
    model.fit(X[part], y[part])
    np.testing.assert_allclose(model.coef_, np.arange(1.0, 7.0), rtol=1e-7)


def check_sparse_rows(comm: Communicator) -> None:
    X = features(200, 8)
    X[np.random.default_rng(6).uniform(size=X.shape) < 0.7] = 0
    y, kind = targets(X), sparse.csr_array(X)
    for estimator in (LinearRegression(), Ridge(solver="cholesky")):
        found = fitted(comm, estimator, kind, y, weights(X))
        expected = alone(estimator, X, y, weights(X))
        np.testing.assert_allclose(found.coef_, expected.coef_, rtol=1e-9)
        np.testing.assert_allclose(found.intercept_, expected.intercept_, rtol=1e-9)
    compare(comm, fitted(comm, PCA(3), kind), alone(PCA(3), X))
    compare_fits(comm, StandardScaler(with_mean=False), kind)
    compare_fits(comm, StandardScaler(with_mean=False), sparse.csc_array(kind), None, weights(X))
    compare_fits(comm, StandardScaler(with_mean=False, with_std=False), kind)
    model = MLPRegressor(
        hidden_layer_sizes=(5,), batch_size=200, max_iter=3, shuffle=False, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        compare_fits(comm, model, kind, y)
    compare_fits(comm, MiniBatchKMeans(3, batch_size=20, random_state=0), kind)


def check_components(comm: Communicator) -> None:
    X = features()
    tall = features(2000, 120, seed=7)
    for estimator in (
        PCA(),
        PCA(3),
        PCA(0),
        PCA(0.8),
        PCA("mle"),
        PCA(2, whiten=True),
        PCA(svd_solver="covariance_eigh"),
    ):
        compare_fits(comm, estimator, X)
        part = own_part(comm, len(X))
        found, expected = fitted(comm, estimator, X), alone(estimator, X)
        np.testing.assert_allclose(
            found.transform(X[part]), expected.transform(X[part]), 1e-8, 1e-8
        )
    compare_fits(comm, PCA(3, svd_solver="full"), features(5, 9))
    compare_fits(comm, PCA(20, svd_solver="full"), tall)


def check_scaler(comm: Communicator) -> None:
    X = features()
    X[:, 2] = 3.25
    missing = X.copy()
    missing[::3, 1] = missing[5, 2] = np.nan
    missing[:150, 4] = np.nan  # all of it, on most ranks
    for estimator in (
        StandardScaler(),
        StandardScaler(with_mean=False),
        StandardScaler(with_std=False),
        StandardScaler(with_mean=False, with_std=False),
    ):
        for rows in (X, missing, X + 1e6):
            compare_fits(comm, estimator, rows)
            if estimator.with_mean or estimator.with_std:
                compare_fits(comm, estimator, rows, None, weights(X))
        found, expected = DistributedEstimator(estimator), sklearn.base.clone(estimator)
        for batch in np.split(np.where(np.isnan(missing), missing, X)[:, :4], 3):
            part = own_part(comm, len(batch))
            found.partial_fit(batch[part])
            expected.partial_fit(batch)
            compare(comm, found, expected)


def check_naive_bayes(comm: Communicator) -> None:
    X = features()
    y = np.array(["a", "b", "c"])[labels(X)]
    for weight in (None, weights(X)):
        for estimator in (GaussianNB(), GaussianNB(priors=[0.2, 0.3, 0.5], var_smoothing=1e-3)):
            compare_fits(comm, estimator, X, y, weight)
    found, expected = DistributedEstimator(GaussianNB()), GaussianNB()
    for rows in (slice(None, None, 2), slice(1, None, 2)):
        part = own_part(comm, len(X[rows]))
        found.partial_fit(X[rows][part], y[rows][part], classes=["c", "a", "b"])
        expected.partial_fit(X[rows], y[rows], classes=["c", "a", "b"])
        compare(comm, found, expected)


def check_clusters(comm: Communicator) -> None:
    """The same random numbers, so the same centers."""
    X = np.concatenate([features(150, 4, seed) + 20 * seed for seed in range(4)])
    by_tolerance = {"batch_size": 32, "tol": 1e-3, "max_no_improvement": None}
    compare_fits(comm, MiniBatchKMeans(4, random_state=0, **by_tolerance), X)
    X = X[np.random.default_rng(8).permutation(len(X))]
    starts = X[:4].copy()
    for estimator in (
        MiniBatchKMeans(4, batch_size=32, random_state=0),
        MiniBatchKMeans(4, batch_size=32, random_state=0, init="random", n_init=3, tol=1e-3),
        MiniBatchKMeans(4, batch_size=50, init=starts, random_state=0, compute_labels=False),
        MiniBatchKMeans(30, batch_size=40, random_state=0, reassignment_ratio=0.3, max_iter=4),
        MiniBatchKMeans(4, batch_size=5000, random_state=0, max_iter=5),
        MiniBatchKMeans(4, batch_size=5000, random_state=0, max_iter=1),
    ):
        for weight in (None, weights(X)):
            part = own_part(comm, len(X))
            found, expected = (
                fitted(comm, estimator, X, None, weight),
                alone(estimator, X, None, weight),
            )
            compare(comm, found, expected)
            if estimator.compute_labels:
                assert (found.labels_ == expected.labels_[part]).all()
    for estimator in (
        MiniBatchKMeans(4, random_state=0),
        MiniBatchKMeans(20, random_state=0, batch_size=30, reassignment_ratio=0.5),
    ):
        found, expected = DistributedEstimator(estimator), sklearn.base.clone(estimator)
        for batch in np.split(X, 6):
            part = own_part(comm, len(batch))
            found.partial_fit(batch[part], sample_weight=weights(batch)[part])
            expected.partial_fit(batch, sample_weight=weights(batch))
            compare(comm, found, expected)


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


def check_perceptrons(comm: Communicator) -> None:
    """Batches of which each rank has its part, as of one process that has all rows."""
    X = features(120 * comm.size) / 5
    part = every_nth(comm)
    random = np.random.default_rng(9)
    several = random.integers(0, 2, size=(len(X), 3))
    y_of = {
        "two": np.array(["no", "yes"])[random.integers(0, 2, len(X))],
        "three": random.integers(0, 3, len(X)),
        "several": several,
        "weights": random.integers(0, 3, len(X)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for kind, y in y_of.items():
            its = {"sample_weight": random.uniform(0, 2, len(X))} if kind == "weights" else {}
            for estimator in perceptrons(50 * comm.size):
                found = DistributedEstimator(estimator)
                found.fit(X[part], y[part], **{name: each[part] for name, each in its.items()})
                compare(
                    comm,
                    found,
                    sklearn.base.clone(estimator).fit(X, y, **its),
                    1e-8 if estimator.solver == "lbfgs" else 1e-9,
                )
        for width in (0, 2):
            y = targets(X, width)
            regressor = MLPRegressor(
                hidden_layer_sizes=(9, 5),
                shuffle=False,
                random_state=0,
                batch_size=40 * comm.size,
                max_iter=4,
            )
            found = DistributedEstimator(regressor).fit(X[part], y[part])
            compare(comm, found, alone(regressor, X, y))


def check_a_larger_perceptron(comm: Communicator) -> None:
    images, digits = load_digits(return_X_y=True)
    X, y = images[: 400 * comm.size] / 16, digits[: 400 * comm.size]
    part = every_nth(comm)
    model = MLPClassifier((256, 128), shuffle=False, random_state=0, batch_size=100 * comm.size)
    found, expected = DistributedEstimator(model), sklearn.base.clone(model)
    for _ in range(3):
        found.partial_fit(X[part], y[part], classes=np.arange(10))
        expected.partial_fit(X, y, classes=np.arange(10))
    compare(comm, found, expected)


def check_perceptrons_of_uneven_ranks(comm: Communicator) -> None:
    """Ranks that have other numbers of rows, or none, or lack classes, step equally often."""
    X = features(101) / 5
    y = labels(X)
    part = own_part(comm, len(X))
    if comm.rank == 0 and comm.size > 1:
        part = slice(0, 0)
    elif comm.rank == 1:
        part = slice(0, part.stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for estimator in perceptrons(batch_size=500):
            found = DistributedEstimator(estimator).fit(X[part], y[part])
            compare(comm, found, alone(estimator, X, y), 1e-8)
        for batch_size in (1, 3, 20):
            model = MLPClassifier((5,), batch_size=batch_size, max_iter=2, solver="sgd")
            found = DistributedEstimator(model).fit(X[part], y[part])
            assert_same_bits(comm, *found.coefs_, found.loss_, found.loss_curve_)
            assert found.t_ == 2 * len(X)
            assert (found.classes_ == [0, 1, 2]).all()
    model = DistributedEstimator(MLPClassifier((5,), random_state=0))
    model.partial_fit(X[:20], y[:20], classes=[0, 1, 2])
    order = comm.allgather(model.estimator_._random_state.randint(1000, size=(1, 4)))
    assert len(np.unique(order, axis=0)) == comm.size, "ranks shuffle alike"


def check_early_stopping(comm: Communicator) -> None:
    X = features(400) / 5
    for model, y in (
        (MLPClassifier((5,), early_stopping=True, max_iter=30), np.arange(len(X)) % 3),
        (MLPRegressor(hidden_layer_sizes=(5,), early_stopping=True, max_iter=30), targets(X)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            found = fitted(comm, model, X, y)
        assert_same_bits(comm, *found.coefs_, found.validation_scores_, found.n_iter_)
        assert found.best_validation_score_ == max(found.validation_scores_)
    diverging = MLPRegressor(
        hidden_layer_sizes=(5,),
        activation="identity",
        early_stopping=True,
        solver="sgd",
        learning_rate_init=1e99,
    )
    with np.errstate(all="ignore"):
        found = fitted(comm, diverging, X, targets(X))
    assert np.isnan(found.validation_scores_).all()
    assert_same_bits(comm, *found.coefs_)  # the initial ones


def averaged_epochs(comm: Communicator, estimator: Any, X: Any, y: Any, epochs: int) -> Any:
    """What the ranks do, in one process: each its own epoch, then the average by rows."""
    parts = [part_of(rank, comm.size, len(X)) for rank in range(comm.size)]
    counts = [part.stop - part.start for part in parts]
    models = [sklearn.base.clone(estimator) for _ in parts]
    its = {"classes": np.unique(y)} if sklearn.base.is_classifier(estimator) else {}
    names = ["coef_", "intercept_"]
    if estimator.average:
        names += ["_standard_coef", "_standard_intercept", "_average_coef", "_average_intercept"]
    for epoch in range(1, epochs + 1):
        for model, part in zip(models, parts, strict=True):
            model.partial_fit(X[part], y[part], **its)
            model.t_, model.n_iter_ = 1.0 + epoch * max(counts), epoch
        for name in names:
            each = [
                count * getattr(model, name) for count, model in zip(counts, models, strict=True)
            ]
            average = sum(each) / len(X)
            for model in models:
                getattr(model, name)[...] = average
    return models[0]


def check_descent(comm: Communicator) -> None:
    """The average of the ranks' models after each epoch; on one rank scikit-learn's own."""
    X = features(180)
    two, three, y = labels(X, 2), labels(X, 3), targets(X)
    its = {"shuffle": False, "max_iter": 4, "tol": None}
    for estimator, target in (
        (SGDClassifier(**its), two),
        (SGDClassifier(loss="log_loss", penalty="elasticnet", **its), three),
        (SGDClassifier(average=True, **its), three),
        (SGDClassifier(average=10, **its), two),
        (SGDRegressor(eta0=1e-4, **its), y),
        (SGDRegressor(eta0=1e-4, average=True, loss="huber", **its), y),
        (Perceptron(**its), three),
    ):
        expected = averaged_epochs(comm, estimator, X, target, 4)
        found = fitted(comm, estimator, X, target)
        compare(comm, found, expected if comm.size > 1 else alone(estimator, X, target))
        part = own_part(comm, len(X))
        model = DistributedEstimator(estimator)
        classes = {} if target is y else {"classes": np.unique(target)}
        for _ in range(4):
            model.partial_fit(X[part], target[part], **classes)
        np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-9)


@needs(ranks=2)
def check_descent_without_weight(comm: Communicator) -> None:
    """A rank whose rows have no weight counts as one that has none."""
    X, y = features(90), np.arange(90) % 3
    weight = np.full(90, 0.0 if comm.rank == 0 else 1.5)
    estimator = SGDClassifier(shuffle=False, max_iter=3, tol=None)
    found, without = (
        DistributedEstimator(estimator).fit(X[part], y[part], weight[part])
        for part in (slice(None), slice(0, 0 if comm.rank == 0 else None))
    )
    assert (found.coef_ == without.coef_).all()


def check_descent_stops(comm: Communicator) -> None:
    """By the objective of all rows, on all ranks at once; with weights, and without rows."""
    X = StandardScaler().fit_transform(features(300))
    y = np.digitize(targets(X), np.quantile(targets(X), [0.3, 0.6]))
    part = every_nth(comm) if comm.rank > 0 or comm.size == 1 else slice(0, 0)
    for estimator in (
        SGDClassifier(random_state=0),
        SGDClassifier(random_state=0, class_weight="balanced", learning_rate="adaptive", eta0=0.1),
        Perceptron(random_state=0, penalty="l1"),
        SGDClassifier(random_state=0, loss="modified_huber", average=True),
    ):
        model = DistributedEstimator(estimator).fit(X[part], y[part], weights(X)[part])
        assert_same_bits(comm, model.coef_, model.intercept_, model.n_iter_, model.t_)
        assert 5 < model.n_iter_ < 1000
        assert model.score(X, y) > 0.7
        assert model.estimator_.get_params() == estimator.get_params()
    regressor = DistributedEstimator(SGDRegressor(random_state=0)).fit(X[part], targets(X)[part])
    assert_same_bits(comm, regressor.coef_, regressor.n_iter_)
    assert regressor.score(X, targets(X)) > 0.9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedEstimator(SGDClassifier(max_iter=2)).fit(X, y)
    assert [each.category for each in caught] == [ConvergenceWarning]


def check_ranks_without_rows(comm: Communicator) -> None:
    """All but the last."""
    X = features(90)
    y = labels(X)
    part = slice(0, None if comm.rank == comm.size - 1 else 0)
    for estimator, target in (
        (Ridge(), targets(X)),
        (LinearRegression(), targets(X, 2)),
        (PCA(3, svd_solver="full"), None),
        (StandardScaler(), None),
        (GaussianNB(), y),
        (MiniBatchKMeans(3, batch_size=20, random_state=0), None),
    ):
        own = None if target is None else target[part]
        compare(
            comm, DistributedEstimator(estimator).fit(X[part], own), alone(estimator, X, target)
        )


def check_single_precision(comm: Communicator) -> None:
    X = features(100).astype(np.float32)
    y, kinds = targets(X), labels(X)
    for estimator, target in (
        (Ridge(), y.astype(np.float32)),
        (LinearRegression(), y),
        (PCA(2, svd_solver="full"), None),
        (StandardScaler(), None),
        (GaussianNB(), kinds),
        (MiniBatchKMeans(2, random_state=0), None),
        (MLPClassifier((5,), batch_size=100, max_iter=3, shuffle=False, random_state=0), kinds),
    ):
        compare_fits(comm, estimator, X, target, tolerance=2e-4)
    kind = np.float64 if comm.rank == 1 else np.float32
    assert DistributedEstimator(PCA()).fit(X.astype(kind)).components_.dtype == (
        np.float64 if comm.size > 1 else np.float32
    )


def check_as_others_are(comm: Communicator) -> None:
    """It clones, pickles, goes through a pipeline, and leaves the given estimator alone."""
    X = features()
    y = labels(X)
    part = every_nth(comm)
    given = GaussianNB()
    pipeline = Pipeline(
        [
            ("scale", DistributedEstimator(StandardScaler())),
            ("reduce", DistributedEstimator(PCA(3))),
            ("classify", DistributedEstimator(given)),
        ]
    )
    pipeline.set_params(classify__estimator__var_smoothing=1e-8)
    found = sklearn.base.clone(pipeline).fit(X[part], y[part])
    expected = make_pipeline(StandardScaler(), PCA(3), GaussianNB(var_smoothing=1e-8)).fit(X, y)
    np.testing.assert_allclose(
        found.predict_proba(X), expected.predict_proba(X), rtol=1e-8, atol=1e-12
    )
    assert not hasattr(given, "theta_")
    assert sklearn.base.is_classifier(pipeline)
    group = comm.group(range(comm.size)[::-1])
    reduced = DistributedEstimator(PCA(3, svd_solver="full"), communicator=group).fit(X[part])
    compare(comm, reduced, PCA(3, svd_solver="full").fit(X))
    model = DistributedEstimator(MLPClassifier((4,)), communicator=group)
    for _ in range(2):
        model.partial_fit(X[part], y[part], classes=[0, 1, 2])
    copy = pickle.loads(pickle.dumps(model))
    assert copy.communicator is None
    assert (copy.predict(X) == model.predict(X)).all()
    assert sklearn.base.clone(model).communicator is group
    assert not hasattr(sklearn.base.clone(model), "estimator_")
    copy.partial_fit(X[part], y[part])  # on the default communicator
    model.partial_fit(X[part], y[part])
    assert_same_bits(comm, *copy.coefs_)
    plain = pickle.loads(pickle.dumps(model.estimator_))
    assert type(plain) is MLPClassifier
    assert not any(name.startswith("_steps") for name in vars(plain))


def check_warm_start(comm: Communicator) -> None:
    X = features(60) / 5
    y, part = labels(X), own_part(comm, 60)
    its = {"warm_start": True, "max_iter": 3, "shuffle": False}
    network = MLPClassifier((5,), batch_size=60, random_state=0, **its)
    found, expected = DistributedEstimator(network), sklearn.base.clone(network)
    linear = DistributedEstimator(SGDClassifier(tol=None, **its))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(3):
            compare(comm, found.fit(X[part], y[part]), expected.fit(X, y))
    coefs = [linear.fit(X[part], y[part]).coef_.copy() for _ in range(2)]
    assert (coefs[0] != coefs[1]).any(), "it began anew"
    assert_same_bits(comm, *coefs)


def check_restart(comm: Communicator) -> None:
    """A model goes on after shutdown() and init()."""
    X = features(60)
    y = labels(X)
    model = DistributedEstimator(MLPClassifier((4,), random_state=0))
    for _ in range(2):
        model.partial_fit(X[every_nth(comm)], y[every_nth(comm)], classes=[0, 1, 2])
        ringdl.shutdown()
        assert ringdl.init() is comm
    assert_same_bits(comm, *model.coefs_)


def check_names_of_features(comm: Communicator) -> None:
    """Where pandas is installed."""
    if importlib.util.find_spec("pandas") is None:
        return
    pandas = importlib.import_module("pandas")
    X = pandas.DataFrame(features(60, 3), columns=["a", "b", "c"])
    y, part = labels(X), own_part(comm, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in (GaussianNB(), SGDClassifier(), MLPClassifier((4,))):
            model = DistributedEstimator(estimator)
            for _ in range(2):
                model.partial_fit(X[part], y[part], classes=[0, 1, 2])
            assert model.feature_names_in_.tolist() == ["a", "b", "c"]
            model.predict(X)
        scaler = DistributedEstimator(StandardScaler()).set_output(transform="pandas")
        assert scaler.fit(X[part]).transform(X).columns.tolist() == ["a", "b", "c"]
    if comm.size > 1:
        renamed = X.rename(columns={"c": "d"}) if comm.rank == 1 else X
        with expect(ringdl.MismatchError, "differ in the names of features", "['a', 'b', 'd'] on"):
            DistributedEstimator(GaussianNB()).fit(renamed, y)


@needs(ranks=2)
def check_one_rank_is_wrong(comm: Communicator) -> None:
    """It raises what scikit-learn raises, and the others hear of it."""
    X = features(40)
    y = labels(X)
    is_wrong = comm.rank == 1
    holed = X.copy()
    if is_wrong:
        holed[3, 3] = np.nan
    for estimator in (Ridge(), GaussianNB(), PCA(), MiniBatchKMeans(2), Perceptron()):
        text = "contains NaN"
        with expect(
            ValueError if is_wrong else ringdl.MismatchError, text, "" if is_wrong else "rank 1"
        ):
            DistributedEstimator(estimator).fit(holed, y)
    wrong = MLPClassifier(alpha=-1.0) if is_wrong else MLPClassifier()
    with expect(ValueError if is_wrong else ringdl.MismatchError, "The 'alpha' parameter"):
        DistributedEstimator(wrong).fit(X, y)
    weight = np.ones(3 if is_wrong else 40)
    with expect(
        ValueError if is_wrong else ringdl.MismatchError,
        "sample_weight has 3 weights, X has 40 rows",
    ):
        DistributedEstimator(Ridge()).fit(X, y, weight)
    huge = np.full_like(X, 1e300 if is_wrong else 1)
    model = DistributedEstimator(SGDRegressor(learning_rate="constant", eta0=1e10))
    with expect(ValueError if is_wrong else ringdl.MismatchError, "under-/overflow"):
        model.fit(huge, targets(X))
    DistributedEstimator(Ridge()).fit(X, y)


@needs(ranks=2)
def check_an_error_while_gradients_are_averaged(comm: Communicator) -> None:
    X = features(40)
    y = np.arange(40) % 2
    if comm.rank == 1:
        y[:] = np.arange(40) == 0  # which cannot be held out by classes
    model = MLPClassifier((4,), early_stopping=True)
    for _ in range(2):
        with expect(
            ValueError if comm.rank == 1 else ringdl.MismatchError,
            "The least populated class"
            if comm.rank == 1
            else "rank 1 cannot go on fitting: The least",
        ):
            DistributedEstimator(model).fit(X, y)
    DistributedEstimator(MLPClassifier((4,))).partial_fit(X, np.arange(40) % 2, classes=[0, 1])


@needs(ranks=2)
def check_ranks_differ(comm: Communicator) -> None:
    X = features(30)
    y, is_other = labels(X), comm.rank == 1
    with expect(ringdl.MismatchError, "the call: Ridge.fit on rank", "and GaussianNB.partial_fit"):
        if is_other:
            DistributedEstimator(GaussianNB()).partial_fit(X, y, classes=[0, 1, 2])
        else:
            DistributedEstimator(Ridge()).fit(X, y)
    with expect(
        ringdl.UsageError if is_other else ringdl.MismatchError, "DistributedEstimator cannot fit"
    ):
        DistributedEstimator(LogisticRegression() if is_other else Ridge()).fit(X, y)
    with expect(ringdl.MismatchError, "features of X: 7 on rank", "and 6 on rank 1"):
        DistributedEstimator(PCA()).fit(X[:, is_other:])
    with expect(ringdl.MismatchError, "parameter alpha: 1.0 on rank", "alike on all ranks"):
        DistributedEstimator(Ridge(alpha=1.0 + is_other)).fit(X, y)
    with expect(ringdl.MismatchError, "shape of y beyond its rows: () on rank"):
        DistributedEstimator(Ridge()).fit(X, targets(X, 2) if is_other else y)
    with expect(ringdl.MismatchError, "differ in the classes"):
        classes = [0, 1] if is_other else [0, 1, 2]
        DistributedEstimator(GaussianNB()).partial_fit(X, y % 2, classes=classes)
    kinds = np.array(["a", "b"])[y % 2] if is_other else y
    with expect(ValueError, "string and number"):
        DistributedEstimator(GaussianNB()).fit(X, kinds)


def check_refusals(comm: Communicator) -> None:
    """The same sentence on all ranks."""
    X = features(30)
    y = labels(X)

    class Own(Ridge):
        pass

    with expect(ringdl.UsageError, "cannot fit Own()", "an instance of GaussianNB, LinearRegr"):
        DistributedEstimator(Own()).fit(X, y)
    with expect(ringdl.UsageError, "communicator is 'all'"):
        DistributedEstimator(Ridge(), communicator="all").fit(X, y)  # type: ignore[arg-type]
    with expect(ringdl.UsageError, "PCA takes no sample_weight"):
        DistributedEstimator(PCA()).fit(X, None, np.ones(30))
    for solver in ("randomized", "arpack"):
        with expect(ringdl.UsageError, f"svd_solver is '{solver}', which approximates"):
            DistributedEstimator(PCA(2, svd_solver=solver)).fit(X)
    with expect(ValueError, "n_components=9 is more than 7"):
        DistributedEstimator(PCA(9)).fit(X)
    with expect(ValueError, "classes must be passed on the first call to partial_fit"):
        DistributedEstimator(GaussianNB()).partial_fit(X, y)
    with expect(ValueError, "sample_weight is zero for all rows"):
        DistributedEstimator(Ridge()).fit(X, y, np.zeros(30))
    with expect(ValueError, "should be >= n_clusters=1000"):
        DistributedEstimator(MiniBatchKMeans(1000)).fit(X)
    with expect(ValueError, "[2] in y do not exist in the initial classes"):
        DistributedEstimator(GaussianNB()).partial_fit(X, y, classes=[0, 1])
    with expect(ValueError, "mle' needs 7 rows at least", f"all ranks have {comm.size}"):
        DistributedEstimator(PCA("mle")).fit(X[:1])
    with expect(ValueError, "none of" if comm.size > 1 else "0 sample(s)"):
        DistributedEstimator(Ridge()).fit(X[:0], y[:0])
    if comm.size > 1:
        with expect(ringdl.UsageError, "early_stopping is for one rank"):
            DistributedEstimator(SGDClassifier(early_stopping=True)).fit(X, y)
        part = slice(0, None if comm.rank == 0 else 0)
        with expect(ringdl.UsageError, "holds out some rows of each rank, and rank 1 has none"):
            DistributedEstimator(MLPClassifier(early_stopping=True)).fit(X[part], y[part])
    ringdl.shutdown()
    with expect(ringdl.UsageError, "init()"):
        DistributedEstimator(Ridge()).fit(X, y)
    ringdl.init()
