"""A run without Hydra: a small regression whose data hold one broken sample, and detectors that speak when told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from collective_limit import limited
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sentinel import IncidentResponse, RankTelemetry, RunJournal
from lightning_sentinel.incidents import Finding, FindingKind

BROKEN = 21


class Samples(Dataset[dict[str, Any]]):
    """48 samples of a linear map, each with its id; ``BROKEN`` holds a NaN where asked for."""

    def __init__(self, broken: bool = True, shift: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(48, 6, generator=generator) + shift
        self.y = self.x.sum(1, keepdim=True)
        if broken:
            self.x[BROKEN, 2] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "sample_id": f"s{index}"}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": torch.stack([s["x"] for s in samples]),
        "y": torch.stack([s["y"] for s in samples]),
        "sample_id": [s["sample_id"] for s in samples],
    }


class Data(L.LightningDataModule):
    """The samples in order, four to a batch, shared out over the ranks."""

    def __init__(self, samples: Samples | None = None) -> None:
        super().__init__()
        self.samples = samples or Samples()

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        ranks = self.trainer.world_size if self.trainer else 1
        rank = self.trainer.global_rank if self.trainer else 0
        order = [i for b in range(rank, 12, ranks) for i in range(4 * b, 4 * b + 4)]
        return DataLoader(self.samples, batch_size=4, sampler=order, collate_fn=collate)


class Net(L.LightningModule):
    """Two layers with BatchNorm and dropout, with a loss that remembers each sample's share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)
        self.sample_loss_nats: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.last(self.drop(torch.relu(self.norm(self.first(batch["x"])))))
        losses = (out - batch["y"]).square().mean(1)
        self.sample_loss_nats = losses.detach()
        self.log("loss", losses.mean())
        return losses.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Says(L.Callback):
    """States a finding at given steps: ``observe`` is what RankTelemetry asks every callback for."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def observe(self, record: Any) -> list[Finding]:
        if record.step not in self.steps:
            return []
        return [Finding(FindingKind.SPIKE, "test", record.step, 9.0, 8.0, "told to say so")]


def suite(run_dir: Path | None, *steps: int, **options: Any) -> list[L.Callback]:
    """The callbacks: the journal, a detector that speaks at ``steps``, the heartbeat and the response."""
    settings = {"mode": "guard", "triage": False, **options}
    journal = [] if run_dir is None else [RunJournal(run_dir, report=False)]
    return [*journal, Says(*steps), RankTelemetry(), IncidentResponse(**settings)]


def fit(callbacks: list[L.Callback], module: L.LightningModule | None = None, **options: Any) -> L.Trainer:
    """Train on the CPU, quietly, in two micro-batches a step unless told otherwise."""
    data = options.pop("data", None) or Data()
    trainer = L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "callbacks": limited(callbacks, options),
            **options,
        }
    )
    L.seed_everything(5, verbose=False)
    trainer.fit(module or Net(), datamodule=data)
    return trainer
