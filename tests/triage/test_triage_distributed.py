"""Two processes: every rank gets the same verdict, and the rank at fault is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentinel_kit import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("triage_two_ranks.py")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Verdicts of both ranks by fault, in rank order."""
    folder = tmp_path_factory.mktemp("verdicts")
    run_ranks(SCRIPT, folder)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    return found


@pytest.mark.parametrize(
    ("fault", "kind", "culprits", "since", "reproducible"),
    [
        ("healthy", "undetermined", [], 13, None),
        ("transient", "infrastructure", ["module:blocks.2.mixer", "rank:1"], 14, False),
        ("masked_rank", "numerics", ["module:training_step"], 15, True),
        ("finding_of_one_rank", "data", ["sample:odd"], 16, None),
        ("failing_replay", "undetermined", [], 17, None),
        ("sealed_batch", "data", ["sample:s49", "sample:s51", "sample:s53", "sample:s55"], 18, True),
        ("rate_spike", "optimization", ["optimizer:lr"], 24, None),
        ("bad_rank", "infrastructure", ["rank:1"], 12, None),
    ],
)
def test_every_rank_gets_the_same_verdict(
    verdicts: Any, fault: str, kind: str, culprits: list[str], since: int, reproducible: bool | None
) -> None:
    first, second = verdicts[fault]
    assert first == second
    assert (first["kind"], first["culprits"], first["since_step"]) == (kind, culprits, since)
    assert first["reproducible"] is reproducible
    results = {e["name"]: e["result"] for e in first["experiments"]}
    if fault not in ("finding_of_one_rank", "rate_spike"):
        assert results["replicas"] == ("differ" if fault == "bad_rank" else "equal to the bit")
    if fault == "masked_rank":
        assert first["evidence"]["ranks"] == [1]
        assert first["evidence"]["operator"] == "aten.div.Tensor"


def test_what_only_one_rank_has_is_said_to_be_its_own(verdicts: Any) -> None:
    [found] = {v["sentence"] for v in verdicts["finding_of_one_rank"]}
    assert found == "An odd one. (Only on rank 1.)"
    [rate] = {v["sentence"] for v in verdicts["rate_spike"]}
    assert rate == (
        "From step 24 to 24 the learning rate on rank 1 was up to 50 times the planned one (0.05 beside 0.001)."
    )
    assert [v["evidence"]["ranks"] for v in verdicts["rate_spike"]] == [[1], [1]]


def test_the_first_layer_in_which_a_rank_differs_is_named(verdicts: Any) -> None:
    found = [v["evidence"]["comparisons"]["first_deviating_layer"] for v in verdicts["loud_layer"]]
    assert found[0] == found[1]
    assert (found[0]["module"], found[0]["rank"], found[0]["healthy_rank"]) == ("blocks.2.mixer", 1, 0)
    assert found[0]["failing_rms"] / found[0]["healthy_rms"] == pytest.approx(50, rel=0.5)
    healthy = verdicts["healthy"][0]["evidence"]["comparisons"]["first_deviating_layer"]
    assert healthy["module"] is None


def test_the_first_gradient_in_which_a_rank_differs_is_named_in_the_order_of_the_backward(verdicts: Any) -> None:
    found = [v["evidence"]["comparisons"]["first_deviating_gradient"] for v in verdicts["loud_layer"]]
    assert found[0] == found[1]
    assert (found[0]["rank"], found[0]["healthy_rank"]) == (1, 0)
    assert found[0]["module"] is not None
    assert not 1 / 3 < found[0]["failing_rms"] / found[0]["healthy_rms"] < 3
    values = verdicts["loud_layer"][0]["evidence"]["comparisons"]["rank_values"]
    assert (values["topology"]["ranks"], len(values["seconds"]["step"])) == (2, 2)


def test_the_suspect_ranks_batch_is_computed_on_every_rank(verdicts: Any) -> None:
    first, second = verdicts["alone_in_its_answer"]
    assert first == second
    assert (first["kind"], first["culprits"]) == ("infrastructure", ["rank:1"])
    [same] = [e for e in first["experiments"] if e["name"] == "the same batch on every rank"]
    assert same["detail"]["of_rank"] == 1
    healthy, failing = same["detail"]["losses"]
    assert failing > 100 * healthy
    assert first["sentence"].endswith("It is alone in its answer.")


def test_an_experiment_that_fails_on_one_rank_is_available_on_none(verdicts: Any) -> None:
    for verdict in verdicts["failing_replay"]:
        assert verdict["sentence"] == "The step could not be replayed: rank 1: RuntimeError: no second time"
        [replayed] = [e for e in verdict["experiments"] if e["name"] == "armed replay"]
        assert replayed["result"] == "not available"


def test_a_batch_that_cannot_be_sent_leaves_no_rank_waiting(verdicts: Any) -> None:
    for verdict in verdicts["sealed_batch"]:
        [sent] = [e for e in verdict["experiments"] if e["name"] == "the same batch on every rank"]
        assert sent["result"] == "not available"
        assert sent["detail"]["reason"].startswith("rank 1: ")


def test_an_overflow_names_the_ranks_where_they_can_be_known(tmp_path: Path) -> None:
    run_ranks(SCRIPT.with_name("triage_scale_two_ranks.py"), tmp_path)
    for rank in range(2):
        of_loss, of_gradient = json.loads((tmp_path / f"overflows-{rank}.json").read_text())
        assert (of_loss["step"], of_loss["rank"], of_loss["nonfinite_ranks"]) == (2, rank, [1])
        # Rank 1's alone, but the reduction has spread it: both ranks hold it, and neither can tell.
        assert (of_gradient["step"], of_gradient["rank"], of_gradient["nonfinite_ranks"]) == (4, rank, None)
        assert of_gradient["parameters"] == ["layer.weight"]


def test_where_one_rank_fails_all_go_on_alike(tmp_path: Path) -> None:
    run_ranks(SCRIPT.with_name("triage_one_fails.py"), tmp_path)
    first, second = (json.loads((tmp_path / f"one-{rank}.json").read_text()) for rank in range(2))
    assert first.keys() == second.keys()
    assert len(first) == 11
    reasons = {}
    for name, mine in first.items():
        assert mine == second[name], name
        assert mine["met"] == [name, name]
        reasons[name] = [e["detail"]["reason"] for e in mine["experiments"] if e["result"] == "not available"]
    no_room = "rank 1: NoRoomError: no room"
    for name in ("size of the update", "stride", "parts that moved", "finite difference", "another rank's batch"):
        assert reasons[name] == [no_room], name
    assert reasons["parts that no optimizer moves"] == [no_room]
    assert reasons["first module that has parted"] == [
        "rank 1: TypeError: can't multiply sequence by non-int of type 'float'"
    ]
    assert first["fidelity"]["answer"] == f"['{no_room}']"
    assert first["the reduction again"]["answer"] == "None"
    worst = first["token losses"]["answer"]["rank_values"]["worst_rank"]
    for name, comparison in (("token losses", "token_level_losses"), ("input manifest", "input_manifest")):
        told = first[name]["answer"][comparison]
        assert (told == "not available: NoRoomError: no room") is (worst == 1)
