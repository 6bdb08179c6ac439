"""Two processes with DeepProbe at an interval and at an incident that one rank's data has caused.

Usage: ``python probes_two_ranks.py FOLDER ddp fsdp2``. Lightning starts the second rank.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sentinel_kit import Loader, Sink, make_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_sentinel import DeepProbe, IncidentResponse, RankTelemetry
from lightning_sentinel.context import context_of

STEPS, EVERY, BAD = 10, 3, 7
STRATEGIES = ("ddp", "fsdp2")
FAILS = 2 * EVERY  # the probe of this step fails on rank 1 alone, in the scenes whose names say so
SCENES = ("weights_fail", "update_fails")


class Deep(L.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.last, self.sharded = nn.LayerNorm(8), nn.Linear(8, 1), sharded

    def configure_model(self) -> None:
        if self.sharded:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)
            self.sharded = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + torch.relu(block(h))
        return self.last(self.norm(h))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch["x"])
        if self.trainer.global_step == BAD and self.global_rank == 1:
            out = out * math.nan
        return (out - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(kind: str, probe: bool) -> tuple[L.Trainer, Sink, dict[str, Tensor]]:
    torch.manual_seed(0)
    strategy = (ModelParallelStrategy if kind == "fsdp2" else DDPStrategy)(process_group_backend="gloo")
    probes = [DeepProbe(every_n_steps=EVERY)] if probe else []
    trainer, sink = make_trainer(
        [RankTelemetry(), IncidentResponse(mode="guard"), *probes],
        max_steps=STEPS,
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
    )
    module = Deep(kind == "fsdp2")
    trainer.fit(module, Loader(seed=trainer.global_rank))
    return trainer, sink, {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in module.named_parameters()}


@contextmanager
def failing(scene: str) -> Iterator[None]:
    """Rank 1 has no memory left where it measures the norms of the weights, or those of the update."""
    norms, what = DeepProbe._norms, scene.partition("_")[0].removesuffix("s")

    def measure(look: Any, of: str, *args: Any, **kwargs: Any) -> None:
        if of == what and look.step == FAILS and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("nothing left here")
        norms(look, of, *args, **kwargs)

    DeepProbe._norms = staticmethod(measure)  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeepProbe._norms = staticmethod(norms)  # type: ignore[method-assign]


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_sentinel"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    for scene in SCENES:
        with failing(scene):
            _, sink, _ = fit("ddp", probe=True)
        Path(sys.argv[1], f"{scene}-{torch.distributed.get_rank()}.json").write_text(
            json.dumps(sink.named("probe.deep"), default=str)
        )
    for kind in sys.argv[2:]:
        _, _, bare = fit(kind, probe=False)
        trainer, sink, probed = fit(kind, probe=True)
        result = {
            "events": sink.named("probe.deep"),
            "same": bare.keys() == probed.keys() and all(torch.equal(bare[n], probed[n]) for n in bare),
            "incidents": len(context_of(trainer).incidents),
        }
        Path(sys.argv[1], f"{kind}-{trainer.global_rank}.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
