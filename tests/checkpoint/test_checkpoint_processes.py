"""Whole processes: two ranks that resume together, real kills of a training run, and the whole suite over a restart."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import Net, events, fit, loader, same_optimizer, same_weights, suite
from fork_server import run_forked
from sentinel_kit import rank_environments

import lightning_sentinel
from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.journal import read_journal

SCRIPT = Path(__file__).with_name("checkpoint_ddp_script.py")
TRAINER_KILLS = int(os.environ.get("SENTINEL_TRAINER_KILLS", "5"))


def run_ranks(folder: Path, *arguments: str) -> int:
    """Two gloo ranks in their own processes; returns the exit status of rank 0."""
    codes, said = run_forked(SCRIPT, [folder, *arguments], rank_environments(2), 200, end_others=False)
    print(said[-6000:])  # pytest shows it where the test fails
    return codes[0]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_resume_together(tmp_path: Path) -> None:
    """Dropout and shuffle differ by rank, so every rank's random state and data position must come back.

    A checkpoint that one rank cannot use is used by none: each refuses it alike, and says so.
    """
    assert run_ranks(tmp_path / "clean") == 0
    assert run_ranks(tmp_path / "run", "--stop=11") != 0
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    saved = {c.step: c for c in store.checkpoints()}
    assert set(saved) == {2, 4, 6, 8, 10}
    assert saved[10].manifest.world_size == 2
    expected = ["lightning.ckpt", "model.pt", "optimizer.pt", "rank-00000.pt", "rank-00001.pt", "run.json"]
    assert sorted(saved[10].manifest.files) == expected
    # the newest one has lost the part of rank 1, in the one before it is damaged, and the next one, whose every hash is
    # right, rank 1 alone cannot load: refused as a whole, by both ranks
    (saved[10].path / "rank-00001.pt").unlink()
    part = saved[8].path / "rank-00001.pt"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert run_ranks(tmp_path / "run", "--seed=9", "--fails-alone=6", "--then-none") == 0
    refused = [(Path(e["path"]).name, e["reason"]) for e in events(tmp_path / "run", "checkpoint.refused")]
    alone = "rank 1: OSError: the disk of this node has gone"
    assert refused[:3] == [
        ("step-00000010", "rank-00001.pt is missing"),
        ("step-00000008", "rank-00001.pt fails SHA-256"),
        ("step-00000006", alone),
    ]
    # where none is left, no rank starts afresh by itself
    nothing = [json.loads((tmp_path / "run" / f"none-{rank}.json").read_text()) for rank in range(2)]
    assert nothing[0] == nothing[1]
    assert nothing[0].startswith("resume='auto': no checkpoint in ")
    assert nothing[0].count("step-") == len(refused[3:]) >= 4
    assert alone in nothing[0]
    assert nothing[0].endswith("Repair one, name one by resume=<path>, or set resume=None to start afresh.")
    for rank in range(2):
        clean = json.loads((tmp_path / "clean" / f"steps-{rank}.json").read_text())
        again = json.loads((tmp_path / "run" / f"steps-{rank}.json").read_text())
        assert [e["checkpoint_step"] for e in events(tmp_path / "run", "run.resumed", rank)] == [4]
        assert again["steps"] == clean["steps"][4:]
        assert again["weights"] == clean["weights"]
    assert not [e for e in events(tmp_path / "run", "finding") if e["finding"]["kind"] == "restart_jump"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
@pytest.mark.timeout(240)
def test_kill_9_of_whole_trainings(tmp_path: Path) -> None:
    """Each killed run goes on where its newest good checkpoint was, and the last one ends bit for bit as an unbroken one."""
    clean, clean_trainer = fit([], max_epochs=4)
    luck = random.Random(1)
    run = tmp_path / "run"

    def options() -> dict[str, Any]:
        return {"every_n_steps": 3, "probation_steps": 1, "save_on_exception": False}

    for kill in range(TRAINER_KILLS):
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                fit(suite(run, **options()), module=Slow, seeds=kill and 50 + kill, max_epochs=4)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(luck.uniform(0.0, 0.5))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        store = CheckpointStore(run / "checkpoints")
        assert all(store.verify(path) == [] for path in store.paths())
        assert read_journal(run)
    again, trainer = fit(suite(run, **options()), seeds=99, max_epochs=4)
    resumed = events(run, "run.resumed")
    assert 1 <= len(resumed) <= TRAINER_KILLS
    assert again.steps == clean.steps[resumed[-1]["checkpoint_step"] :]
    assert same_weights(clean, again)
    assert same_optimizer(clean_trainer, trainer)
    assert not events(run, "checkpoint.refused")


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("policy", ["observe", "recover"])
def test_the_whole_suite_survives_a_restart(policy: str, tmp_path: Path) -> None:
    """Every callback's state goes through a checkpoint, and the resumed run is the uninterrupted one."""

    def callbacks(folder: Path) -> list[Any]:
        found = lightning_sentinel.default_callbacks(folder, policy=policy, checkpoint_every_n_steps=5)
        found[0].report = False
        return found

    clean, clean_trainer = fit([])
    with pytest.raises(RuntimeError, match="boom"):
        fit(callbacks(tmp_path), module=lambda: Net(fail_at=17))
    again, trainer = fit(callbacks(tmp_path), seeds=99)
    start = events(tmp_path, "run.resumed")[0]["checkpoint_step"]
    assert start >= 15
    assert again.steps == clean.steps[start:]
    assert same_weights(clean, again)
    assert same_optimizer(clean_trainer, trainer)
    assert not events(tmp_path, "checkpoint.failed")
    assert not events(tmp_path, "incident.opened")


def test_a_state_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """SIGTERM between two micro-batches: the gradients so far are in the checkpoint."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from test_checkpoint_callback import At

    clean, _ = fit([], accumulate_grad_batches=3)
    hits: list[int] = []

    def strike(trainer: Any) -> None:
        hits.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        fit([At(2, strike), *suite(tmp_path, every_n_steps=0)], accumulate_grad_batches=3)
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.load_json(store.checkpoints()[0], "run.json")["mid_accumulation"] is True
    again, _ = fit(suite(tmp_path, every_n_steps=0), seeds=9, accumulate_grad_batches=3)
    assert hits == [7]
    assert again.steps == clean.steps[7:]
    assert same_weights(clean, again)


def test_the_loader_of_the_tests_is_shuffled() -> None:
    torch.manual_seed(0)
    assert [b["sample_id"] for b in loader()] != [[f"s{i + k}" for k in range(4)] for i in range(0, 48, 4)]
