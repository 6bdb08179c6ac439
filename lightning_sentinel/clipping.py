"""One gradient norm for two: what the gate has measured is what Lightning clips by.

``Trainer(gradient_clip_val=...)`` computes the 2-norm of all gradients right after the gate has. That second time is left
out where nothing can have changed them in between: only hooks of the suite run there, and the gradients are the same objects
with the same version counters. The total is put together from the same norms of the same tensors, in the same order and by
the same calls as in ``torch.nn.utils.clip_grad_norm_``, and so is the factor: every bit of the clipped gradients stays what
it was. On a CPU the factor is looked at, and gradients within the limit are not multiplied by 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from .state.lightning_private import intercept_norm_clipping, overrides

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")

GATE = "on_before_optimizer_step"


class SharedNorm:
    """The norms of the newest gate, for the clipping that follows it.

    Attributes:
        wanted: Whether Lightning clips by them in this fit, so that they are worth keeping until then.
        used: How often it has.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.used = 0
        self._known: tuple[list[Tensor], list[int], Sequence[Tensor]] | None = None
        self._undo: Callable[[], None] = lambda: None

    def start(self, trainer: Trainer, module: LightningModule, trusted: type) -> None:
        """At the start of a fit. ``trusted``: the callbacks that leave gradients alone, or take them away."""
        self.stop()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        gate = next((i for i, c in enumerate(callbacks) if getattr(c, "shared_norm", None) is self), len(callbacks))
        later = [c for c in callbacks[gate:] if not isinstance(c, trusted)]
        if (
            not trainer.gradient_clip_val
            or trainer.gradient_clip_algorithm not in (None, "norm")
            or not module.automatic_optimization
            or any(overrides(module, hook) for hook in (GATE, "configure_gradient_clipping"))
            or any(overrides(c, GATE) for c in later)
        ):
            return
        undo = intercept_norm_clipping(trainer, self._clip)
        if undo is not None:
            self.wanted, self._undo = True, undo

    def stop(self) -> None:
        self._undo()
        self.wanted, self._known, self._undo = False, None, lambda: None

    def keep(self, gradients: list[Tensor], norms: Sequence[Tensor]) -> None:
        """At the gate: the norm of each gradient as ``torch._foreach_norm`` gave it."""
        self._known = (gradients, [*map(_VERSION, gradients)], norms)

    def forget(self) -> None:
        self._known = None

    def _clip(self, optimizer: Optimizer, most: float) -> bool:
        """Clip by what is known; False where it is not known for certain."""
        known, self._known = self._known, None
        if known is None:
            return False
        gradients, versions, norms = known
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        now = [g for g in map(_GRAD, parameters) if g is not None]
        if len(now) != len(gradients) or not all(map(is_, now, gradients)) or [*map(_VERSION, now)] != versions:
            return False
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        if total.is_cpu:
            self._scale(gradients, total, most)
        else:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, total)
        self.used += 1
        return True

    @torch.no_grad()
    def _scale(self, gradients: list[Tensor], total: Tensor, most: float) -> None:
        """What ``clip_grads_with_norm_`` does, where the host can look at the factor: gradients stay as they are if it is 1.

        There are many such steps in a sound run, and each is a pass over all gradients.
        """
        factor = torch.clamp(most / (total + 1e-6), max=1.0)
        # Where numbers below the normal ones are flushed (``torch.set_flush_denormal``), multiplying by 1 makes them 0.
        if factor.item() != 1.0 or (factor * 1e-40).item() == 0.0:
            torch._foreach_mul_(gradients, factor)
