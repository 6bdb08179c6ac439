"""Two processes, one fault of rank 1 after the other; every rank writes down each verdict that it was given.

Usage: ``python triage_two_ranks.py FOLDER``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler
from triage_models import Net, Samples, collate, one_of_two_ranks

from lightning_sentinel import NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident
from lightning_sentinel.state.snapshot import take
from lightning_sentinel.triage import investigate
from lightning_sentinel.triage.sandbox import is_replaying
from lightning_sentinel.triage.window import restore_buffers

SNAPSHOT = 12  # late enough for a level of the losses from which a healthy step does not stand out
FAULTS = {  # at which step which one
    12: "loud_layer",
    13: "healthy",
    14: "transient",
    15: "masked_rank",
    16: "finding_of_one_rank",
    17: "failing_replay",
    18: "sealed_batch",
    19: "alone_in_its_answer",
    20: "bad_rank",
    24: "rate_spike",  # without a scheduler the plan is what the rate has been
}
NONFINITE = ("transient", "masked_rank", "failing_replay")


class Fault(L.Callback):
    hook: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SNAPSHOT:
            context_of(trainer).snapshots.append(take(trainer))
        name = FAULTS.get(trainer.global_step)
        if trainer.global_rank != 1:
            return
        if name == "loud_layer":
            mixer = pl_module.blocks[2].mixer
            self.hook = mixer.register_forward_hook(lambda module, args, output: output * 50.0)
        if name == "alone_in_its_answer":  # whatever the batch, and in every replay
            self.hook = pl_module.head.register_forward_hook(lambda module, args, output: output + 30.0)
        if name == "bad_rank":
            pl_module.head.weight.data.normal_(0.0, 10.0, generator=torch.Generator().manual_seed(1))
        if name == "transient":
            fired: list[int] = []

            def hook(m: Any, args: Any, output: Any) -> Any:
                if fired:
                    return output
                fired.append(1)
                return output / torch.zeros_like(output)

            pl_module.blocks[2].mixer.register_forward_hook(hook)
        if name in NONFINITE[1:]:
            batch["x"] = batch["x"].clone()
            batch["x"][:, -1] = 1.0
        if name == "sealed_batch":  # high, and of something that no other process can be sent
            batch["y"] = batch["y"] + 30.0
            batch["note"] = lambda: None
        if name == "failing_replay":
            pl_module.refuses = True
        if name == "rate_spike":
            trainer.optimizers[0].param_groups[0]["lr"] *= 50.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.refuses = False
        if self.hook is not None:
            self.hook.remove()
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-3


class MaskedMean(Net):
    """The mean over the samples that are not masked: 0/0 where all of a rank's are. A replay may be refused."""

    refuses = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.refuses and is_replaying(self.trainer):
            raise RuntimeError("no second time")
        weight = 1.0 - batch["x"][:, -1]
        h = self.stem(batch["x"])
        for block in self.blocks:
            h = block(h, torch.zeros(len(h), 1))
        per_sample = (self.head(h) - batch["y"]).square().mean(1)
        return (per_sample * weight).sum() / weight.sum()


class Gavel(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        context = context_of(trainer)
        if trainer.global_step not in FAULTS:
            return
        step, name = trainer.global_step, FAULTS[trainer.global_step]
        record = context.record
        kind = FindingKind.NONFINITE_LOSS if record.has_nonfinite else FindingKind.RANK_OUTLIER
        findings = [Finding(kind, "test", step, 1.0, 0.0, "seen", ranks=(1,))]
        if name == "finding_of_one_rank" and trainer.global_rank == 1:
            culprits = ("sample:odd",)
            findings.append(
                Finding(FindingKind.INVALID_BATCH, "test", step, 1.0, 0.0, "An odd one.", culprits=culprits)
            )
        incident = Incident(1, step, step, 0, 0, findings=findings)
        verdict = investigate(trainer, pl_module, optimizer, incident, record)
        Path(sys.argv[1], f"{name}-{trainer.global_rank}.json").write_text(json.dumps(verdict.to_dict()))
        context.held = True
        if name != "healthy" and context.history[-1].step == step:
            context.history.pop()  # held by an IncidentResponse, it would never have been taken for a healthy one
        restore_buffers(trainer)
        for p in pl_module.parameters():
            p.grad = None


def main() -> None:
    trainer = one_of_two_ranks(
        [Fault(), NonFiniteTracer(["blocks.*"]), RankTelemetry(), Gavel()],
        max(FAULTS) + 1,
        use_distributed_sampler=False,
    )
    data = Samples("", 96, 0)
    sampler = DistributedSampler(data, 2, trainer.global_rank, shuffle=False)
    trainer.fit(MaskedMean(), DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate))


if __name__ == "__main__":
    main()
