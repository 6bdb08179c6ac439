"""One training on 2, 4, 2 and 1 ranks, its weights divided among them: ``python distributed_reshard.py FOLDER``.

Each start trains a step beyond its last checkpoint, which the next one takes up. Every rank writes, for each step that it
begins, a digest of the whole weights and moments.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from distributed_kit import MEETING, CollectiveLimit, fork_ranks
from elastic_script import Points
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_sentinel import ForensicCheckpoint, RankTelemetry, RunJournal
from lightning_sentinel.data import MixtureLoader

STARTS, EVERY, BATCH = ((2, 7), (4, 13), (2, 19), (1, 24)), 6, 8


class Net(L.LightningModule):
    """Its parts do not divide evenly, and some ranks hold nothing of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 13), nn.LayerNorm(13), nn.Linear(13, 1)

    def configure_model(self) -> None:
        if self.trainer.world_size > 1:
            for part in (self.first, self.norm, self.last):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((self.last(self.norm(self.first(batch["x"])).relu()) - batch["y"]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Witness(L.Callback):
    """Weights and moments, whole, at the beginning of each step."""

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        found = hashlib.sha256()
        for parameter in pl_module.parameters():
            state = trainer.optimizers[0].state.get(parameter, {})
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found.update(whole.detach().numpy().tobytes())
        self.seen[trainer.global_step] = found.hexdigest()


def fit(folder: Path, ranks: int, steps: int, run: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(5, verbose=False)
    witness = Witness()
    saver = ForensicCheckpoint(EVERY, probation_steps=1, save_on_exception=False)
    strategy = ModelParallelStrategy(ranks, 1, process_group_backend="gloo", timeout=MEETING) if ranks > 1 else "auto"
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            *([CollectiveLimit()] if ranks > 1 else []),
            witness,
            RunJournal(folder / run, report=False),
            RankTelemetry(),
            saver,
        ],
    )
    # without a length: Lightning has fetched a batch ahead for the old ranks
    trainer.fit(Net(), MixtureLoader([Points("a", 400)], batch_size=BATCH // ranks, seed=3))
    (folder / f"{run}-{ranks}-{steps}-{trainer.global_rank}.json").write_text(json.dumps(witness.seen))


def main() -> int:
    folder = Path(sys.argv[1])
    for ranks, steps in STARTS:
        if fork_ranks(ranks, lambda ranks=ranks, steps=steps: fit(folder, ranks, steps, "divided")):  # type: ignore[misc]
            return 1
    return fork_ranks(1, lambda: fit(folder, 1, STARTS[-1][1], "alone"))


if __name__ == "__main__":
    sys.exit(main())
