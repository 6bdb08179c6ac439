"""Training does not wait for the disk: not for hashes, not for files, not for a promotion; a long save says how far it is."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import lightning as L
import pytest
import torch
from checkpoint_disk import QuickDisk
from checkpoint_world import events, fit, same_weights, suite

from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.checkpoint.describe import code_revision
from lightning_sentinel.checkpoint.probation import Probation
from lightning_sentinel.checkpoint.saving import Part, Patience, collect_parts, leave_part, write_part
from lightning_sentinel.checkpoint.store import CheckpointError
from lightning_sentinel.checkpoint.writer import NICENESS, Writer

AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


class GatedDisk(QuickDisk):
    """Lets no byte through until training has gone on for some steps; notes which thread asks."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: set[str] = set()

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        self.threads.add(threading.current_thread().name)
        if not self.gate.wait(60):
            raise TimeoutError("training did not go on while the disk was slow")
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.threads.add(threading.current_thread().name)


class OpensLater(L.Callback):
    def __init__(self, gate: threading.Event, step: int) -> None:
        self.gate, self.step = gate, step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.gate.set()


@pytest.mark.parametrize("lightning", [False, True], ids=["suite", "with-lightnings-file"])
def test_training_goes_on_while_the_disk_does_not(
    lightning: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = GatedDisk()
    monkeypatch.setattr("lightning_sentinel.checkpoint.store.Disk", lambda: disk)
    opens = OpensLater(disk.gate, 12)
    # saved at step 8, through its probation at step 10; the disk moves at step 12
    callbacks = suite(tmp_path, every_n_steps=8, probation_steps=2, write_lightning_ckpt=lightning)
    clean, _ = fit([], max_steps=14)
    module, trainer = fit([opens, *callbacks], max_steps=14)
    assert trainer.global_step == 14
    assert disk.threads == {"ForensicCheckpoint_0"}
    assert module.steps == clean.steps
    assert same_weights(module, clean)
    store = CheckpointStore(tmp_path / "checkpoints")
    [checkpoint] = store.checkpoints()
    assert store.verify(checkpoint.path) == []
    assert ("lightning.ckpt" in checkpoint.manifest.files) is lightning
    # what was written late is what training was at the save
    saved = store.load_torch(checkpoint, "rank-00000.pt")["snapshot"]
    assert (saved["step"], saved["loops"]["epoch_loop.batch_progress"]["total"]["completed"]) == (8, 8)
    [good] = events(tmp_path, "checkpoint.known_good")
    assert good["checkpoint_step"] == 8
    assert good["step"] >= 12  # its probation was over at step 10, but nothing is good before it is on the disk


@pytest.mark.filterwarnings("ignore:.*weights_only.*")
def test_lightnings_file_is_what_lightning_itself_would_have_written(tmp_path: Path) -> None:
    """Copied while training goes on, and yet the same values, kinds and versions."""

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 12:
                trainer.save_checkpoint(tmp_path / "own.ckpt")

    fit([*suite(tmp_path, every_n_steps=12, write_lightning_ckpt=True), Keep()], max_steps=15)
    [checkpoint] = CheckpointStore(tmp_path / "checkpoints").checkpoints()
    mine = torch.load(checkpoint.path / "lightning.ckpt", weights_only=False)
    own = torch.load(tmp_path / "own.ckpt", weights_only=False)
    assert mine.keys() == own.keys()
    assert type(mine["state_dict"]) is type(own["state_dict"])
    assert mine["state_dict"]._metadata == own["state_dict"]._metadata
    for name, value in own["state_dict"].items():
        assert torch.equal(mine["state_dict"][name], value)
    assert mine["optimizer_states"][0]["param_groups"] == own["optimizer_states"][0]["param_groups"]
    assert mine["lr_schedulers"] == own["lr_schedulers"]


def test_the_writer_keeps_the_order_and_tells_on_the_asking_thread() -> None:
    told: list[Any] = []
    writer, gate = Writer(), threading.Event()
    writer.submit(lambda: gate.wait(30), lambda _: told.append("first"), print)
    writer.submit(lambda: 1 // 0, print, lambda error: told.append(str(error)))
    writer.submit(threading.get_native_id, lambda thread: told.append(thread != threading.get_native_id()), print)
    writer.settle(wait=False)
    assert told == []
    assert writer.busy
    gate.set()
    writer.settle(wait=True)
    assert told == ["first", "integer division or modulo by zero", True]
    assert not writer.busy
    writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to the process")
def test_the_writers_thread_gives_way_to_training() -> None:
    writer, found = Writer(), deque[int]()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), found.append, print)
    writer.settle(wait=True)
    writer.close()
    assert list(found) == [min(19, own + NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_long_save_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_sentinel.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("lightning_sentinel.progress.LINE_SECONDS", 0.0)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # as Lightning has it
    logging.getLogger("lightning.pytorch").addHandler(caplog.handler)
    try:
        fit(suite(tmp_path), max_steps=7)
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(caplog.handler)
    lines = [r.message for r in caplog.records if r.message.startswith("checkpoint of step 5: ")]
    assert any("MiB (" in line and " %)" in line for line in lines)
    assert lines[-1].startswith("checkpoint of step 5: done after ")


# --------------------------------------------------------------------------------------------------- several ranks


class Rank:
    """The contents of a rank that holds nothing but its number."""

    step, attempt, tokens, world_size = 7, 0, 70, 3

    def __init__(self, rank: int, fails: bool = False, nonfinite: str | None = None) -> None:
        self.rank, self.fails, self._nonfinite = rank, fails, nonfinite

    def nonfinite(self) -> str | None:
        return self._nonfinite

    def write(self, pending: Any) -> None:
        pending.write_torch(f"rank-{self.rank:05d}.pt", {"rank": self.rank})
        if self.fails:
            raise OSError(28, "No space left on device")


def test_rank_0_hears_of_all_parts_and_of_what_went_wrong(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pending = store.begin(7)
    write_part(store, store.join(pending.directory), Rank(2, nonfinite="parameter a"))  # type: ignore[arg-type]
    write_part(store, store.join(pending.directory), Rank(1))  # type: ignore[arg-type]
    told = collect_parts(store, pending, Rank(0), Patience(30))  # type: ignore[arg-type]
    assert sorted(told) == [1, 2]
    assert list(told[1].entries) == ["rank-00001.pt"]
    assert (told[1].nonfinite, told[2].nonfinite) == (None, "parameter a")
    assert sorted(p.name for p in pending.directory.iterdir()) == ["rank-00001.pt", "rank-00002.pt"]

    with pytest.raises(OSError, match="No space left"):
        write_part(store, store.join(pending.directory), Rank(3, fails=True))  # type: ignore[arg-type]
    assert not (pending.directory / "rank-00003.pt").exists()  # its room is given back
    leave_part(store, pending, 1, Part())
    (pending.directory / "part-00003.json").rename(pending.directory / "part-00002.json")
    with pytest.raises(CheckpointError, match="rank 2: No space left on device"):
        collect_parts(store, pending, Rank(0), Patience(30))  # type: ignore[arg-type]


def test_rank_0_does_not_wait_for_ever_and_less_where_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    pending = store.begin(7)
    leave_part(store, pending, 2, Part())
    with pytest.raises(CheckpointError, match=r"rank 1 has not told within .* s that the files of step 7 are written"):
        collect_parts(store, pending, Rank(0), Patience(0.2))  # type: ignore[arg-type]
    monkeypatch.setattr("lightning_sentinel.checkpoint.saving.HURRY_SECONDS", 0.2)
    patience = Patience(600)
    patience.hurry.set()
    with pytest.raises(CheckpointError, match="ranks 1, 2 have not told"):
        collect_parts(store, pending, Rank(0), patience)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- probation


def test_a_save_of_an_abandoned_path_never_passes() -> None:
    probation = Probation(length=4)
    probation.begin((8, 0))
    probation.begin((12, 0))
    probation.go_back(10)  # a rollback: 12 is abandoned, 8 starts its four steps anew
    probation.begin((12, 1))
    assert probation.due(13) == []
    assert probation.due(14) == [(8, 0)]
    probation.passed(probation.due(16))
    assert probation.good == {(8, 0), (12, 1)}
    assert not probation.knows((12, 0))
    probation.forget_after(9)  # an incident that began at step 9
    assert probation.good == {(8, 0)}


def _stays(end: Any) -> None:
    end.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.parametrize("git", [True, False], ids=["a-repository", "none"])
def test_a_loaders_worker_that_is_forked_meanwhile_does_not_hold_the_writer_up(git: bool, tmp_path: Path) -> None:
    """A worker inherits the pipes that are open when it is forked; a save must not wait for it to end."""
    if git:
        for command in (["init", "-q"], [*AUTHOR, "commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
        (tmp_path / "new.py").touch()
    fork = multiprocessing.get_context("fork")
    asked, over, end = [], threading.Event(), fork.Event()

    def ask() -> None:
        while not over.is_set():
            asked.append(code_revision(tmp_path))

    asking = threading.Thread(target=ask, daemon=True)
    workers = [fork.Process(target=_stays, args=(end,)) for _ in range(40)]
    asking.start()
    try:
        for worker in workers:
            worker.start()
        over.set()
        asking.join(30)
        assert not asking.is_alive(), f"still waits, after {len(asked)} answers"
        assert all(worker.is_alive() for worker in workers)
        if git:
            assert len(asked[0]["commit"]) == 40
            assert asked[0]["changed"] is False  # what git does not know is no change
        else:
            assert asked[0] is None
    finally:
        over.set(), end.set()
        for worker in workers:
            worker.join()
