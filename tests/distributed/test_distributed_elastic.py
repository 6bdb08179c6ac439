"""Dying and coming back: ten kills at random steps, in the middle of a gather, a checkpoint, a rollback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from docs_pages import Block
from elastic_job import ROLLBACK_EVERY, agent_command, compare, kill_plan, read, run, torchrun_command, unlike_the_plan

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = pytest.mark.distributed
STEPS = 48
SEED = int(os.environ.get("SENTINEL_KILL_SEED", "11"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training without a kill."""
    folder = tmp_path_factory.mktemp("calm")
    assert run(agent_command(2, 0, str(folder), f"--steps={STEPS}"), 200).returncode == 0
    return folder


def journal(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    """A run folder's journal of one rank, and the weights that it ended with."""
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"step": 0} | event) + "\n" for event in events)
    (folder / "journal" / f"rank-{rank:05d}.jsonl").write_text(lines)
    (folder / f"weights-{rank}.json").write_text("[]")


def steps(numbers: range, loss: str = "3f800000", attempt: int = 0) -> list[dict[str, Any]]:
    where = {"attempt": attempt, "epoch": 0, "loss_bits": loss}
    return [{"event": "step", "step": i, "sample_ids": [f"a/{i}"], "batch_idx": i, **where} for i in numbers]


RESTART = {
    "event": "infra.event",
    "kind": "restart",
    "text": "torchelastic has started the workers anew, restart number 1",
}


def test_the_comparison_sees_what_it_is_there_to_see(tmp_path: Path) -> None:
    """Journals written by hand: a repetition unlike the first time on rank 1 alone, a kill that nobody died of."""
    start = {"event": "run.started"}
    back = [RESTART, start, {"event": "run.resumed", "checkpoint_step": 2}]
    saved = {"event": "checkpoint.saved", "step": 2}
    plan = [{"rank": 1, "step": 3, "where": "gather"}]
    for rank in range(2):
        journal(tmp_path / "calm", rank, [start, *steps(range(4))])
        journal(
            tmp_path / "killed",
            rank,
            [start, *steps(range(2)), saved, *steps(range(2, 3)), *back, *steps(range(2, 4), attempt=1)],
        )
    marker = tmp_path / "killed" / "killed-0"
    marker.write_text(json.dumps(plan[0]))
    found = compare(tmp_path / "calm", tmp_path / "killed", 2, 4)
    assert (found.problems, len(found.resumed), found.repeated_steps) == ([], 1, 2)  # step 2, on each rank
    assert unlike_the_plan(tmp_path / "killed", plan) == []

    abandoned = [
        start,
        *steps(range(2)),
        saved,
        *steps(range(2, 3), loss="bad0bad0"),
        *back,
        *steps(range(2, 4), attempt=1),
    ]
    journal(tmp_path / "killed", 1, abandoned)
    assert compare(tmp_path / "calm", tmp_path / "killed", 2, 4).problems == [
        "rank 1: step 2 is repeated as (('a/2',), '3f800000'), it was (('a/2',), 'bad0bad0')"
    ]
    marker.unlink()
    journal(tmp_path / "killed", 0, [start, *steps(range(2)), saved, start, *steps(range(4), attempt=1)])
    assert unlike_the_plan(tmp_path / "killed", plan) == [
        f"attempt 0: nobody was killed, {plan[0]} was planned",
        "restarts [] are on rank 0's journal, 1 were planned",
        "1 of 2 starts did not resume although a checkpoint had been saved",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_and_back_each_time(calm: Path, tmp_path: Path) -> None:
    """Ranks start half a second apart; the job ends as if nothing had been, and the journal tells each repetition."""
    plan = kill_plan(SEED, 10, 2, STEPS)
    assert {p["where"] for p in plan} >= {"gather", "checkpoint", "rollback"}
    options = [f"--steps={STEPS}", f"--rollback-every={ROLLBACK_EVERY}", f"--kills={json.dumps(plan)}", "--skew=0.5"]
    assert run(agent_command(2, 10, str(tmp_path), *options), 800).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert unlike_the_plan(tmp_path, plan) == []  # each of the ten took place, and each restart resumed
    events = read(tmp_path, 0)
    assert len(found.resumed) == 10 - sum(p["step"] < 5 for p in plan)  # before the first checkpoint: from the start
    assert {e["status"] for e in found.resumed} <= {"known_good", "candidate"}
    store = CheckpointStore(tmp_path / "checkpoints")
    assert all(store.verify(path) == [] for path in store.paths())
    assert not [e for e in events if e["event"] in ("checkpoint.refused", "incident.opened")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_brings_it_back_as_typed(calm: Path, tmp_path: Path, documented: list[Block]) -> None:
    """The command line itself, ranks that start three seconds apart, one kill in a gather.

    The script makes the calls of the page's program, with arguments of its own; the program is not run as it stands.
    """
    program, line = (block.take() for block in documented)
    script = (Path(__file__).parent / "elastic_script.py").read_text(encoding="utf-8")
    for call in ("init_process_group(timeout=", "L.Trainer(", "lightning_sentinel.default_callbacks(", "trainer.fit("):
        assert call in program
        assert call in script
    words = line.split()
    assert (words[0], words[1], words[3]) == ("torchrun", "--nproc-per-node", "--max-restarts")
    plan = [{"rank": 1, "step": 21, "where": "gather", "after": "step-00000020"}]
    command = torchrun_command(2, 1, str(tmp_path), f"--steps={STEPS}", f"--kills={json.dumps(plan)}", "--skew=3")
    assert run(command, 350).returncode == 0
    assert unlike_the_plan(tmp_path, plan) == []
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [20]
