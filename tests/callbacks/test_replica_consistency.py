"""Replicas compared bit by bit: the drifted rank and the tensor are named, what differs by design is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_ranks import EVERY, HEALED, HIT, OF_FOUR, SCENARIOS
from sentinel_kit import Loader, Net, make_trainer, run_ranks

from lightning_sentinel import RankTelemetry, ReplicaConsistency
from lightning_sentinel.callbacks.replica_consistency import Judgement, Witness, judge
from lightning_sentinel.state.fingerprint import Difference, differences, digest, fingerprints

SCRIPT = Path(__file__).with_name("replica_ranks.py")
CPU = torch.device("cpu")
FIRST_LOOK = 2 * EVERY  # after HIT

# ------------------------------------------------------------------------------------------------------- fingerprints

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def row(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(fingerprints([("t", tensor)], CPU)[1][0].tolist())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES[:-1]), st.sampled_from([1, 3, 8, 1000, 2**13, 2**15 + 5]), st.data())
def test_one_flipped_bit_changes_both_sums(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    place = data.draw(st.integers(0, len(raw) - 1))
    before = row(raw.clone().view(dtype))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    after = row(raw.view(dtype))
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("numel", [64, 2**15])
def test_exchanged_values_change_it_and_the_way_they_lie_does_not(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[1, numel - 3]] = values[[numel - 3, 1]]
    assert row(values) != row(swapped)
    strided = torch.stack([values, values], dim=1)[:, 0]
    shifted = torch.cat([torch.zeros(1), values])[1:]  # not aligned to eight bytes
    assert row(values) == row(strided) == row(shifted) == row(values.view(2, -1))
    assert row(torch.tensor([0.0])) != row(torch.tensor([-0.0]))
    assert row(torch.tensor([True])) != row(torch.tensor([False]))


def test_many_tensors_at_once_are_each_what_they_are_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    named = [(f"t{n}", torch.randn(n, generator=generator)) for n in (1, 0, 5, 4096, 7, 2**14 + 1, 2)]
    names, table = fingerprints(named, CPU)
    assert names == [n for n, _ in named]
    assert [tuple(r) for r in table.tolist()] == [row(t) for _, t in named]
    assert table[1].tolist() == [0, 0]
    assert not torch.equal(digest(names, table), digest(names[::-1], table))


def test_nothing_is_read_by_the_host() -> None:
    named = [("a", torch.empty(100, device="meta")), ("b", torch.empty(2**15, device="meta", dtype=torch.float16))]
    names, table = fingerprints(named, torch.device("meta"))
    assert digest(names, table).shape == (2,)


# ------------------------------------------------------------------------------------------------------ who is wrong


def witness(**options: Any) -> Witness:
    return Witness(
        **{"table": {}, "owners": {}, "changed": {}, "updated": {"parameter:w"}, "counted": 4, "applied": 4, **options}
    )


def test_three_replicas_have_a_majority_and_sixty_four() -> None:
    tables = [{"a": (1, 1), "b": (5, r // 2)} for r in range(4)]  # b: two pairs
    assert differences(tables, [{"a": 0, "b": 0}] * 4) == [Difference("b", (0, 1, 2, 3), (0, 1, 2, 3))]
    tables = [{"a": (1, 1 if r != 41 else 2)} for r in range(64)]
    (found,) = differences(tables, [{"a": 0}] * 64)
    assert found.parted == (41,)
    assert judge([found], [witness() for _ in range(64)]) == Judgement((41,), "majority")


def test_only_ranks_that_hold_the_same_shard_are_compared() -> None:
    # 2 x 2, replicated over the first dimension: ranks 0 and 2 hold one shard, 1 and 3 the other.
    owners = [{"w": r % 2} for r in range(4)]
    tables = [{"w": (r % 2, 7)} for r in range(4)]
    assert differences(tables, owners) == []
    tables[3] = {"w": (9, 9)}
    assert differences(tables, owners) == [Difference("w", (1, 3), (1, 3))]


def test_a_rank_that_lacks_a_tensor_differs() -> None:
    tables = [{"w": (1, 1)}, {"w": (1, 1)}, {}]
    assert differences(tables, [{"w": 0}, {"w": 0}, {}]) == [Difference("w", (0, 1, 2), (2,))]


def test_two_replicas_need_another_witness() -> None:
    pair = [Difference("parameter:w", (0, 1), (0, 1))]
    assert judge(pair, [witness(), witness()]) == Judgement((), "tie")
    assert judge(pair, [witness(), witness(counted=3)]) == Judgement((1,), "updates")
    assert judge(pair, [witness(), witness(counted=5)]) == Judgement((1,), "updates")  # one too many
    assert judge(pair, [witness(counted=None, applied=3), witness(counted=None)]) == Judgement((0,), "updates")
    assert judge(pair, [witness(counted=2), witness(counted=2)]) == Judgement((), "tie")  # the counters know no better
    frozen = [Difference("parameter:f", (0, 1), (0, 1))]
    still, moved = {"parameter:f": False}, {"parameter:f": True}
    assert judge(frozen, [witness(changed=moved), witness(changed=still)]) == Judgement((0,), "untouched")
    assert judge(frozen, [witness(changed=moved), witness(changed=moved)]) == Judgement((), "tie")
    assert judge(frozen, [witness(), witness()]) == Judgement((), "tie")  # nothing is known of before


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("replicas")
    run_ranks(SCRIPT, folder, *SCENARIOS)
    return {s: [json.loads((folder / f"{s}-{r}.json").read_text()) for r in (0, 1)] for s in SCENARIOS}


def only(result: dict[str, Any], step: int = FIRST_LOOK) -> dict[str, Any]:
    (found,) = [f for f in result["findings"] if f["kind"] == "replica_drift" and f["step"] == step]
    assert (found["severity"], found["since_step"]) == ("incident", EVERY)
    return dict(found)


@pytest.mark.distributed
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_ranks_say_the_same_and_the_fault_struck(scenario: str, ranks: Any) -> None:
    first, second = ranks[scenario]
    assert first["hit"]
    assert second["hit"]
    for key in ("findings", "incidents", "compared", "local", "state"):
        assert first[key] == second[key]


@pytest.mark.distributed
def test_healthy_replicas_are_compared_without_a_word(ranks: Any) -> None:
    result = ranks["clean"][0]
    assert result["findings"] == []
    assert result["apart"] == 0.0
    assert result["state"] == {"equal_step": 12, "differ": False, "parted_step": None, "local_buffers": ["seen"]}
    (compared,) = result["compared"]
    assert compared["reason"] is None
    assert compared["left_out"] == ["norm.running_mean", "norm.running_var"]  # BatchNorm's, of this rank's data
    (local,) = result["local"]  # a sum over the rank's own data, seen to differ at the first look
    assert local["buffers"] == ["seen"]


@pytest.mark.distributed
def test_a_look_that_fails_on_one_rank_alone_is_none_on_any_and_nobody_waits(ranks: Any) -> None:
    """It would have been the first to see the drift; the next one sees it."""
    for result in ranks["cannot_look"]:
        [failed] = result["not_compared"]
        assert (failed["step"], failed["reason"]) == (2 * EVERY, "rank 1: OutOfMemoryError: nothing left here")
        assert only(result, 3 * EVERY)["evidence"]["tensors"][0] == "parameter:last.weight"
    assert ranks["clean"][0]["not_compared"] == []


@pytest.mark.distributed
def test_a_rank_that_skipped_alone_is_named(ranks: Any) -> None:
    result = ranks["skip"][0]
    found = only(result)
    assert found["ranks"] == [1]
    assert found["culprits"] == ["rank:1", "parameter:first.weight"]
    assert found["evidence"]["decided_by"] == "updates"
    assert (
        f"{FIRST_LOOK - EVERY} updates were due since then; rank 1 made {FIRST_LOOK - EVERY - 1}." in found["message"]
    )
    assert 0.01 < found["evidence"]["largest_difference"] < 0.1
    assert result["apart"] > 0.01  # nobody put it right


@pytest.mark.distributed
def test_and_with_the_response_all_ranks_go_back_to_where_they_were_equal(ranks: Any) -> None:
    result = ranks["skip_recover"][0]
    incident = result["incidents"][-1]
    assert incident["verdict"]["kind"] == "infrastructure"
    assert incident["verdict"]["culprits"] == ["rank:1", "parameter:first.weight"]
    assert [(a["action"], a["to_step"]) for a in incident["actions"]] == [("rollback_replay", EVERY)]
    assert result["apart"] == 0.0
    (agree,) = result["agree"]
    assert agree["seen_step"] == FIRST_LOOK


@pytest.mark.distributed
def test_a_drift_that_is_only_watched_is_told_once_and_at_its_end(ranks: Any) -> None:
    result = ranks["tie_observe"][0]
    (incident,) = result["incidents"]
    looks = [f["step"] for f in incident["findings"]]
    assert looks[0] == FIRST_LOOK
    assert len(looks) >= 5  # it went on looking
    assert result["told"] == ["incident.opened", "incident.updated", "incident.closed"]
    (agree,) = result["agree"]
    assert agree["seen_step"] == FIRST_LOOK
    assert HEALED <= agree["agree_step"] < HEALED + 4
    assert incident["closed_step"] >= agree["agree_step"]
    assert result["still"] == []
    assert [e["seen_step"] for e in ranks["skip"][0]["still"]] == [FIRST_LOOK]  # nobody healed that one


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("four")
    run_ranks(SCRIPT, folder, "four", *OF_FOUR, ranks=4)
    return {s: [json.loads((folder / f"{s}-{r}.json").read_text()) for r in range(4)] for s in OF_FOUR}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("scenario", "ranks_named", "tensors"),
    [("tie", [2], ["parameter:last.weight"]), ("two_ways", [0, 2], ["parameter:last.weight", "buffer:table"])],
)
def test_of_four_replicas_the_majority_names_the_one_that_drifted(
    scenario: str, ranks_named: list[int], tensors: list[str], four_ranks: Any
) -> None:
    everyone = four_ranks[scenario]
    assert all(r["findings"] == everyone[0]["findings"] for r in everyone)
    found = only(everyone[0])
    assert found["ranks"] == ranks_named
    assert found["culprits"] == [*(f"rank:{r}" for r in ranks_named), tensors[0]]
    assert found["evidence"]["tensors"] == tensors
    assert found["evidence"]["decided_by"] == "majority"
    assert "The other replicas agree to the bit." in found["message"]


@pytest.mark.distributed
def test_of_four_replicas_a_moment_is_enough(four_ranks: Any) -> None:
    found = only(four_ranks["moment"][0])
    assert (found["ranks"], found["evidence"]["decided_by"]) == ([2], "majority")
    assert found["culprits"] == ["rank:2", "parameter:first.weight"]  # the moment has moved the weight by now


@pytest.mark.distributed
@pytest.mark.parametrize(("scenario", "culprit"), [("frozen", "parameter:frozen"), ("buffer", "buffer:table")])
def test_what_no_update_touches_has_changed_on_the_guilty_rank(scenario: str, culprit: str, ranks: Any) -> None:
    found = only(ranks[scenario][0])
    assert found["culprits"] == ["rank:1", culprit]
    assert found["evidence"]["decided_by"] == "untouched"


@pytest.mark.distributed
@pytest.mark.parametrize(("scenario", "tensors"), [("tie", 1), ("moment", 2)])
def test_two_replicas_alone_cannot_tell_and_it_is_said(scenario: str, tensors: int, ranks: Any) -> None:
    found = only(ranks[scenario][0])
    assert found["ranks"] == []
    assert found["score"] == tensors
    assert "which of them is wrong cannot be told" in found["message"]


@pytest.mark.distributed
def test_a_snapshot_breaks_the_tie(ranks: Any) -> None:
    result = ranks["flip"][0]
    (incident,) = result["incidents"]
    assert incident["verdict"]["culprits"] == ["rank:1", "parameter:last.weight"]
    assert incident["verdict"]["evidence"]["decided_by"] == "snapshot"
    assert incident["status"] == "recovered"
    assert result["apart"] == 0.0


@pytest.mark.distributed
def test_sharded_parameters_have_no_replicas_unless_a_dimension_replicates_them(ranks: Any) -> None:
    assert ranks["fsdp"][0]["findings"] == []
    assert ranks["fsdp"][0]["compared"][0]["tensors"] == 4  # the frozen parameter, the table, the counter, the rate
    assert ranks["hsdp"][0]["compared"][0]["tensors"] == 8  # and the four that are replicated over two ranks
    found = only(ranks["hsdp"][0])
    assert found["culprits"] == ["parameter:last.weight"]


@pytest.mark.distributed
def test_replicas_that_are_averaged_now_and_then_are_left_alone(ranks: Any) -> None:
    (compared,) = ranks["averaged"][0]["compared"]
    assert compared["tensors"] == 0
    assert "model_averaging_period" in compared["reason"]


def test_one_process_has_nothing_to_compare_and_writes_nothing() -> None:
    trainer, sink = make_trainer([ReplicaConsistency(), RankTelemetry()], max_steps=3)
    trainer.fit(Net(), Loader())
    assert sink.named("replicas.compared", "finding") == []


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps must be at least 1, found 0"):
        ReplicaConsistency(every_n_steps=0)
    with pytest.raises(ValueError, match=r"buffers is 'some', expected one of auto, all, none"):
        ReplicaConsistency(buffers="some")
    with pytest.raises(ValueError, match="ReplicaConsistency needs RankTelemetry"):
        make_trainer([ReplicaConsistency()])[0].fit(Net(), Loader())


def test_the_fault_lies_between_two_looks() -> None:
    assert EVERY < HIT < FIRST_LOOK
