"""scikit-learn's estimators, fitted on the rows of all ranks.

import ringdl, ringdl.sklearn
from sklearn.neural_network import MLPClassifier

ringdl.init()
model = ringdl.sklearn.DistributedEstimator(MLPClassifier())
model.fit(X, y)                 # this rank's rows; the model is the same on all ranks
model.estimator_                # it, as scikit-learn knows it
"""

from ringdl.sklearn._estimator import DistributedEstimator

__all__ = ["DistributedEstimator"]
