"""Linear least squares: scikit-learn solves for the triangular factor of all ranks' rows.

The problem's solutions are the same: the squared errors of any coefficients differ by a constant.
So whatever scikit-learn has (penalties per target, positive coefficients, each solver) is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone

from ringdl.sklearn._factor import factorized
from ringdl.sklearn._ranks import Ranks
from ringdl.sklearn._rows import Rows, Strategy, set_fitted

_SOLVED = ("coef_", "rank_", "singular_", "n_iter_", "solver_")


def _fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    means, factor = factorized(rows, ranks, estimator.fit_intercept)
    features = rows.X.shape[1]

    def solved() -> dict[str, Any]:
        small = clone(estimator).set_params(fit_intercept=False)
        small.fit(factor[:, :features], factor[:, features:].reshape(-1, *rows.y.shape[1:]))
        its = {name: getattr(small, name) for name in _SOLVED if hasattr(small, name)}
        its["intercept_"] = 0.0
        if estimator.fit_intercept:
            intercept = means[features:] - small.coef_ @ means[:features]
            its["intercept_"] = intercept.reshape(rows.y.shape[1:])[()]
        return its

    set_fitted(estimator, ranks.from_rank_0(solved), rows)


LINEAR = Strategy(
    fit=_fit,
    x_checks={"accept_sparse": "csr", "dtype": [np.float64, np.float32]},
    y_checks={"multi_output": True, "y_numeric": True},
    refuses_negative_weights=True,
)
