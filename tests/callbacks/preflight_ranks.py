"""Two processes that differ in weights, configuration and versions; each writes down what the preflight said.

Usage: ``python preflight_ranks.py FOLDER SCENARIO...``. Lightning starts the second rank.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sentinel_kit import Loader, Net, make_trainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_sentinel import Preflight, RankTelemetry
from lightning_sentinel.callbacks import run_journal
from lightning_sentinel.callbacks.preflight import PreflightError

SCENARIOS = ("alike", "weights", "config", "versions", "strict", "sharded")


class Sharded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)  # type: ignore[assignment]
        self.last.weight.data.fill_(0.25)

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class Scatter(L.Callback):
    """Gives rank 1 other weights after DDP has sent rank 0's."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            pl_module.last.weight.data[0, 0] += 1e-6


def fit(scenario: str, folder: Path) -> None:
    torch.manual_seed(0)
    sharded = scenario == "sharded"
    strategy: Any = (ModelParallelStrategy if sharded else DDPStrategy)(process_group_backend="gloo")
    preflight = Preflight(strict=scenario == "strict", skip=[] if sharded else ["warmup", "clipping"])
    trainer, sink = make_trainer(
        [*([Scatter()] if scenario in ("weights", "strict") else []), preflight, RankTelemetry()],
        max_steps=2,
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
    )
    module = Sharded() if sharded else Net()
    if scenario == "config":
        module.save_hyperparameters({"width": 8 + trainer.global_rank, "depth": 2})
    versions = run_journal.versions
    if scenario == "versions" and trainer.global_rank == 1:
        run_journal.versions = lambda: versions() | {"torch": "1.0"}  # type: ignore[assignment]
    refused = ""
    try:
        trainer.fit(module, Loader(seed=trainer.global_rank))
    except PreflightError as error:
        refused = str(error)
    run_journal.versions = versions
    result = {
        "remarks": [r.to_dict() for r in preflight.remarks],
        "events": [e["event"] for e in sink.events if e["event"].startswith("preflight")],
        "refused": refused,
        "steps": trainer.global_step,
    }
    (folder / f"{scenario}-{trainer.global_rank}.json").write_text(json.dumps(result))


def main() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_sentinel"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    for scenario in sys.argv[2:]:
        fit(scenario, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
