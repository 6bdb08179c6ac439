"""Ways to run in two processes, in one group: what is found, what is answered, and exactness against an undisturbed fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed_kit import run_script

SCRIPT = Path(__file__).with_name("distributed_strategies.py")
ONCE, AGAIN, ALWAYS, STEPS = 7, 12, 16, 20
LOUD = 21
WAYS = (
    "plain", "find_unused", "static_graph", "no_sync", "bucket_view", "fp16_hook", "bf16_hook", "own_hook", "power_sgd",
    "ddp_compiled", "fsdp2", "fsdp2_full", "fsdp2_compiled", "tensor", "mesh", "mesh_compiled",
)  # fmt: skip
RESUMED = (
    "find_unused", "static_graph", "no_sync", "fp16_hook", "bf16_hook", "power_sgd",
    "fsdp2", "fsdp2_full", "fsdp2_compiled", "tensor", "mesh", "mesh_compiled",
)  # fmt: skip
MESH = ("mesh", "mesh_compiled")

# where ranks of one replica compute the same loss
BAD = {"tensor": [0, 1], "mesh": [2, 3], "mesh_compiled": [2, 3]}

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ways")
    run_script(SCRIPT, folder, *WAYS)
    return {way: [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in ranks_of(way)] for way in WAYS}


def ranks_of(way: str) -> range:
    return range(4 if way in MESH else 2)


@pytest.mark.distributed
@pytest.mark.timeout(960)
@pytest.mark.parametrize("way", WAYS)
def test_two_rollbacks_and_a_skip_leave_what_an_undisturbed_fit_leaves(results: Results, way: str) -> None:
    """Weights and moments bit for bit; every collective within 60 s, also while triage replays steps."""
    for result in results[way]:
        assert (result["equal"], result["finite"], result["placed"]) == (True, True, True)
        assert result["step"] == (STEPS + 5 if way in MESH else STEPS)
        expected = {
            str(ONCE): [False, True, True],  # once more after the first rollback, and after the second
            str(AGAIN): [False, True],
            str(ALWAYS): [False],
        }
        assert result["not_applied"] == expected | ({str(LOUD): [False, True]} if way in MESH else {})


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_each_nan_is_found_and_traced_alike_on_all_ranks(results: Results, way: str) -> None:
    ours, *others = results[way]
    assert all(theirs["incidents"] == ours["incidents"] for theirs in others)
    once, again, always = ours["incidents"][:3]
    assert [i["opened_step"] for i in (once, again, always)] == [ONCE, AGAIN, ALWAYS]
    for incident in (once, again):
        assert [a["action"] for a in incident["actions"]] == ["rollback_replay"]
        assert incident["verdict"]["kind"] == "infrastructure"
        assert f"rank:{BAD.get(way, [1])[0]}" in incident["verdict"]["culprits"]
        (nan,) = [f for f in incident["findings"] if f["kind"] == "nonfinite_loss"]
        assert nan["ranks"] == BAD.get(way, [1])
    assert [a["action"] for a in always["actions"]] == ["skip_step"]
    assert always["verdict"]["kind"] == "numerics"
    assert always["verdict"]["evidence"]["operator"] == "aten.div.Tensor"
    assert {i["status"] for i in ours["incidents"]} == {"recovered"}
    # One replica of two ranks makes its NaN on both.
    elsewhere = dict.fromkeys(MESH, "Of 4 ranks only on ranks 2, 3.")
    assert {"tensor": "step", **elsewhere}.get(way, "Of 2 ranks only on rank 1.") in always["verdict"]["sentence"]


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_what_ran_compiled_is_asked_compiled(results: Results, way: str) -> None:
    """Of sharded parameters, too: whether layers are compiled before they are sharded or afterwards."""
    asked = ["finite", "finite", "again"] if way.endswith("compiled") else ["", "", ""]
    assert [result["compiled"] for result in results[way]] == [asked] * len(results[way])


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["ddp_compiled", "fsdp2_compiled"])
def test_faults_strike_within_a_compiled_layer_of_one_rank(results: Results, way: str) -> None:
    """The rank that is struck runs its layer eagerly, the other one compiled; both take part in the same collectives."""
    for rank, result in enumerate(results[way]):
        found = result["strike"]
        assert found["struck"] == [[ONCE, ["middle"]], [ALWAYS, ["middle"]]] * rank
        assert found["compiled"] == ["finite", "again"]
        assert found["incidents"] == [
            [ONCE, "infrastructure", ["module:middle", "rank:1"], ["rollback_replay"]],
            [ALWAYS, "numerics", ["module:middle"], ["skip_step"]],
        ]
        assert found["equal"] is True


@pytest.mark.distributed
@pytest.mark.parametrize("way", MESH)
def test_on_a_mesh_the_replica_is_named_by_its_first_rank(results: Results, way: str) -> None:
    """Two replicas of two tensor-parallel ranks each: the loss of the second is 40, once, on both of its ranks."""
    for result in results[way]:
        loud = result["incidents"][3]
        (outlier,) = [f for f in loud["findings"] if f["kind"] == "rank_outlier"]
        assert (loud["opened_step"], outlier["ranks"], outlier["culprits"]) == (LOUD, [2], ["rank:2"])
        assert loud["verdict"]["kind"] == "infrastructure"
        assert "rank:2" in loud["verdict"]["culprits"]
        assert len(result["incidents"]) == 4


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_the_record_counts_each_token_and_each_gradient_once(results: Results, way: str) -> None:
    """Two ranks of one tensor-parallel replica compute one batch; parts of a gradient and what lies on both count once."""
    ours, theirs = results[way][0], results[way][-1]
    batch = 8 * 16  # samples, tokens
    assert ours["tokens"]["0"] == batch * {"tensor": 1, "no_sync": 6}.get(way, 2)
    assert ours["grad_norm"] == pytest.approx(
        ours["true_norm"], rel=1e-4 if way in ("fp16_hook", "bf16_hook") else 1e-6
    )
    losses = ours["rank_losses"]
    first, second = losses[0], losses[-1]
    assert (first == second) == (way == "tensor")
    if way in MESH:
        assert losses == [first, first, second, second]
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
@pytest.mark.parametrize("way", RESUMED)
def test_a_fit_is_taken_up_again_exactly_and_gone_back_to_on_disk(results: Results, way: str) -> None:
    """Taken up by new Trainers, from the checkpoint of step 10, after an interruption at step 12; and at step 15 put in place
    from that checkpoint once more, because no snapshot in memory is as old. Compressed gradients and PowerSGD's memory,
    parameters without a gradient, windows of micro-batches; parts of weights and moments.
    """
    for rank, result in enumerate(results[way]):
        found = result["resume"]
        assert (found["equal"], found["resumed"], found["back"]) == (True, [10], [[10, "step-00000010"]])
        assert found["bad"] == []
        assert len(found["verified"]) >= 3
        assert not any(found["verified"])
        parts = found["parts"]
        if way.startswith("fsdp2"):
            assert parts[0] == [(16, 15)[rank], 32]  # of 31 rows
        elif way == "tensor":
            assert parts[7:9] == [[32, 32], [32]]  # of 64 columns
        elif way in MESH:
            assert parts[0] == [(16, 15)[rank // 2], 32]
            assert parts[7:9] == [[16, 32], [16]]  # of 64 columns, of which each replica has half, again half


@pytest.mark.distributed
def test_lightnings_own_file_of_whole_weights_lies_beside_and_is_complete(results: Results) -> None:
    """``save_distributed_checkpoint=False``: all weights and moments in one file, as a plain resume from it finds them."""
    for result in results["fsdp2_full"]:
        equal = result["resume"]["by_lightning"]
        assert (len(equal), all(equal)) == (4 * 7, True)  # each parameter with two moments and a count
        assert result["resume"]["files"] == ["lightning.ckpt"]
        assert result["resume"]["without_file"] == []


@pytest.mark.distributed
def test_a_fit_goes_on_from_lightnings_folder_with_the_suite_on(results: Results) -> None:
    """``fit(ckpt_path=<folder of torch's DCP>)``: weights, moments, a detector's state, the next samples."""
    for result in results["fsdp2"]:
        found = result["resume"]
        assert found["dcp"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
        assert (len(found["by_dcp"]), all(found["by_dcp"])) == (4 * 7, True)
        assert [line[0] for line in found["went_on"]] == list(range(10, STEPS))
        assert found["went_on"][:2] == found["interrupted"]  # samples, and the loss to the bit
        assert found["spike"] == STEPS  # ten of them come from the folder


@pytest.mark.distributed
def test_where_lightnings_checkpoint_is_no_file_the_suites_own_is_saved_without_it(results: Results) -> None:
    """``write_lightning_ckpt=True`` under FSDP2's default: said once, by rank 0; nothing fails on any rank."""
    for rank, result in enumerate(results["fsdp2"]):
        found = result["resume"]
        assert (found["bad"], found["files"]) == ([], [])
        assert [w.partition(":")[0] for w in found["without_file"]] == [
            "ForensicCheckpoint(write_lightning_ckpt=True)"
        ] * (rank == 0)
        assert all("ModelParallelStrategy is no single file (set save_distr" in w for w in found["without_file"])
