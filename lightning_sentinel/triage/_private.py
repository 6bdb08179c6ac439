"""The private Lightning and torch names that triage relies on, each with the versions it was checked on.

A rename upstream is then one error in one place that says which name is missing.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

CHECKED_ON = "lightning 2.6.4 to 2.6.6, torch 2.8 to 2.13"


def rng_states() -> dict[str, Any]:
    """Global random states of torch, CUDA, NumPy and Python (``_collect_rng_states``)."""
    return _collect_rng_states()


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what :func:`rng_states` returned (``_set_rng_states``)."""
    _set_rng_states(states)


def training_step_arguments(trainer: Trainer, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The positional arguments that the loop gives ``training_step`` (``epoch_loop._build_kwargs``)."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx).values())


def lightning_optimizers(trainer: Trainer) -> list[Any]:
    """The wrappers that ``self.optimizers()`` hands out (``strategy._lightning_optimizers``)."""
    return list(trainer.strategy._lightning_optimizers)


def loggers(trainer: Trainer) -> list[Any]:
    return trainer._loggers


def set_loggers(trainer: Trainer, value: list[Any]) -> None:
    trainer._loggers = value


def current_hook(module: LightningModule) -> str | None:
    """Name of the hook that ``self.log`` believes to be in (``_current_fx_name``)."""
    return module._current_fx_name


def set_current_hook(module: LightningModule, value: str | None) -> None:
    module._current_fx_name = value


def scaler_of(trainer: Trainer) -> Any | None:
    """The gradient scaler of the precision plugin, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def scale_of(trainer: Trainer) -> torch.Tensor | None:
    """A copy of the loss scale as the scaler holds it on its device (``GradScaler._scale``), or None before its first use."""
    scaler = scaler_of(trainer)
    scale = getattr(scaler, "_scale", None)
    return None if scale is None else scale.detach().clone()


def found_inf(trainer: Trainer, optimizer: Optimizer) -> bool | None:
    """What the scaler's own check found for this optimizer in this step; None where it has not looked."""
    scaler = scaler_of(trainer)
    if scaler is None:
        return None
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag.item()) for flag in found.values()) if found else None


def intercept_batch_start(trainer: Trainer, hook: Callable[[Any, int], None]) -> Callable[[], None]:
    """Call ``hook(batch, batch_idx)`` right before ``training_step``; returns what undoes it.

    ``strategy.on_train_batch_start`` is the last hook before ``training_step``: whatever random numbers the hooks of
    callbacks and module draw have been drawn by then.
    """
    strategy = trainer.strategy
    inner = strategy.on_train_batch_start

    def on_train_batch_start(batch: Any, batch_idx: int) -> None:
        inner(batch, batch_idx)
        hook(batch, batch_idx)

    strategy.on_train_batch_start = on_train_batch_start  # type: ignore[method-assign]
    held = weakref.ref(strategy)  # what undoes it must not keep the strategy, and with it the Trainer, alive

    def undo() -> None:
        strategy = held()
        if strategy is not None:
            strategy.__dict__.pop("on_train_batch_start", None)

    return undo


def in_backward() -> bool:
    """True while autograd runs a backward on this thread (also under the recomputation of a checkpoint)."""
    return torch._C._current_graph_task_id() != -1


def next_node_number() -> int:
    """Sequence number that the next autograd node of this thread will get (``torch.autograd._get_sequence_nr``)."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node() -> Any | None:
    """The autograd node whose backward runs on this thread (``torch._C._current_autograd_node``), or None."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """Sequence number of an autograd node (``Node._sequence_nr``)."""
    return int(node._sequence_nr())
