"""A pipeline of scikit-learn's learns handwritten digits: it scales, reduces and classifies.

    python examples/sklearn_digits.py                       # alone; no MPI needed
    ringdl run -n 2 examples/sklearn_digits.py

What makes the script for one machine distributed: ``ringdl.init``, ``DistributedEstimator`` around
each step of the pipeline, and each rank's part of the rows (``[rank::size]``).
Needs scikit-learn; its data (1,797 images of 8 x 8) come with it.
"""

import argparse
import hashlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ringdl
from ringdl.sklearn import DistributedEstimator


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--components", type=int, default=40, help="of the images")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % 5 == 4
    mine = np.flatnonzero(~is_test)[rank::size]

    network = MLPClassifier(
        (256, 128),
        batch_size=arguments.batch,
        max_iter=arguments.epochs,
        random_state=arguments.seed,
        verbose=True,
    )
    model = make_pipeline(
        DistributedEstimator(StandardScaler()),
        DistributedEstimator(PCA(arguments.components)),
        DistributedEstimator(network),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # all epochs are wanted
        model.fit(images[mine], labels[mine])

    accuracy = model.score(images[is_test], labels[is_test])
    scaler, reducer, classifier = (step.estimator_ for step in model.named_steps.values())
    arrays = [scaler.mean_, scaler.scale_, reducer.components_]
    arrays += classifier.coefs_ + classifier.intercepts_
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()[:8]
    digests = ringdl.allgather(np.frombuffer(digest, np.uint8)[None].copy())
    are_equal = bool((digests == digests[0]).all())
    if rank == 0:
        print(f"test accuracy {accuracy:.3f}")
        ranks = f"all {size} ranks hold" if size > 1 else "the only rank holds"
        print(f"{ranks} the same bits: {digest.hex()}" if are_equal else "the ranks' bits differ")
        if arguments.json:
            summary = {"accuracy": accuracy, "ranks": size, "digest": digest.hex()}
            arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
