"""Public cases trl#6702, WeatherGenerator#2726, metaseq#521: a logged mean hides a rank's NaN; the ranks decide apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hidden_nan_ranks import AT, COMPARED, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
Told = dict[str, list[dict[str, Any]]]


@pytest.fixture
def told(told_by_ranks: Told) -> Told:
    return told_by_ranks


def test_the_rank_stands_beside_the_mean_and_both_ranks_decide_alike(told: Told) -> None:
    first, second = told["nan_forward"]
    step = first["steps"][str(AT)]
    assert step["nonfinite_ranks"] == [1]
    assert math.isfinite(float(step["rank_losses"][0]))
    assert str(step["rank_losses"][1]).lower() == "nan"
    assert [first["steps"][str(s)]["applied"] for s in range(STEPS)] == [s != AT for s in range(STEPS)]
    assert [e["applied"] for e in first["steps"].values()] == [e["applied"] for e in second["steps"].values()]
    assert first["opened"] == second["opened"] == [AT]
    assert first["verdict"] == second["verdict"]
    assert (first["verdict"]["kind"], first["verdict"]["culprits"]) == ("numerics", ["module:model.layers.0.mixer"])
    assert first["verdict"]["evidence"]["ranks"] == [1]


@pytest.mark.parametrize("case", ["nan_forward", "no_supervised_tokens"])
def test_the_replicas_stay_equal_and_finite(told: Told, case: str) -> None:
    first, second = told[case]
    assert first["weights"] == second["weights"]
    assert first["finite"]
    assert "replica_drift" not in {f["kind"] for f in first["findings"]}


def test_a_rank_that_decided_alone_is_named_by_the_hash_of_its_replica(told: Told) -> None:
    first, second = told["skips_alone"]
    assert first["weights"] != second["weights"]
    drift = next(f for f in first["findings"] if f["kind"] == "replica_drift")
    assert drift["step"] == AT + COMPARED  # the look at AT was before the update
    assert drift["since_step"] == AT
    assert drift["ranks"] == [1]
    assert drift["culprits"][0] == "rank:1"
    assert first["verdict"] == second["verdict"]
    assert (first["verdict"]["kind"], first["verdict"]["culprits"][0]) == ("infrastructure", "rank:1")
