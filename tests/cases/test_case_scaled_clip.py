"""Case scaled-clip (Lightning#9694): in manual optimization with fp16 ``self.clip_gradients`` acts on scaled gradients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from case_world import Net, events, fit, shuffled, suite
from lightning.pytorch.plugins import MixedPrecision

from lightning_sentinel import LossScaleMonitor

SCALE = 1024.0


class Clipped(Net):
    """Clips before the step, as the documentation of manual optimization shows, or in the hook after unscaling."""

    def __init__(self, clip: str = "before") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip
        self.norms: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.norms.append(norm.item())
        if self.clip == "before":
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.clip == "hook":
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def run(folder: Path, **options: Any) -> tuple[Any, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    callbacks = suite(folder, 0)
    callbacks.insert(1, LossScaleMonitor())
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    return fit(callbacks, shuffled, seed=0, module=lambda: Clipped(**options), max_steps=4, plugins=[precision])


def test_a_clip_of_scaled_gradients_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path)
    [event] = events(tmp_path, "scaler.clipped_scaled")  # once, not at every step
    assert (event["step"], event["scale"], event["gradient_clip_val"]) == (0, SCALE, 0.5)
    assert (event["optimizer"], event["effective_clip_val"]) == ("AdamW", 0.5 / SCALE)
    [told] = [r.message for r in caplog.records if r.levelno == logging.WARNING and "clip_gradients" in r.message]
    assert told.startswith(
        "Clipped.clip_gradients at step 0 acts on gradients of AdamW that are still multiplied by the"
    )
    # the gradients that reach the update are a thousand times smaller than was asked for
    assert all(e["grad_norm"] == pytest.approx(0.5 / SCALE, rel=1e-3) for e in events(tmp_path, "step"))


def test_a_clip_of_unscaled_gradients_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, clip="hook")
    assert not events(tmp_path, "scaler.clipped_scaled")
    assert not [r for r in caplog.records if "clip_gradients" in r.message]


def test_gradient_norms_are_reported_unscaled(tmp_path: Path) -> None:
    module, _ = run(tmp_path, clip="never")
    norms = [e["grad_norm"] for e in events(tmp_path, "step")]
    assert norms == [pytest.approx(norm / SCALE, rel=1e-5) for norm in module.norms]
