"""Two processes under guard: a loss that is not finite on rank 1, and a batch of rank 1 without a supervised token.

Usage: ``python -m two_rank_cases FOLDER`` in each process; every rank writes down what it was told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from triage_matrix.faults import NanForward, NoSupervisedTokens
from triage_matrix.run import Sink, quiet, suite

from lightning_sentinel import IncidentResponse
from lightning_sentinel.context import context_of

AT, STEPS = 4, 8


class Told(Sink):
    """Keeps steps and findings."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, Any]] = {}

    def write(self, event: str, **fields: Any) -> None:
        super().write(event, **fields)
        if event == "step":
            self.steps[fields["step"]] = {k: fields[k] for k in ("loss", "rank_losses", "nonfinite_ranks", "applied")}


def main() -> None:
    quiet()
    for kind in (NanForward, NoSupervisedTokens):
        L.seed_everything(0, verbose=False)
        case = kind(0, 2)
        case.at = AT
        world = case.world()
        callbacks = [IncidentResponse(mode="guard") if isinstance(c, IncidentResponse) else c for c in suite()]
        trainer = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[case, *callbacks],
        )
        told = context_of(trainer).journal = Told()
        trainer.fit(world, case.loader())
        incidents = context_of(trainer).incidents
        report = {
            "rank": trainer.global_rank,
            "weights": [float(p.detach().double().sum()) for p in world.parameters()],
            "finite": all(bool(torch.isfinite(p).all()) for p in world.parameters()),
            "steps": told.steps,
            "findings": [(str(f.kind), list(f.ranks), f.message) for i in incidents for f in i.findings],
            "verdict": incidents[0].verdict.to_dict() if incidents else None,
            "opened": [i.opened_step for i in incidents],
        }
        Path(sys.argv[1], f"{case.name()}-{trainer.global_rank}.json").write_text(json.dumps(report, default=str))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
