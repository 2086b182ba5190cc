"""Equal parts of something."""

from __future__ import annotations


def split(size: int, parts: int, number: int) -> tuple[int, int]:
    """One of the parts of something, as equal as can be: from which on, and how many."""
    least, more = divmod(size, parts)
    return number * least + min(number, more), least + (number < more)
