"""Four processes, each of them hurt in turn in nine ways: all ranks name the same culprit at the same step, in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed_kit import run_script
from elastic_job import read

SCRIPT = Path(__file__).with_name("distributed_four_ranks.py")
LOSS_40, FORWARD, BACKWARD, UNSUPERVISED, WEIGHTS, CURSOR, FLIP, SLOW, SLOW_STEPS = (
    43,
    69,
    95,
    121,
    147,
    173,
    200,
    229,
    28,
)
HURT = [LOSS_40, FORWARD, BACKWARD, UNSUPERVISED, WEIGHTS, CURSOR, FLIP]
RAISES = 3
RANKS = BAD = range(4)

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_script(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """By bad rank, what each rank wrote; all fits in one launch, none of whose collectives took 60 s."""
    return {bad: [json.loads((folder / f"bad-{bad}-rank-{r}.json").read_text()) for r in RANKS] for bad in BAD}


def incident_at(result: dict[str, Any], step: int) -> dict[str, Any]:
    (incident,) = [i for i in result["incidents"] if i["opened_step"] == step and i not in slow_ranks(result)]
    return incident


def slow_ranks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Incidents of a slow rank; a loaded machine may add some of its own to the one that is asked for."""
    return [i for i in result["incidents"] if {f["kind"] for f in i["findings"]} == {"straggler"}]


def ranks_found(incident: dict[str, Any], kind: str) -> list[int]:
    (ranks,) = [f["ranks"] for f in incident["findings"] if f["kind"] == kind]
    return list(ranks)


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bad", BAD)
def test_all_ranks_tell_the_same_story_and_end_with_the_same_weights(results: Results, bad: int) -> None:
    first, *others = results[bad]
    for other in others:
        assert other["incidents"] == first["incidents"]
        assert other["applied"] == first["applied"]
        assert (other["end"], other["step"], other["quarantined"]) == (first["end"], 260, first["quarantined"])
    hurt = [i for i in first["incidents"] if i not in slow_ranks(first)]
    assert [i["opened_step"] for i in hurt] == HURT
    assert {i["status"] for i in hurt} == {"recovered"}


@pytest.mark.distributed
@pytest.mark.parametrize("bad", BAD)
def test_each_bad_update_is_kept_out_at_its_step(results: Results, bad: int) -> None:
    applied = {int(step): passes for step, passes in results[bad][0]["applied"].items()}
    # What is tried again goes in the second time; what is skipped never does.
    for step in (LOSS_40, WEIGHTS, CURSOR, FLIP):
        assert applied[step] == [False, True]
    for step in (FORWARD, BACKWARD, UNSUPERVISED):
        assert set(applied[step]) == {False}
    never = {step for step, passes in applied.items() if not all(passes)}
    assert never == set(HURT)
    assert [result["flipped"] for result in results[bad]] == [rank == bad for rank in RANKS]


@pytest.mark.distributed
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("seen_by", RANKS)
def test_the_bad_rank_is_named_by_every_rank(results: Results, bad: int, seen_by: int) -> None:
    result = results[bad][seen_by]

    once = incident_at(result, LOSS_40)
    assert ranks_found(once, "rank_outlier") == [bad]
    assert (once["verdict"]["kind"], once["verdict"]["culprits"]) == ("infrastructure", [f"rank:{bad}"])
    assert [a["action"] for a in once["actions"]] == ["retry_step"]

    forward = incident_at(result, FORWARD)
    assert ranks_found(forward, "nonfinite_loss") == [bad]
    # Reduced gradients are everybody's: only the examination knows whose they are.
    backward = incident_at(result, BACKWARD)
    assert ranks_found(backward, "nonfinite_grads") == list(RANKS)
    for incident in (forward, backward):
        assert (incident["verdict"]["kind"], incident["verdict"]["culprits"]) == ("numerics", ["module:middle"])
        assert incident["verdict"]["evidence"]["ranks"] == [bad]
        assert f"Of 4 ranks only on rank {bad}." in incident["verdict"]["sentence"]
        assert [a["action"] for a in incident["actions"]] == ["skip_step"]

    unsupervised = incident_at(result, UNSUPERVISED)
    assert ranks_found(unsupervised, "no_supervised_tokens") == [bad]
    ids = [f"{bad}-{UNSUPERVISED}-{i}" for i in range(8)]  # the rank's own samples of that step, by name
    assert unsupervised["verdict"]["culprits"] == [f"sample:{i}" for i in ids]
    assert [a["action"] for a in unsupervised["actions"]] == ["skip_step"]

    weights = incident_at(result, WEIGHTS)
    assert ranks_found(weights, "rank_outlier") == [bad]
    assert (weights["verdict"]["kind"], weights["verdict"]["culprits"]) == ("infrastructure", [f"rank:{bad}"])
    assert [(a["action"], a["to_step"]) for a in weights["actions"]] == [("rollback_replay", 125)]

    cursor = incident_at(result, CURSOR)
    assert ranks_found(cursor, "repeated_samples") == [bad]
    assert cursor["verdict"]["culprits"] == ["cursor"]
    assert [(a["action"], a["to_step"]) for a in cursor["actions"]] == [("rollback_replay", 150)]

    # One bit of one weight, after the restore point of that step: the other three agree.
    flipped = incident_at(result, FLIP)
    assert ranks_found(flipped, "replica_drift") == [bad]
    assert flipped["verdict"]["kind"] == "infrastructure"
    assert flipped["verdict"]["culprits"] == [f"rank:{bad}", "parameter:middle.weight"]
    assert [(a["action"], a["to_step"]) for a in flipped["actions"]] == [("rollback_replay", 200)]


@pytest.mark.distributed
@pytest.mark.parametrize("bad", BAD)
def test_the_slow_rank_is_told_from_those_that_wait_for_it(results: Results, bad: int) -> None:
    """All ranks take the same wall time for a step: only the time without waiting tells them apart."""
    for result in results[bad]:
        [incident] = [i for i in slow_ranks(result) if i["opened_step"] >= SLOW]
        assert (incident["verdict"]["kind"], incident["verdict"]["culprits"]) == ("infrastructure", [f"rank:{bad}"])
        assert incident["actions"] == []
        assert incident["status"] in ("open", "resolved")
        slow = incident["findings"][0]
        assert SLOW + 8 <= slow["step"] < SLOW + SLOW_STEPS  # a loaded machine may have begun to slow it before
        evidence = slow["evidence"]
        assert evidence["seconds"] > 0.1  # it sleeps for so long
        assert evidence["wait_seconds"] < evidence["median_wait_seconds"]
        assert evidence["median_wait_seconds"] > 0.05
        assert result["slowest"].count(bad) > 0.8 * SLOW_STEPS  # the step lines name it long before it is an incident


@pytest.mark.distributed
def test_whoever_was_hurt_the_weights_are_the_same(results: Results) -> None:
    """The same three updates were left out of each run, and everything else came in exactly."""
    assert len({result["end"] for ranks in results.values() for result in ranks}) == 1


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bad", BAD)
def test_a_rank_that_raises_is_its_own_cause_and_the_others_say_so(folder: Path, bad: int) -> None:
    """Its traceback is its own, and in its journal before anything collective; the others stop in time and name it."""
    run = folder / f"raises-{bad}"
    [raised] = [e for e in read(run, bad) if e["event"] == "exception"]
    assert (raised["step"], raised["type"], raised["message"]) == (RAISES, "LookupError", f"boom on rank {bad}")
    assert raised["frames"][-1].endswith("training_step")
    own = (run / f"traceback-{bad}.txt").read_text()
    assert own.rstrip().endswith(f"LookupError: boom on rank {bad}")
    assert not [e for e in read(run, bad) if e["event"] == "infra.event"]  # it was not missing anybody
    for other in set(RANKS) - {bad}:
        events = read(run, other)
        [failed] = [e for e in events if e["event"] == "exception"]
        assert raised["time"] <= failed["time"] < raised["time"] + 60
        [lost] = [e for e in events if e["event"] == "infra.event"]
        assert (lost["kind"], lost["step"]) == ("lost_rank", RAISES)
        assert lost["text"] == f"rank {bad} raised LookupError at step {RAISES} (boom on rank {bad})"
        assert f"lightning-sentinel: {lost['text']}" in (run / f"traceback-{other}.txt").read_text()


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_rows_gathered_in_two_stages_are_the_same_to_the_bit(folder: Path) -> None:
    """The fit in which rank 3 is hurt gathers by pairs, and ends as the others do."""
    for rank in RANKS:
        found = json.loads((folder / f"gather-{rank}.json").read_text())
        assert (found["equal"], found["bytes"]) == (True, 4 * 112)
        assert found["refused"].startswith("RankTelemetry: gather_within is 3, which does not divide the 4 ranks.")
