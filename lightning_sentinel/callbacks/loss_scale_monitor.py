"""The fp16 loss scaler in a Trainer: every event with its cause, and the collapse as an incident."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..detectors.loss_scale import LossScale
from ..incidents import Finding
from ..record import StepRecord
from ..state.lightning_private import scaler_of, was_unscaled
from ..state.tree import local
from .base import DetectorCallback

log = logging.getLogger("lightning_sentinel")

# Names written for one overflow; a large model that overflows everywhere would fill the journal otherwise.
MAX_NAMES = 32


def live_scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """The Trainer's enabled ``GradScaler``, or None."""
    scaler = scaler_of(trainer)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def nonfinite_parameters(module: torch.nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of this optimizer's parameters whose (local) gradient holds a non-finite value."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(n, p.grad) for n, p in module.named_parameters() if id(p) in mine and p.grad is not None]
    if not named:
        return []
    peaks = torch._foreach_norm([_values(grad) for _, grad in named], math.inf, dtype=torch.float64)
    finite = torch.isfinite(torch.stack([p.to("cpu", torch.float64) for p in peaks])).tolist()
    return [name for (name, _), good in zip(named, finite, strict=True) if not good]


def _values(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return grad.coalesce().values()
    return local(grad)


def skipped_by_scaler(trainer: Trainer, optimizer: Optimizer) -> bool:
    """True if the live scaler will skip this optimizer's step; call it in ``on_before_optimizer_step``.

    The scaler's own flags say so where it has unscaled the gradients. A fused optimizer unscales inside its step and
    leaves no flags before, so there the gradients are looked at.
    """
    scaler = live_scaler(trainer)
    if scaler is None:
        return False
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if flags:
        return any(float(flag) > 0 for flag in flags.values())
    grads = [_values(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads:
        return False
    return not bool(torch.isfinite(torch.stack(torch._foreach_norm(grads, math.inf, dtype=torch.float64))).all())


class LossScaleMonitor(DetectorCallback):
    """Journals every event of the loss scaler with its cause and states a collapse as an incident.

    Silent without a scaler. A single overflow is the scaler's own controlled answer and stays an event.

    Example:
        >>> from lightning_sentinel import LossScaleMonitor
        >>> LossScaleMonitor(max_consecutive=8).detector.max_consecutive
        8

    Journal events, each with ``old_scale``, ``new_scale``, ``rank`` (whose journal it is), ``parameters`` (names whose
    gradient on this rank was non-finite, filled for an overflow only) and ``nonfinite_ranks``:

    ====================  =================================================================
    event                 meaning
    ====================  =================================================================
    ``scaler.overflow``   non-finite gradients: the scaler skips the step
    ``scaler.backoff``    the scale went down after an overflow
    ``scaler.growth``     the scale went up after enough steps without one
    ``scaler.changed``    somebody else set the scale between two steps
    ====================  =================================================================

    ``nonfinite_ranks`` says on which ranks an overflow arose, as far as that can be known. A loss is each rank's own: the
    ranks whose loss was not finite are named. Where every loss was finite, the overflow arose in a backward; on several
    ranks the gradients have been reduced by then and are not finite on any of them, so the field is None: not known. It is
    empty for events other than an overflow.

    In manual optimization ``self.clip_gradients`` acts on gradients as they are: called before they are unscaled it clips far
    harder than its number says. The first such call is warned of by name and journalled as ``scaler.clipped_scaled``, with
    ``optimizer``, ``scale``, ``gradient_clip_val`` and ``effective_clip_val``.

    Findings: ``scaler_overflow`` (event) for each overflow, ``scale_collapse`` (incident).

    Args:
        max_consecutive: Overflows in a row that make an incident, once a step has been applied.
        max_without_step: Steps without one applied update that make an incident.
        floor: A scale at or below this, reached by overflows, is an incident.
    """

    fresh_state = LossScale

    def __init__(
        self,
        max_consecutive: int = LossScale.max_consecutive,
        max_without_step: int = LossScale.max_without_step,
        floor: float = LossScale.floor,
    ) -> None:
        self.detector = LossScale(max_consecutive=max_consecutive, max_without_step=max_without_step, floor=floor)
        self._known_scale: float | None = None
        self._in_step: dict[str, Any] | None = None
        self._record: StepRecord | None = None
        self._scaler: torch.amp.GradScaler | None = None  # of this fit
        self._watching = False

    def observe(self, record: StepRecord) -> list[Finding]:
        """Findings on one record, the same on every rank."""
        self._record = record
        return super().observe(record)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._in_step = None
        self._scaler = scaler = live_scaler(trainer)
        if scaler is not None and not pl_module.automatic_optimization:
            self._watch_clipping(trainer, pl_module, scaler)
        if scaler is None:
            self._known_scale = None
        elif self._known_scale is None:
            self._known_scale = float(scaler.get_scale())

    def _watch_clipping(self, trainer: Trainer, pl_module: LightningModule, scaler: torch.amp.GradScaler) -> None:
        """Look at the module's own calls of ``clip_gradients`` until one comes before the gradients are unscaled."""
        inner = pl_module.clip_gradients

        def clip_gradients(optimizer: Optimizer, gradient_clip_val: Any = None, *args: Any, **options: Any) -> None:
            raw = getattr(optimizer, "optimizer", optimizer)
            value = trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
            if value and not was_unscaled(scaler, raw):
                self._stop_watching(pl_module)
                self._tell_of_clipping(trainer, pl_module, type(raw).__name__, float(scaler.get_scale()), float(value))
            inner(optimizer, gradient_clip_val, *args, **options)

        pl_module.clip_gradients = clip_gradients  # type: ignore[method-assign]
        self._watching = True

    def _stop_watching(self, pl_module: LightningModule) -> None:
        if self._watching:
            self._watching = False
            vars(pl_module).pop("clip_gradients", None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_watching(pl_module)

    def _tell_of_clipping(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: str, scale: float, value: float
    ) -> None:
        if scale == 1.0:
            return
        log.warning(
            "%s.clip_gradients at step %d acts on gradients of %s that are still multiplied by the loss scale %g: a"
            " gradient_clip_val of %g clips at %g. Call it in `on_before_optimizer_step(self, optimizer)` of the module,"
            " where they are unscaled.",
            type(pl_module).__name__,
            trainer.global_step,
            optimizer,
            scale,
            value,
            value / scale,
        )
        self.context(trainer).write(
            trainer,
            "scaler.clipped_scaled",
            optimizer=optimizer,
            scale=scale,
            gradient_clip_val=value,
            effective_clip_val=value / scale,
        )

    def idle_hooks(self, trainer: Trainer) -> Collection[str]:
        return ("on_before_optimizer_step", "on_train_batch_end") if self._scaler is None else ()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        scaler = self._scaler
        if scaler is None:
            return
        scale = float(scaler.get_scale())
        if self._known_scale is not None and scale != self._known_scale:
            self._write(trainer, "scaler.changed", self._known_scale, scale)
        self._known_scale = scale
        overflow = skipped_by_scaler(trainer, optimizer)
        names = nonfinite_parameters(pl_module, optimizer) if overflow else []
        if self._in_step is not None:  # several optimizers share one scaler
            overflow, names = overflow or self._in_step["overflow"], [*self._in_step["parameters"], *names]
        self._in_step = {"overflow": overflow, "parameters": names, "scale": scale, "step": trainer.global_step}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = self._scaler
        if scaler is None or self._in_step is None:
            return
        before, self._in_step = self._in_step, None
        old, new = before["scale"], float(scaler.get_scale())
        self._known_scale = new
        if before["overflow"]:
            ranks = self._nonfinite_ranks(trainer, before["step"])
            self._write(trainer, "scaler.overflow", old, new, before["parameters"], before["step"], ranks)
        if new < old:
            self._write(trainer, "scaler.backoff", old, new, step=before["step"])
        elif new > old:
            self._write(trainer, "scaler.growth", old, new, step=before["step"])

    def _nonfinite_ranks(self, trainer: Trainer, step: int) -> list[int] | None:
        """Ranks on which the overflow arose; None where that is not known."""
        if trainer.world_size == 1:
            return [0]
        record = self._record
        if record is None or (record.step, record.attempt) != (step, self.context(trainer).attempt):
            return None
        return np.flatnonzero(record.column("nonfinite_loss")).tolist() or None

    def _write(
        self,
        trainer: Trainer,
        event: str,
        old: float,
        new: float,
        parameters: list[str] | None = None,
        step: int | None = None,
        nonfinite_ranks: Sequence[int] | None = (),
    ) -> None:
        context = self.context(trainer)
        names = parameters or []
        context.journal.write(
            event,
            step=trainer.global_step if step is None else step,
            attempt=context.attempt,
            tokens=context.tokens,
            old_scale=old,
            new_scale=new,
            rank=trainer.global_rank,
            parameters=names[:MAX_NAMES],
            parameter_count=len(names),
            nonfinite_ranks=None if nonfinite_ranks is None else list(nonfinite_ranks),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"detector": self.detector.state_dict(), "known_scale": self._known_scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.detector.load_state_dict(state_dict["detector"])
        self._known_scale = state_dict["known_scale"]
