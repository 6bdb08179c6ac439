"""Public reports whose non-finite value hides or shows in the wrong place, in one small network, and what must be named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from hybrid_lm import gated_delta
from hybrid_lm.model import GatedDeltaNet, HybridLM, HybridLMConfig, Layout
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


class _Hard(GatedDeltaNet):
    """The example's layer, in which a bad sample forgets hard; ``masked_late`` masks its decays after ``exp``."""

    masked_late: bool
    bad: Tensor
    log_decays: list[Tensor]

    def rule_inputs(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        query, key, value, log_decay, beta = super().rule_inputs(x, layout)
        log_decay = log_decay * (1.0 + 3000.0 * self.bad[:, None, None])
        self.log_decays.append(log_decay.detach())
        return query, key, value, log_decay, beta

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        before = gated_delta.decay
        if self.masked_late:
            gated_delta.decay = lambda log_decay, cut: log_decay.exp() * ~cut
        try:
            return super().forward(x, layout)
        finally:
            gated_delta.decay = before


class Decay(nn.Module):
    """fla#111: ``exp`` of a strong decay is masked after the exponential: infinity times zero.

    Args:
        log_decays: Takes up the log decays of each forward, ``[samples, 16 tokens, heads]``.
        masked_late: As in the report; False: as the example does it.
    """

    def __init__(self, log_decays: list[Tensor], masked_late: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = HybridLMConfig(vocab_size=8, width=8, layers=1, ffn_width=8, linear_head_dim=8, chunk_size=16)
        self.spread = nn.Linear(1, 8)
        self.layer = HybridLM(self.config).layers[0].mixer
        self.layer.__class__ = _Hard
        self.layer.masked_late, self.layer.log_decays = masked_late, log_decays

    def forward(self, x: Tensor, bad: Tensor) -> Tensor:
        """Each of the 16 features is a token."""
        self.layer.bad = bad
        layout = Layout.of(torch.zeros_like(x, dtype=torch.int64), self.config, x.dtype)
        return self.layer(self.spread(x[..., None]), layout).mean(-1)


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


def trained(mixer: nn.Module) -> tuple[L.Trainer, NonFiniteTracer, list[str]]:
    """Three steps of four samples, under observation. Sample 10, the third of step 2, is bad; gives the ids of that step."""
    x, bad = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(16)
    bad[10] = 1.0
    tracer = NonFiniteTracer()
    trainer = L.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[tracer, RankTelemetry(), IncidentResponse()],
    )
    trainer.fit(Case(mixer), DataLoader(TensorDataset(x, bad), batch_size=4))
    return trainer, tracer, list(sample_ids([x[8:12], bad[8:12]]))


def assert_named(
    mixer: Callable[[], nn.Module],
    *,
    loss_is_finite: bool,
    phase: str,
    operator: str,
    module: str = "mixer",
    samples_first: bool = True,
) -> dict[str, Any]:
    """Operator, module and sample are named, by the trace and by the verdict.

    Args:
        mixer: Makes what the network has in its middle.
        loss_is_finite: Whether the loss hides it.
        phase: Where the operator runs, ``forward`` or ``backward``.
        operator: Its name.
        module: Path of the module that calls it.
        samples_first: Whether what it gives has the samples in its first dimension; otherwise all of
            the step's are named.

    Returns:
        The range of the operator's input.
    """
    trainer, tracer, ids = trained(mixer())
    [report] = tracer.reports
    assert (report.step, report.module, report.name, report.reproduced) == (2, module, operator, True)
    assert report.phase.startswith(phase)
    assert bool(context_of(trainer).record.column("nonfinite_loss")[0]) is not loss_is_finite
    assert context_of(trainer).record.has_nonfinite
    assert report.samples == ((ids[2],) if samples_first else ())
    [incident] = context_of(trainer).incidents
    verdict = incident.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, (f"module:{module}",))
    assert (verdict.since_step, verdict.reproducible) == (2, True)
    assert verdict.sample_ids == (report.samples or tuple(ids))
    assert verdict.evidence["operator"] == operator
    if phase == "backward":  # what came into the operator was finite
        assert all(i["nonfinite"] == 0 for i in report.inputs)
    return report.inputs[0] if report.inputs else {}
