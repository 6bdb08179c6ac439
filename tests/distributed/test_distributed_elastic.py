"""Dying and coming back: ten kills at random steps, in the middle of a gather, a checkpoint, a rollback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, Block
from elastic_job import ROLLBACK_EVERY, agent_command, compare, kill_plan, read, run, torchrun_command

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
    events = read(tmp_path, 0)
    restarts = [e["text"] for e in events if e["event"] == "infra.event" and e["kind"] == "restart"]
    assert [int(text.split("number ")[1].split()[0]) for text in restarts] == list(range(1, 11))
    assert len(found.resumed) == 10 - sum(p["step"] < 5 for p in plan)  # before the first checkpoint: from the start
    assert {e["status"] for e in found.resumed} <= {"known_good", "candidate"}
    store = CheckpointStore(tmp_path / "checkpoints")
    assert all(store.verify(path) == [] for path in store.paths())
    assert not [e for e in events if e["event"] in ("checkpoint.refused", "incident.opened")]


# What the page takes for granted: a model, a loader, a time-out that a test can wait for, and a kill in the first attempt.
PRELUDE = """
import os, signal, sys
sys.path[:0] = {folders!r}
import lightning as L
import torch
from elastic_script import Net, Points
from lightning_sentinel.data import MixtureLoader

torch.set_num_threads(1)
model, loader = Net(), MixtureLoader([Points("a", 400)], batch_size=4, steps_per_epoch=10, seed=3)


class Kill(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 19 and trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_program_of_the_page_comes_back_after_a_kill(tmp_path: Path, documented: list[Block]) -> None:
    """``train.py`` of the page and its ``torchrun`` line, with two processes, fewer steps and one kill."""
    code, line = (block.take() for block in documented)
    tests = str(Path(__file__).parents[1])
    few = "max_steps=24, accelerator='cpu', max_epochs=-1, logger=False, enable_progress_bar=False, "
    few += "enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False, "
    assert code.count("L.Trainer(") == code.count("checkpoint_every_n_steps=500") == code.count("trainer.fit(") == 1
    code = code.replace("L.Trainer(", f"L.Trainer({few}").replace("n_steps=500", "n_steps=6")
    code = code.replace("trainer.fit(", "trainer.callbacks.insert(0, Kill())\ntrainer.fit(")
    prelude = PRELUDE.format(folders=[str(Path(__file__).parent), tests, str(ROOT)])
    (tmp_path / "train.py").write_text(prelude + code + "\n")
    words = shlex.split(line)
    assert (words[0], words[-1]) == ("torchrun", "train.py")
    words[words.index("--nproc-per-node") + 1] = "2"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-6000:]
    events = read(tmp_path / "runs" / "a", 0)
    (restart,) = (e for e in events if e["event"] == "infra.event" and e["kind"] == "restart")
    assert "number 1" in restart["text"]
    assert [e["checkpoint_step"] for e in events if e["event"] == "run.resumed"] == [18]
    assert [e["status"] for e in events if e["event"] == "run.ended"] == ["finished"]
    live = {e["step"] for e in events if e["event"] == "step"}
    assert live == set(range(24))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_brings_it_back_as_typed(calm: Path, tmp_path: Path) -> None:
    """The command line itself, ranks that start three seconds apart, one kill in a gather."""
    kills = json.dumps([{"rank": 1, "step": 21, "where": "gather", "after": "step-00000020"}])
    command = torchrun_command(2, 1, str(tmp_path), f"--steps={STEPS}", f"--kills={kills}", "--skew=3")
    assert run(command, 350).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [20]
