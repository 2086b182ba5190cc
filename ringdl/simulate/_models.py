"""The gradients of models: how many elements each has, in the order of the model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from ringdl import _safetensors
from ringdl._errors import UsageError


def resnet50() -> list[int]:
    """He and others 2015, for 1,000 classes: 25.6 million."""
    counts = [7 * 7 * 3 * 64, 64, 64]
    inside = 64
    for blocks, planes in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            counts += [inside * planes, planes, planes]
            counts += [9 * planes * planes, planes, planes]
            counts += [planes * 4 * planes, 4 * planes, 4 * planes]
            if block == 0:
                counts += [inside * 4 * planes, 4 * planes, 4 * planes]
            inside = 4 * planes
    return [*counts, inside * 1000, 1000]


def vgg16() -> list[int]:
    """Simonyan and Zisserman 2014, for 1,000 classes: 138.4 million."""
    widths = (3, 64, 64, 128, 128, 256, 256, 256, *(6 * (512,)))
    counts: list[int] = []
    for inputs, outputs in itertools.pairwise(widths):
        counts += [9 * inputs * outputs, outputs]
    for inputs, outputs in ((7 * 7 * 512, 4096), (4096, 4096), (4096, 1000)):
        counts += [inputs * outputs, outputs]
    return counts


def gpt2() -> list[int]:
    """Radford and others 2019, the smallest: 124.4 million."""
    width = 768
    layer = [width, width, width * 3 * width, 3 * width, width * width, width]
    layer += [width, width, width * 4 * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width, *(12 * layer), width, width]


_MOST = 1 << 44
"""Elements that arrays have addresses for."""

MODELS = {"resnet50": resnet50, "vgg16": vgg16, "gpt2": gpt2}


def gradients_of(model: str) -> list[int]:
    """Elements of each gradient of a model.

    Args:
        model: one of `MODELS`; or a safetensors file, whose arrays are its parameters; or a JSON
            file, a list of numbers of elements.

    Raises:
        UsageError: it is none of these.
    """
    if model in MODELS:
        return MODELS[model]()
    file = Path(model)
    if not file.is_file():
        raise UsageError(
            f"--model {model}: there is no such file, and known are {', '.join(MODELS)}"
        )
    if file.suffix == ".safetensors":
        arrays, _ = _safetensors.map_file(file)
        counts = [array.size for array in arrays.values()]
    else:
        try:
            counts = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {model}: it is neither safetensors nor JSON") from error
    is_list = isinstance(counts, list) and all(type(n) is int and 0 <= n < _MOST for n in counts)
    if not is_list or not 0 < sum(counts) < _MOST:
        raise UsageError(f"--model {model}: write a list of numbers of elements, one per gradient")
    return counts
