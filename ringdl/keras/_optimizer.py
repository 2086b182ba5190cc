"""DistributedOptimizer: a Keras optimizer that applies gradients averaged over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import keras

import ringdl
from ringdl._reductions import Op
from ringdl._training.compression import AnyCompression, Compression, wire_of
from ringdl._training.options import check_passes, check_policy, check_reduction
from ringdl._training.process_sets import (
    AnySet,
    ProcessSet,
    communicator_of,
    global_process_set,
)
from ringdl.keras._averaging import Averaging, Options, make_averaging
from ringdl.keras._policies import Followed
from ringdl.policies import ParameterServer, Policy
from ringdl.policies._server import check_options

_BY_OPTIMIZER = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm")
"""What an optimizer does to gradients and parameters by itself."""

_METHODS = ("apply", "apply_gradients", "stateless_apply", "register_local_var")
"""Those that a wrapped optimizer has of its own."""


def DistributedOptimizer(  # noqa: N802 (the name that training scripts use)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = ringdl.Average,
    *,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: AnySet = global_process_set,
    scale_local_gradients: bool = True,
    policy: Policy | None = None,
) -> Any:
    """Make a Keras optimizer average its gradients over all ranks, in ``fit`` and outside.

    Returns the same object (under the policy mixed_float16 in a LossScaleOptimizer, as ``compile``
    would make one: all ranks have to find alike whether gradients are finite). Its class and its
    configuration stay, so models are saved as ever, and load without ringdl. The first gradients
    make all ranks agree on names, shapes and dtypes, and are the time at which replicas that differ
    are found. Gradients that are missing on some ranks count as zeros there on PyTorch, and on
    TensorFlow run eagerly; else they are an error on all ranks.

    Args:
        optimizer: one of Keras 3, on any of its backends, or of tf_keras (Keras 2). One that was
            wrapped is wrapped anew.
        name: accepted, but without effect, like `device_dense`, `device_sparse`, `num_groups` and
            `groups`: the buckets decide which gradients travel together.
        device_dense: see `name`.
        device_sparse: see `name`.
        compression: ``Compression.fp16`` or ``.bf16``: what float32 gradients travel as between
            hosts.
        sparse_as_dense: average sparse gradients (of embeddings) as dense ones.
        gradient_predivide_factor: gradients are divided by it before they are summed, and the
            averages multiplied by it. For Average.
        op: Average or Sum.
        num_groups: see `name`.
        groups: see `name`.
        backward_passes_per_step: apply the gradients of so many steps at once, as Keras' own
            ``gradient_accumulation_steps`` does, which has to be unset or the same.
        average_aggregated_gradients: over these steps take the average, not the sum.
        process_set: whose ranks average. On a rank that is not in it nothing is averaged.
        scale_local_gradients: of variables that are kept local (`PartialDistributedOptimizer`):
            divide their gradients by the number of ranks, as averages are.
        policy: when ranks exchange what: one of `ringdl.policies`, by default ``AllReduce()``, all
            that is said above. Of Keras 3; it counts calls of ``apply``.

    Raises:
        UsageError: no optimizer of Keras, or another argument is wrong; other ranks get a
            MismatchError with the first gradients.
    """
    is_alone = isinstance(process_set, ProcessSet) and process_set.included() is False
    is_legacy = _is_legacy(optimizer)
    if not (is_legacy or isinstance(optimizer, keras.optimizers.Optimizer)):
        raise ringdl.UsageError(
            f"ringdl.keras.DistributedOptimizer wraps an optimizer of Keras 3, not a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    reduction = check_reduction(op, gradient_predivide_factor)
    check_passes(backward_passes_per_step)
    unwrap(optimizer)
    scale = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (is_scaled or is_legacy) and keras.config.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    chosen = check_policy(
        policy, reduction, wire_of(compression), gradient_predivide_factor, handed=True
    )
    if chosen is not None:
        _refuse_with(chosen, optimizer, is_legacy)
    options = Options(
        reduction, compression, gradient_predivide_factor, sparse_as_dense, process_set
    )
    optimizer._ringdl_wrapped = Wrapped(
        optimizer, None if is_alone else options, scale, scale_local_gradients
    )
    followed = None
    if chosen is not None and not is_alone:
        followed = Followed(chosen, communicator_of(process_set))
    optimizer._ringdl_wrapped.followed = followed
    optimizer._ringdl_following = None if followed is None else _Synchronized(optimizer, followed)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """The same, where the variables of some layers are kept local: each rank trains its own.

    Args:
        optimizer: see `DistributedOptimizer`, as for all others.
        args: see `DistributedOptimizer`.
        local_layers: a layer or several.
        kwargs: see `DistributedOptimizer`.
    """
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers if local_layers is not None else ():
        if not layer.built:
            raise ringdl.UsageError(
                f"the local layer {layer.name!r} has no variables yet; build the model first"
            )
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


class Wrapped:
    """Averages gradients before an optimizer applies them.

    Args:
        optimizer: gets methods of its own, which call this before those of its class.
        options: None on a rank that averages nothing.
        scale: of averages, before they are applied.
        scales_local: whether gradients of local variables are divided by the number of ranks.
    """

    def __init__(
        self, optimizer: Any, options: Options | None, scale: float, scales_local: bool
    ) -> None:
        self._options = options
        self._scale = scale
        self._scales_local = scales_local
        self.followed: Followed | None = None
        """Says what ranks exchange, if that is not gradients in each step."""
        self.expects_broadcast = False
        """Whether replicas become equal after the first step."""
        self._local: set[int] = set()
        self._averaging: Averaging | None = None
        self._epoch = 0
        """Of the ranks that it was agreed with."""
        self._variables: list[Any] = []
        """Those of the first step, but for local ones."""
        self._places: dict[int, int] = {}
        """By id: where each of them is."""
        bare, its = type(optimizer), weakref.ref(optimizer)  # it goes when the model drops it
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        is_scaled = inner is not optimizer
        self._couples = "a LossScaleOptimizer" if is_scaled else ""
        if getattr(inner, "global_clipnorm", None):
            self._couples = "global_clipnorm"
        self._backend = "tensorflow" if _is_legacy(optimizer) else keras.backend.backend()

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            gradients, variables = zip(*grads_and_vars, strict=True)
            averages = self._averaged([*gradients], [*variables])
            pairs = zip(averages, variables, strict=True)
            return bare.apply_gradients(its(), pairs, *args, **kwargs)

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            optimizer: Any = its()
            if len(grads) == 0 or (trainable_variables is None and not optimizer.built):
                bare.apply(optimizer, grads, trainable_variables)
                return
            given = trainable_variables
            known = optimizer._trainable_variables if given is None else [*given]
            if self.followed is not None:
                passed = None if given is None else known
                self.followed.apply(
                    optimizer, [*grads], known, lambda used: bare.apply(optimizer, used, passed)
                )
                return
            bare.apply(optimizer, self._averaged([*grads], known), None if given is None else known)
            self._finish()

        def stateless_apply(variables: Any, grads: Any, trainable_variables: Any) -> Any:
            optimizer: Any = its()
            known = optimizer._trainable_variables
            averages = self._averaged([*grads], known, trainable_variables)
            result = bare.stateless_apply(optimizer, variables, averages, trainable_variables)
            self._finish()
            return result

        if _is_legacy(optimizer):
            optimizer.apply_gradients = apply_gradients
        else:
            optimizer.apply = apply
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.stateless_apply = stateless_apply  # others' calls apply
        optimizer.register_local_var = self.register_local_var

    def register_local_var(self, var: Any) -> None:
        """Do not average the gradients of a variable: each rank trains its own.

        Raises:
            UsageError: all variables are clipped or scaled together.
        """
        if self.followed is not None:
            raise ringdl.UsageError("with a policy all variables are exchanged; none can be local")
        if self._couples:
            raise ringdl.UsageError(
                f"variables cannot be local with {self._couples}, by which local gradients would "
                "change those that all ranks share"
            )
        self._local.add(id(var))

    def _averaged(
        self, gradients: list[Any], variables: list[Any], values: Sequence[Any] | None = None
    ) -> list[Any]:
        if self._options is None:
            return gradients
        ranks = communicator_of(self._options.process_set)
        if len(gradients) != len(variables):
            raise ringdl.UsageError(
                f"there are {len(gradients)} gradients for {len(variables)} variables; pass one "
                "for each, None where there is none"
            )
        shared = [index for index, each in enumerate(variables) if id(each) not in self._local]
        if self._averaging is None or self._epoch != ranks.epoch:  # some ranks may be new
            self._epoch = ranks.epoch
            self._variables = [variables[index] for index in shared]
            self._places = {id(each): place for place, each in enumerate(self._variables)}
            self._averaging = make_averaging(
                self._backend,
                self._variables,
                [gradients[index] for index in shared],
                replace(self._options, expects_broadcast=self.expects_broadcast),
            )
        own: list[Any] = [None] * len(self._variables)
        own_values = None if values is None else [*own]
        for index in shared:
            place = self._places.get(id(variables[index]))
            if place is None:
                raise ringdl.UsageError(
                    f"the variable {variables[index].name!r} was not among those of the first "
                    "step, which ranks have agreed on; wrap an optimizer for each set of variables"
                )
            own[place] = gradients[index]
            if own_values is not None and values is not None:
                own_values[place] = values[index]
        averages = self._averaging.average(own, own_values)
        if self._scales_local and len(shared) < len(gradients):
            gradients = [_scaled(each, 1 / ranks.size) for each in gradients]
        for index in shared:
            gradients[index] = averages[self._places[id(variables[index])]]
        return [_scaled(each, self._scale) for each in gradients]

    def _finish(self) -> None:
        if self._averaging is not None:
            self._averaging.finish_step()


def _scaled(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        values = gradient.values * factor
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    return gradient * factor


class _Synchronized:
    """What `ringdl.policies.synchronize` calls."""

    def __init__(self, optimizer: Any, followed: Followed) -> None:
        self._optimizer, self._followed = weakref.ref(optimizer), followed  # it owns this one

    def synchronize(self) -> None:
        """Make the variables of all ranks the same."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it is the caller's
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not inner.built:
            raise ringdl.UsageError(
                "the optimizer knows no variables before its first step; call "
                "optimizer.build(model.trainable_variables) before synchronize()"
            )
        self._followed.synchronize(inner._trainable_variables)

    def start_over(self) -> None:
        """What `ringdl.policies.start_over` calls."""
        self._followed.start_over()


def _refuse_with(policy: Policy, optimizer: Any, is_legacy: bool) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_legacy:
        raise ringdl.UsageError("policies are for optimizers of Keras 3; this one is of tf_keras")
    if inner is not optimizer and keras.backend.backend() == "jax":
        raise ringdl.UsageError(
            "on JAX policies do not go with a LossScaleOptimizer; train in float32 or bfloat16"
        )
    if isinstance(policy, ParameterServer) and policy.rule != "sgd":
        if inner is not optimizer:
            raise ringdl.UsageError(
                f"with rule={policy.rule!r} a LossScaleOptimizer's gradients would be pushed "
                "before they are divided by its scale; train in float32 or bfloat16, or take "
                "rule='sgd'"
            )
        check_options(policy.rule, {name: getattr(inner, name, None) for name in _BY_OPTIMIZER})
    if getattr(inner, "gradient_accumulation_steps", None):
        raise ringdl.UsageError(
            f"{policy!r} counts calls of apply(), and this optimizer steps in some of them only; "
            "leave backward_passes_per_step and gradient_accumulation_steps out"
        )


def is_wrapped(optimizer: Any) -> bool:
    """Whether an optimizer averages."""
    return isinstance(getattr(optimizer, "_ringdl_wrapped", None), Wrapped)


def unwrap(optimizer: Any) -> None:
    """Make an optimizer bare again, if it was wrapped."""
    if is_wrapped(optimizer):
        for name in ("_ringdl_wrapped", "_ringdl_following", *_METHODS):
            vars(optimizer).pop(name, None)


def _accumulate(optimizer: Any, passes: int, is_average: bool) -> float:
    """Let Keras accumulate gradients; returns what its averages are to be multiplied by."""
    if passes == 1:
        return 1.0
    if _is_legacy(optimizer):
        raise ringdl.UsageError(
            f"backward_passes_per_step={passes} needs Keras 3; this optimizer is of tf_keras"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise ringdl.UsageError(
            "a MultiOptimizer accumulates nothing; set gradient_accumulation_steps of its "
            "optimizers instead of backward_passes_per_step"
        )
    known = inner.gradient_accumulation_steps
    if known != passes and (known or inner.built):
        raise ringdl.UsageError(
            f"backward_passes_per_step={passes} becomes gradient_accumulation_steps, but the "
            "optimizer has been built or has others already; make a new one"
        )
    inner.gradient_accumulation_steps = passes
    return 1.0 if is_average else float(passes)


def _is_legacy(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras 2, which applies gradients by another method."""
    return any(base.__module__.partition(".")[0] == "tf_keras" for base in type(optimizer).__mro__)
