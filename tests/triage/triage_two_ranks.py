"""Run by torchrun-like hand in two processes: one fault on rank 1, every rank prints what it was told.

Usage: ``python triage_two_ranks.py FAULT``; faults: bad_rank, transient, masked_rank, reduction, healthy.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler
from triage_models import Net, Samples, collate

from lightning_sentinel import NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident
from lightning_sentinel.state.snapshot import take
from lightning_sentinel.triage import investigate

STEP = 6


class Fault(L.Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            context_of(trainer).snapshots.append(take(trainer))
        if trainer.global_step != STEP or (trainer.global_rank != 1 and self.name != "reduction"):
            return
        if self.name == "bad_rank":
            pl_module.head.weight.data.normal_(0.0, 10.0, generator=torch.Generator().manual_seed(1))
        if self.name == "transient":
            fired: list[int] = []

            def hook(m: Any, args: Any, output: Any) -> Any:
                if fired:
                    return output
                fired.append(1)
                return output / torch.zeros_like(output)

            pl_module.blocks[2].mixer.register_forward_hook(hook)
        if self.name == "masked_rank":
            batch["x"] = batch["x"].clone()
            batch["x"][:, -1] = 1.0


class MaskedMean(Net):
    """The mean over the samples that are not masked: 0/0 where all of a rank's are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = 1.0 - batch["x"][:, -1]
        h = self.stem(batch["x"])
        for block in self.blocks:
            h = block(h, torch.zeros(len(h), 1))
        per_sample = (self.head(h) - batch["y"]).square().mean(1)
        return (per_sample * weight).sum() / weight.sum()


class Gavel(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        context = context_of(trainer)
        if trainer.global_step != STEP:
            return
        record = context.record
        kind = FindingKind.NONFINITE_LOSS if record.has_nonfinite else FindingKind.RANK_OUTLIER
        incident = Incident(1, STEP, STEP, 0, 0, findings=[Finding(kind, "test", STEP, 1.0, 0.0, "seen", ranks=(1,))])
        verdict = investigate(trainer, pl_module, optimizer, incident, record)
        print("VERDICT", trainer.global_rank, json.dumps(verdict.to_dict()), flush=True)
        for p in pl_module.parameters():
            p.grad = None


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    name = sys.argv[1]
    module: Any = MaskedMean() if name == "masked_rank" else Net()
    trainer = L.Trainer(
        max_steps=STEP + 2,
        accelerator="cpu",
        devices=2,
        strategy=L.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Fault(name), NonFiniteTracer(), RankTelemetry(), Gavel()],
    )
    data = Samples("", 96, 0)
    sampler = DistributedSampler(data, 2, trainer.global_rank, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate))


if __name__ == "__main__":
    main()
