"""ringdl.sklearn on one rank: scikit-learn's own checks of estimators, and what needs no others."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier, is_regressor  # noqa: E402
from sklearn.cluster import MiniBatchKMeans  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.linear_model import (  # noqa: E402
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.neural_network import MLPClassifier, MLPRegressor  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

import ringdl  # noqa: E402
from ringdl.sklearn import DistributedEstimator, _mlp, _sgd  # noqa: E402
from ringdl.sklearn._moments import _merge, _moments  # noqa: E402
from ringdl.sklearn._ranks import Ranks  # noqa: E402
from ringdl.sklearn._rows import Rows  # noqa: E402

ESTIMATORS = [
    LinearRegression(),
    Ridge(),
    PCA(),
    StandardScaler(),
    GaussianNB(),
    MiniBatchKMeans(random_state=0, n_init=2),
    MLPClassifier(max_iter=50, random_state=0),
    MLPRegressor(max_iter=40, random_state=0),
    SGDClassifier(random_state=0),
    SGDRegressor(random_state=0),
    Perceptron(random_state=0),
]
BY_WEIGHT = {f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")}
"""Failed by scikit-learn's own estimators, too, which go row by row or draw rows."""

MAY_FAIL: dict[type, set[str]] = {
    PCA: BY_WEIGHT  # fit() has a sample_weight, of which a PCA takes none
    | {
        "check_all_zero_sample_weights_error",
        "check_sample_weights_list",
        "check_sample_weights_not_an_array",
        "check_sample_weights_not_overwritten",
        "check_sample_weights_pandas_series",
        "check_sample_weights_shape",
    },
    MiniBatchKMeans: BY_WEIGHT,
    SGDClassifier: BY_WEIGHT,
    SGDRegressor: BY_WEIGHT,
    Perceptron: BY_WEIGHT,
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    ringdl.init()
    yield
    ringdl.shutdown()


def rows() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(60, 4)), np.arange(60) % 3


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda its: type(its).__name__)
def test_passes_the_checks_of_estimators(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(DistributedEstimator(estimator), on_fail=None, on_skip=None)
    failed = {each["check_name"] for each in results if each["status"] == "failed"}
    assert failed <= MAY_FAIL.get(type(estimator), set())
    assert len(results) > 50


def test_has_the_methods_of_the_estimator() -> None:
    scaler, classifier = (DistributedEstimator(each) for each in (StandardScaler(), GaussianNB()))
    for name in ("transform", "inverse_transform", "fit_transform", "set_output", "partial_fit"):
        assert hasattr(scaler, name)
    for name in ("predict", "fit_predict", "score", "decision_function"):
        assert not hasattr(scaler, name)
    assert hasattr(classifier, "predict_proba")
    assert not hasattr(classifier, "transform")
    assert not hasattr(DistributedEstimator(Ridge()), "partial_fit")
    assert not hasattr(DistributedEstimator(SGDClassifier()), "predict_proba")
    assert hasattr(DistributedEstimator(SGDClassifier(loss="log_loss")), "predict_proba")
    assert is_classifier(classifier)
    assert is_regressor(DistributedEstimator(Ridge()))


def test_parameters() -> None:
    model = DistributedEstimator(Ridge(alpha=2.0))
    assert model.get_params()["estimator__alpha"] == 2.0
    model.set_params(estimator__alpha=3.0)
    assert clone(model).estimator.alpha == 3.0
    assert "communicator" not in repr(model)


def test_has_the_attributes_of_the_model() -> None:
    X, y = rows()
    model = DistributedEstimator(GaussianNB())
    with pytest.raises(AttributeError, match="has no attribute 'theta_'"):
        _ = model.theta_
    with pytest.raises(NotFittedError):
        model.predict(X)
    model.fit(X, y)
    assert model.theta_ is model.estimator_.theta_
    assert model.classes_.tolist() == [0, 1, 2]
    with pytest.raises(AttributeError):
        _ = model.nothing_


def test_pickles_without_a_communicator() -> None:
    X, y = rows()
    model = DistributedEstimator(SGDClassifier(), communicator=ringdl.get_communicator())
    model.partial_fit(X, y, classes=[0, 1, 2])
    copy = pickle.loads(pickle.dumps(model))
    assert copy.communicator is None
    assert (copy.predict(X) == model.predict(X)).all()
    copy.partial_fit(X, y)
    assert copy.t_ == 121


def test_the_model_needs_no_ringdl() -> None:
    X, y = rows()
    for estimator in ESTIMATORS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = DistributedEstimator(estimator).fit(X, y).estimator_
        assert type(fitted) is type(estimator)
        assert b"ringdl" not in pickle.dumps(fitted)


@pytest.mark.parametrize("estimator", ESTIMATORS[-5:], ids=lambda its: type(its).__name__)
def test_one_rank_is_scikit_learn(estimator: Any) -> None:
    """Bit by bit: the same rows in the same order."""
    X, y = rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = DistributedEstimator(estimator).fit(X, y)
        expected = clone(estimator).fit(X, y)
    name = "coefs_" if hasattr(expected, "coefs_") else "coef_"
    for own, other in zip(getattr(found, name), getattr(expected, name), strict=True):
        assert (own == other).all()
    assert found.n_iter_ == expected.n_iter_


def test_names_of_features() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = rows()
    frame = pandas.DataFrame(X, columns=list("abcd"))
    for estimator in (GaussianNB(), SGDClassifier(), MLPClassifier((3,))):
        model = DistributedEstimator(estimator)
        for _ in range(2):
            model.partial_fit(frame, y, classes=[0, 1, 2])
        assert model.feature_names_in_.tolist() == list("abcd")
        model.predict(frame)


def test_refuses() -> None:
    X, y = rows()
    for other in (LogisticRegression(), Ridge, None):
        with pytest.raises(ringdl.UsageError, match="pass an instance of GaussianNB, LinearRegr"):
            DistributedEstimator(other).fit(X, y)
    with pytest.raises(ringdl.UsageError, match="communicator is 3"):
        DistributedEstimator(Ridge(), communicator=3).fit(X, y)  # type: ignore[arg-type]
    ringdl.shutdown()
    with pytest.raises(ringdl.UsageError, match=r"init\(\)"):
        DistributedEstimator(Ridge()).fit(X, y)


def test_moments_merge() -> None:
    X, _ = rows()
    parts = [_moments(len(each), each.mean(0), each.var(0), (4,)) for each in (X[:7], X[7:])]
    nothing = np.zeros((3, 4))
    for merged in (_merge(*parts), _merge(_merge(nothing, parts[0]), _merge(parts[1], nothing))):
        np.testing.assert_allclose(merged, [[60.0] * 4, X.mean(0), X.var(0) * 60], rtol=1e-12)


def test_an_interrupt_ends_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn only ends the epochs, and other ranks would wait."""
    X, y = rows()

    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    model = DistributedEstimator(MLPClassifier((3,), batch_size=20))
    step = _mlp._Steps.end
    monkeypatch.setattr(
        _mlp._Steps, "end", lambda its, *how: (interrupted if its.done == 1 else step)(its, *how)
    )
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="interrupted by user"):
        model.fit(X, y)


@pytest.mark.parametrize("loss", _sgd._LOSSES)
def test_losses_are_scikit_learns(loss: str) -> None:
    is_regression = loss in SGDRegressor._parameter_constraints["loss"][0].options
    estimator = SGDRegressor(loss=loss) if is_regression else SGDClassifier(loss=loss)
    own = estimator._get_loss_function(loss)

    def expected(y: float, predicted: float) -> float:
        if hasattr(own, "py_loss"):
            return own.py_loss(predicted, y)
        y = max(y, 0.0) if loss == "log_loss" else y  # of classes 0 and 1 there
        out = np.empty(1)
        own.loss(np.array([y]), np.array([predicted]), None, out)
        return out[0]

    for y in (-1.5, 0.2, 3.0) if is_regression else (-1.0, 1.0):
        for predicted in (-2.5, -0.5, 0.0, 0.15, 0.9, 4.0):
            found = _sgd._LOSSES[loss](y, predicted, estimator.epsilon)
            assert found == pytest.approx(expected(y, predicted), rel=1e-12)


@pytest.mark.parametrize("penalty", [None, "l2", "l1", "elasticnet"])
def test_objective(penalty: str | None) -> None:
    X, _ = rows()
    y = X @ np.arange(4.0)
    model = SGDRegressor(penalty=penalty, alpha=0.1, l1_ratio=0.3, max_iter=3, tol=None).fit(X, y)
    all_rows = Rows(X, y, None, [len(X)], 0, None, None, None)
    ranks = Ranks(ringdl.get_communicator())
    found = _sgd._objective(model, all_rows, ranks)
    ratio = {"l2": 0.0, "l1": 1.0, "elasticnet": 0.3}.get(penalty or "", 0.0)
    size = ratio * np.abs(model.coef_).sum() + (1 - ratio) * (model.coef_**2).sum() / 2
    expected = ((model.predict(X) - y) ** 2).mean() / 2 + (0.1 * size if penalty else 0.0)
    assert found == pytest.approx(expected, rel=1e-12)
