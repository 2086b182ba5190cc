"""Numbers that callers pass, Python's or NumPy's."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def is_count(value: Any, at_least: int = 1) -> bool:
    """Whether it is a whole number, and no smaller one."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= at_least


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0, and finite."""
    return isinstance(value, Real) and 0 < float(value) < math.inf
