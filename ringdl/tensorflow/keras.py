"""Keras on ringdl, under the name that MPI training scripts for TensorFlow use: `ringdl.keras`."""

from ringdl.keras import *  # noqa: F403
