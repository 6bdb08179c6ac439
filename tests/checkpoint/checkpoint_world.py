"""A small real training for the checkpoint tests: dropout, BatchNorm, AdamW, a schedule, and a log of every step."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel import ForensicCheckpoint, RankTelemetry, RunJournal


class Samples(Dataset):
    def __init__(self, n: int = 48) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "sample_id": f"s{i}"}


class Stream(IterableDataset):
    """Stateful, without ``__len__``."""

    def __init__(self, n: int = 48) -> None:
        self.base, self.i = Samples(n), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.i >= len(self.base):
            self.i = 0
            raise StopIteration
        self.i += 1
        return self.base[self.i - 1]

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


class Net(L.LightningModule):
    def __init__(self, fail_at: int | None = None, interval: str = "step") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.steps: list[tuple[Any, ...]] = []
        self.validated: list[int] = []
        self.fail_at, self.interval = fail_at, interval

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = ((self.net(batch["x"]) - batch["y"]) ** 2).mean()
        bits = struct.pack(">f", loss.item()).hex()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        row = (self.trainer.current_epoch, batch_idx, self.global_step, tuple(batch["sample_id"]), bits, rate)
        if self.fail_at is not None and self.global_step == self.fail_at:
            raise RuntimeError(f"boom at step {self.global_step}, password=hunter2")
        self.steps.append(row)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 if self.interval == "step" else 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def seed(value: int = 0) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def loader(kind: str = "map", workers: int = 0, batch_size: int = 4) -> StatefulDataLoader:
    if kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=batch_size, num_workers=workers)
    return StatefulDataLoader(Samples(), batch_size=batch_size, num_workers=workers, shuffle=True)


def fp16() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


def suite(run_dir: Path, **options: Any) -> list[L.Callback]:
    options = {"every_n_steps": 5, "probation_steps": 2} | options
    return [RunJournal(run_dir, report=False), RankTelemetry(), ForensicCheckpoint(**options)]


def fit(
    callbacks: list[L.Callback],
    *,
    module: Callable[[], L.LightningModule] = Net,
    data: Callable[[], Any] = loader,
    seeds: int = 0,
    ckpt_path: Any = None,
    val: Any = None,
    **options: Any,
) -> tuple[L.LightningModule, L.Trainer]:
    """One fit of a new module on a new loader. Resumed runs get other ``seeds``, so that nothing is equal by luck."""
    seed(seeds)
    model, batches = module(), data()
    options = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    } | options
    trainer = L.Trainer(callbacks=callbacks, **options)
    resumed = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": False}
    try:
        trainer.fit(model, batches, val, **resumed)
    except Exception as error:
        error.world = (model, trainer)  # type: ignore[attr-defined]
        raise
    return model, trainer


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def same_optimizer(a: L.Trainer, b: L.Trainer) -> bool:
    mine, theirs = a.optimizers[0].state_dict(), b.optimizers[0].state_dict()
    if mine["param_groups"] != theirs["param_groups"]:
        return False
    return all(torch.equal(v, theirs["state"][i][k]) for i, state in mine["state"].items() for k, v in state.items())


def events(run_dir: Path, name: str, rank: int = 0) -> list[dict[str, Any]]:
    path = run_dir / "journal" / f"rank-{rank:05d}.jsonl"
    return [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == name]
