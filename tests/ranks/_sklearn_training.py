"""ringdl.sklearn: perceptrons, and linear models by stochastic gradient descent."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import sklearn.base
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import (
    Perceptron,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl import Communicator
from ringdl.sklearn import DistributedEstimator
from tests.ranks._sklearn_models import (
    alone,
    compare,
    every_nth,
    features,
    fitted,
    labels,
    own_part,
    part_of,
    perceptrons,
    targets,
    weights,
)
from tests.ranks.support import assert_same_bits, expect, needs


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
def check_averages_that_begin_late(comm: Communicator) -> None:
    """On some ranks in this epoch, on others in the next: all have the same model."""
    counts = [60] + [40] * (comm.size - 1)
    X = features(sum(counts))
    y = labels(X, 2)
    part = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
    model = DistributedEstimator(SGDClassifier(average=50, shuffle=False))
    for _ in range(3):
        model.partial_fit(X[part], y[part], classes=[0, 1])
        assert_same_bits(comm, model.coef_, model.intercept_)


@needs(ranks=2)
def check_perceptrons_without_weight(comm: Communicator) -> None:
    """A rank whose rows have no weight counts as one that has none."""
    X = features(40)
    y = targets(X)
    weight = np.full(40, 0.0 if comm.rank == 0 else 1.5)
    for solver in ("adam", "lbfgs"):
        estimator = MLPRegressor(
            hidden_layer_sizes=(4,), solver=solver, max_iter=3, shuffle=False, random_state=0
        )
        found, without = (
            DistributedEstimator(estimator).fit(X[part], y[part], weight[part])
            for part in (slice(None), slice(0, 0 if comm.rank == 0 else None))
        )
        for ours, theirs in zip(found.coefs_, without.coefs_, strict=True):
            assert_same_bits(comm, ours)
            if solver == "lbfgs":
                np.testing.assert_allclose(ours, theirs)
    with expect(ringdl.UsageError, "rank 0 has none with a weight"):
        DistributedEstimator(MLPRegressor(early_stopping=True)).fit(X, y, weight)


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


def check_weights_where_ranks_have_none(comm: Communicator) -> None:
    """Perceptrons by steps whose length is by the weights' sum, which Adam's is not."""
    X = features(24)
    y, weight = targets(X), np.linspace(0.1, 0.5, 24)
    estimator = MLPRegressor(
        hidden_layer_sizes=(4,),
        solver="sgd",
        shuffle=False,
        random_state=1,
        max_iter=20,
        batch_size=100,
    )
    for kept in (24, 20):
        its = np.where(np.arange(24) < kept, weight, 0)
        rest = np.arange(24) >= kept if kept < 24 else np.zeros(24, bool)
        mine = (
            rest
            if comm.rank == 0
            else ~rest & (np.arange(24) % max(1, comm.size - 1) == comm.rank - 1)
        )
        mine = np.ones(24, bool) if comm.size == 1 else mine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = sklearn.base.clone(estimator).fit(X, y, its)
            found = DistributedEstimator(estimator).fit(X[mine], y[mine], its[mine])
        np.testing.assert_allclose(found.loss_, whole.loss_, rtol=1e-9)
        for own, other in zip(found.coefs_, whole.coefs_, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-9)


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
