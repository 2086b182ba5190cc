"""What averaging gradients is told, under the names that MPI training scripts use."""

from __future__ import annotations

from typing import Any

import ringdl
from ringdl._joining import trains_at_own_pace
from ringdl._numbers import is_count
from ringdl.policies import AllReduce, Policy


def check_reduction(op: Any, predivisor: float, *others: Any) -> Any:
    """Refuse what gradients are not reduced with.

    Args:
        op: Average or Sum.
        predivisor: ``gradient_predivide_factor``.
        others: what `op` may be, too: Adasum.

    Returns:
        `op`.

    Raises:
        UsageError: it is another one; or the predivisor is no positive number, or not 1 although
            nothing is averaged.
    """
    if op not in (ringdl.Average, ringdl.Sum, *others):
        names = "Average, Sum or Adasum" if others else "Average or Sum"
        raise ringdl.UsageError(f"gradients are reduced with {names}, not {op}")
    if predivisor != 1.0 and (op != ringdl.Average or not predivisor > 0):
        raise ringdl.UsageError(
            f"gradient_predivide_factor={predivisor} with {op}: it is a positive number, and only "
            "averages are divided"
        )
    return op


def check_passes(passes: int) -> None:
    """Check ``backward_passes_per_step``.

    Raises:
        UsageError: it is no whole number, or not positive.
    """
    if not is_count(passes):
        raise ringdl.UsageError(f"backward_passes_per_step must be at least 1, not {passes!r}")


def check_policy(
    policy: Any, op: Any, wire: str | None, predivisor: float = 1.0, handed: bool = False
) -> Policy | None:
    """Refuse what does not go with a policy, which is going to be used.

    Args:
        policy: the argument.
        op: how gradients are reduced.
        wire: what they travel as, if not as they are.
        predivisor: ``gradient_predivide_factor``.
        handed: whether averages that the policy wants are made in a way of their own.

    Returns:
        The policy; None for `AllReduce`.

    Raises:
        UsageError: it is none, or says nothing of gradients, which other arguments are for.
    """
    if policy is None or isinstance(policy, AllReduce):
        return None
    if not isinstance(policy, Policy):
        raise ringdl.UsageError(f"policy is {policy!r}; pass one of ringdl.policies")
    if op != ringdl.Average:
        raise ringdl.UsageError(f"op={op} is for AllReduce(); {policy!r} averages by itself")
    if handed and policy.averages_gradients(0) and (wire is not None or predivisor != 1.0):
        raise ringdl.UsageError(
            f"{policy!r} averages gradients as they are here; leave out how they travel and are "
            "divided"
        )
    if not policy.averages_gradients(0):
        if wire is not None:
            raise ringdl.UsageError(
                f"compression is of gradients, and with {policy!r} none travel; leave it out"
            )
        if predivisor != 1.0:
            raise ringdl.UsageError(
                f"gradient_predivide_factor is for gradients, and with {policy!r} none are averaged"
            )
    if type(policy).leave is not Policy.leave:
        trains_at_own_pace(policy)
    return policy
