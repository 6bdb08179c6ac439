"""Public case fla#111: a strong log decay of a Gated DeltaNet layer is masked after ``exp``, infinity times zero."""

from __future__ import annotations

import pytest
import torch
from nonfinite_origins import Decay, assert_named, trained
from torch import Tensor

from lightning_sentinel.context import context_of


def test_the_exponential_is_named_with_the_range_of_the_log_decay() -> None:
    log_decays: list[Tensor] = []
    found = assert_named(
        lambda: Decay(log_decays),
        loss_is_finite=False,
        phase="forward",
        operator="aten.exp.default",
        module="mixer.layer",
        samples_first=False,  # chunks come first, then samples
    )
    # From the last token back to the first, whose own decay is not on the way.
    farthest = float(-log_decays[-1][:, 1:].double().sum(1).min())
    assert farthest > 89.0  # the largest that exp has a float32 for is 88.7
    assert found["finite_max"] == pytest.approx(farthest, rel=1e-5)
    assert found["finite_min"] == pytest.approx(-farthest, rel=1e-5)
    assert found["nonfinite"] == 0


def test_masked_before_the_exponential_the_same_decay_is_finite() -> None:
    log_decays: list[Tensor] = []
    mixer = Decay(log_decays, masked_late=False)
    trainer, tracer, _ = trained(mixer)
    assert float(-log_decays[-1][:, 1:].sum(1).min()) > 89.0
    assert tracer.reports == []
    assert context_of(trainer).incidents == []
    assert all(bool(torch.isfinite(p).all()) for p in mixer.parameters())
