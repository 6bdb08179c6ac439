"""Processes whose replicas part, in one way after the other; each rank writes down what was found.

Usage: ``python replica_ranks.py FOLDER [four] SCENARIO...``; see :data:`SCENARIOS`. Lightning starts the other ranks.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sentinel_kit import Loader, Net, make_trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sentinel import IncidentResponse, RankTelemetry, ReplicaConsistency, Rollback
from lightning_sentinel.callbacks import replica_consistency
from lightning_sentinel.context import context_of

STEPS, HIT, EVERY = 14, 5, 4
SCENARIOS = (
    "clean",
    "skip",
    "skip_recover",
    "tie_observe",
    "frozen",
    "buffer",
    "moment",
    "tie",
    "flip",
    "fsdp",
    "hsdp",
    "averaged",
    "cannot_look",
)
HEALED, LONG = 31, 42  # of the scenario that is only watched: five looks while the replicas differ
OF_FOUR = ("tie", "moment", "two_ways")  # by what two replicas cannot tell
GUILTY = {2: (1,), 4: (2,)}  # by number of ranks


FINGERPRINTS = replica_consistency.fingerprints


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("nothing left here")


class Model(Net):
    """BatchNorm's statistics differ by rank; a counter of batches and a frozen table are the same everywhere."""

    def __init__(self, sharding: str = "") -> None:
        super().__init__()
        self.sharding = sharding
        if sharding:
            self.norm = nn.LayerNorm(8)  # type: ignore[assignment]
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("seen", torch.zeros(()))  # of this rank's own data, by design
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def configure_model(self) -> None:
        if self.sharding and not isinstance(self.first.weight, torch.distributed.tensor.DTensor):
            mesh = (
                self.device_mesh["data_parallel"]  # type: ignore[index]
                if self.sharding == "fsdp"
                else init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            )
            fully_shard(self.first, mesh=mesh)
            fully_shard(self.last, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch["x"].sum()
        return super().training_step(batch, batch_idx)


class Parting(L.Callback):
    """Does to the guilty rank at step :data:`HIT` what the scenario says, once; heals what it is told to."""

    def __init__(self, scenario: str) -> None:
        self.scenario, self.done = scenario, False
        self.largest = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.scenario == "tie_observe" and trainer.global_step == HEALED:
            with torch.no_grad():
                state = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.is_floating_point()]
                for tensor in [*pl_module.parameters(), *state]:
                    torch.distributed.broadcast(tensor, 0)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.scenario == "cannot_look" and trainer.global_rank == 1:
            # At the first look after the others have gone on: no memory left there, for once.
            failing = trainer.global_step == 2 * EVERY
            replica_consistency.fingerprints = no_memory if failing else FINGERPRINTS  # type: ignore[assignment]
        if trainer.global_step != HIT or self.done:
            return
        self.done = True
        if trainer.global_rank not in GUILTY[trainer.world_size]:
            if self.scenario == "two_ways" and trainer.global_rank == 0:
                pl_module.table[1] = 7.0  # another tensor, on another rank
            return
        with torch.no_grad():
            if self.scenario.startswith("skip"):
                for parameter in pl_module.parameters():  # judged bad by this rank alone
                    parameter.grad = None
            elif self.scenario == "frozen":
                pl_module.frozen[2] += 1.0
            elif self.scenario == "buffer":
                pl_module.table[0] = -0.0
            elif self.scenario == "moment":
                optimizer.state[pl_module.first.weight]["exp_avg_sq"][0, 0] *= 2.0
            elif self.scenario in ("tie", "two_ways", "tie_observe", "cannot_look"):
                bits = pl_module.last.weight.view(torch.int32)
                bits[0, 3] ^= 1 << 12
            elif self.scenario in ("flip", "hsdp"):
                weight = getattr(pl_module.last.weight, "_local_tensor", pl_module.last.weight)
                weight[0, 3] += 2.0


def fit(scenario: str, folder: Path, devices: int = 2) -> None:
    torch.manual_seed(0)
    sharding = scenario if scenario in ("fsdp", "hsdp") else ""
    strategy: Any = DDPStrategy(process_group_backend="gloo", broadcast_buffers=False)
    if sharding:
        strategy = ModelParallelStrategy(process_group_backend="gloo")
    watch, parting = ReplicaConsistency(every_n_steps=EVERY), Parting(scenario)
    callbacks: list[L.Callback] = [parting, watch, RankTelemetry()]
    if scenario.endswith("recover") or scenario == "flip":
        callbacks += [IncidentResponse(mode="recover", probation_steps=4), Rollback(every_n_steps=4)]
    if scenario.endswith("observe"):
        callbacks += [IncidentResponse(probation_steps=6)]
    trainer, sink = make_trainer(
        callbacks,
        max_steps=LONG if scenario.endswith("observe") else STEPS,
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=False,
    )
    if scenario == "averaged":
        trainer.strategy._model_averaging_period = 3  # type: ignore[attr-defined]
    module = Model(sharding)
    trainer.fit(module, Loader(seed=trainer.global_rank))
    vector = torch.cat([getattr(p, "_local_tensor", p).detach().reshape(-1) for p in module.parameters()])
    others = [torch.zeros_like(vector) for _ in range(devices)]
    torch.distributed.all_gather(others, vector)
    result = {
        "findings": [e["finding"] for e in sink.named("finding")],
        "incidents": [i.to_dict() for i in context_of(trainer).incidents],
        "compared": sink.named("replicas.compared"),
        "local": sink.named("replicas.local_buffers"),
        "apart": max(float((others[0] - o).abs().max()) for o in others),
        "told": [e["event"] for e in sink.events if e["event"].startswith("incident.")],
        "agree": sink.named("replicas.agree_again"),
        "still": sink.named("replicas.still_differ"),
        "not_compared": sink.named("replicas.not_compared"),
        "norms": [float(o.norm()) for o in others],
        "hit": parting.done,
        "state": watch.state_dict(),
    }
    (folder / f"{scenario}-{trainer.global_rank}.json").write_text(json.dumps(result, default=str))
    assert math.isfinite(result["apart"])


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    four = sys.argv[2] == "four"
    for scenario in sys.argv[3 if four else 2 :]:
        fit(scenario, Path(sys.argv[1]), 4 if four else 2)


if __name__ == "__main__":
    main()
