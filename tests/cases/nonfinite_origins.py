"""Public reports whose non-finite value hides or shows in the wrong place, in one small network, and what must be named."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import IncidentResponse, NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.data.identity import sample_ids
from lightning_sentinel.incidents import VerdictKind


class Hidden(nn.Module):
    """pytorch#41508: an attention row that is fully masked, in a sample that the loss leaves out."""

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        q = x.view(-1, 4, 4)
        mask = torch.zeros(4, 4, dtype=torch.bool)
        mask[1] = True
        scores = (q @ q.mT).masked_fill(mask & (bad > 0)[:, None, None], -math.inf)
        out = scores.softmax(-1) @ q
        return torch.where((bad > 0)[:, None, None], 0.0, out).flatten(1)


class Divided(nn.Module):
    """pytorch#16317: ``where(n == 0, 0, x / n)`` is finite, its gradient is not."""

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        n = x.abs().mean(1, keepdim=True) * (1 - bad[:, None])
        return torch.where(n == 0, torch.zeros_like(x), x / n)


class Decay(nn.Module):
    """fla#111: ``exp`` of a strong decay is masked after the exponential: infinity times zero."""

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        decay = -torch.arange(1.0, 17.0) * (0.1 + 30.0 * bad[:, None])
        between = torch.exp(decay[:, :, None] - decay[:, None, :]) * torch.ones(16, 16).tril()
        return (between @ x[:, :, None]).squeeze(-1)


class Kernel(nn.Module):
    """fla#913: a kernel whose backward is NaN on finite input."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
            ctx.save_for_backward(bad)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * torch.where(ctx.saved_tensors[0] > 0, math.nan, 2.0)[:, None], None

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        return self.Function.apply(x, bad)


class Case(L.LightningModule):
    def __init__(self, mixer: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem, self.mixer, self.head = nn.Linear(16, 16), mixer, nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, bad = batch
        loss = self.head(self.mixer(self.stem(x), bad)).square().mean(1)
        return torch.where(bad > 0, 0.0, loss).mean() if isinstance(self.mixer, Hidden) else loss.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def assert_named(mixer: type[nn.Module], *, loss_is_finite: bool, phase: str, operator: str) -> dict[str, Any]:
    """Train three steps; sample 10, in step 2, is bad. Operator, module and sample are named by the trace and by the verdict.

    Returns:
        The range of the operator's input.
    """
    x, bad = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(16)
    bad[10] = 1.0  # step 2, second sample of four in order
    tracer, telemetry = (
        NonFiniteTracer(),
        RankTelemetry(sample_id_fn=lambda batch: [f"{v:.6f}" for v in batch[0][:, 0]]),
    )
    trainer = L.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[tracer, telemetry, IncidentResponse()],
    )
    trainer.fit(Case(mixer()), DataLoader(TensorDataset(x, bad), batch_size=4))
    [report] = tracer.reports
    assert (report.step, report.module, report.name, report.reproduced) == (2, "mixer", operator, True)
    assert report.phase.startswith(phase)
    assert bool(context_of(trainer).record.column("nonfinite_loss")[0]) is not loss_is_finite
    assert context_of(trainer).record.has_nonfinite
    assert report.samples == (sample_ids([x[8:12], bad[8:12]])[2],)
    [incident] = context_of(trainer).incidents
    verdict = incident.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("module:mixer",))
    assert (verdict.since_step, verdict.reproducible, verdict.sample_ids) == (2, True, report.samples)
    assert verdict.evidence["operator"] == operator
    if phase == "backward":  # what came into the operator was finite
        assert all(i["nonfinite"] == 0 for i in report.inputs)
    return report.inputs[0] if report.inputs else {}
