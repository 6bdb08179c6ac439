"""Public cases trl#6702, WeatherGenerator#2726, metaseq#521: a logged mean hides a rank's NaN; the ranks decide apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hidden_nan_ranks import AT, COMPARED, STEPS
from triage_matrix.ranks import start_together

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank wrote down, by case and in rank order."""
    folder = tmp_path_factory.mktemp("told")
    assert start_together("hidden_nan_ranks", [str(folder)], Path(__file__).parent, timeout=280) == [0, 0]
    found: Told = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    return found


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


def test_a_rank_without_a_supervised_token_is_named_and_leaves_the_mean_unharmed(told: Told) -> None:
    """Public case Megatron-LM#1764: 0/0 on one rank."""
    first, second = told["no_supervised_tokens"]
    assert first["verdict"] == second["verdict"]
    assert first["verdict"]["kind"] == "data"
    assert len(first["verdict"]["culprits"]) == 4
    [message] = {f["message"] for f in first["findings"] if f["kind"] == "no_supervised_tokens" and f["ranks"] == [1]}
    assert message.startswith("rank 1: none of the 4 samples has a target that carries loss")
    step = first["steps"][str(AT)]
    assert float(step["loss"]) == pytest.approx(float(step["rank_losses"][0]), abs=1e-5)
    assert step["applied"] is False
