"""Callbacks for ``fit``, under the names that MPI training scripts use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

import ringdl
from ringdl._metrics import average_metrics
from ringdl.keras._averaging import HOW_TO_WRAP
from ringdl.keras._optimizer import is_wrapped
from ringdl.keras._state import broadcast_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

Logs = dict[str, Any] | None


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """One that models of Keras 2 take as well: they ask in which loops its batch hooks are for."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(_Callback):
    """All ranks begin with the weights, and the optimizer's state, of one of them.

    A model that is not built yet, which is possible on TensorFlow, gets them after the first batch.
    Optimizers that a model has as other attributes are looked after, too.

    Args:
        root_rank: whose.
        device: accepted, but without effect.
        local_variables: see `register_local_var`: several at once.
    """

    def __init__(
        self, root_rank: int = 0, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local: set[int] = {id(each) for each in local_variables or ()}
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as each rank has it."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast. Collective."""
        model: Any = self.model
        inner = getattr(model.optimizer, "inner_optimizer", None)
        if is_wrapped(inner):
            raise ringdl.UsageError(
                "compile() has put the wrapped optimizer into a LossScaleOptimizer, where each "
                "rank would find for itself whether gradients are finite; pass compile() "
                "ringdl.keras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        if ringdl.size() > 1 and not _wrapped_optimizers(model):
            warnings.warn(
                "the model's optimizer is not wrapped, so the ranks train models of their own; "
                f"before compile(): {HOW_TO_WRAP}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._is_done = False
        if model.built:
            self._broadcast(model)
        else:
            for optimizer in _wrapped_optimizers(model):
                if optimizer._ringdl_wrapped.followed is not None:
                    raise ringdl.UsageError(
                        "with a policy ranks have to begin alike, and this model is built by its "
                        "first step; give it a keras.layers.Input, or call model.build(shape) "
                        "before fit()"
                    )
                optimizer._ringdl_wrapped.expects_broadcast = True

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast, if the model was not built before. Collective."""
        if not self._is_done:
            self._broadcast(self.model)

    def _broadcast(self, model: Any) -> None:
        self._is_done = True
        variables = [*model.weights]
        for optimizer in _wrapped_optimizers(model) or [model.optimizer]:
            its_state = optimizer.variables
            variables += its_state() if callable(its_state) else its_state
        broadcast_variables(
            [each for each in variables if id(each) not in self._local], self.root_rank
        )


def _wrapped_optimizers(model: Any) -> list[Any]:
    """That of ``compile``, and those that a model has for itself, as one with two networks has."""
    found = {id(each): each for each in (model.optimizer, *vars(model).values())}
    return [each for each in found.values() if is_wrapped(each)]


class MetricAverageCallback(_Callback):
    """At the end of each epoch, metrics become their averages over all ranks.

    List it before callbacks that read metrics (checkpoints, early stopping), so that all ranks
    decide alike.

    Args:
        device: accepted, but without effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average. Collective.

        Raises:
            MismatchError: on every rank, if they have different metrics.
        """
        if logs is None:
            return
        arrays = {name: np.asarray(each) for name, each in logs.items() if np.size(each) > 1}
        logs.update(average_metrics({name: logs[name] for name in logs if name not in arrays}))
        for name in sorted(arrays):
            logs[name] = ringdl.allreduce(arrays[name])


class LearningRateScheduleCallback(_Callback):
    """The learning rate is a multiple of an initial one, by epoch.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch; or a number, of which the rate is multiplied by one
            power more in each epoch after `start_epoch`.
        start_epoch: the first epoch in which it holds.
        end_epoch: the first in which it does not hold any more.
        staircase: change the rate with each epoch; else with each batch, of a fraction of an epoch.
        momentum_correction: scale momentum with the rate (Goyal et al. 2017, section 3).
        steps_per_epoch: where Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ringdl.UsageError("initial_lr is None; pass the learning rate to begin with")
        self.initial_lr, self.multiplier = initial_lr, multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many steps an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ringdl.UsageError(
                    f"Keras does not know how many steps an epoch has; pass steps_per_epoch to "
                    f"{type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Set the rate of the epoch."""
        self._epoch = epoch
        if self.staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of the batch."""
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the rate."""
        if logs is not None:
            logs["lr"] = _number(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if callable(self.multiplier):
            rate = self.initial_lr * self.multiplier(epoch)
        else:
            rate = self.initial_lr * self.multiplier ** (epoch - self.start_epoch)
        optimizer: Any = self.model.optimizer
        before = _number(optimizer.learning_rate)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        holds_rate = isinstance(inner, keras.optimizers.SGD) and inner.momentum and inner.built
        if self.momentum_correction and holds_rate and before > 0:
            for velocity in inner.momentums:  # sums of gradients times their rates
                velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate rises from that of one rank to that of all, with each batch.

    Args:
        initial_lr: the rate at the end: that of one rank, times the number of ranks.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: whether rank 0 prints when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (done * (ringdl.size() - 1) + 1) / ringdl.size()

        super().__init__(
            *(initial_lr, multiplier, 0, warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the rate."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and ringdl.rank() == 0:
            rate = _number(self.model.optimizer.learning_rate)
            print(f"\nepoch {epoch + 1}: the learning rate has warmed up to {rate:g}")


class BestModelCheckpoint(_Callback, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Rank 0 saves the model when it is the best so far.

    List `MetricAverageCallback` before it: then it is the best of all ranks.

    Args:
        monitor: which metric.
        verbose: see keras.callbacks.ModelCheckpoint, as for `mode` and `save_freq`.
        mode: whether ``"min"`` or ``"max"`` is best.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: where; may be set later as an attribute.
        kwargs: as ModelCheckpoint takes them.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: int | str = "epoch",
        *,
        filepath: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            "unnamed.keras" if filepath is None else filepath,
            *(monitor, verbose),
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
            **kwargs,
        )
        self.filepath: Any = filepath if filepath is None else self.filepath

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse to begin without a path."""
        if self.filepath is None:
            raise ringdl.UsageError("BestModelCheckpoint has no filepath; pass it, or set it")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save, on rank 0."""
        if ringdl.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Save, on rank 0."""
        if ringdl.rank() == 0:
            super().on_epoch_end(epoch, logs)


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
