"""State beside the model goes back too: the user's callbacks, the module's and the datamodule's own state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from state_world import (
    Cell,
    Hurt,
    Net,
    Outcome,
    Recorder,
    Samples,
    assert_same_run,
    final_state,
    make_trainer,
    map_loader,
    run,
    same,
    seed_all,
    spoil,
)
from torch.utils.data import DataLoader

from lightning_sentinel.callbacks.base import SentinelCallback
from lightning_sentinel.callbacks.rollback import Rollback


def hurt_run(cell: Cell, *callbacks: L.Callback) -> tuple[Outcome, Hurt]:
    rollback = Rollback(every_n_steps=cell.every)
    hurt = Hurt(rollback, cell.batch, cell.before_step)
    outcome = run(cell, *callbacks, hurt, rollback)
    assert rollback.executed == 1
    return outcome, hurt


def test_weight_averaging_is_not_poisoned() -> None:
    cell = Cell("averaged")
    clean = WeightAveraging()
    reference = run(cell, clean)
    averaged = WeightAveraging()
    outcome, _ = hurt_run(cell, averaged)
    assert clean._average_model is not None
    assert averaged._average_model is not None
    same(averaged._average_model.state_dict(), clean._average_model.state_dict())
    assert all(bool(p.isfinite().all()) for p in averaged._average_model.parameters())
    assert_same_run(outcome, reference)


def test_early_stopping_forgets_the_abandoned_path() -> None:
    cell = Cell("stopping", batch=14, before_step=13, every=12, validation=True, trainer={"max_epochs": 4})

    def stopping() -> EarlyStopping:
        # a NaN on the abandoned path must not count
        return EarlyStopping("val_loss", patience=1, min_delta=0.5, check_finite=False)

    first = stopping()
    reference = run(cell, first)
    second = stopping()
    outcome, _ = hurt_run(cell, second)
    assert second.state_dict() == first.state_dict()
    assert first.stopped_epoch > 0  # it does stop, at the same epoch in both runs
    assert_same_run(outcome, reference)


def test_early_stopping_that_fired_on_the_abandoned_path_is_taken_back() -> None:
    # The weights are spoilt at batch 5; the validation after batch 6 sees it and asks for the end, which min_steps puts
    # off; batch 7 asks for the rollback.
    class Late(Hurt):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if self.batches == 4 and not self.fired:
                spoil(trainer, module, 100.0)
            super().on_train_batch_end(trainer, module, *args)

    cell = Cell("fired", batch=7, before_step=4, every=4, validation=True, trainer={"val_check_interval": 3})
    cell.trainer["min_steps"] = 8
    first = EarlyStopping("val_loss", patience=50, divergence_threshold=1e3)
    reference = run(cell, first)
    second = EarlyStopping("val_loss", patience=50, divergence_threshold=1e3)
    rollback = Rollback(every_n_steps=cell.every)
    hurt = Late(rollback, cell.batch, cell.before_step)
    stops: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            stops.append(second.stopped_epoch if trainer.should_stop else -1)

    outcome = run(cell, second, Watch(), hurt, rollback)
    assert rollback.executed == 1
    assert stops[:8] == [-1] * 6 + [0, -1]  # asked for the end before batch 7, taken back after it
    assert second.stopped_epoch == first.stopped_epoch == 0
    assert_same_run(outcome, reference)


def checkpoints(path: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(path, "{step}", monitor="loss_step", save_top_k=2, every_n_train_steps=4, **options)


def test_model_checkpoint_saves_again_and_forgets_what_came_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell("checkpoint", batch=9, before_step=7, every=3, trainer={"enable_checkpointing": True})
    first = checkpoints(tmp_path / "clean")
    reference = run(cell, first)
    second = checkpoints(tmp_path / "hurt")
    caplog.set_level(logging.INFO, "lightning_sentinel")
    outcome, hurt = hurt_run(cell, second)
    assert hurt.restored == [6]
    poisoned = [r.getMessage() for r in caplog.records if "checkpoint.poisoned" in r.getMessage()]
    assert len(poisoned) == 1  # without a journal, events go to the log
    assert str(tmp_path / "hurt" / "step=8.ckpt") in poisoned[0]
    assert_same_run(outcome, reference)

    def scores(callback: ModelCheckpoint) -> dict[str, float]:
        return {Path(p).stem.split("-v")[0]: float(s) for p, s in callback.best_k_models.items()}

    assert scores(second) == scores(first)
    assert second._last_global_step_saved == first._last_global_step_saved
    assert all(Path(p).exists() for p in second.best_k_models)
    best = torch.load(second.best_model_path, weights_only=True)
    same(best["state_dict"], torch.load(first.best_model_path, weights_only=True)["state_dict"])


def test_best_models_whose_files_are_gone_are_not_claimed(tmp_path: Path) -> None:
    class Remove(L.Callback):
        """Someone deletes the best file between snapshot and rollback."""

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 9:
                for path in list(checkpoint.best_k_models):
                    Path(path).unlink()

    checkpoint = checkpoints(tmp_path)
    cell = Cell("gone", batch=9, before_step=8, every=8, trainer={"enable_checkpointing": True, "max_steps": 10})
    cell.trainer["max_epochs"] = -1
    hurt_run(cell, Remove(), checkpoint)
    assert checkpoint.best_k_models == {}
    assert checkpoint.best_model_path == ""
    assert checkpoint.best_model_score is None


def test_bars_and_rate_monitor_follow(tmp_path: Path) -> None:
    cell = Cell("bars", batch=15, before_step=14, every=5, restored=10)
    cell.trainer = {"enable_progress_bar": True, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    tqdm_bar = TQDMProgressBar()
    titles: list[str] = []

    class Titles(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            bar = tqdm_bar.train_progress_bar
            titles.append(f"{bar.desc}{bar.n}/{bar.total}")

    plain = Cell("plain", trainer={"logger": CSVLogger(tmp_path / "plain"), "log_every_n_steps": 1})
    clean, monitor = LearningRateMonitor("step"), LearningRateMonitor("step")
    reference = run(plain, clean)
    outcome, _ = hurt_run(cell, tqdm_bar, monitor, Titles())
    assert monitor.lrs == clean.lrs
    assert [len(rates) for rates in clean.lrs.values()] == [36]
    # one batch late: the rollback's own callback runs before the bar moves
    assert titles[14:17] == ["Epoch 1: 3/12", "Epoch 0: 11/12", "Epoch 0: 12/12"]
    assert_same_run(outcome, reference)
    rich = Cell("rich", batch=15, before_step=14, every=5, trainer={"enable_progress_bar": True})
    outcome, _ = hurt_run(rich, RichProgressBar())
    assert_same_run(outcome, run(Cell("plain")))


def test_the_timer_is_not_refunded() -> None:
    timer = Timer(duration={"hours": 1})
    elapsed: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            elapsed.append(timer.time_elapsed())

    hurt_run(Cell("timer"), timer, Watch())
    assert elapsed == sorted(elapsed)


class OwnState(SentinelCallback):
    def __init__(self, rewinds: bool) -> None:
        self.rewinds, self.count = rewinds, 0

    @property
    def state_key(self) -> str:
        return f"own.{self.rewinds}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_callbacks_of_the_suite_go_back_only_if_they_rewind() -> None:
    back, kept = OwnState(True), OwnState(False)
    outcome, _ = hurt_run(Cell("own", batch=10, before_step=9), back, kept)
    assert back.count == len(outcome.steps) == 36
    assert kept.count == outcome.calls == 38


class Saving(Net):
    """Keeps state in plain attributes and saves it by the hooks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.passes = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.passes += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["passes"] = self.passes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.passes = checkpoint["passes"]
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def train_dataloader(self) -> Any:
        return map_loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.drawn += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def test_module_hooks_and_datamodule_go_back() -> None:
    cell = Cell("hooks")

    def fit(*callbacks: L.Callback) -> tuple[Outcome, Saving, Data]:
        seed_all(0)
        recorder, module, data = Recorder(), Saving(), Data()
        trainer = make_trainer(cell, [recorder, *callbacks])
        seed_all(1)
        trainer.fit(module, datamodule=data)
        state = final_state(trainer, module)
        return Outcome(recorder.steps, recorder.epochs, state, module.calls, trainer, module), module, data

    reference, _, _ = fit()
    rollback = Rollback(every_n_steps=4)
    outcome, module, data = fit(Hurt(rollback, 9, 8), rollback)
    assert rollback.executed == 1
    assert module.passes == data.drawn == 36
    assert outcome.calls == 37
    assert_same_run(outcome, reference)
