"""ringdl.sklearn: errors of one rank, ranks that differ, and what is refused."""

from __future__ import annotations

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import (
    LogisticRegression,
    Perceptron,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl import Communicator
from ringdl.sklearn import DistributedEstimator
from tests.ranks._sklearn_models import (
    features,
    labels,
    targets,
)
from tests.ranks.support import expect, needs


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
    with expect(ValueError, "y has the classes [2] on some rank, and not [0 1]"):
        own = np.where(y == 2, 2 if comm.rank == 0 else 1, y)
        DistributedEstimator(MLPClassifier((3,))).partial_fit(X, own, classes=[0, 1])
    with expect(ringdl.UsageError, "StandardScaler takes no classes; pass sample_weight by"):
        DistributedEstimator(StandardScaler()).partial_fit(X, None, np.ones(30))
    with expect(ValueError, "mle' needs 7 rows at least", f"all ranks have {comm.size}"):
        DistributedEstimator(PCA("mle")).fit(X[:1])
    with expect(ValueError, "none of" if comm.size > 1 else "0 sample(s)"):
        DistributedEstimator(Ridge()).fit(X[:0], y[:0])
    if comm.size > 1:
        with expect(ringdl.UsageError, "early_stopping is for one rank"):
            DistributedEstimator(SGDClassifier(early_stopping=True)).fit(X, y)
        part = slice(0, None if comm.rank == 0 else 0)
        with expect(
            ringdl.UsageError, "holds out some rows of each rank, and rank 1 has none with a weight"
        ):
            DistributedEstimator(MLPClassifier(early_stopping=True)).fit(X[part], y[part])
    ringdl.shutdown()
    with expect(ringdl.UsageError, "init()"):
        DistributedEstimator(Ridge()).fit(X, y)
    ringdl.init()
