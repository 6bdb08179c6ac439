"""Two gloo processes: an uninterrupted run, one that rolls back, one that is interrupted and taken up by new Trainers; each
rank writes down whether they are equal.

Started by a test as ``python state_two_ranks.py <folder> ddp:1:0 fsdp2:1:2 skip`` (strategy, accumulation, workers; or the
name of another scene); Lightning starts the second rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from collective_limit import CollectiveLimit
from fork_server import IMPORTED
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from state_world import Hurt, Net, Recorder, Samples, same, seed_all
from test_state_incidents import Alarm, names_of
from test_state_mixture import Numbered
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_sentinel import ForensicCheckpoint, IncidentResponse, RankTelemetry, Rollback, RunJournal
from lightning_sentinel.data.mixture import MixtureLoader
from lightning_sentinel.incidents import Action, FindingKind
from lightning_sentinel.journal import iter_events
from lightning_sentinel.state.tree import local, map_tensors

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class TwoRanks(Net):
    def __init__(self, sharded: bool, workers: int = 0) -> None:
        super().__init__()
        self.sharded, self.workers = sharded, workers
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
        # Not forked from here: where a thread of gloo's is about to enter Python at that moment, CPython's own lock is left
        # taken in the child, which never begins (seen on 3.11).
        options = {"num_workers": self.workers, "multiprocessing_context": "forkserver"} if self.workers else {}
        return StatefulDataLoader(samples, batch_size=4, sampler=sampler, **options)


class Mixed(TwoRanks):
    """Both ranks draw from one global order; the loader brings ids and can leave samples out."""

    def train_dataloader(self) -> Any:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        return MixtureLoader([Numbered("a", 0, 96)], batch_size=4, steps_per_epoch=8, rank=rank, world_size=ranks)


def fit(
    kind: str, accumulate: int, *callbacks: L.Callback, workers: int = 0, mixed: bool = False, seed: int = 1
) -> tuple[Recorder, dict[str, Any], L.Trainer]:
    seed_all(0)
    recorder = Recorder()
    module = Mixed(False) if mixed else TwoRanks(kind == "fsdp2", workers)
    strategy: Any = (
        ModelParallelStrategy(2, 1, process_group_backend="gloo")
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
        callbacks=[CollectiveLimit(), recorder, *callbacks],
    )
    seed_all(seed + trainer.global_rank)
    trainer.fit(module)
    state = {
        "module": {n: local(t.detach()).clone() for n, t in [*module.named_parameters(), *module.named_buffers()]},
        "optimizer": map_tensors(trainer.strategy.optimizers[0].state_dict(), lambda t: local(t).clone()),
        "draw": torch.rand(3),
    }
    return recorder, state, trainer


def compare(kind: str, accumulate: int, workers: int, folder: Path) -> None:
    reference, state, _ = fit(kind, accumulate, workers=workers)
    rollback = Rollback(every_n_steps=2)
    hurt = Hurt(rollback, 2 * accumulate + 3, (2 * accumulate + 2) // accumulate)
    outcome, after, trainer = fit(kind, accumulate, hurt, rollback, workers=workers)
    result = {"executed": rollback.executed, "restored": hurt.restored, "problem": "", "steps": len(outcome.steps)}
    try:
        assert outcome.steps == reference.steps, "the logs of the steps differ"
        assert outcome.epochs == reference.epochs, "the epoch values differ"
        same(after, state)
    except AssertionError as error:
        result["problem"] = str(error)
    result["resumed"] = resume(kind, accumulate, workers, folder, reference, state)
    (folder / f"{kind}-{accumulate}-{workers}-rank-{trainer.global_rank}.json").write_text(json.dumps(result))


def resume(
    kind: str, accumulate: int, workers: int, folder: Path, reference: Recorder, state: dict[str, Any]
) -> dict[str, Any]:
    """Interrupted before step 11 (or 5, of two micro-batches), taken up with other random states from step 8 (or 4)."""
    run_dir = folder / f"resumed-{kind}-{accumulate}-{workers}"

    def part(*callbacks: L.Callback, seed: int) -> tuple[Recorder, dict[str, Any], L.Trainer]:
        saver = ForensicCheckpoint(4 // accumulate, probation_steps=1, save_on_exception=False)
        callbacks = (*callbacks, RunJournal(run_dir, report=False), RankTelemetry(), saver)
        return fit(kind, accumulate, *callbacks, workers=workers, seed=seed)

    with contextlib.suppress(InterruptedError):
        part(Stop(11 // accumulate), seed=1)
    outcome, after, trainer = part(seed=40)
    events = list(iter_events(run_dir, rank=trainer.global_rank))
    problem = ""
    try:
        assert outcome.steps == reference.steps, "the logs of the steps differ"
        assert outcome.epochs == reference.epochs, "the epoch values differ"
        same(after, state)
    except AssertionError as error:
        problem = str(error)
    from_steps = [e["checkpoint_step"] for e in events if e["event"] == "run.resumed"]
    bad = [
        e["event"] for e in events if e["event"] in ("checkpoint.failed", "checkpoint.refused", "checkpoint.incomplete")
    ]
    return {"from": from_steps, "bad": bad, "problem": problem, "calls": trainer.lightning_module.calls}


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


class Stop(L.Callback):
    def __init__(self, step: int = 11) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def suite(run_dir: Path, *extra: L.Callback) -> list[L.Callback]:
    return [
        RunJournal(run_dir, report=False),
        *extra,
        RankTelemetry(),
        IncidentResponse(
            "recover", ladders={"undetermined/loss": ["rollback_skip", "stop"]}, triage=False, probation_steps=2
        ),
        Rollback(every_n_steps=2),
        ForensicCheckpoint(4, probation_steps=1, save_on_exception=False),
    ]


def skip(folder: Path) -> None:
    """One rank has a finding at step 5: the batch of both is left out, also by the processes that resume."""
    run_dir = folder / "run"
    reference, _, trainer = fit("ddp", 1, mixed=True)
    with contextlib.suppress(InterruptedError):
        fit("ddp", 1, Stop(), *suite(run_dir, Alarm({5: 5})), mixed=True)
    first = [e for e in iter_events(run_dir, rank=trainer.global_rank) if e["event"] == "action.rollback"]
    outcome, _, trainer = fit("ddp", 1, *suite(run_dir), mixed=True, seed=40)
    result = {"reference": reference.steps, "steps": outcome.steps, "excluded": [e["excluded"] for e in first]}
    (folder / f"skip-rank-{trainer.global_rank}.json").write_text(json.dumps(result))


def late(folder: Path) -> None:
    """What began before every snapshot goes back, on both ranks, to the newest checkpoint that both can read."""
    run_dir = folder / "late"
    reference, state, _ = fit("ddp", 1)
    callbacks = suite(run_dir, Alarm({13: 5}, FindingKind.LEVEL_SHIFT))
    callbacks[-3].policy = IncidentResponse(  # type: ignore[attr-defined]
        "recover", ladders={"undetermined/loss": ["rollback_replay", "stop"]}
    ).policy
    callbacks[2].sample_id_fn = names_of  # type: ignore[attr-defined]
    outcome, after, trainer = fit("ddp", 1, *callbacks)
    backs = [e for e in iter_events(run_dir, rank=trainer.global_rank) if e["event"] == "action.rollback"]
    problem = ""
    try:
        assert outcome.steps == reference.steps, "the logs of the steps differ"
        same(after, state)
    except AssertionError as error:
        problem = str(error)
    result = {"back": [(e["to_step"], e.get("checkpoint")) for e in backs], "problem": problem}
    (folder / f"late-rank-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    target = Path(sys.argv[1])
    for name in sys.argv[2:]:
        if name.startswith("uneven:"):
            uneven(name == "uneven:late", target)
        elif name in ("skip", "late"):
            {"skip": skip, "late": late}[name](target)
        else:
            strategy, accumulate, workers = name.split(":")
            compare(strategy, int(accumulate), int(workers), target)
