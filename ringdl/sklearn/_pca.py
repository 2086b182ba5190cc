"""Principal components: the singular values of the triangular factor of all ranks' rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.decomposition._pca import _infer_dimension
from sklearn.utils.extmath import svd_flip

import ringdl
from ringdl.sklearn._factor import factorized
from ringdl.sklearn._ranks import Array, Ranks
from ringdl.sklearn._rows import Rows, Strategy, set_fitted


def _fit(estimator: Any, rows: Rows, ranks: Ranks) -> None:
    most = min(rows.total, rows.X.shape[1])
    wanted = most if estimator.n_components is None else estimator.n_components
    if estimator.svd_solver not in ("auto", "full", "covariance_eigh"):
        raise ringdl.UsageError(
            f"svd_solver is {estimator.svd_solver!r}, which approximates; over ranks components "
            "are exact: pass svd_solver='full'"
        )
    if wanted == "mle":
        if rows.total < rows.X.shape[1]:
            raise ValueError(
                f"n_components='mle' needs {rows.X.shape[1]} rows at least, as many as there are "
                f"features; all ranks have {rows.total}"
            )
    elif wanted > most:
        raise ValueError(
            f"n_components={wanted} is more than {most}, the smaller number of all ranks' rows and "
            "of features"
        )
    means, factor = factorized(rows, ranks, is_centred=True)
    its = ranks.from_rank_0(lambda: _decomposed(factor, rows.total, wanted))
    set_fitted(estimator, {"mean_": means, **its}, rows)


def _decomposed(factor: Array, row_count: int, wanted: int | float | str) -> dict[str, Any]:
    """The attributes of a `PCA`, but for the means, from the factor of its centred rows."""
    _, singular, components = np.linalg.svd(factor, full_matrices=False)
    _, components = svd_flip(None, components, u_based_decision=False)
    variances = singular**2 / (row_count - 1)
    ratios = variances / variances.sum()
    if wanted == "mle":
        count = int(_infer_dimension(variances, row_count))
    elif isinstance(wanted, float) and wanted < 1:
        count = int(np.searchsorted(np.cumsum(ratios), wanted, side="right")) + 1
    else:
        count = int(wanted)
    return {
        "n_samples_": row_count,
        "n_components_": count,
        "components_": components[:count].copy(),
        "explained_variance_": variances[:count].copy(),
        "explained_variance_ratio_": ratios[:count].copy(),
        "singular_values_": singular[:count].copy(),
        "noise_variance_": variances[count:].mean() if count < len(variances) else 0.0,
    }


COMPONENTS = Strategy(
    fit=_fit, x_checks={"accept_sparse": "csr", "dtype": [np.float64, np.float32]}
)
