"""Public case pytorch#40497: a permanent fp16 overflow, hundreds of steps without an update, and no error."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from sentinel_kit import Loader, make_trainer
from torch import nn

from lightning_sentinel import IncidentResponse, LossScaleMonitor, NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import FindingKind, VerdictKind

SINCE, STEPS = 10, 34


class Growing(nn.Linear):
    """From step ``SINCE`` on its activations are beyond 65,504 before they are scaled down again."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor / self.factor


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(6, 8), Growing(8, 8), nn.Linear(8, 1)


def test_a_scale_that_collapses_is_an_incident_and_the_layer_is_named() -> None:
    class Case(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.deep = Deep()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.deep.wide.factor = 1e6 if self.trainer.global_step >= SINCE else 1.0
            hidden = self.deep.wide(torch.relu(self.deep.first(batch["x"])))
            # The loss clips what is not finite, so that it looks healthy: only the gradients are not.
            out = self.deep.last(hidden)
            return (
                out.nan_to_num(0.0, 1.0, -1.0).float() - batch["y"]
            ).square().mean() + 0.0 * self.deep.last.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10_000)
    callbacks = [NonFiniteTracer(), LossScaleMonitor(), RankTelemetry(), IncidentResponse()]
    trainer, sink = make_trainer(callbacks, max_steps=STEPS, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(Case(), Loader())
    incident = context_of(trainer).incidents[0]
    collapse = next(f for f in incident.findings if f.kind is FindingKind.SCALE_COLLAPSE)
    assert collapse.since_step == SINCE
    assert collapse.step < SINCE + 10
    assert (incident.verdict.kind, incident.verdict.culprits) == (VerdictKind.NUMERICS, ("module:deep.wide",))
    assert incident.verdict.since_step == SINCE
    assert [e["step"] for e in sink.steps() if not e["applied"]] == list(range(SINCE, STEPS))
    assert scaler.get_scale() < 1.0
