"""Two processes under guard: rank 1 has a loss that is not finite; it has no supervised token; it skips an update alone.

Usage: ``python hidden_nan_ranks.py FOLDER`` in each process; every rank writes down what it was told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from collective_limit import CollectiveLimit
from lightning.pytorch.strategies import DDPStrategy
from triage_matrix.fault import SECOND, Case
from triage_matrix.faults import NanForward, NoSupervisedTokens
from triage_matrix.run import Sink, quiet, suite

from lightning_sentinel import IncidentResponse, ReplicaConsistency
from lightning_sentinel.context import context_of

AT, STEPS, COMPARED = 4, 9, 2  # replicas are compared every so many steps
KEPT = ("loss", "rank_losses", "nonfinite_ranks", "applied")


class SkipsAlone(Case):
    """Rank 1 takes its batch for bad and skips the update that the other makes."""

    kind, culprits, ranks = "infrastructure", ("rank:1",), SECOND

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.armed:
            for p in pl_module.parameters():
                p.grad = None


class Told(Sink):
    """Keeps the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, Any]] = {}

    def write(self, event: str, **fields: Any) -> None:
        super().write(event, **fields)
        if event == "step":
            self.steps[fields["step"]] = {k: fields[k] for k in KEPT}


def callbacks() -> list[L.Callback]:
    found = suite()
    for i, callback in enumerate(found):
        if isinstance(callback, IncidentResponse):
            found[i] = IncidentResponse(mode="guard")
        if isinstance(callback, ReplicaConsistency):
            callback.every_n_steps = COMPARED
    return found


def main() -> None:
    quiet()
    for kind in (NanForward, NoSupervisedTokens, SkipsAlone):
        L.seed_everything(0, verbose=False)
        case = kind(0, 2)
        case.at = AT
        world = case.world()
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
            callbacks=[CollectiveLimit(), case, *callbacks()],
        )
        told = context_of(trainer).journal = Told()
        trainer.fit(world, case.loader())
        incidents = context_of(trainer).incidents
        report = {
            "weights": [float(p.detach().double().sum()) for p in world.parameters()],
            "finite": all(bool(torch.isfinite(p).all()) for p in world.parameters()),
            "steps": told.steps,
            "struck": sorted(case.named),
            "findings": [f.to_dict() for i in incidents for f in i.findings],
            "verdict": incidents[0].verdict.to_dict() if incidents else None,
            "opened": [i.opened_step for i in incidents],
        }
        file = Path(sys.argv[1], f"{case.name()}-{trainer.global_rank}.json")
        file.write_text(json.dumps(report, default=str))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
