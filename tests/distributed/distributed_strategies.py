"""Many small fits in one group of processes, one for each way to run them: ``python distributed_strategies.py FOLDER``.

Each way is trained twice. In the first fit nothing happens, but one update is left out by hand. In the second the last rank
makes a NaN twice for once (answered by going back to a restore point) and in one step each time that it is computed
(answered by leaving that update out). In most ways a fit is also interrupted and taken up again. Each rank
writes down for each way how they differ and what was found. Four ranks take the ways of two dimensions, ``mesh`` and
``mesh_compiled``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from callbacks_two_ranks import Bigram, Sequences
from distributed_kit import MEETING, CollectiveLimit, fork_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sentinel_kit import Sink
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_sentinel import (
    FaultInjector,
    ForensicCheckpoint,
    IncidentResponse,
    NonFiniteTracer,
    RankOutlierDetector,
    RankTelemetry,
    Rollback,
    RunJournal,
    SpikeDetector,
)
from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import NanForward, TransientNan
from lightning_sentinel.faults.base import Fault
from lightning_sentinel.incidents import Action
from lightning_sentinel.journal import iter_events
from lightning_sentinel.state import lightning_private as private
from lightning_sentinel.state.tree import local

ONCE, AGAIN, ALWAYS, STEPS = 7, 12, 16, 20
ACCUMULATE = {"no_sync": 3}
LOUD = 21  # on the mesh the second replica's loss is 40 there, once
WAYS = (
    "plain", "find_unused", "static_graph", "no_sync", "bucket_view", "fp16_hook", "bf16_hook", "own_hook", "power_sgd",
    "ddp_compiled", "fsdp2", "fsdp2_full", "fsdp2_compiled", "tensor", "mesh", "mesh_compiled",
)  # fmt: skip
RESUMED = (
    "find_unused", "static_graph", "no_sync", "fp16_hook", "bf16_hook", "power_sgd",
    "fsdp2", "fsdp2_full", "fsdp2_compiled", "tensor", "mesh", "mesh_compiled",
)  # fmt: skip
MESH = ("mesh", "mesh_compiled")


def ranks_of(way: str) -> int:
    return 4 if way in MESH else 2


def steps_of(way: str) -> int:
    return STEPS + 5 if way in MESH else STEPS


def data_rank(way: str, rank: int) -> int:
    """Whose data this rank trains on: ranks of one replica share theirs."""
    return {"tensor": 0, **dict.fromkeys(MESH, rank // 2)}.get(way, rank)


class Walk(Bigram):
    """Its loss is NaN on the last rank at some steps; with a branch that every second step does without."""

    nan_step = -1

    def __init__(self, way: str, hurt: bool) -> None:
        super().__init__()
        self.way, self.hurt = way, hurt
        self.branch = nn.Linear(32, 32) if way == "find_unused" else None
        self.struck: list[int] = []

    def configure_model(self) -> None:
        if self.way in ("ddp_compiled", "fsdp2_compiled"):  # before they are sharded; those of the mesh afterwards
            self.compile_parts()
        if self.way in ("tensor", *MESH):
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.inner, mesh, plan)
        if self.way.startswith("fsdp2") or self.way in MESH:
            for part in self.children():
                fully_shard(part, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]
        if self.way == "mesh_compiled":
            self.compile_parts()

    def compile_parts(self) -> None:
        """Each on its own."""
        torch.compiler.reset()  # what fits before have compiled counts towards the limit on recompilations
        for part in self.children():
            part.compile(backend="aot_eager")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.middle(self.embedding(batch["input_ids"]))
        if self.branch is not None and self.trainer.global_step % 2:
            h = h + self.branch(h)
        if self.way in ("tensor", *MESH):
            h = h + self.inner(h)
        h = self.norm(h)
        step = self.trainer.global_step
        # One replica computes one loss: on all of its ranks.
        bad = data_rank(self.way, self.global_rank) == data_rank(self.way, self.trainer.world_size - 1)
        if self.hurt and bad:
            first = batch_idx % self.trainer.accumulate_grad_batches == 0
            if first and (step == ALWAYS or (step in (ONCE, AGAIN) and step not in self.struck)):
                self.struck.append(step)
                h = h / torch.zeros(())
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        if self.hurt and bad and step == LOUD and step not in self.struck:
            self.struck.append(step)
            loss = loss * (40.0 / loss.detach())
        return loss


class LeaveOut(L.Callback):
    """One update left out by hand; and what the gradient norm of the first step really is."""

    norm = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        hook = next((c for c in trainer.callbacks if isinstance(c, CommHook)), None)  # type: ignore[attr-defined]
        self.memory = hook.state if hook is not None else None
        if trainer.global_step == ALWAYS - 1:
            self.kept = bits(trainer)
        if trainer.global_step == ALWAYS and self.memory is not None:
            names = ("error_dict", "p_memory_dict", "q_memory_dict", "iter", "rng")
            self.before = copy.deepcopy({name: getattr(self.memory, name) for name in names})

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
            for name, value in (self.before if self.memory is not None else {}).items():
                setattr(self.memory, name, value)  # a step that is left out leaves no trace in it


def own_hook(state, bucket):  # type: ignore[no-untyped-def]
    """The mean over the ranks, counted. DDP wants the annotation as a class, or none."""
    state.calls += 1
    return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]
    """What ``bf16_compress_hook`` does, which torch has for accelerators only."""
    gradients = bucket.buffer()
    small = gradients.to(torch.bfloat16).div_(torch.distributed.get_world_size())
    done = torch.distributed.all_reduce(small, async_op=True).get_future()
    return done.then(lambda reduced: gradients.copy_(reduced.value()[0]))


class CommHook(L.Callback):
    """What a user does on a strategy whose hook Lightning registers on CUDA only."""

    def __init__(self, way: str) -> None:
        self.way, self.calls, self.state = way, 0, None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        ddp: Any = trainer.strategy.model
        if self.way == "fp16_hook":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.way == "bf16_hook":
            ddp.register_comm_hook(None, bf16_hook)
        elif self.way == "own_hook":
            ddp.register_comm_hook(self, own_hook)
        elif self.way == "power_sgd":
            self.state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=4, min_compression_rate=0.5)
            ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)


def strategy_of(way: str) -> Any:
    shape = {"tensor": (1, 2), **dict.fromkeys(MESH, (2, 2))}.get(way, (2, 1) if way.startswith("fsdp2") else None)
    if shape is not None:
        return ModelParallelStrategy(
            *shape,
            save_distributed_checkpoint=way != "fsdp2_full",
            process_group_backend="gloo",
            timeout=MEETING,
        )
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


def fit(way: str, hurt: bool, *faults: Fault) -> tuple[L.Trainer, Sink]:
    L.seed_everything(0, verbose=False)
    ladders = {"infrastructure/transient": ["rollback_replay", "stop"]}
    response = IncidentResponse("recover", ladders=ladders, probation_steps=3, hardware_counters=counters)
    suite: list[L.Callback] = [LeaveOut()]
    if hurt or faults:
        suite = [FaultInjector(faults), NonFiniteTracer(), RankTelemetry(2), response, Rollback(every_n_steps=5)]
        suite += [RankOutlierDetector()] if way in MESH else []
    trainer = L.Trainer(
        max_steps=steps_of(way),
        accelerator="cpu",
        devices=ranks_of(way),
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
    trainer.fit(Walk(way, hurt), Sequences(data_rank(way, trainer.global_rank)))
    return trainer, sink


def bits(trainer: L.Trainer) -> list[Tensor]:
    """Weights and moments of this rank."""
    found = []
    for parameter in trainer.lightning_module.parameters():
        state = trainer.optimizers[0].state.get(parameter, {})
        found += [local(t.detach()).clone() for t in (parameter, *(state[k] for k in sorted(state)))]
    return found


def lies_where_it_says(parameter: Tensor) -> bool:
    """Whether this rank's part is that of the whole tensor at the place that checkpoints and bundles note."""
    place = private.shard_place(parameter)
    if place is None:
        return True
    whole, mine = parameter.full_tensor(), local(parameter)  # type: ignore[attr-defined]
    at = tuple(slice(o, o + n) for o, n in zip(place[1], mine.shape, strict=True))
    return place[0] == list(whole.shape) and torch.equal(whole[at], mine)


def strike(way: str, reference: L.Trainer) -> dict[str, Any]:
    """Faults within a compiled layer of the last rank, which that rank then runs eagerly: once, and in each computation."""
    last = reference.world_size - 1
    trainer, sink = fit(way, False, TransientNan(ONCE, "middle", rank=last), NanForward(ALWAYS, "middle", rank=last))
    ours, theirs = bits(trainer), bits(reference)
    return {
        "equal": len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "struck": [[e["step"], e["ran_eagerly"]] for e in sink.named("fault.injected")],
        "compiled": [e["compiled"] for e in sink.named("triage.nonfinite")],
        "incidents": [
            [i.opened_step, str(i.verdict.kind), i.verdict.culprits, [a["action"] for a in i.actions]]
            for i in context_of(trainer).incidents
        ],
    }


def run(way: str, reference: L.Trainer) -> dict[str, Any]:
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
        "placed": all(map(lies_where_it_says, trainer.lightning_module.parameters())),
        "compiled": [e["compiled"] for e in sink.named("triage.nonfinite")],
        "hardware": [e["counters"] for e in sink.named("infra.hardware")],
        "update_norm": [e["update_norm"] for e in sink.steps()][3],
        "step": trainer.global_step,
    }


class Counted(Sequences):
    """With a length nothing is fetched ahead, so Lightning's own resume is exact, too."""

    def __len__(self) -> int:
        return 1_000


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


class Stop(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == AGAIN:
            raise InterruptedError


class FarBack(L.Callback):
    """Goes back once, from step 16 to before any snapshot in memory: to the checkpoint of step 10."""

    gone = False

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == ALWAYS - 1 and not self.gone:
            self.gone = True
            rollback = next(c for c in trainer.callbacks if isinstance(c, Rollback))  # type: ignore[attr-defined]
            rollback.request(
                trainer, before_step=11, action=Action.ROLLBACK_REPLAY, incident=0, reason="a drill", exclude=()
            )


def resume(way: str, folder: Path, reference: L.Trainer) -> dict[str, Any]:
    """Interrupted after step 11, taken up by a new Trainer from the checkpoint of step 10; it goes back there once more."""
    run_dir = folder / f"run-{way}"

    def part(*extra: L.Callback, ckpt_path: Path | None = None) -> L.Trainer:
        L.seed_everything(0, verbose=False)
        saver = ForensicCheckpoint(
            5, probation_steps=2, save_on_exception=False, write_lightning_ckpt=way.startswith("fsdp2")
        )
        journal = RunJournal(run_dir if ckpt_path is None else folder / f"plain-{way}", report=False)
        trainer = L.Trainer(
            max_steps=steps_of(way),
            accelerator="cpu",
            devices=ranks_of(way),
            strategy=strategy_of(way),
            accumulate_grad_batches=ACCUMULATE.get(way, 1),
            logger=False,
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in extra),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[CollectiveLimit(), CommHook(way), LeaveOut(), *extra, journal, RankTelemetry(), saver],
        )
        trainer.fit(
            Walk(way, hurt=False),
            (Counted if way == "fsdp2" else Sequences)(data_rank(way, trainer.global_rank)),
            ckpt_path=ckpt_path,
            weights_only=False,
        )
        return trainer

    said = Said()
    logging.getLogger("lightning_sentinel").addHandler(said)
    # Lightning's own, a folder of torch's distributed checkpoint, of step 10 too
    own = [ModelCheckpoint(folder / "dcp", "{step}", every_n_train_steps=10, save_top_k=-1)] if way == "fsdp2" else []
    with contextlib.suppress(InterruptedError):
        part(Stop(), *own, *([SpikeDetector()] if own else []))
    logging.getLogger("lightning_sentinel").removeHandler(said)
    store = CheckpointStore(run_dir / "checkpoints")
    trainer = part(FarBack(), Rollback(every_n_steps=2, keep=2))
    events = list(iter_events(run_dir, rank=trainer.global_rank))
    ours, theirs = bits(trainer), bits(reference)
    found = {
        "equal": len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "resumed": [e["step"] for e in events if e["event"] == "run.resumed"],
        "back": [(e["to_step"], e.get("checkpoint")) for e in events if e["event"] == "action.rollback"],
        "bad": [e["event"] for e in events if e["event"] in ("checkpoint.failed", "checkpoint.refused")],
        "verified": [store.verify(path) for path in store.paths()],
        "without_file": [words for words in said.words if "lightning.ckpt" in words],
        "files": sorted(path.name for path in store.paths()[0].glob("*.ckpt")),
        "parts": [list(local(p).shape) for p in trainer.lightning_module.parameters()],
    }
    if (
        way == "fsdp2_full"
    ):  # Lightning's own file, whole weights and moments, as they are found in the step after its load
        kept = max((p for p in store.paths() if p.name.startswith("step-00000015")), key=lambda p: p.name)
        loaded, expected = (
            next(c.kept for c in t.callbacks if isinstance(c, LeaveOut))  # type: ignore[attr-defined]
            for t in (part(ckpt_path=kept / "lightning.ckpt"), reference)
        )
        found["by_lightning"] = [torch.equal(a, b) for a, b in zip(loaded, expected, strict=True)]
    if way == "fsdp2":
        dcp = folder / "dcp" / "step=10.ckpt"
        spike = SpikeDetector()
        again = bits(part(spike, ckpt_path=dcp))
        found["spike"] = spike.detector.state_dict()["accepted"]
        found["dcp"] = sorted(path.name for path in dcp.iterdir())
        found["by_dcp"] = [torch.equal(a, b) for a, b in zip(again, theirs, strict=True)]
        first, after = (
            [e for e in iter_events(path, rank=trainer.global_rank) if e["event"] == "step" and e["step"] >= 10]
            for path in (run_dir, folder / f"plain-{way}")
        )
        told = ("step", "batch_idx", "sample_ids", "loss_bits")
        found["went_on"] = [[e[name] for name in told] for e in after]
        found["interrupted"] = [[e[name] for name in told] for e in first[:2]]
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for way in WAYS:
        if way not in (sys.argv[2:] or WAYS) or ranks_of(way) != int(os.environ["RANKS"]):
            continue
        reference, _ = fit(way, hurt=False)
        result = run(way, reference)
        if way in ("ddp_compiled", "fsdp2_compiled"):
            result["strike"] = strike(way, reference)
        if way in RESUMED:
            result["resume"] = resume(way, Path(sys.argv[1]), reference)
        (Path(sys.argv[1]) / f"{way}-{torch.distributed.get_rank()}.json").write_text(json.dumps(result, default=str))


def launch() -> int:
    for ranks in sorted({ranks_of(way) for way in sys.argv[2:] or WAYS}):
        os.environ["RANKS"] = str(ranks)
        if fork_ranks(ranks, main):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch())
