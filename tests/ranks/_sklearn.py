"""ringdl.sklearn: estimators that are exact over ranks, and what all estimators are."""

from __future__ import annotations

import importlib.util
import pickle
import warnings

import numpy as np
import sklearn.base
from scipy import sparse
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import (
    LinearRegression,
    Ridge,
    SGDClassifier,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl import Communicator
from ringdl.sklearn import DistributedEstimator
from tests.ranks._sklearn_models import (
    alone,
    compare,
    compare_fits,
    every_nth,
    features,
    fitted,
    labels,
    own_part,
    targets,
    weights,
)
from tests.ranks.support import assert_same_bits, expect


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


def check_pipelines_of_ranks_without_rows(comm: Communicator) -> None:
    """Rank 0 alone has some."""
    X = features(60)
    y = labels(X, 2)
    part = slice(0, None if comm.rank == 0 else 0)
    model = make_pipeline(
        DistributedEstimator(StandardScaler()),
        DistributedEstimator(PCA(3, svd_solver="full")),
        DistributedEstimator(GaussianNB()),
    ).fit(X[part], y[part])
    assert_same_bits(comm, model.predict(X), model[-1].theta_)
    clusters = DistributedEstimator(MiniBatchKMeans(2, random_state=0))
    assert len(clusters.fit_predict(X[part])) == len(X[part])
    rows = sparse.csr_matrix(X) if comm.rank == 0 else X[:0]
    clusters = DistributedEstimator(MiniBatchKMeans(2, random_state=0)).fit(rows)
    assert_same_bits(comm, clusters.cluster_centers_)


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
