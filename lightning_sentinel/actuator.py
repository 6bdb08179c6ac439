"""The hands of the response: hold an update, put rates, scale and optimizer state right. No decision is made here."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from .context import RunContext, context_of
from .state.lightning_private import scaler_of

log = logging.getLogger("lightning_sentinel")

SCALE_STEP = 16.0  # a lowered loss scale is this much smaller: four halvings at once


class Actuator:
    """Changes a run on behalf of ``IncidentResponse``; attached to the optimizers for one fit.

    Attributes:
        reduction: A reduced learning rate in force: ``factor``, ``from``, ``until`` (step or None), ``incident``.
        experiment: Id of the experiment that a permanent change began, or None.
        plan_until: Step up to which the learning rate is held to what the scheduler set, or None.
    """

    def __init__(self) -> None:
        self.reduction: dict[str, Any] | None = None
        self.plan_until: int | None = None
        self.experiment: str | None = None
        self._hooks: list[Any] = []
        self._skip_fused = False
        self._saved_rates: list[Any] | None = None
        self._scaler_state: dict[str, Any] | None = None
        self._new_scale: float | None = None

    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self.experiment is not None:
            context_of(trainer).scratch["experiment"] = self.experiment
        for optimizer in trainer.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ------------------------------------------------------------------------------------------------ holding a step

    def hold(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Keep this step's update out: no gradient, no update. Buffers that the forward changed go back."""
        from .triage.window import restore_buffers

        context_of(trainer).held = True
        self._keep_scale(trainer)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scaler_of(trainer) is not None and fused:
            # GradScaler insists on gradients with a fused optimizer: the step pre-hook raises the optimizer's own flag.
            self._skip_fused = True
        else:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        restore_buffers(trainer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = getattr(optimizer, "found_inf", None)
        if self._skip_fused and found is not None:
            optimizer.found_inf = torch.ones_like(found)  # type: ignore[attr-defined]
        if self.reduction is not None and not self._reduction_is_over(self._trainer.global_step):
            # Multiplied for this step only: a scheduler that computes the next rate from the last one never sees it.
            self._saved_rates = [rate_of(group) for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, self._saved_rates, strict=True):
                set_rate(group, rate * self.reduction["factor"])
            # Where this hook runs before the gate, the plan for this very step is reduced as well.
            context_of(self._trainer).scratch["lr_factor"] = self.reduction["factor"]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._skip_fused = False
        if self._saved_rates is not None:
            for group, rate in zip(optimizer.param_groups, self._saved_rates, strict=True):
                set_rate(group, rate)
            self._saved_rates = None
            context_of(self._trainer).scratch.pop("lr_factor", None)

    def _reduction_is_over(self, step: int) -> bool:
        until = None if self.reduction is None else self.reduction["until"]
        return until is not None and step >= until

    # ------------------------------------------------------------------------------------------------ learning rate

    def reduce_rate(self, trainer: Trainer, step: int, incident: int, factor: float, steps: int | None) -> None:
        """Multiply the rate by ``factor`` for ``steps`` steps; None: for good, which starts a new experiment id."""
        context = context_of(trainer)
        if self.reduction is not None:
            factor *= self.reduction["factor"]
        until = None if steps is None else step + 1 + steps  # the present step's update is held anyway
        self.reduction = {"factor": factor, "from": step, "until": until, "incident": incident}
        identity = None if steps is not None else f"lr-{incident}-{step}"
        if identity is not None:
            self.experiment = context.scratch["experiment"] = identity
        context.write(trainer, "experiment.started", kind="reduce_lr", experiment=identity, **self.reduction)

    def keep_plan(self, trainer: Trainer, optimizer: Optimizer, step: int) -> None:
        """End a temporary reduction when it is due; hold the rate to the scheduler's plan while ``plan_until`` lasts."""
        context = context_of(trainer)
        if self.reduction is not None and self._reduction_is_over(step):
            context.write(trainer, "experiment.ended", kind="reduce_lr", **self.reduction)
            self.reduction = None
        if self.plan_until is None:
            return
        if step >= self.plan_until:
            self.plan_until = None
            return
        _, planned, actual = context.rates[-1]
        if planned is None:
            return
        usual = _usual_factors(context, len(planned))
        wanted = tuple(rate * factor for rate, factor in zip(planned, usual, strict=True))
        if any(abs(a - w) > 1e-9 * abs(w) for a, w in zip(actual, wanted, strict=True)):
            for group, rate in zip(optimizer.param_groups, wanted, strict=True):
                set_rate(group, rate)
            context.rates[-1] = (step, planned, wanted)
            context.write(trainer, "lr.changed", old=list(actual), new=list(wanted), reason="held to the plan")

    # -------------------------------------------------------------------------------------------------- loss scale

    def _keep_scale(self, trainer: Trainer) -> None:
        """A held step leaves the loss scale as it is, too."""
        scaler = scaler_of(trainer)
        if scaler is not None:
            self._scaler_state = dict(scaler.state_dict())

    def lower_scale(self, scale: float) -> None:
        """Set a smaller loss scale at the end of this batch."""
        self._new_scale = max(1.0, scale / SCALE_STEP)

    def finish_batch(self, trainer: Trainer) -> None:
        """Changes of the scaler that can only be made after its own update."""
        scaler = scaler_of(trainer)
        if scaler is not None and self._scaler_state is not None:
            scaler.load_state_dict(self._scaler_state)
        if scaler is not None and self._new_scale is not None:
            scaler.update(self._new_scale)
        self._scaler_state = self._new_scale = None

    # ---------------------------------------------------------------------------------------------- optimizer state

    def restore_schedule(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Schedulers and rates as a checkpoint holds them: ``schedulers`` (states) and ``rates`` (by optimizer, group)."""
        for config, state in zip(trainer.lr_scheduler_configs, saved["schedulers"], strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, rates in zip(trainer.optimizers, saved["rates"], strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                set_rate(group, rate)
        self._saved_rates = None  # what a reduction would put back after this step is out of date

    @staticmethod
    def restore_optimizers(trainer: Trainer, states: Sequence[dict[str, Any]]) -> None:
        """Optimizer states of an older restore point, onto the present weights; rates stay where the schedule is."""
        from .state.snapshot import restore_optimizer

        for optimizer, state in zip(trainer.optimizers, states, strict=True):
            rates = [rate_of(group) for group in optimizer.param_groups]
            restore_optimizer(optimizer, state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                set_rate(group, rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "reduction": dict(self.reduction) if self.reduction else None,
            "plan_until": self.plan_until,
            "experiment": self.experiment,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reduction, self.plan_until = state["reduction"], state["plan_until"]
        self.experiment = state["experiment"]


def rate_of(group: dict[str, Any]) -> Any:
    """A parameter group's rate to keep: a number, or a copy of the tensor that a capturable optimizer has there."""
    rate = group["lr"]
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """A tensor stays the same tensor, as a compiled or captured optimizer step needs it; the host does not wait.

    Example:
        >>> group = {"lr": (here := torch.tensor(0.5))}
        >>> set_rate(group, 0.25)
        >>> group["lr"] is here, float(here)
        (True, 0.25)
    """
    now = group["lr"]
    if not isinstance(now, torch.Tensor):
        group["lr"] = rate
    elif isinstance(rate, torch.Tensor):
        now.copy_(rate)
    else:
        now.fill_(rate)


def _usual_factors(context: RunContext, groups: int) -> list[float]:
    """By which factor each group's rate usually differs from the scheduler's; exactly 1 where it does not."""
    ratios = [
        [a / p if p else 1.0 for p, a in zip(planned, actual, strict=True)]
        for _, planned, actual in list(context.rates)[:-1]
        if planned is not None and len(planned) == len(actual) == groups
    ]
    if not ratios:
        return [1.0] * groups
    middle = [sorted(column)[len(ratios) // 2] for column in zip(*ratios, strict=True)]
    return [1.0 if abs(m - 1.0) < 1e-9 else m for m in middle]
