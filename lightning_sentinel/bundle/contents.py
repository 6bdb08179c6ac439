"""Collects what a bundle holds at the gate of the incident's step: copies in host memory, ready for a thread to write."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.describe import library_versions, topology
from ..checkpoint.plain import encode
from ..context import RunContext, context_of
from ..data.identity import batch_hash
from ..incidents import Incident
from ..journal import redact, to_json
from ..record import StepRecord
from ..state import lightning_private as private
from ..state.fingerprint import fingerprints
from ..state.tree import HostCopies, local
from ..triage.window import MicroBatch, StepWindow
from .drill import Drill

SCHEMA = 1
HISTORY = 64  # records before the incident whose losses by rank are kept


@dataclass(frozen=True)
class Survey:
    """What one rank would have to write, and what its replica looks like; exchanged before anything is decided.

    Attributes:
        weights: Bytes of the parameters, of this rank's part where they are sharded.
        batch: Bytes of the micro-batches.
        sharded: True where the parameters are parts of larger tensors.
        window: True where the step's micro-batches were captured.
        prints: Fingerprint of each parameter, by name; empty on one rank alone.
        free: Free bytes where the bundle goes, or None where that cannot be told.
        busy: True where as many bundles wait to be written as may.
        there: True where the incident has its bundle already, from before a restart.
    """

    weights: int
    batch: int
    sharded: bool
    window: bool
    prints: dict[str, tuple[int, int]] = field(default_factory=dict)
    free: int | None = None
    busy: bool = False
    there: bool = False


@dataclass(frozen=True)
class Plan:
    """What the bundle will hold; the same on every rank.

    Attributes:
        state: Whether weights are written.
        batch: Whether micro-batches are written.
        differing: By rank, the parameters that differ from rank 0's to the bit; these ranks write their own.
        why_no_state: A sentence, where ``state`` is false.
        why_no_batch: A sentence, where ``batch`` is false.
        bytes: About what all ranks together will write.
    """

    state: bool
    batch: bool
    differing: dict[int, tuple[str, ...]]
    why_no_state: str = ""
    why_no_batch: str = ""
    bytes: int = 0


@dataclass
class Part:
    """One rank's files, in host memory."""

    rank: int
    world_size: int
    number: int
    step: int
    attempt: int
    tokens: int
    own: dict[str, Any]
    weights: dict[str, Tensor] | None = None
    run: dict[str, Any] | None = None
    incident: dict[str, Any] = field(default_factory=dict)


def survey(trainer: Trainer, module: LightningModule, record: StepRecord, folder: Path, *, busy: bool) -> Survey:
    """Measure this rank; reads fingerprints from the device where there are several ranks. ``folder``: of the bundle."""
    window = window_of(trainer, record)
    parameters = dict(module.named_parameters())
    sharded = any(hasattr(p, "_local_tensor") for p in parameters.values())
    prints: dict[str, tuple[int, int]] = {}
    if trainer.world_size > 1 and not sharded:
        names, table = fingerprints(parameters.items(), trainer.strategy.root_device)
        prints = {n: (a, b) for n, (a, b) in zip(names, table.tolist(), strict=True)}
    return Survey(
        weights=sum(local(p).nbytes for p in parameters.values()),
        batch=0 if window is None else window.nbytes,
        sharded=sharded,
        window=window is not None,
        prints=prints,
        free=_free_bytes(folder),
        busy=busy,
        there=folder.exists(),
    )


def window_of(trainer: Trainer, record: StepRecord) -> StepWindow | None:
    """The captured micro-batches of the record's step, or None."""
    window = context_of(trainer).window
    if window is None or not window.micro_batches:
        return None
    # With several optimizers in one batch ``global_step`` has moved on by the time of the later ones' gates.
    automatic = trainer.lightning_module.automatic_optimization
    if window.step > record.step or (automatic and window.step != record.step):
        return None
    return window if all(m.batch is not None for m in window.micro_batches) else None


def plan(everyone: list[Survey], *, state: bool, batch: bool, room: int) -> Plan:
    """What to write, a pure function of what all ranks have said.

    Args:
        everyone: Surveys in rank order.
        state: Whether weights are wanted.
        batch: Whether micro-batches are wanted.
        room: Bytes that bundles of this run may still take.
    """
    first = everyone[0]
    differing = {
        rank: tuple(n for n, p in s.prints.items() if p != first.prints.get(n))
        for rank, s in enumerate(everyone)
        if rank > 0 and s.prints != first.prints
    }
    shares = {rank: len(names) / max(1, len(first.prints)) for rank, names in differing.items()}
    weights = first.weights + sum(int(first.weights * share) for share in shares.values())
    if any(s.sharded for s in everyone):
        weights = sum(s.weights for s in everyone)
    batches = sum(s.batch for s in everyone)
    frees = [s.free for s in everyone if s.free is not None]
    free = min(frees, default=room)

    def refused(size: int, wanted: bool, option: str) -> str:
        if not wanted:
            return f"{option} is off"
        if not all(s.window for s in everyone):
            return "the step's micro-batches were not captured"
        if any(s.busy for s in everyone):
            return "earlier bundles are still being written"
        if size > room:
            return f"it takes {size:,} bytes, bundles of this run have {max(0, room):,} left (bundle_bytes)"
        if size * 2 > free:  # a run that fills its own disk has failed at what matters more
            return f"it takes {size:,} bytes, the disk has {free:,} left"
        return ""

    no_batch = refused(batches, batch, "capture_batch")
    taken = 0 if no_batch else batches
    no_state = refused(weights + taken, state, "capture_state")
    total = taken + (0 if no_state else weights)
    return Plan(not no_state, not no_batch, differing, no_state, no_batch, total)


def collect(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    incident: Incident,
    record: StepRecord,
    planned: Plan,
    config: Mapping[str, Any] | None,
) -> Part:
    """Copy this rank's part to host memory."""
    context, rank = context_of(trainer), trainer.global_rank
    window = window_of(trainer, record)
    copies = HostCopies(pin=False)
    weights: dict[str, Tensor] | None = None
    layout: dict[
        str, tuple[list[int], list[int]]
    ] = {}  # of sharded parameters: whole shape, offset of this rank's part
    if planned.state:
        mine = set(planned.differing.get(rank, ()))
        named = dict(module.named_parameters())
        layout = {n: place for n, p in named.items() if (place := private.shard_place(p)) is not None}
        weights = {n: copies.tensor(p) for n, p in named.items() if rank == 0 or n in mine or layout}
    own: dict[str, Any] = {"rank": rank, "micro_batches": [], "buffers": {}, "scale": None, "layout": layout}
    own["faults"] = Drill.remembered(trainer)
    if window is not None:
        own["buffers"] = {n: copies.tensor(b) for n, b in window.buffers.items()}
        own["scale"] = None if window.scale is None else window.scale.detach().cpu().clone()
    copies.run()
    if window is not None:
        own["micro_batches"] = [_micro_batch(m, planned.batch) for m in window.micro_batches]
    live = context.scratch.get("live_losses") or []
    own["live_losses"] = [x.detach().float().cpu().reshape(()).clone() for x in live]
    own["loops"] = _loops(trainer)
    own["eval_modules"] = [path for path, m in module.named_modules() if not m.training]
    own["frozen"] = [name for name, p in module.named_parameters() if not p.requires_grad]
    own["own_weights"] = weights if rank > 0 else None
    run = None
    if rank == 0:
        run = _run_facts(trainer, module, optimizer, context, record, planned, config)
    return Part(
        rank=rank,
        world_size=trainer.world_size,
        number=incident.number,
        step=record.step,
        attempt=record.attempt,
        tokens=record.tokens,
        own=own,
        weights=weights if rank == 0 else None,
        run=run,
        incident=plain(incident.to_dict()),
    )


def plain(value: Any) -> Any:
    """``value`` as strict JSON gives it back."""
    return json.loads(to_json(value))


def _micro_batch(micro: MicroBatch, with_batch: bool) -> dict[str, Any]:
    from ..triage.nonfinite import ids_of

    found: dict[str, Any] = {
        "ids": list(ids_of(micro)),
        "hash": batch_hash(micro.batch),
        "batch_idx": micro.batch_idx,
        "rng": encode(micro.rng, "rng"),
        "generators": [[path, key, state.clone()] for (path, key), state in micro.generators.items()],
        "changed_in_place": micro.changed_in_place,
        "batch": None,
        "captured": False,
        "why_not": "",
    }
    if with_batch:
        try:
            found |= {"batch": encode(_as_plain(micro.batch), "batch"), "captured": True}
        except TypeError as error:
            found["why_not"] = f"{error}"
    return found


def _as_plain(batch: Any) -> Any:
    """The batch, if it comes back from a file as what it is; TypeError for classes that plain data cannot carry."""
    if isinstance(batch, Tensor) or batch is None or isinstance(batch, bool | int | float | str):
        return batch
    if isinstance(batch, Mapping):
        return {k: _as_plain(v) for k, v in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_as_plain(v) for v in batch)
    raise TypeError(
        f"the batch holds a {type(batch).__qualname__}; only tensors, numbers, text, None, dicts, lists and tuples are"
        " written to a bundle, because nothing else is loaded back without running code"
    )


def _loops(trainer: Trainer) -> dict[str, Any]:
    """Progress of the loops, less the loaders' states: where ``global_step`` and ``current_epoch`` are read from."""
    state = private.loop_state(trainer)
    private.take_loader_states(state)
    try:
        encoded: dict[str, Any] = encode(state, "loops")
    except TypeError:
        return {}
    return encoded


def _run_facts(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    context: RunContext,
    record: StepRecord,
    planned: Plan,
    config: Mapping[str, Any] | None,
) -> dict[str, Any]:
    history = list(context.history)[-HISTORY:]
    device = trainer.strategy.root_device
    facts = {
        "schema": SCHEMA,
        "signals": list(record.signals),
        "record": record.values.tolist(),
        "learning_rates": list(record.learning_rates),
        "epoch": trainer.current_epoch,
        "history": [
            {"step": r.step, "attempt": r.attempt, "loss": r.column("loss_nats").tolist(), "grad_norm": r.grad_norm}
            for r in history
        ],
        "rates": [[s, p, a] for s, p, a in list(context.rates)[-HISTORY:]],
        "optimizer": {
            "index": next((i for i, o in enumerate(trainer.optimizers) if o is optimizer), 0),
            "class": type(optimizer).__name__,
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        },
        "trainer": topology(trainer)
        | {
            "precision_plugin": type(trainer.precision_plugin).__name__,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None
            if trainer.gradient_clip_algorithm is None
            else str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)),
            "device": str(device),
        },
        "numerics": {
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        },
        "model": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "state": {"captured": planned.state, "why_not": planned.why_no_state, "differing_ranks": {}},
        "batch": {"captured": planned.batch, "why_not": planned.why_no_batch},
        "config": None if config is None else redact(dict(config)),
        "code": {"path": code_path(), "folder": os.getcwd(), "command": redact(" ".join(sys.argv))},
        "versions": library_versions(),
    }
    facts["state"] |= {"differing_ranks": {str(r): list(n) for r, n in planned.differing.items()}}
    facts["state"]["checkpoint"] = _checkpoint(context, record)
    found: dict[str, Any] = plain(facts)
    return found


def _checkpoint(context: RunContext, record: StepRecord) -> dict[str, Any] | None:
    """The newest checkpoint on disk whose weights are the step's own or older, as a reference: path, step, hash."""
    from ..checkpoint.manifest import Status
    from ..checkpoint.store import CheckpointStore

    if context.run_dir is None:
        return None
    usable = [
        c
        for c in CheckpointStore(context.run_dir / "checkpoints").checkpoints()
        if c.step <= record.step and c.manifest.attempt <= record.attempt and c.status.status is not Status.POISONED
    ]
    if not usable:
        return None
    newest = max(usable, key=lambda c: (c.step, c.age_key))
    return {
        "path": str(newest.path),
        "step": newest.step,
        "attempt": newest.manifest.attempt,
        "sha256": newest.sha256,
        "status": str(newest.status.status),
    }


def code_path() -> list[str]:
    """Folders that the program imports its own code from: ``sys.path`` less the installation's."""
    installed = tuple(
        os.path.realpath(p) for n in ("stdlib", "platstdlib", "purelib", "platlib") if (p := sysconfig.get_path(n))
    )
    folders = (os.path.realpath(p or os.getcwd()) for p in sys.path)
    return list(dict.fromkeys(f for f in folders if os.path.isdir(f) and not f.startswith(installed)))


def _free_bytes(folder: Path) -> int | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
