"""Public case Megatron-LM#1764: one rank's batch has no supervised token, 0/0. The mean over the others is unharmed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hidden_nan_ranks import AT, STEPS

from lightning_sentinel.detectors.nonfinite import NonFinite
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.record import StepRecord


@pytest.mark.slow
@pytest.mark.distributed
def test_the_rank_and_its_samples_are_named_and_the_mean_is_unharmed(
    told_by_ranks: dict[str, list[dict[str, Any]]],
) -> None:
    first, second = told_by_ranks["no_supervised_tokens"]
    assert first["struck"] == []
    assert len(second["struck"]) == 4  # the fault was on rank 1, in every sample of one batch
    for told in (first, second):
        step = told["steps"][str(AT)]
        assert step["nonfinite_ranks"] == [1]
        assert str(step["rank_losses"][1]).lower() == "nan"
        assert float(step["loss"]) == pytest.approx(float(step["rank_losses"][0]), abs=1e-5)
        assert [told["steps"][str(s)]["applied"] for s in range(STEPS)] == [s != AT for s in range(STEPS)]
        assert told["opened"] == [AT]
        assert told["finite"]
    assert first["weights"] == second["weights"]

    by_kind = {f["kind"]: f for f in first["findings"]}
    assert set(by_kind) == {"nonfinite_loss", "no_supervised_tokens"}
    assert (by_kind["nonfinite_loss"]["ranks"], by_kind["nonfinite_loss"]["culprits"]) == ([1], ["rank:1"])
    masked = by_kind["no_supervised_tokens"]
    assert masked["ranks"] == [1]
    assert masked["message"].startswith("rank 1: none of the 4 samples has a target that carries loss")

    verdict = first["verdict"]
    assert second["verdict"] == verdict
    assert (verdict["kind"], sorted(verdict["culprits"])) == ("data", second["struck"])
    assert [f"sample:{i}" for i in verdict["sample_ids"]] == verdict["culprits"] == masked["culprits"]
    assert verdict["since_step"] == AT
    assert verdict["evidence"]["comparisons"]["rank_values"]["worst_rank"] == 1


def test_the_token_weighted_mean_leaves_a_rank_without_tokens_out() -> None:
    record = StepRecord.from_losses(7, [2.0, math.nan, 3.0], supervised_tokens=[100.0, 0.0, 300.0], grad_norm=1.0)
    assert record.mean_loss == pytest.approx(2.75)
    [finding] = NonFinite().observe(record)
    assert (finding.kind, finding.ranks, finding.culprits) == (FindingKind.NONFINITE_LOSS, (1,), ("rank:1",))
