"""Public case Megatron-LM#1764: one rank's batch has no supervised token. The mean over the others is unharmed."""

from __future__ import annotations

import math

import pytest

from lightning_sentinel.detectors.nonfinite import NonFinite
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.record import StepRecord


def test_the_token_weighted_mean_leaves_a_rank_without_tokens_out() -> None:
    record = StepRecord.from_losses(7, [2.0, math.nan, 3.0], supervised_tokens=[100.0, 0.0, 300.0], grad_norm=1.0)
    assert record.mean_loss == pytest.approx(2.75)
    [finding] = NonFinite().observe(record)
    assert (finding.kind, finding.ranks, finding.culprits) == (FindingKind.NONFINITE_LOSS, (1,), ("rank:1",))
