"""Power loss at every single operation of a real save with its rotation, and of a promotion; after each a Trainer resumes."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from checkpoint_disk import CrashingDisk, PowerLoss, QuickDisk
from checkpoint_world import events, fit, suite

from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.checkpoint.contents import Contents, collect
from lightning_sentinel.checkpoint.saving import Patience, Rotation, StatusAtSave, write_and_publish
from lightning_sentinel.journal import read_journal
from lightning_sentinel.state.snapshot import take

STEPS = 10
DESCRIBED = {"versions": {}, "code": None}


class Copies(L.Callback):
    """Keeps what a checkpoint of step 8 would hold."""

    def __init__(self) -> None:
        self.part: Contents | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            self.part = collect(trainer, take(trainer), None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents, list[Any]]:
    """A run folder with the known-good checkpoints 2, 4 and 6; the next one's contents; the steps of an unbroken run."""
    run, copies = tmp_path_factory.mktemp("crash") / "run", Copies()
    clean, _ = fit([], max_steps=STEPS)
    # the copy is the newest thing that a killed process had in hand; its own journal ends somewhere before
    fit([*suite(run, every_n_steps=2, probation_steps=1, keep=9), copies], max_steps=7)
    fit([copies], max_steps=8)
    assert copies.part is not None
    assert {c.step: str(c.status.status) for c in CheckpointStore(run / "checkpoints").checkpoints()} == {
        2: "known_good",
        4: "known_good",
        6: "known_good",
    }
    return run, copies.part, clean.steps


def save_and_rotate(store: CheckpointStore, part: Contents) -> None:
    write_and_publish(
        store,
        store.begin(part.step, part.attempt),
        part,
        StatusAtSave(),
        Rotation(1, None),
        lambda: DESCRIBED,
        Patience(),
    )


def promote(store: CheckpointStore, part: Contents) -> None:
    store.promote(store.root / "step-00000008")


@pytest.mark.slow
@pytest.mark.parametrize("act", [save_and_rotate, promote])
@pytest.mark.timeout(600)
def test_a_trainer_resumes_after_power_loss_at_every_operation(
    act: Callable[[CheckpointStore, Contents], None],
    world: tuple[Path, Contents, list[Any]],
    tmp_path: Path,
) -> None:
    run, part, steps = world
    template = tmp_path / "template"
    shutil.copytree(run, template)
    if act is promote:
        save_and_rotate(CheckpointStore(template / "checkpoints", QuickDisk()), part)
    shutil.copytree(template, tmp_path / "whole")
    disk = CrashingDisk(tmp_path / "whole")
    act(CheckpointStore(tmp_path / "whole" / "checkpoints", disk), part)
    assert disk.count >= (5 if act is promote else 40)
    names = {line.split()[0] for line in disk.log}
    if act is save_and_rotate:
        assert names == {"make_dir", "create", "write", "sync", "sync_dir", "rename", "remove", "remove_dir"}

    seen = set()
    for k, draw in itertools.product(range(disk.count), range(4 if act is promote else 1)):
        where = f"{act.__name__}, operation {k} of {disk.count} ({disk.log[k]}), draw {draw}"
        work, after = tmp_path / "work", tmp_path / "after"
        for folder in (work, after):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, work)
        broken = CrashingDisk(work, stop_at=k)
        with pytest.raises(PowerLoss):
            act(CheckpointStore(work / "checkpoints", broken), part)
        broken.survivors(after, random.Random(10 * k + draw))
        module, _ = fit(suite(after, every_n_steps=0), seeds=50 + k, max_steps=STEPS)
        [resumed] = events(after, "run.resumed")
        assert resumed["status"] == "known_good", where
        assert resumed["checkpoint_step"] in ((6, 8) if act is promote else (6,)), where
        assert module.steps == steps[resumed["checkpoint_step"] :], where
        assert not events(after, "checkpoint.refused"), where
        assert read_journal(after), where
        seen.add(resumed["checkpoint_step"])
    assert seen == ({6, 8} if act is promote else {6})
