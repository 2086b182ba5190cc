"""The estimator that fits another one on the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

import ringdl
from ringdl.sklearn._ranks import Ranks
from ringdl.sklearn._rows import agreed
from ringdl.sklearn._strategies import strategy_of


def _if_it_has(name: str) -> Callable[[Any], Any]:
    """Make a method available where the wrapped estimator has one of this name."""
    return available_if(lambda self: hasattr(self.estimator, name))  # type: ignore[no-any-return]


def _of_rows(method: Callable[[Any], Any], X: Any) -> Any:
    """What it returns; of no rows, which scikit-learn refuses, nothing."""
    if getattr(X, "shape", (1,))[0] > 0:
        return method(X)
    row = np.zeros((1, X.shape[1]), getattr(X, "dtype", np.float64))
    return method(type(X)(row, columns=X.columns) if hasattr(X, "columns") else row)[:0]


class DistributedEstimator(MetaEstimatorMixin, BaseEstimator):
    """Fits a scikit-learn estimator on the rows of all ranks; each passes its own.

    ``fit`` and ``partial_fit`` are collective, and afterwards the model is the same on all ranks,
    bit by bit. All other methods are the model's own: they take what this rank passes, and do not
    communicate.

    Least squares, components, means and variances, clusters and the gradients of perceptrons are
    computed of all ranks' rows: the model is the one that scikit-learn finds where all rows are
    in one process, but for rounding. `SGDClassifier`, `SGDRegressor` and `Perceptron` are averaged
    after each epoch. Ranks may have different numbers of rows, and some none (``X[:0]``).

    Args:
        estimator: an instance of LinearRegression, Ridge, PCA, StandardScaler, GaussianNB,
            MiniBatchKMeans, MLPClassifier, MLPRegressor, SGDClassifier, SGDRegressor or
            Perceptron; the same on all ranks, but for ``random_state``. It is cloned, not changed.
        communicator: by default the one of `ringdl.init`. Pickles are without it.

    Attributes:
        estimator_: the fitted model, which pickles and predicts without ringdl. Its public
            attributes (``coef_``, ``classes_``, ``n_features_in_``, ...) are this one's, too.

    Example:
        >>> model = DistributedEstimator(MLPClassifier()).fit(X, y)
    """

    def __init__(self, estimator: Any, *, communicator: ringdl.Communicator | None = None) -> None:
        self.estimator = estimator
        self.communicator = communicator

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> DistributedEstimator:
        """Fit the model. Collective.

        Args:
            X: this rank's rows, as the estimator takes them.
            y: their targets, if it takes some.
            sample_weight: their weights, if it takes some; ranks without count each row once.

        Raises:
            ValueError: what scikit-learn raises, on the rank that passes what it refuses.
            MismatchError: on the other ranks then; on all, if the columns, the shape of y or the
                parameters differ.
            UsageError: an estimator or a parameter that is not supported, or before `ringdl.init`.
        """
        self._fit((X, y, sample_weight), None, is_partial=False)
        return self

    @_if_it_has("partial_fit")
    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None
    ) -> DistributedEstimator:
        """Go on fitting with more rows. Collective; see `fit`.

        Args:
            X: this rank's rows.
            y: their targets, if it takes some.
            classes: for classifiers, in the first call: all labels, of all ranks and calls.
            sample_weight: their weights, if it takes some.
        """
        self._fit((X, y, sample_weight), classes, is_partial=True)
        return self

    def _fit(self, given: tuple[Any, Any, Any], classes: Any, is_partial: bool) -> None:
        ranks = self._ranks_of_communicator()
        with ranks.telling():
            strategy = strategy_of(self.estimator)
            fitted = self._to_fit(is_partial)
        rows = agreed(ranks, strategy, fitted, given, classes, is_partial)
        call = strategy.partial_fit if is_partial else strategy.fit
        assert call is not None
        with rows.without_names(fitted):
            call(fitted, rows, ranks)
        self.estimator_ = fitted
        if not is_partial:
            del self._ranks  # and the memory of gradients

    def _to_fit(self, is_partial: bool) -> Any:
        """A new estimator; or the one that goes on, with the parameters that it has by now."""
        fitted = vars(self).get("estimator_")
        if fitted is None or not (is_partial or getattr(self.estimator, "warm_start", False)):
            return clone(self.estimator)
        return fitted.set_params(**self.estimator.get_params(deep=False))

    def _ranks_of_communicator(self) -> Ranks:
        its = ringdl.get_communicator() if self.communicator is None else self.communicator
        if not isinstance(its, ringdl.Communicator):
            raise ringdl.UsageError(
                f"communicator is {its!r}; pass one of ringdl.get_communicator().group()"
            )
        kept: Ranks | None = vars(self).get("_ranks")
        if kept is None or kept.communicator is not its:
            kept = self._ranks = Ranks(its)
        return kept

    @_if_it_has("transform")
    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit the model on all ranks' rows, and transform this rank's. Collective."""
        return _of_rows(self.fit(X, y, sample_weight).transform, X)

    @_if_it_has("fit_predict")
    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit the model on all ranks' rows, and predict for this rank's. Collective."""
        return _of_rows(self.fit(X, y, sample_weight).predict, X)

    @_if_it_has("predict")
    def predict(self, X: Any) -> Any:
        """The model's predictions."""
        return self._fitted().predict(X)

    @_if_it_has("predict_proba")
    def predict_proba(self, X: Any) -> Any:
        """The model's probabilities of classes."""
        return self._fitted().predict_proba(X)

    @_if_it_has("predict_log_proba")
    def predict_log_proba(self, X: Any) -> Any:
        """Their logarithms."""
        return self._fitted().predict_log_proba(X)

    @_if_it_has("decision_function")
    def decision_function(self, X: Any) -> Any:
        """The model's confidences."""
        return self._fitted().decision_function(X)

    @_if_it_has("transform")
    def transform(self, X: Any) -> Any:
        """The rows as the model transforms them."""
        return self._fitted().transform(X)

    @_if_it_has("inverse_transform")
    def inverse_transform(self, X: Any) -> Any:
        """The rows of which these are the transforms."""
        return self._fitted().inverse_transform(X)

    @_if_it_has("score")
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The model's score on these rows: this rank's alone."""
        its = {} if sample_weight is None else {"sample_weight": sample_weight}
        return self._fitted().score(X, y, **its)  # type: ignore[no-any-return]

    @_if_it_has("score_samples")
    def score_samples(self, X: Any) -> Any:
        """The model's score of each row."""
        return self._fitted().score_samples(X)

    @_if_it_has("get_feature_names_out")
    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """The names of the features that the model makes."""
        return self._fitted().get_feature_names_out(input_features)

    @_if_it_has("set_output")
    def set_output(self, *, transform: str | None = None) -> DistributedEstimator:
        """Say what container ``transform`` is to return, as in scikit-learn."""
        for each in (self.estimator, vars(self).get("estimator_")):
            if each is not None:
                each.set_output(transform=transform)
        return self

    def _fitted(self) -> Any:
        check_is_fitted(self)
        return self.estimator_

    def __getattr__(self, name: str) -> Any:
        """The public attributes that the model has since it was fitted."""
        is_fitted_attribute = name.endswith("_") and not name.startswith("_")
        if is_fitted_attribute and "estimator_" in vars(self):
            return getattr(self.estimator_, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__(), communicator=None)
        state.pop("_ranks", None)
        return state

    def __sklearn_tags__(self) -> Any:
        tags = get_tags(self.estimator)
        tags.array_api_support = False
        return tags
