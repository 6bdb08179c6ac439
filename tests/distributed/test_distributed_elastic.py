"""Dying and coming back: ten kills at random steps, in the middle of a gather, a checkpoint, a rollback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from docs_pages import Block
from elastic_job import (
    ROLLBACK_EVERY,
    Job,
    Started,
    agent_of,
    as_here,
    compare,
    kill_plan,
    read,
    run,
    typed,
    unlike_the_plan,
)

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = pytest.mark.distributed
STEPS = 48
SEED = int(os.environ.get("SENTINEL_KILL_SEED", "11"))


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


def test_a_command_that_does_not_exist_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError) as raised:
        Started(["no-such-command"])
    assert len(os.listdir("/proc/self/fd")) == before, raised


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_and_back_each_time(tmp_path: Path) -> None:
    """Ranks start half a second apart; the job ends as if nothing had been, and the journal tells each repetition."""
    plan = kill_plan(SEED, 10, 2, STEPS)
    assert {p["where"] for p in plan} >= {"gather", "sent", "checkpoint", "publish", "rollback", "backward", "resume"}
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    more = [f"--rollback-every={ROLLBACK_EVERY}", f"--kills={json.dumps(plan)}", "--skew=0.5"]
    steps = f"--steps={STEPS}"
    jobs = [Job([str(calm), steps]), Job([str(killed), steps, *more], restarts=10)]
    assert run(agent_of(*jobs), 800).returncode == 0
    found = compare(calm, killed, 2, STEPS)
    assert found.problems == []
    assert unlike_the_plan(killed, plan) == []  # each of the ten took place, and each restart resumed
    events = read(killed, 0)
    assert len(found.resumed) == 10 - sum(p["step"] < 5 for p in plan)  # before the first checkpoint: from the start
    assert {e["status"] for e in found.resumed} <= {"known_good", "candidate"}
    store = CheckpointStore(killed / "checkpoints")
    assert all(store.verify(path) == [] for path in store.paths())
    assert not [e for e in events if e["event"] in ("checkpoint.refused", "incident.opened")]


# What the page's program takes for granted: a model, a loader, and that somebody may kill it in the middle of a gather. Its
# Trainer has no last step, so the model ends the fit. Each start has other weights until it has resumed.
PRELUDE = """
import json, os, struct, sys
from pathlib import Path

sys.path.insert(0, {folder!r})
import torch
from elastic_script import CollectiveLimit, Killer, MixtureLoader, Net, Points

FOLDER, RANK, START = Path("runs/a"), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
KILLS = json.loads(os.environ.get("KILLS", "[]"))


class Model(Net):
    def configure_callbacks(self):
        mine = START < len(KILLS) and KILLS[START]["rank"] == RANK
        return [CollectiveLimit(), *([Killer(KILLS[START], FOLDER, START)] if mine else [])]

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.trainer.global_step == {steps}

    def on_train_end(self):
        bits = [struct.pack(">f", float(v)).hex() for p in self.state_dict().values() for v in p.flatten()]
        (FOLDER / f"weights-{{RANK}}.json").write_text(json.dumps(bits))


torch.manual_seed(START)
model = Model()
loader = MixtureLoader([Points("a", 400), Points("b", 400)], batch_size=2, steps_per_epoch=30, seed=3)
"""
PAGE_STEPS, PAGE_EVERY = 75, 10
# A CPU counts as one device unless told otherwise, and a checkpoint every 500 steps would take 550 to be known-good.
PAGE_TRAINER = {
    "L.Trainer(": 'L.Trainer(accelerator="cpu", devices=2, ',
    "checkpoint_every_n_steps=500": f"checkpoint_every_n_steps={PAGE_EVERY}",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_brings_it_back_as_typed(tmp_path: Path, documented: list[Block]) -> None:
    """The page's own program, started by the page's own line on two ranks, one of them killed in a gather.

    It goes on from the newest checkpoint that is known-good by the default probation, to the end of the same program
    without a kill. What differs from the page: two processes of a CPU in place of eight devices, and how often it saves.
    """
    program, line = (block.take() for block in documented)
    prelude = PRELUDE.format(folder=str(Path(__file__).parent), steps=PAGE_STEPS)
    folders = [tmp_path / name for name in ("calm", "killed")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(prelude + as_here(program, PAGE_TRAINER))
    calm, killed = (folder / "runs" / "a" for folder in folders)
    job = Job(script=str(folders[0] / "train.py"), folder=str(folders[0]))
    assert run(agent_of(job), 200).returncode == 0
    plan = [{"rank": 1, "step": 64, "where": "gather", "after": "step-00000010"}]
    command = as_here(line, {"--nproc-per-node 8": "--nproc-per-node 2"})
    job = typed(command, cwd=folders[1], env={"KILLS": json.dumps(plan)})
    job.end(350)
    assert job.returncode == 0
    assert unlike_the_plan(killed, plan) == []
    found = compare(calm, killed, 2, PAGE_STEPS)
    assert found.problems == []
    assert [(e["checkpoint_step"], e["status"]) for e in found.resumed] == [(10, "known_good")]
    assert found.repeated_steps > 2 * 50
