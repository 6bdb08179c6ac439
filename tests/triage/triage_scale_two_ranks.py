"""Two processes under a loss scaler: rank 1's loss overflows at one step, its gradient alone at another.

Usage: ``python triage_scale_two_ranks.py FOLDER``; every rank writes down its overflows.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader
from triage_models import one_of_two_ranks

from lightning_sentinel import LossScaleMonitor, RankTelemetry
from lightning_sentinel.context import context_of

LOSS_STEP, GRADIENT_STEP = 2, 4


class Overflows(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).float().square().mean()
        if self.global_rank == 1 and self.trainer.global_step == LOSS_STEP:
            return loss * math.inf
        if self.global_rank == 1 and self.trainer.global_step == GRADIENT_STEP:
            return loss + 1e38 * (self.layer.weight - self.layer.weight.detach()).sum()  # worth 0
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Overflow:
    """A journal that keeps the overflows."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None:
        if event == "scaler.overflow":
            self.lines.append({"step": step, **fields})

    def flush(self) -> None:
        return None


def main() -> None:
    trainer = one_of_two_ranks(
        [LossScaleMonitor(), RankTelemetry()],
        6,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))],
    )
    journal = context_of(trainer).journal = Overflow()
    trainer.fit(Overflows(), DataLoader(torch.randn(48, 4), batch_size=4))
    Path(sys.argv[1], f"overflows-{trainer.global_rank}.json").write_text(json.dumps(journal.lines))


if __name__ == "__main__":
    main()
