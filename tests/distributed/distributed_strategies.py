"""Many small fits in one group of processes, one for each way to run them: ``python distributed_strategies.py FOLDER``.

Each way is trained twice. In the first fit nothing happens, but one update is left out by hand. In the second the last rank
makes a NaN twice for once (answered by going back to a restore point) and in one step each time that it is computed
(answered by leaving that update out). Where parameters are sharded a fit is also interrupted and taken up again. Each rank
writes down for each way how they differ and what was found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from callbacks_two_ranks import Bigram, Sequences
from distributed_kit import MEETING, CollectiveLimit, fork_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sentinel_kit import Sink
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_sentinel import (
    ForensicCheckpoint,
    IncidentResponse,
    NonFiniteTracer,
    RankTelemetry,
    Rollback,
    RunJournal,
)
from lightning_sentinel.context import context_of
from lightning_sentinel.journal import iter_events
from lightning_sentinel.state.tree import local

ONCE, AGAIN, ALWAYS, STEPS = 7, 12, 16, 20
ACCUMULATE = {"no_sync": 3}
WAYS = (
    "plain", "find_unused", "static_graph", "no_sync", "bucket_view", "fp16_hook", "own_hook", "fsdp2", "tensor",
)  # fmt: skip


class Walk(Bigram):
    """Its loss is NaN on the last rank at some steps; with a branch that every second step does without."""

    nan_step = -1

    def __init__(self, way: str, hurt: bool) -> None:
        super().__init__()
        self.way, self.hurt = way, hurt
        self.branch = nn.Linear(32, 32) if way == "find_unused" else None
        self.struck: list[int] = []

    def configure_model(self) -> None:
        if self.way == "fsdp2":
            for part in (self.embedding, self.middle, self.norm, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]
        if self.way == "tensor":
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.inner, mesh, plan)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.middle(self.embedding(batch["input_ids"]))
        if self.branch is not None and self.trainer.global_step % 2:
            h = h + self.branch(h)
        if self.way == "tensor":
            h = h + self.inner(h)
        h = self.norm(h)
        step = self.trainer.global_step
        # One replica computes one loss: on all of its ranks.
        if self.hurt and (self.way == "tensor" or self.global_rank == self.trainer.world_size - 1):
            first = batch_idx % self.trainer.accumulate_grad_batches == 0
            if first and (step == ALWAYS or (step in (ONCE, AGAIN) and step not in self.struck)):
                self.struck.append(step)
                h = h / torch.zeros(())
        logits = self.head(h)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class LeaveOut(L.Callback):
    """One update left out by hand; and what the gradient norm of the first step really is."""

    norm = 0.0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            whole = [
                g.full_tensor() if hasattr(g, "full_tensor") else g
                for p in pl_module.parameters()
                if (g := p.grad) is not None
            ]
            self.norm = float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in whole])))
        if trainer.global_step == ALWAYS:
            for parameter in pl_module.parameters():
                parameter.grad = None


def own_hook(state, bucket):  # type: ignore[no-untyped-def]
    """The mean over the ranks, counted. DDP wants the annotation as a class, or none."""
    state.calls += 1
    return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)


class CommHook(L.Callback):
    """What a user does on a strategy whose hook Lightning registers on CUDA only."""

    def __init__(self, way: str) -> None:
        self.way, self.calls = way, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        ddp: Any = trainer.strategy.model
        if self.way == "fp16_hook":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.way == "own_hook":
            ddp.register_comm_hook(self, own_hook)
        elif self.way == "power_sgd":
            state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=4, min_compression_rate=0.5)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def strategy_of(way: str) -> Any:
    if way == "fsdp2":
        return ModelParallelStrategy(2, 1, process_group_backend="gloo", timeout=MEETING)
    if way == "tensor":
        return ModelParallelStrategy(1, 2, process_group_backend="gloo", timeout=MEETING)
    options = {
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "bucket_view": {"gradient_as_bucket_view": True},
    }
    return DDPStrategy(process_group_backend="gloo", timeout=MEETING, **options.get(way, {}))


def counters() -> dict[str, float]:
    """Rank 0's driver is broken."""
    rank = torch.distributed.get_rank()
    return {"ecc_errors": 6 // rank, "temperature_c": 61.0}


def fit(way: str, hurt: bool) -> tuple[L.Trainer, Sink]:
    L.seed_everything(0, verbose=False)
    ladders = {"infrastructure/transient": ["rollback_replay", "stop"]}
    response = IncidentResponse("recover", ladders=ladders, probation_steps=3, hardware_counters=counters)
    suite: list[L.Callback] = [LeaveOut()]
    if hurt:
        suite = [NonFiniteTracer(), RankTelemetry(2), response, Rollback(every_n_steps=5)]
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(way),
        accumulate_grad_batches=ACCUMULATE.get(way, 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[CollectiveLimit(), CommHook(way), *suite],
    )
    context, sink = context_of(trainer), Sink()
    context.journal = sink
    data_rank = 0 if way == "tensor" else trainer.global_rank
    trainer.fit(Walk(way, hurt), Sequences(data_rank))
    return trainer, sink


def bits(trainer: L.Trainer) -> list[Tensor]:
    """Weights and moments of this rank."""
    found = []
    for parameter in trainer.lightning_module.parameters():
        state = trainer.optimizers[0].state.get(parameter, {})
        found += [local(t.detach()).clone() for t in (parameter, *(state[k] for k in sorted(state)))]
    return found


def run(way: str) -> dict[str, Any]:
    reference, _ = fit(way, hurt=False)
    (witness,) = [c for c in reference.callbacks if isinstance(c, LeaveOut)]  # type: ignore[attr-defined]
    trainer, sink = fit(way, hurt=True)
    ours, theirs = bits(trainer), bits(reference)
    steps: dict[int, list[bool]] = {}
    for event in sink.steps():
        steps.setdefault(event["step"], []).append(event["applied"])
    return {
        "equal": len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "finite": all(bool(torch.isfinite(t).all()) for t in ours),
        "incidents": [incident.to_dict() for incident in context_of(trainer).incidents],
        "not_applied": {step: passes for step, passes in steps.items() if not all(passes)},
        "rank_losses": sink.steps()[0].get("rank_losses"),
        "tokens": {e["step"]: e["tokens"] for e in sink.steps()},
        "loss": sink.steps()[0]["loss"],
        "grad_norm": sink.steps()[0]["grad_norm"],
        "true_norm": witness.norm,
        "hardware": [e["counters"] for e in sink.named("infra.hardware")],
        "update_norm": [e["update_norm"] for e in sink.steps()][3],
        "step": trainer.global_step,
    }


class Stop(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == AGAIN:
            raise InterruptedError


def resume(way: str, folder: Path) -> dict[str, Any]:
    """Interrupted after step 11, and taken up by a new Trainer from the checkpoint of step 10."""
    reference, _ = fit(way, hurt=False)

    def part(*extra: L.Callback) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        suite = [RankTelemetry(), ForensicCheckpoint(5, probation_steps=2, save_on_exception=False)]
        trainer = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=2,
            strategy=strategy_of(way),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[CollectiveLimit(), LeaveOut(), *extra, RunJournal(folder / f"run-{way}", report=False), *suite],
        )
        trainer.fit(Walk(way, hurt=False), Sequences(0 if way == "tensor" else trainer.global_rank))
        return trainer

    with contextlib.suppress(InterruptedError):
        part(Stop())
    trainer = part()
    events = [e for e in iter_events(folder / f"run-{way}", rank=trainer.global_rank) if e["event"] == "run.resumed"]
    ours, theirs = bits(trainer), bits(reference)
    return {
        "equal": len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "resumed": [e["step"] for e in events],
        "parts": [list(local(p).shape) for p in trainer.lightning_module.parameters()],
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for way in sys.argv[2:] or WAYS:
        result = run(way)
        if way in ("fsdp2", "tensor"):
            result["resume"] = resume(way, Path(sys.argv[1]))
        (Path(sys.argv[1]) / f"{way}-{torch.distributed.get_rank()}.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    sys.exit(fork_ranks(2, main))
