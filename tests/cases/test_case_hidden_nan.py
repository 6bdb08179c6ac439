"""Public cases trl#6702, WeatherGenerator#2726, metaseq#521: a logged mean hides a rank's NaN; the ranks decide apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from triage_matrix.ranks import start_together
from two_rank_cases import AT, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank wrote down, by case and in rank order."""
    folder = tmp_path_factory.mktemp("told")
    start_together("two_rank_cases", [str(folder)], Path(__file__).parent, timeout=280)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    return found


def test_the_rank_stands_beside_the_mean_and_both_ranks_decide_alike(told: Any) -> None:
    first, second = told["nan_forward"]
    step = first["steps"][str(AT)]
    assert step["nonfinite_ranks"] == [1]
    assert math.isfinite(float(step["rank_losses"][0]))
    assert str(step["rank_losses"][1]).lower() == "nan"
    assert step["applied"] is False
    assert [first["steps"][str(s)]["applied"] for s in range(STEPS) if s != AT] == [True] * (STEPS - 1)
    assert first["opened"] == second["opened"] == [AT]
    assert first["verdict"] == second["verdict"]
    assert (first["verdict"]["kind"], first["verdict"]["culprits"]) == ("numerics", ["module:model.layers.0.mixer"])


def test_the_replicas_stay_equal_and_finite(told: Any) -> None:
    for reports in told.values():
        assert reports[0]["weights"] == reports[1]["weights"]
        assert all(r["finite"] for r in reports)


def test_a_rank_without_a_supervised_token_is_named_and_leaves_the_mean_unharmed(told: Any) -> None:
    """Public case Megatron-LM#1764: 0/0 on one rank."""
    first, second = told["no_supervised_tokens"]
    assert first["verdict"] == second["verdict"]
    assert first["verdict"]["kind"] == "data"
    assert len(first["verdict"]["culprits"]) == 4
    [message] = {m for kind, ranks, m in first["findings"] if kind == "no_supervised_tokens" and ranks == [1]}
    assert message.startswith("rank 1: none of the 4 samples has a target that carries loss")
    step = first["steps"][str(AT)]
    assert float(step["loss"]) == pytest.approx(float(step["rank_losses"][0]), abs=1e-5)
    assert step["applied"] is False
