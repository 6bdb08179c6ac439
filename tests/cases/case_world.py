"""A small training for the cases of resuming: shuffled or streamed, stopped after a step, resumed by the suite or plainly."""

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

# the plain resumes come without the callback that wrote their file
WITHOUT_ITS_CALLBACK = pytest.mark.filterwarnings(
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
    callbacks: list[L.Callback],
    data: Callable[[], Any],
    *,
    seed: int,
    ckpt_path: Path | None = None,
    module: Callable[[], Any] = Net,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """One fit of a new module on a new loader, in a process that has drawn other random numbers if ``seed`` differs."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    module, batches = module(), data()
    options = {"max_epochs": 3} | options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=callbacks,
        **options,
    )
    with contextlib.suppress(InterruptedError):
        trainer.fit(module, batches, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else False)
    return module, trainer


def suite(folder: Path, every: int) -> list[L.Callback]:
    checkpoint = ForensicCheckpoint(every_n_steps=every, keep=9, probation_steps=0, save_on_exception=False)
    return [RunJournal(folder, report=False), RankTelemetry(), checkpoint]


def all_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal" / "rank-00000.jsonl").read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in all_events(folder) if event["event"] == name]


def the_rest_is_exact(tmp_path: Path, data: Callable[[], Any], save_at: int, stop_at: int, **options: Any) -> None:
    """Stopped and resumed from the suite's own checkpoint: 36 of 36 steps, and every bit of an uninterrupted run."""
    clean, _ = fit([], data, seed=0, **options)
    assert len(clean.steps) == 36
    first, _ = fit([Stop(stop_at), *suite(tmp_path, save_at)], data, seed=0, **options)
    again, trainer = fit(suite(tmp_path, save_at), data, seed=7, **options)
    assert trainer.global_step == 36
    assert first.steps[:save_at] + again.steps == clean.steps
    for mine, theirs in zip(clean.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not [e for e in events(tmp_path, "finding") if e["finding"]["kind"] == "restart_jump"]


def lightning_checkpoint(
    tmp_path: Path, data: Callable[[], Any], step: int, with_suite: bool = True, **options: Any
) -> Path:
    """A file of Lightning's own, of a run that the suite has watched or not."""
    keeper = ModelCheckpoint(tmp_path / "plain", filename="{step}", every_n_train_steps=step, save_top_k=-1)
    fit([Stop(step + 1), *(suite(tmp_path, step) if with_suite else []), keeper], data, seed=0, **options)
    return tmp_path / "plain" / f"step={step}.ckpt"


def restart_finding(folder: Path) -> dict[str, Any]:
    """The finding as it was journalled, on its own or with an incident."""
    found = [e["finding"] for e in events(folder, "finding") if e["finding"]["kind"] == "restart_jump"]
    assert len(found) == 1
    return found[0]
