"""Two gloo ranks; rank 1 raises at its third batch. Started by the test beside it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
from collective_limit import CollectiveLimit
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import ForensicCheckpoint, RankTelemetry, RunJournal

torch.set_num_threads(1)


class Raises(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("boom on rank 1")
        return (self.layer(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(folder: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[
            CollectiveLimit(),
            RunJournal(folder, report=False),
            RankTelemetry(),
            ForensicCheckpoint(every_n_steps=100),
        ],
    )
    try:
        trainer.fit(Raises(), data)
    except BaseException:
        rank = os.environ.get("LOCAL_RANK", "0")
        (folder / f"stderr-{rank}.txt").write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
