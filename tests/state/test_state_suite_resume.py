"""A run that the suite resumes in a new Trainer equals an unbroken one in all that the rollback matrix compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from state_world import (
    Cell,
    Net,
    Outcome,
    Samples,
    assert_same_run,
    distributed_loader,
    make_trainer,
    map_loader,
    run,
    same,
    seed_all,
    stream_loader,
)
from test_state_incidents import Alarm, Fail, FailedError, events, interrupted, names_of, suite
from test_state_mixture import mixture
from torch.utils.data import DataLoader

from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import FindingKind

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]


def both(mode: str) -> Any:
    return lambda: CombinedLoader({"long": map_loader(), "short": stream_loader()}, mode)


def averaged(tmp_path: Path) -> list[L.Callback]:
    return [
        WeightAveraging(),
        EarlyStopping("val_loss", patience=50),
        ModelCheckpoint(tmp_path / "best", monitor="loss_step", save_top_k=2, every_n_train_steps=6),
    ]


# cell, checkpoints every so many steps, step before which the first process ends
CELLS: list[tuple[Cell, int, int]] = [
    (Cell("mid-epoch"), 5, 8),
    (Cell("last batch of an epoch"), 12, 14),
    (Cell("last batch of the second epoch", trainer={"max_epochs": 4}), 24, 26),
    (Cell("workers", loader=lambda: map_loader(2, every=4)), 7, 9),
    (Cell("distributed sampler, second epoch", loader=lambda: distributed_loader(2)), 16, 18),
    (Cell("iterable without length", loader=stream_loader), 5, 7),
    (Cell("iterable, last but one batch", loader=stream_loader), 11, 13),
    (Cell("iterable, last batch, workers", loader=lambda: stream_loader(2)), 12, 14),
    (Cell("fp16 with a moving scale", fp16=True), 8, 10),
    (Cell("bf16", trainer={"precision": "bf16-mixed"}), 8, 10),
    (Cell("accumulate 4", trainer={"accumulate_grad_batches": 4}), 4, 6),
    (Cell("manual, two optimizers", net={"manual": True, "two_optimizers": True}), 16, 20),
    (Cell("manual, accumulating by itself", net={"manual": True, "step_every": 3}), 5, 7),
    (Cell("scheduler by epoch", net={"scheduler": "epoch"}), 12, 14),
    (Cell("plateau", net={"scheduler": "plateau"}, validation=True), 12, 14),
    (Cell("validation inside the epoch", validation=True, trainer={"val_check_interval": 4}), 8, 10),
    (Cell("clipping, limit", trainer={"gradient_clip_val": 0.1, "limit_train_batches": 7}), 7, 9),
    (Cell("combined, max_size", loader=both("max_size")), 5, 7),
    (Cell("combined, max_size_cycle", loader=both("max_size_cycle")), 11, 13),
    (Cell("mixture", loader=lambda: mixture(steps_per_epoch=6)), 6, 9),
]


@pytest.mark.parametrize(("cell", "every", "stop"), CELLS, ids=[c.name.replace(" ", "-") for c, _, _ in CELLS])
def test_resumed_by_the_suite(cell: Cell, every: int, stop: int, tmp_path: Path) -> None:
    reference = run(cell)
    options = {"checkpoint": {"every_n_steps": every, "save_on_exception": False}, "rollback": {"every_n_steps": 1000}}
    outcome = interrupted(tmp_path, cell, lambda: named(suite(tmp_path, **options)), stop)
    (resumed,) = events(tmp_path, "run.resumed")
    assert resumed["checkpoint_step"] == every
    assert_same_run(outcome, reference)
    (compared,) = events(tmp_path, "run.compared")
    assert compared["equal_losses"] == compared["equal_samples"] == compared["steps"] > 0
    assert compared["largest_relative_difference"] == 0
    assert restart_findings(tmp_path) == []


def named(callbacks: list[L.Callback]) -> list[L.Callback]:
    """Ids for any of the batches here."""
    callbacks[1].sample_id_fn = ids_of  # type: ignore[attr-defined]
    return callbacks


def ids_of(batch: Any) -> list[str]:
    if isinstance(batch, dict) and "sample_id" not in batch:
        return [f"{k}/{i}" for k, part in batch.items() if part is not None for i in names_of(part)]
    return names_of(batch) if isinstance(batch, (list, tuple)) else batch["sample_id"]


def restart_findings(folder: Path) -> list[dict[str, Any]]:
    alone = [e["finding"] for e in events(folder, "finding")]
    inside = [f for e in events(folder, "incident.opened") for f in e["incident"]["findings"]]
    return [f for f in (*alone, *inside) if f["kind"] == "restart_jump"]


def test_the_state_of_callbacks_beside_it(tmp_path: Path) -> None:
    cell = Cell("beside", validation=True, trainer={"enable_checkpointing": True, "val_check_interval": 6})

    def run_with(folder: Path, *parts: L.Callback, seed: int = 0) -> tuple[Outcome, list[Any]]:
        beside = averaged(folder)
        return run(cell, *beside, *parts, seed=seed), beside

    reference, clean = run_with(tmp_path / "clean")
    options = {"checkpoint": {"every_n_steps": 8, "save_on_exception": False}, "rollback": {"every_n_steps": 1000}}
    with pytest.raises(FailedError):
        run_with(tmp_path / "run", Fail(13), *suite(tmp_path / "run", **options))
    parts = suite(tmp_path / "run", **options)
    parts[-1].resume = "latest"  # type: ignore[attr-defined]
    outcome, again = run_with(tmp_path / "run", *parts, seed=5)
    assert_same_run(outcome, reference)
    same(again[0]._average_model.state_dict(), clean[0]._average_model.state_dict())
    assert again[1].state_dict() == clean[1].state_dict()

    def scores(keeper: ModelCheckpoint) -> list[float]:
        return sorted(float(s) for s in keeper.best_k_models.values())

    assert scores(again[2]) == scores(clean[2])
    assert all(Path(p).exists() for p in again[2].best_k_models)


# ------------------------------------------------------------------------- what the resumed run finds out by itself


class Shuffled:
    """Another order from the third batch after the resume on."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self) -> Any:
        loader, after = map_loader(), self.after

        class Loader(type(loader)):  # type: ignore[misc]
            def __iter__(self) -> Any:
                kept: list[Any] = []
                for number, batch in enumerate(super().__iter__()):
                    kept.append(batch)
                    yield kept[0] if number >= after else batch

        loader.__class__ = Loader
        return loader


def test_samples_that_part_after_the_first_batch_are_named_at_that_step(tmp_path: Path) -> None:
    cell = Cell("later", trainer={"max_epochs": 1})
    with pytest.raises(FailedError):
        run(cell, Fail(11), *suite(tmp_path, checkpoint={"every_n_steps": 4}, rollback={"every_n_steps": 1000}))
    other = Cell("later", trainer={"max_epochs": 1}, loader=Shuffled(2))
    parts = suite(tmp_path, response={"mode": "observe"})
    parts[-1].resume = "latest"  # type: ignore[attr-defined]
    run(other, *parts, seed=5)
    start = events(tmp_path, "run.resumed")[0]["checkpoint_step"]
    (finding,) = [f for f in restart_findings(tmp_path) if f["culprits"] == ["cursor"]]
    assert finding["message"].startswith(
        f"restart-aligned, cursor: the samples of step {start + 2} are not those that the journal has at this step"
    )
    assert finding["evidence"]["live"] != finding["evidence"]["expected"]


@pytest.mark.parametrize("what", ["scheduler", "optimizer:lr", "optimizer:loss_scale", "nothing"])
def test_a_plain_resume_is_held_against_its_own_file(what: str, tmp_path: Path) -> None:
    """No journal and no checkpoint of the suite from before: the file itself says where the plan was."""
    cell = Cell("plain", fp16=True, trainer={"max_epochs": 1}, net={"scheduler": "step"})
    if what == "optimizer:lr":
        cell.net["scheduler"] = "none"
    keeper = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=6, save_top_k=-1)
    run(cell | {"enable_checkpointing": True}, keeper)
    (file,) = (p for p in (tmp_path / "plain").glob("*.ckpt") if "step=6" in p.name)

    class Renamed(MixedPrecision):
        """Lightning looks for the scale under the class name, and says nothing where it finds none."""

    class Strike(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            if what == "scheduler":
                trainer.lr_scheduler_configs[0].scheduler.last_epoch = 0
            elif what == "optimizer:lr":
                trainer.optimizers[0].param_groups[0]["lr"] = 0.5

    parts = suite(tmp_path / "run", response={"mode": "observe"}, checkpoint={"every_n_steps": 0})
    trainer = make_trainer(cell, [Strike(), *parts])
    if what == "optimizer:loss_scale":
        options = {"plugins": [Renamed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))]}
        trainer = make_trainer(Cell("renamed", trainer={"max_epochs": 1, **options}), [Strike(), *parts])
    seed_all(0)
    trainer.fit(Net(**cell.net), map_loader(), DataLoader(Samples(8), batch_size=4), ckpt_path=file, weights_only=False)
    found = [tuple(f["culprits"]) for f in restart_findings(tmp_path / "run") if f["culprits"]]
    assert found == ([] if what == "nothing" else [(what,)])
    for finding in restart_findings(tmp_path / "run"):
        assert finding["step"] == 6  # the first step after the restart, before its update
        assert finding["restart_aligned"]


def test_a_plain_resume_from_a_file_that_an_incident_has_damaged_is_told(tmp_path: Path) -> None:
    cell = Cell("poisoned", trainer={"enable_checkpointing": True, "max_epochs": 1})
    keeper = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    parts = suite(tmp_path / "run", Alarm({9: 7}, FindingKind.LEVEL_SHIFT), checkpoint={"every_n_steps": 0})
    run(cell, keeper, *parts)
    bad = {e["path"] for e in events(tmp_path / "run", "checkpoint.poisoned")}
    assert bad == {str(tmp_path / "plain" / "step=8.ckpt")}
    for file in sorted((tmp_path / "plain").glob("step=*.ckpt")):
        again = suite(tmp_path / "run", checkpoint={"every_n_steps": 0})
        trainer = make_trainer(cell | {"enable_checkpointing": False}, again)
        before = len(events(tmp_path / "run", "checkpoint.poisoned"))
        trainer.fit(Net(), map_loader(), DataLoader(Samples(8), batch_size=4), ckpt_path=file, weights_only=False)
        told = events(tmp_path / "run", "checkpoint.poisoned")[before:]
        assert [e["path"] for e in told] == ([str(file)] if str(file) in bad else [])
        assert context_of(trainer).restart_step is not None
