"""Which estimators there are, and how each is fitted."""

from __future__ import annotations

from typing import Any

from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, Perceptron, Ridge, SGDClassifier, SGDRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl.sklearn._kmeans import KMEANS
from ringdl.sklearn._linear import LINEAR
from ringdl.sklearn._mlp import CLASSIFIER, REGRESSOR
from ringdl.sklearn._moments import NAIVE_BAYES, SCALER
from ringdl.sklearn._pca import COMPONENTS
from ringdl.sklearn._rows import Strategy
from ringdl.sklearn._sgd import SGD

_STRATEGIES: dict[type, Strategy] = {
    LinearRegression: LINEAR,
    Ridge: LINEAR,
    PCA: COMPONENTS,
    StandardScaler: SCALER,
    GaussianNB: NAIVE_BAYES,
    MiniBatchKMeans: KMEANS,
    MLPClassifier: CLASSIFIER,
    MLPRegressor: REGRESSOR,
    SGDClassifier: SGD,
    SGDRegressor: SGD,
    Perceptron: SGD,
}


def strategy_of(estimator: Any) -> Strategy:
    """How an estimator is fitted: by its very class, as a subclass may fit otherwise.

    Raises:
        UsageError: there is no way.
    """
    strategy = _STRATEGIES.get(type(estimator))
    if strategy is None:
        known = ", ".join(sorted(each.__name__ for each in _STRATEGIES))
        raise ringdl.UsageError(
            f"DistributedEstimator cannot fit {estimator!r} on the rows of several ranks; pass an "
            f"instance of {known}"
        )
    return strategy
