"""Going on with another number of ranks: every remaining sample once, by whichever rank; the rest is said."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from distributed_kit import run_script
from distributed_reshard import STARTS
from elastic_job import Job, agent_of, read, run
from elastic_script import Points
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.data import MixtureLoader
from lightning_sentinel.report.chart import build_chart
from lightning_sentinel.report.data import load_run
from lightning_sentinel.report.summary import summarise

SIZES = st.integers(1, 40)
# (ranks, samples for each rank and step, steps before the cut) of each start of the job
PHASES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=3), phases=PHASES, ahead=st.integers(0, 2), seed=st.integers(0, 9))
def test_the_order_does_not_depend_on_the_ranks(
    sizes: list[int], phases: list[tuple[int, int, int]], ahead: int, seed: int
) -> None:
    """Cut anywhere, with batches fetched ahead or not, and shared among any number: the order of one single process."""
    sources = [Points(f"s{i}", n) for i, n in enumerate(sizes)]
    trained: list[tuple[str, int]] = []
    state = None
    for ranks, batch_size, steps in phases:
        loaders = [
            MixtureLoader(sources, batch_size=batch_size, seed=seed, rank=r, world_size=ranks) for r in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        for step in range(steps + ahead):
            batches = [next(stream) for stream in streams]
            if step < steps:
                trained += [pair for b in batches for pair in zip(b["sample_id"], b["sample_pass"], strict=True)]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(MixtureLoader.state_before(states[0], ahead)))
    alone = iter(MixtureLoader(sources, seed=seed, rank=0, world_size=1))
    expected = [(b["sample_id"][0], b["sample_pass"][0]) for b in (next(alone) for _ in trained)]
    assert trained == expected
    assert len(set(trained)) == len(trained)  # each sample once in each pass over its source


def test_more_was_fetched_ahead_than_can_be_given_back() -> None:
    loader = MixtureLoader([Points("s", 9)], rank=0, world_size=1)
    next(iter(loader))
    with pytest.raises(ValueError, match="knows its position 1 batches back, 2 were asked for"):
        MixtureLoader.state_before(loader.state_dict(), 2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_then_two_then_three(tmp_path: Path) -> None:
    """One training on 4 ranks, of which one is killed, on 2, one of which is told to end, and on 3: one order of samples."""
    # without a length, so that Lightning has fetched a batch ahead for the old ranks
    options = [str(tmp_path), "--steps=16", "--every=4", "--batch=48", "--endless", "--policy=observe"]
    kill = {"rank": 2, "step": 7, "where": "gather", "after": "step-00000004"}
    jobs = [
        Job([*options, "--devices=4", f"--kills={json.dumps([kill])}"], ranks=4, fails=True),
        Job([*options, "--devices=2", "--terminate=" + json.dumps({"0": 9}), "--hosts=" + json.dumps({"1": "node-b"})]),
        Job([*options, "--devices=3"], ranks=3),
    ]
    assert run(agent_of(*jobs), 400).returncode == 0
    events = {rank: read(tmp_path, rank) for rank in range(4)}
    cuts = [0, 4, 10, 16]
    trained: list[str] = []
    for ranks, (first, end) in zip((4, 2, 3), pairwise(cuts), strict=True):
        for step in range(first, end):
            rows = [e for r in range(4) for e in events[r] if e["event"] == "step" and e["step"] == step]
            rows = [e for e in rows if e["attempt"] == max(row["attempt"] for row in rows)]
            assert len(rows) == ranks  # no step twice on the path
            trained += [sample for row in rows for sample in row["sample_ids"]]
    alone = iter(MixtureLoader([Points("a", 400), Points("b", 400)], batch_size=48, seed=3, rank=0, world_size=1))
    assert trained == [sample for _ in range(16) for sample in next(alone)["sample_id"]]

    topology = [(e["old_world_size"], e["world_size"]) for e in events[0] if e["event"] == "topology.changed"]
    assert topology == [(4, 2), (2, 3)]
    resumed = [(e["checkpoint_step"], e["status"]) for e in events[0] if e["event"] == "run.resumed"]
    assert resumed == [(4, "known_good"), (10, "candidate")]
    told = {(e["step"], e["kind"]): e["text"] for e in events[0] if e["event"] == "infra.event"}
    here = socket.gethostname()
    assert told[10, "host"] == f"rank 1 runs on host {here}, before on node-b"
    assert told[4, "host"] == f"rank 1 runs on host node-b, before on {here}"
    assert f"rank 2 (host {here}) ended without a word" in told[4, "lost_rank"]
    assert told[10, "sigterm"] == "rank 0 received SIGTERM; all ranks end at step 10"
    data = load_run(tmp_path)
    marks = {(m.kind, m.step, m.detail) for m in build_chart(data, summarise(data)).marks if m.lane == "run"}
    assert {(step, words) for kind, step, words in marks if kind == "topology"} == {
        (4, "4 to 2 ranks at step 4"),
        (10, "2 to 3 ranks at step 10"),
    }
    assert {("infra", step, f"{text} at step {step}") for (step, _), text in told.items()} <= marks

    said = [e["missing"] for e in events[0] if e["event"] == "checkpoint.incomplete"]
    assert [m[:2] for m in said] == [
        ["from 4 to 2 ranks", "the random state of ranks 2 to 3 has no counterpart"],
        ["from 2 to 3 ranks", "the random state of rank 2 is derived from that of rank 0"],
    ]
    assert not [e for e in events[0] if e["event"] in ("checkpoint.refused", "checkpoint.failed", "incident.opened")]
    weights = [json.loads((tmp_path / f"weights-{rank}.json").read_text()) for rank in range(3)]
    parameters = [w[:176] + w[-17:] for w in weights]  # without BatchNorm's own statistics, which differ by rank
    assert parameters[0] == parameters[1] == parameters[2]
    assert CheckpointStore(tmp_path / "checkpoints").newest_verified(known_good=False) is not None


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_divided_weights_are_divided_anew_for_two_then_four_then_two_ranks_then_one(tmp_path: Path) -> None:
    """FSDP2's parts of weights and moments, bit for bit those of the checkpoint; samples and losses as on one rank."""
    run_script(Path(__file__).with_name("distributed_reshard.py"), tmp_path)
    seen = {
        (ranks, end): [json.loads((tmp_path / f"divided-{ranks}-{end}-{r}.json").read_text()) for r in range(ranks)]
        for ranks, end in STARTS
    }
    for first, second in pairwise(STARTS):
        cut = str(first[1] - 1)  # the step of the checkpoint
        assert {next(iter(s)) for s in seen[second]} == {cut}
        assert {s[cut] for s in (*seen[first], *seen[second])} == {seen[first][0][cut]}

    lines = [e for r in range(4) for e in read(tmp_path / "divided", r)]
    assert not [e for e in lines if e["event"] in ("checkpoint.refused", "checkpoint.failed", "exception")]
    alone = {e["step"]: e for e in read(tmp_path / "alone", 0) if e["event"] == "step"}
    for step in range(24):
        newest = max(e["attempt"] for e in lines if e["event"] == "step" and e["step"] == step)
        rows = [e for e in lines if e["event"] == "step" and (e["step"], e["attempt"]) == (step, newest)]
        assert [sample for row in rows for sample in row["sample_ids"]] == alone[step]["sample_ids"]
        # sums in another order: no more than that
        assert rows[0]["loss"] == pytest.approx(alone[step]["loss"], rel=1e-4)
