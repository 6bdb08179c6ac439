"""Public cases marin#1368 and OLMo#245: correlated gradients grow the update, not the gradient norm; the loss follows later.

The gradient norm says nothing, so it must not be what is judged; the update norm is a signal, and a loss that rises and
stays is named a level shift.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from sentinel_kit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import RankTelemetry
from lightning_sentinel.detectors import Divergence, Spike
from lightning_sentinel.incidents import FindingKind, Severity
from lightning_sentinel.record import StepRecord


class Correlated(L.LightningModule):
    """Gradients are independent noise of one size until step 380, and share one direction from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))
        self.generator = torch.Generator().manual_seed(0)
        self.direction = torch.randn(4096, generator=self.generator)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noise = torch.randn(4096, generator=self.generator)
        gradient = noise if self.trainer.global_step < 380 else self.direction + 0.3 * noise
        return (self.weight * gradient).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3, betas=(0.9, 0.999), weight_decay=0.0)


def test_the_update_norm_is_seen_to_grow_while_the_gradient_norm_stays() -> None:
    trainer, sink = make_trainer([RankTelemetry(update_norm_every_n_steps=1)], max_steps=400)
    trainer.fit(Correlated(), DataLoader(TensorDataset(torch.zeros(1000, 1)), batch_size=1))
    steps = sink.steps()
    update = [e["update_norm"] for e in steps]
    gradient = [e["grad_norm"] for e in steps]
    assert gradient[395] / np.median(gradient[300:380]) == pytest.approx(1.05, abs=0.03)
    assert update[396] / np.median(update[300:380]) == pytest.approx(3.4, abs=0.3)


def losses_after_the_update() -> np.ndarray[Any, Any]:
    """2.3 nats with noise; at step 400 it jumps by 0.9 and comes back only two thirds of the way."""
    rng = np.random.default_rng(0)
    loss = 2.3 + 0.03 * rng.standard_normal(500)
    loss[400:] += 0.3 + 0.6 * np.exp(-np.arange(100) / 6)
    return loss


def test_a_spike_that_does_not_recover_becomes_a_level_shift_of_its_height() -> None:
    spike, divergence, found = Spike(), Divergence(), []
    for step, loss in enumerate(losses_after_the_update()):
        record = StepRecord.from_losses(step, [loss], grad_norm=64.0)
        found += [f for d in (spike, divergence) for f in d.observe(record) if f.severity is Severity.INCIDENT]
    assert found[0].kind is FindingKind.SPIKE
    assert 400 <= found[0].step <= 403
    shifts = [f for f in found if f.kind is FindingKind.LEVEL_SHIFT]
    assert shifts
    assert 398 <= shifts[0].since_step <= 406


@pytest.mark.parametrize("norm", [1e2, 1e4, 1e6])
def test_a_gradient_outlier_that_does_nothing_to_the_loss_is_no_loss_incident(norm: float) -> None:
    rng = np.random.default_rng(1)
    spike, divergence = Spike(), Divergence()
    for step in range(600):
        loss = 2.3 + 0.03 * rng.standard_normal()
        record = StepRecord.from_losses(step, [loss], grad_norm=norm if step in (200, 300, 301) else 1.0 + rng.random())
        assert [*spike.observe(record), *divergence.observe(record)] == [], (step, math.log10(norm))
