"""The suite beside what people already have: Lightning's callbacks and profilers, Hugging Face models, other loaders."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from sentinel_kit import Loader, Net, same_bits, weights
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_sentinel
from lightning_sentinel.faults import Fault, LearningRateSpike, TransientNan
from lightning_sentinel.journal import read_journal

STEPS = 40


def fit(
    tmp_path: Path,
    module: L.LightningModule,
    loader: Any,
    *own: L.Callback,
    fault: Fault | None = None,
    suite: bool = True,
    steps: int = STEPS,
    **options: Any,
) -> tuple[L.Trainer, list[dict[str, Any]]]:
    """A run with the user's own callbacks before the whole suite, and its journal."""
    run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    injector = [] if fault is None else [lightning_sentinel.FaultInjector([fault])]
    whole = lightning_sentinel.default_callbacks(run, "recover", checkpoint_every_n_steps=20) if suite else []
    defaults = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": -1}
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in own)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[*own, *injector, *whole],
        enable_checkpointing=checkpointing,
        default_root_dir=tmp_path,
        **(defaults | options),
    )
    torch.manual_seed(0)
    trainer.fit(module, loader)
    return trainer, read_journal(run) if suite else []


def started(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def statuses(journal: list[dict[str, Any]]) -> list[str]:
    return [line["incident"]["status"] for line in journal if line["event"] == "incident.closed"]


class Logged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler}


class Shown(L.Callback):
    """What the rich bar shows of the suite, batch after batch."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        bar = trainer.progress_bar_callback
        assert isinstance(bar, RichProgressBar)
        assert bar.is_enabled
        self.lines.append(str(getattr(bar, "_metric_component")._metrics.get("sentinel")))  # noqa: B009


@pytest.mark.parametrize("profiler", PROFILERS)
def test_beside_lightnings_own_callbacks_and_profilers(tmp_path: Path, profiler: str) -> None:
    def own(where: str) -> list[L.Callback]:
        return [
            ModelCheckpoint(tmp_path / where, monitor="loss", save_top_k=2, every_n_train_steps=10),
            EarlyStopping("loss", patience=1000, check_on_train_epoch_end=False),
            LearningRateMonitor("step"),
            DeviceStatsMonitor(cpu_stats=True),
            Timer("00:01:00:00"),
            RichProgressBar(),
        ]

    def logged(where: str) -> dict[str, Any]:
        where_to = where.removesuffix("-logs")
        return {
            "logger": CSVLogger(tmp_path / where),
            "log_every_n_steps": 5,
            "profiler": PROFILERS[profiler](tmp_path / where_to, "profile"),
            "enable_progress_bar": True,
        }

    torch.manual_seed(0)
    bare = Logged()
    without, _ = fit(tmp_path, bare, Loader(), *own("bare"), suite=False, **logged("bare-logs"))
    torch.manual_seed(0)
    watched, shown = Logged(), Shown()
    trainer, journal = fit(
        tmp_path,
        watched,
        Loader(),
        *own("watched"),
        shown,
        fault=TransientNan(step=23, target="first"),
        **logged("watched-logs"),
    )
    assert same_bits(weights(watched), weights(bare))
    assert statuses(journal) in ([], ["recovered"])  # the run may end inside the probation
    assert len([line for line in journal if line["event"] == "action.rollback"]) == 1
    best = [t.checkpoint_callback.best_model_score for t in (trainer, without)]  # type: ignore[union-attr]
    assert torch.equal(*best)
    files = [sorted(f.name for f in (tmp_path / where).glob("*.ckpt")) for where in ("watched", "bare")]
    assert files[0] == files[1]
    assert len(files[0]) == 2
    rows = []
    for t in (trainer, without):
        with (Path(t.log_dir or "") / "metrics.csv").open() as file:
            rows.append([{key: value for key, value in row.items() if value} for row in csv.DictReader(file)])
    rates = [[row["lr-AdamW"] for row in logged if "lr-AdamW" in row] for logged in rows]
    assert rates[0] == rates[1]
    assert len(rates[0]) == STEPS // 5
    # Each of them has really been at work, with the suite as without it.
    for logged_rows in rows:
        stats = {key for row in logged_rows for key in row if key.startswith("DeviceStatsMonitor.on_train_batch_")}
        assert {key.rpartition("/")[2].rpartition(".")[2] for key in stats} >= {"cpu_percent", "cpu_vm_percent"}
    for where in ("watched", "bare"):
        (profile,) = (tmp_path / where).glob("fit-profile*.txt")
        assert "run_training_batch" in profile.read_text()
    assert shown.lines[21] == "ok"
    assert "1 open (#1), retry_step@24" in shown.lines, sorted(set(shown.lines))


def test_early_stopping_stops_where_it_would_have(tmp_path: Path) -> None:
    def own() -> EarlyStopping:
        return EarlyStopping("loss", patience=2, min_delta=100.0, check_on_train_epoch_end=True)

    stopping, alone = own(), own()
    torch.manual_seed(0)
    bare = Logged()
    without, _ = fit(tmp_path, bare, Loader(samples=32), alone, suite=False, steps=200)
    torch.manual_seed(0)
    watched = Logged()
    trainer, journal = fit(
        tmp_path, watched, Loader(samples=32), stopping, fault=TransientNan(step=13, target="first"), steps=200
    )
    assert trainer.global_step == without.global_step == 24  # three epochs: one to begin with, two without progress
    assert (stopping.stopped_epoch, stopping.wait_count) == (alone.stopped_epoch, alone.wait_count) == (2, 2)
    assert torch.equal(stopping.best_score, alone.best_score)
    assert [line["action"] for line in journal if line["event"] == "action.rollback"] == ["retry_step"]
    assert same_bits(weights(watched), weights(bare))


class Unscheduled(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def test_stochastic_weight_averaging_is_told_to_stand_in_the_way_and_training_goes_on(tmp_path: Path) -> None:
    # SWA swaps the schedulers in the middle of a run; a rollback could not put that back.
    def made() -> Unscheduled:
        torch.manual_seed(4)
        return Unscheduled()

    module, bare = made(), made()
    rows = [{"x": x, "y": y} for x, y in zip(Loader().x[:64], Loader().y[:64], strict=True)]
    loader = StatefulDataLoader(rows, batch_size=4)  # type: ignore[var-annotated]
    averaging, alone = StochasticWeightAveraging(1e-3), StochasticWeightAveraging(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, bare, StatefulDataLoader(rows, batch_size=4), alone, max_epochs=4, steps=-1, suite=False)
    with pytest.warns(UserWarning, match="Rollback is off, training goes on without it"):
        trainer, journal = fit(tmp_path, module, loader, averaging, max_epochs=4, steps=-1)
    assert trainer.global_step >= 64
    # The averaged weights are what they are without the suite.
    counts = [int(callback.n_averaged) for callback in (averaging, alone)]  # type: ignore[arg-type]
    assert counts == [2, 2]
    assert same_bits(weights(module), weights(bare))
    assert {line["applied"] for line in journal if line["event"] == "step"} == {True}
    said = [line for line in journal if "StochasticWeightAveraging" in str(line) and line["event"] != "run.started"]
    assert said, "nothing in the journal says that there is no rollback"
    assert "WeightAveraging" in str(said[0])


class HuggingFace(L.LightningModule):
    """A transformers model, made from a configuration: nothing is downloaded."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 3e-3)


class Encodings:
    """Batches as Hugging Face's collators make them, from a loader with a position."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 31, (400, 12), generator=draw)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        from transformers import BatchEncoding

        while self.position < len(self.tokens):
            tokens = self.tokens[self.position : self.position + 4].clone()
            mask = torch.ones_like(tokens)
            mask[:, 10:] = 0
            self.position += 4
            yield BatchEncoding(
                {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
            )
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_hugging_face_model_with_its_own_kind_of_batch(tmp_path: Path) -> None:
    def module() -> HuggingFace:
        torch.manual_seed(2)
        return HuggingFace()

    bare = module()
    fit(tmp_path, bare, Encodings(), suite=False)
    watched = module()
    _, journal = fit(tmp_path, watched, Encodings(), fault=TransientNan(step=22, target="model.transformer.h.0.mlp"))
    assert same_bits(weights(watched), weights(bare))
    steps = [line for line in journal if line["event"] == "step"]
    assert [line["step"] for line in steps if line["attempt"] == 0][:3] == [0, 1, 2]
    assert [line["tokens"] for line in steps[:3]] == [48, 96, 144]
    assert all(name.startswith("hash/") for name in steps[0]["sample_ids"])
    # This loader has no length, so Lightning fetches one batch ahead, and the checkpoint holds it.
    assert not [line for line in journal if line["event"] == "checkpoint.failed"]
    assert [line["step"] for line in journal if line["event"] == "checkpoint.saved"] == [20]
    assert [line["action"] for line in journal if line["event"] == "action.rollback"] == ["retry_step"]


class Streaming:
    """litdata's protocol: a position counted in samples, which a loaded state moves only at the next ``iter()``."""

    def __init__(self, batch_size: int = 4) -> None:
        self.data = Loader()
        self.batch_size, self.current_epoch = batch_size, 0
        self._yielded, self._restore = 0, False

    def __len__(self) -> int:
        return len(self.data.x) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._restore:
            self._restore = False
        else:
            self.current_epoch, self._yielded = self.current_epoch + 1, 0
        order = torch.randperm(len(self.data.x), generator=torch.Generator().manual_seed(self.current_epoch))
        for start in range(self._yielded, len(order) - self.batch_size + 1, self.batch_size):
            rows = order[start : start + self.batch_size]
            self._yielded = start + self.batch_size
            yield {"x": self.data.x[rows], "y": self.data.y[rows], "sample_id": rows.clone()}
        self._restore = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataset": {"seed": 0, "input_dir_path": "data"},
            "current_epoch": self.current_epoch,
            "num_samples_yielded": self._yielded,
            "latest_worker_idx": 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_epoch, self._yielded = state["current_epoch"], state["num_samples_yielded"]
        self._restore = True


@pytest.mark.parametrize("fault", [TransientNan(step=130, target="first"), LearningRateSpike(step=140, factor=3000.0)])
def test_a_loader_with_litdatas_protocol_goes_back_exactly(tmp_path: Path, fault: Fault) -> None:
    bare, watched = started(), started()
    fit(tmp_path, bare, Streaming(), suite=False, steps=160)  # 128 batches an epoch: the fault is in the second one
    _, journal = fit(tmp_path, watched, Streaming(), fault=fault, steps=160)
    assert [line for line in journal if line["event"] == "fault.injected"]
    assert [line for line in journal if line["event"] == "action.rollback"]
    assert same_bits(weights(watched), weights(bare))
