"""Ways to run in two processes, in one group: what is found, what is answered, and exactness against an undisturbed fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed_kit import run_script

SCRIPT = Path(__file__).with_name("distributed_strategies.py")
ONCE, AGAIN, ALWAYS, STEPS = 7, 12, 16, 20
WAYS = (
    "plain", "find_unused", "static_graph", "no_sync", "bucket_view", "fp16_hook", "own_hook", "fsdp2", "tensor",
)  # fmt: skip

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ways")
    run_script(SCRIPT, folder, *WAYS)
    return {way: [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in (0, 1)] for way in WAYS}


@pytest.mark.distributed
@pytest.mark.timeout(960)
@pytest.mark.parametrize("way", WAYS)
def test_two_rollbacks_and_a_skip_leave_what_an_undisturbed_fit_leaves(results: Results, way: str) -> None:
    """Weights and moments bit for bit; every collective within 60 s, also while triage replays steps."""
    for result in results[way]:
        assert (result["equal"], result["finite"], result["step"]) == (True, True, STEPS)
        assert result["not_applied"] == {
            str(ONCE): [False, True, True],  # once more after the first rollback, and after the second
            str(AGAIN): [False, True],
            str(ALWAYS): [False],
        }


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_each_nan_is_found_and_traced_alike_on_both_ranks(results: Results, way: str) -> None:
    ours, theirs = results[way]
    assert ours["incidents"] == theirs["incidents"]
    once, again, always = ours["incidents"]
    assert [i["opened_step"] for i in (once, again, always)] == [ONCE, AGAIN, ALWAYS]
    for incident in (once, again):
        assert [a["action"] for a in incident["actions"]] == ["rollback_replay"]
        assert incident["verdict"]["kind"] == "infrastructure"
        assert "rank:1" in incident["verdict"]["culprits"]
    assert [a["action"] for a in always["actions"]] == ["skip_step"]
    assert always["verdict"]["kind"] == "numerics"
    assert always["verdict"]["evidence"]["operator"] == "aten.div.Tensor"
    assert {i["status"] for i in ours["incidents"]} == {"recovered"}
    # One replica of two ranks makes its NaN on both.
    assert ("Of 2 ranks only on rank 1." in always["verdict"]["sentence"]) == (way != "tensor")


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_the_record_counts_each_token_and_each_gradient_once(results: Results, way: str) -> None:
    """Two ranks of one tensor-parallel replica compute one batch; parts of a gradient and what lies on both count once."""
    ours, theirs = results[way]
    batch = 8 * 16  # samples, tokens
    assert ours["tokens"]["0"] == batch * {"tensor": 1, "no_sync": 6}.get(way, 2)
    assert ours["grad_norm"] == pytest.approx(ours["true_norm"], rel=1e-6 if way != "fp16_hook" else 1e-4)
    first, second = ours["rank_losses"]
    assert (first == second) == (way == "tensor")
    assert ours["loss"] == pytest.approx((first + second) / 2, rel=1e-6)
    assert theirs["rank_losses"] == ours["rank_losses"]


@pytest.mark.distributed
def test_hardware_counters_are_read_on_every_rank_when_an_incident_opens(results: Results) -> None:
    broken = {"error": "ZeroDivisionError: integer division or modulo by zero"}
    fine = {"ecc_errors": 6.0, "temperature_c": 61.0}
    ours, theirs = results["plain"]
    assert (ours["hardware"], theirs["hardware"]) == ([broken] * 3, [fine] * 3)  # once for each incident
    for incident in ours["incidents"]:
        kept = incident["hardware"]
        assert kept["ranks"]["1"] == fine
        assert kept["range"] == {"ecc_errors": [6.0, 6.0, 6.0], "temperature_c": [61.0, 61.0, 61.0]}
        assert kept["failed"] == [0]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["fsdp2", "tensor"])
def test_sharded_parameters_are_taken_up_again_exactly(results: Results, way: str) -> None:
    """By new Trainers, from the sharded checkpoint of step 10, after an interruption at step 12."""
    for rank, result in enumerate(results[way]):
        assert (result["resume"]["equal"], result["resume"]["resumed"]) == (True, [10])
        parts = result["resume"]["parts"]
        if way == "fsdp2":
            assert parts[0] == [(16, 15)[rank], 32]  # of 31 rows
        else:
            assert parts[7:9] == [[32, 32], [32]]  # of 64 columns
