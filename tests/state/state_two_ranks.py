"""Two gloo processes: an uninterrupted run, then one that rolls back; each rank writes down whether they are equal.

Started by a test as ``python state_two_ranks.py <folder> ddp:1 ddp:2 fsdp2:1`` (strategy and accumulation); Lightning
starts the second rank.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from state_world import Hurt, Net, Recorder, Samples, same, seed_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_sentinel.callbacks.rollback import Rollback
from lightning_sentinel.incidents import Action
from lightning_sentinel.state.tree import local, map_tensors

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class TwoRanks(Net):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        if sharded:
            # running statistics are not sharded and would differ between ranks
            self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def configure_model(self) -> None:
        if self.sharded:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.net, mesh=mesh)
            fully_shard(self.other, mesh=mesh)
            self.sharded = False

    def train_dataloader(self) -> Any:
        samples = Samples(64)
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = StatefulDistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=True, seed=3)
        return StatefulDataLoader(samples, batch_size=4, sampler=sampler)


def fit(kind: str, accumulate: int, *callbacks: L.Callback) -> tuple[Recorder, dict[str, Any], L.Trainer]:
    seed_all(0)
    recorder, module = Recorder(), TwoRanks(kind == "fsdp2")
    strategy: Any = (
        ModelParallelStrategy(process_group_backend="gloo")
        if kind == "fsdp2"
        else DDPStrategy(process_group_backend="gloo")
    )
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        callbacks=[recorder, *callbacks],
    )
    seed_all(1 + trainer.global_rank)
    trainer.fit(module)
    state = {
        "module": {n: local(t.detach()).clone() for n, t in [*module.named_parameters(), *module.named_buffers()]},
        "optimizer": map_tensors(trainer.strategy.optimizers[0].state_dict(), lambda t: local(t).clone()),
        "draw": torch.rand(3),
    }
    return recorder, state, trainer


def compare(kind: str, accumulate: int, folder: Path) -> None:
    reference, state, _ = fit(kind, accumulate)
    rollback = Rollback(every_n_steps=2)
    hurt = Hurt(rollback, 2 * accumulate + 3, (2 * accumulate + 2) // accumulate)
    outcome, after, trainer = fit(kind, accumulate, hurt, rollback)
    result = {"executed": rollback.executed, "restored": hurt.restored, "problem": "", "steps": len(outcome.steps)}
    try:
        assert outcome.steps == reference.steps, "the logs of the steps differ"
        assert outcome.epochs == reference.epochs, "the epoch values differ"
        same(after, state)
    except AssertionError as error:
        result["problem"] = str(error)
    (folder / f"{kind}-{accumulate}-rank-{trainer.global_rank}.json").write_text(json.dumps(result))


class UnevenRetry(L.Callback):
    """Holds step 3 on both ranks and asks for another try; on rank 1 alone something has written to a weight."""

    def __init__(self, rollback: Rollback, late: bool) -> None:
        self.rollback, self.late = rollback, late
        self.light: list[bool] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step != 3 or self.light:
            return
        for parameter in module.parameters():
            parameter.grad = None
        if not self.late:
            self.touch(trainer, module)
        request = self.rollback.request(
            trainer, before_step=3, action=Action.RETRY_STEP, incident=1, reason="uneven ranks"
        )
        self.light.append(request.light)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if self.late and self.rollback.pending:
            self.touch(trainer, module)

    @staticmethod
    def touch(trainer: L.Trainer, module: Any) -> None:
        if trainer.global_rank == 1:
            with torch.no_grad():
                next(module.parameters()).add_(0.0)


def uneven(late: bool, folder: Path) -> None:
    rollback = Rollback(every_n_steps=2)
    retry = UnevenRetry(rollback, late)
    outcome, _, trainer = fit("ddp", 1, retry, rollback)
    result = {"light": retry.light, "executed": rollback.executed, "steps": outcome.steps}
    name = "late" if late else "early"
    (folder / f"uneven-{name}-rank-{trainer.global_rank}.json").write_text(json.dumps(result))
    calls = trainer.lightning_module.calls
    assert calls == 16 + 2, calls  # steps 2 and 3 once more


if __name__ == "__main__":
    for name in sys.argv[2:]:
        if name.startswith("uneven:"):
            uneven(name == "uneven:late", Path(sys.argv[1]))
            continue
        compare(name.split(":")[0], int(name.split(":")[1]), Path(sys.argv[1]))
