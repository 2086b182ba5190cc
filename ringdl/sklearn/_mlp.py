"""Multi-layer perceptrons: scikit-learn's training loop, with gradients summed over the ranks.

Each rank runs the loop on its own rows, and its share of a batch is proportional to these. The
class of the estimator is another one meanwhile, whose methods make the steps those of one process
that has all rows: they sum gradients and losses in `ringdl.Buckets`, layer by layer while the
backward pass goes on. So solvers, learning rates and early stopping are scikit-learn's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.neural_network._multilayer_perceptron import BaseMultilayerPerceptron
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import column_or_1d
from sklearn.utils.extmath import safe_sparse_dot

import ringdl
from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows, Strategy, changed


class _Steps:
    """The steps of one epoch, on this rank.

    Attributes:
        count: how many an epoch has, the same on all ranks.
        batch_size: this rank's rows of each.
        done: how many there were in this epoch.
    """

    def __init__(self, estimator: Any, rows: Rows, ranks: Ranks) -> None:
        self.rows, self.ranks = rows, ranks
        held_out = estimator.validation_fraction if estimator.early_stopping else 0.0
        trained = [count - math.ceil(held_out * count) for count in rows.counts]
        self.row_count = sum(trained)
        wanted = 200 if estimator.batch_size == "auto" else estimator.batch_size
        batch_size = min(wanted, self.row_count)
        self.count = -(-self.row_count // batch_size)
        self.own_row_count = max(1, trained[ranks.rank] if rows.X.shape[0] > 0 else 0)
        self.batch_size = -(-self.own_row_count * batch_size // self.row_count)
        self.buckets: ringdl.Buckets | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.done, self.loss = 0, 0.0
        self.seen = 0.0
        """Rows that were trained on; a rank whose rows have no weight has none."""

    def allocate(self, coefs: list[Array], intercepts: list[Array]) -> None:
        """Make the memory in which gradients are summed. Collective."""
        specs: list[tuple[str, tuple[int, ...], str]] = [("loss", (4,), "float64")]
        for layer, pair in enumerate(zip(coefs, intercepts, strict=True)):
            for name, array in zip(("coefs", "intercepts"), pair, strict=True):
                specs.append((f"{name} {layer}", array.shape, array.dtype.name))
        self.buckets = self.ranks.buckets(specs)
        self.summed, *gradients = self.buckets.views()
        self.coefs, self.intercepts = gradients[::2], gradients[1::2]

    def end(self, loss: float, weight: float, rows: int, problem: str | None = None) -> float:
        """End a step: the gradients become sums over all ranks. Collective.

        Args:
            loss: the sum of this rank's losses.
            weight: the sum of this rank's weights.
            rows: how many rows this rank has had.
            problem: why it cannot go on.

        Returns:
            The sum of all weights.

        Raises:
            MismatchError: a rank cannot go on.
        """
        assert self.buckets is not None
        self.summed[:] = loss, weight, rows, problem is not None
        self.buckets.ready(0)
        self.buckets.wait()
        if self.summed[3] > 0:
            problems = self.ranks.gathered(lambda: problem)
            rank = next(rank for rank, text in enumerate(problems) if text is not None)
            raise ringdl.MismatchError(f"rank {rank} cannot go on fitting: {problems[rank]}")
        return float(self.summed[1]) or 1.0

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, which wait for gradients, of this one's error."""
        if self.buckets is not None and not isinstance(error, ringdl.Error):
            with suppress(ringdl.Error):
                self.end(0.0, 0.0, 0, problem=str(error))


class _Together(BaseMultilayerPerceptron):
    """What scikit-learn calls on the estimator while it fits: the same, over all ranks."""

    _steps: _Steps
    classes_: Array
    _random_state: np.random.RandomState

    def _validate_input(self, X: Any, y: Any, incremental: bool, reset: bool) -> tuple[Any, Any]:
        del reset
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        if not is_classifier(self):
            return X, y
        classes, labels = self._steps.rows.classes, self._steps.rows.labels
        assert classes is not None
        assert labels is not None
        if not (hasattr(self, "classes_") and (self.warm_start or incremental)):
            self._label_binarizer = LabelBinarizer().fit(classes if y.ndim == 1 else y)
            self.classes_ = self._label_binarizer.classes_
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown) > 0:
            raise ValueError(f"y has the classes {unknown} on some rank, and not {self.classes_}")
        return X, self._label_binarizer.transform(y).astype(bool)

    def _initialize(self, *arguments: Any) -> None:
        super()._initialize(*arguments)
        for array in (*self.coefs_, *self.intercepts_):
            self._steps.ranks.communicator.broadcast_(array)
        self._best_coefs = [array.copy() for array in self.coefs_]
        self._best_intercepts = [array.copy() for array in self.intercepts_]

    def _fit_lbfgs(self, *arguments: Any) -> None:
        self._steps.allocate(self.coefs_, self.intercepts_)
        super()._fit_lbfgs(*arguments)

    def _fit_stochastic(self, *arguments: Any) -> None:
        steps = self._steps
        steps.allocate(self.coefs_, self.intercepts_)
        if steps.ranks.size > 1:
            seed = self._random_state.randint(np.iinfo(np.int32).max)
            self._random_state = np.random.RandomState([seed, steps.ranks.rank])
        super()._fit_stochastic(*arguments)
        if steps.done > 0:  # scikit-learn ends an epoch there, without the others
            raise KeyboardInterrupt

    def _backprop(
        self, X: Any, y: Any, sample_weight: Any, *arguments: Any
    ) -> tuple[float, list[Array], list[Array]]:
        loss, rows = 0.0, 0 if self._steps.rows.X.shape[0] == 0 else X.shape[0]
        weight = float(rows if sample_weight is None or rows == 0 else sample_weight.sum())
        if rows > 0 and weight > 0:
            mean, *_ = super()._backprop(X, y, sample_weight, *arguments)
            loss = mean * weight - self._penalty()
        return self._step(loss, weight, rows)

    def _compute_loss_grad(
        self, layer: int, _: Any, activations: Any, deltas: Any, *gradients: Any
    ) -> None:
        del gradients
        steps = self._steps
        assert steps.buckets is not None
        if sparse.issparse(activations[layer]):
            steps.coefs[layer][...] = safe_sparse_dot(activations[layer].T, deltas[layer])
        else:
            np.matmul(activations[layer].T, deltas[layer], out=steps.coefs[layer])
        steps.buckets.ready(1 + 2 * layer)
        np.sum(deltas[layer], axis=0, out=steps.intercepts[layer])
        steps.buckets.ready(2 + 2 * layer)

    def _step(
        self, loss: float, weight: float, rows: int
    ) -> tuple[float, list[Array], list[Array]]:
        """The mean loss and the gradients of all ranks' rows. Collective."""
        steps = self._steps
        if steps.ranks.rank == 0:
            loss += self._penalty()
        total = steps.end(loss, weight, rows)
        for gradient, coef in zip(steps.coefs, self.coefs_, strict=True):
            gradient += self.alpha * coef
            gradient /= total
        for gradient in steps.intercepts:
            gradient /= total
        mean = float(steps.summed[0]) / total
        steps.loss += mean * float(steps.summed[2])
        steps.seen += float(steps.summed[2])
        steps.done += 1
        return mean, [*steps.coefs], [*steps.intercepts]

    def _penalty(self) -> float:
        squares = sum(np.dot(coef.ravel(), coef.ravel()) for coef in self.coefs_)
        return 0.5 * float(self.alpha * squares)

    def _update_no_improvement_count(self, *arguments: Any) -> None:
        """At the end of an epoch: for the steps that others have left, with nothing to add."""
        steps = self._steps
        while steps.done < steps.count:
            _, coefs, intercepts = self._step(0.0, 0.0, 0)
            self._optimizer.update_params(self.coefs_ + self.intercepts_, coefs + intercepts)
        self.loss_ = self.loss_curve_[-1] = steps.loss / (steps.seen or 1.0)
        self.t_ += steps.row_count - steps.own_row_count
        steps.begin_epoch()
        super()._update_no_improvement_count(*arguments)

    def _score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Of the rows that all ranks hold out."""
        every = self._steps.ranks.gathered(
            lambda: (y, self._predict(X, check_input=False), sample_weight)
        )
        targets, predicted = (np.concatenate([each[part] for each in every]) for part in (0, 1))
        if sample_weight is not None:
            sample_weight = np.concatenate([each[2] for each in every])
        if predicted.dtype.kind == "f" and not np.isfinite(predicted).all():
            return math.nan
        score = accuracy_score if is_classifier(self) else r2_score
        return float(score(targets, predicted, sample_weight=sample_weight))


class _TogetherClassifier(_Together, MLPClassifier):
    pass


class _TogetherRegressor(_Together, MLPRegressor):
    pass


_TOGETHER = {MLPClassifier: _TogetherClassifier, MLPRegressor: _TogetherRegressor}


def _train(estimator: Any, rows: Rows, ranks: Ranks, call: Callable[..., Any]) -> None:
    rows = rows.without_weightless()
    if estimator.early_stopping:
        counts = ranks.gathered(lambda: rows.X.shape[0])
        if 0 in counts:
            raise ringdl.UsageError(
                f"early_stopping holds out some rows of each rank, and rank {counts.index(0)} has "
                "none with a weight; give it some, or pass early_stopping=False"
            )
    steps = _Steps(estimator, rows, ranks)
    plain = type(estimator)
    verbose = estimator.verbose if ranks.rank == 0 else False
    try:
        with changed(estimator, batch_size=steps.batch_size, verbose=verbose):
            estimator.__class__ = _TOGETHER[plain]
            estimator._steps = steps
            X, y, weights = rows.padded()
            call(X, y, sample_weight=weights)
    except Exception as error:
        steps.fail(error)
        raise
    finally:
        estimator.__class__ = plain
        vars(estimator).pop("_steps", None)


def _fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    _train(estimator, rows, ranks, lambda *own, **how: estimator.fit(*own, **how))


def _partial_fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    its = {} if rows.classes is None else {"classes": rows.classes}
    _train(estimator, rows, ranks, lambda *own, **how: estimator.partial_fit(*own, **how, **its))


CLASSIFIER = Strategy(
    fit=_fit,
    partial_fit=_partial_fit,
    x_checks={"accept_sparse": "csr", "dtype": [np.float64, np.float32]},
    y_checks={"multi_output": True},
)
REGRESSOR = replace(CLASSIFIER, y_checks={"multi_output": True, "y_numeric": True})
