"""DistributedOptimizer to a type checker.

What it returns is of the optimizer's own class, and a WrappedOptimizer. For classes that are not of
torch.optim only the former can be said.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch

import ringdl
from ringdl._training.compression import AnyCompression
from ringdl._training.process_sets import AnySet
from ringdl.policies import Policy
from ringdl.torch._wrapped import Wrapped as WrappedOptimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
AnyWrapped = TypeVar("AnyWrapped", bound=WrappedOptimizer)
_Named = Iterable[tuple[str, torch.Tensor]]

class Options(TypedDict, total=False):
    compression: AnyCompression
    backward_passes_per_step: int
    op: ringdl.Reduction | ringdl.AdasumOp
    gradient_predivide_factor: float
    num_groups: int
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: AnySet
    check_replicas: bool
    policy: Policy | None

class WrappedAdadelta(WrappedOptimizer, torch.optim.Adadelta): ...
class WrappedAdafactor(WrappedOptimizer, torch.optim.Adafactor): ...
class WrappedAdagrad(WrappedOptimizer, torch.optim.Adagrad): ...
class WrappedAdamW(WrappedOptimizer, torch.optim.AdamW): ...
class WrappedAdam(WrappedOptimizer, torch.optim.Adam): ...
class WrappedAdamax(WrappedOptimizer, torch.optim.Adamax): ...
class WrappedASGD(WrappedOptimizer, torch.optim.ASGD): ...
class WrappedLBFGS(WrappedOptimizer, torch.optim.LBFGS): ...
class WrappedMuon(WrappedOptimizer, torch.optim.Muon): ...
class WrappedNAdam(WrappedOptimizer, torch.optim.NAdam): ...
class WrappedRAdam(WrappedOptimizer, torch.optim.RAdam): ...
class WrappedRMSprop(WrappedOptimizer, torch.optim.RMSprop): ...
class WrappedRprop(WrappedOptimizer, torch.optim.Rprop): ...
class WrappedSparseAdam(WrappedOptimizer, torch.optim.SparseAdam): ...
class WrappedSGD(WrappedOptimizer, torch.optim.SGD): ...

@overload
def DistributedOptimizer(
    optimizer: AnyWrapped,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> AnyWrapped: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adadelta,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdadelta: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adafactor,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdafactor: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adagrad,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdagrad: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.AdamW,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdamW: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adam,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdam: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Adamax,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedAdamax: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.ASGD,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedASGD: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.LBFGS,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedLBFGS: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Muon,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedMuon: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.NAdam,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedNAdam: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.RAdam,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedRAdam: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.RMSprop,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedRMSprop: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.Rprop,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedRprop: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.SparseAdam,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedSparseAdam: ...
@overload
def DistributedOptimizer(
    optimizer: torch.optim.SGD,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> WrappedSGD: ...
@overload
def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: _Named | None = None,
    *more: Any,
    **options: Unpack[Options],
) -> AnyOptimizer: ...
