"""What goes into a checkpoint of a fit, and how it comes back: the snapshot and all that a rollback leaves alone.

Files: ``model.pt`` and ``optimizer.pt`` (once, where every rank holds the same), ``rank-00000.pt`` (the rest of a rank's
snapshot, the state of callbacks that do not rewind, the newest records) and ``run.json`` (plain facts, for people too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from ..callbacks.base import SentinelCallback, find_callback, ledger_of
from ..callbacks.rank_telemetry import RankTelemetry
from ..context import RunContext, context_of
from ..data.identity import sample_ids
from ..distributed.mesh import speaks_for_unit
from ..incidents import Incident
from ..journal import journal_files, redact, to_json
from ..progress import TRAINING_LOG, Progress
from ..record import StepRecord
from ..state import lightning_private as private
from ..state.snapshot import Snapshot, cursor_problems, from_payload, state_problems, to_payload
from ..state.tree import tensor_bytes
from .aloud import loading
from .describe import topology
from .manifest import rank_file
from .plain import decode, encode
from .store import Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint

MODEL, OPTIMIZER, RUN, LIGHTNING = "model.pt", "optimizer.pt", "run.json", "lightning.ckpt"
_SHARED = {MODEL: "params", OPTIMIZER: "optimizers"}
_PRIVATE = 0o600  # prefetched batches hold samples
_HISTORY = 256


@dataclass
class Contents:
    """One rank's part, in host memory, ready to be written by a thread that never touches the Trainer."""

    step: int
    attempt: int
    tokens: int
    rank: int
    world_size: int
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    lightning: dict[str, Any] | None = None
    handover: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in it: nearly what will be written."""
        return sum(map(tensor_bytes, (self.shared, self.own, self.lightning)))

    def write(self, pending: PendingCheckpoint) -> None:
        """Write this rank's files, with progress, and read the small one back: nothing is saved that cannot be loaded."""
        what = f"checkpoint of step {self.step}"
        with Progress(what, total=self.nbytes, unit="B", log=TRAINING_LOG, enabled=self.rank == 0) as bar:
            pending.progress = bar.advance
            self._write(pending)
            pending.progress = None

    def _write(self, pending: PendingCheckpoint) -> None:
        if self.lightning is not None:
            pending.write_torch(LIGHTNING, self.lightning)
        for name, content in self.shared.items():
            pending.write_torch(name, content)
        own = rank_file(self.rank)
        pending.write_torch(own, self.own, mode=_PRIVATE)
        try:
            torch.load(pending.directory / own, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"{own} can't be loaded back with weights_only=True: {error}") from error
        if self.rank == 0:
            pending.write_json(RUN, self.run)

    def nonfinite(self) -> str | None:
        """The first tensor of weights or optimizer state that holds a non-finite value, in a sentence; or None."""
        parts = self.shared or {name: self.own["snapshot"].get(key) for name, key in _SHARED.items()}
        for name, prefix in ((MODEL, "parameter "), (OPTIMIZER, "optimizer state ")):
            for found, value in _named_tensors(parts.get(name) or {}, prefix):
                if not all_finite(value):
                    bad = int((~torch.isfinite(value)).sum())
                    return f"{bad} of {value.numel()} values of {found} are not finite"
        return None


def collect(trainer: Trainer, snapshot: Snapshot, config: Mapping[str, Any] | None) -> Contents:
    """Everything of this rank. The snapshot's tensors are referenced, not copied: reuse it only after the writing."""
    context = context_of(trainer)
    payload = to_payload(snapshot)
    replicated = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    shared = {}
    if replicated:
        parts = {name: payload.pop(key) for name, key in _SHARED.items()}
        shared = parts if trainer.is_global_zero else {}
    own = {
        "snapshot": payload,
        "callbacks": {key: encode(c.state_dict(), key) for key, c in _kept_callbacks(trainer)},
        "rates": encode(list(context.rates)),
        "history": [_encode_record(r) for r in list(context.history)[-_HISTORY:]],
        "journal": _journal_position(trainer, context),
        "next_sample_ids": _prefetched_ids(trainer, snapshot),
    }
    if not replicated:
        named = trainer.lightning_module.named_parameters()
        own["layout"] = {n: place for n, p in named if (place := private.shard_place(p)) is not None}
        own["speaks"] = speaks_for_unit(trainer.lightning_module.device_mesh)
    run = _run_facts(trainer, context, snapshot, config) if trainer.is_global_zero else {}
    return Contents(
        snapshot.step, snapshot.attempt, snapshot.tokens, trainer.global_rank, trainer.world_size, shared, own, run
    )


@dataclass
class Loaded:
    """A checkpoint read back by one rank."""

    checkpoint: Checkpoint
    snapshot: Snapshot
    own: dict[str, Any]
    run: dict[str, Any]
    left_out: list[str] = field(default_factory=list)  # what this number of ranks has no place for

    @property
    def next_sample_ids(self) -> list[str]:
        """Ids of batches that had been fetched ahead but not trained."""
        return list(self.own["next_sample_ids"])

    @property
    def ledger_names(self) -> frozenset[str]:
        return frozenset(self.run["quarantined"])


def load(store: CheckpointStore, checkpoint: Checkpoint, rank: int, *, aloud: bool = False) -> Loaded:
    """This rank's part, ``aloud`` with progress; CheckpointError names the file and the reason."""
    with loading(checkpoint, [rank_file(rank), *_SHARED], log=TRAINING_LOG, enabled=aloud) as bar:
        own = store.load_torch(checkpoint, rank_file(rank), bar.advance)
        payload = dict(own["snapshot"])
        for name, key in _SHARED.items():
            if name in checkpoint.manifest.files:
                payload[key] = store.load_torch(checkpoint, name, bar.advance)
    return Loaded(checkpoint, from_payload(payload), own, store.load_json(checkpoint, RUN))


def apply(trainer: Trainer, loaded: Loaded) -> None:
    """Bring back what a snapshot's restore leaves alone: incidents, ledger, records, callbacks that do not rewind."""
    context = context_of(trainer)
    known = {incident.number for incident in context.incidents}
    context.incidents.extend(
        incident for i in loaded.run["incidents"] if (incident := Incident.from_dict(i)).number not in known
    )
    _apply_ledger(trainer, loaded.run["ledger"])
    context.infra_events.extend(loaded.run["infra_events"])
    if (experiment := loaded.run.get("experiment")) is not None:
        context.scratch["experiment"] = experiment
    context.rates.clear()
    context.rates.extend((int(s), p, a) for s, p, a in decode(loaded.own["rates"]))
    context.history.clear()
    context.history.extend(_decode_record(r) for r in loaded.own["history"])
    states = loaded.own["callbacks"]
    for key, callback in _kept_callbacks(trainer):
        if states.get(key):
            callback.load_state_dict(decode(states[key]))


# ------------------------------------------------------------------------------------------------------------- pieces


def _kept_callbacks(trainer: Trainer) -> list[tuple[str, Callback]]:
    """Callbacks whose state a rollback leaves alone, so that the snapshot does not hold it."""
    found: list[tuple[str, Callback]] = []
    seen: dict[str, int] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        number = seen[callback.state_key] = seen.get(callback.state_key, -1) + 1
        if isinstance(callback, Timer) or (isinstance(callback, SentinelCallback) and not callback.rewinds):
            found.append((f"{callback.state_key}#{number}", callback))
    return found


def _run_facts(
    trainer: Trainer, context: RunContext, snapshot: Snapshot, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    facts = {
        "step": snapshot.step,
        "attempt": snapshot.attempt,
        "tokens": snapshot.tokens,
        "epoch": snapshot.loops["epoch_progress"]["current"]["processed"],
        "mid_accumulation": snapshot.mid_accumulation,
        "topology": topology(trainer),
        "incidents": [incident.to_dict() for incident in context.incidents],
        "infra_events": list(context.infra_events),
        "ledger": None if context.ledger is None else context.ledger.state_dict(),
        "quarantined": [] if context.ledger is None else sorted(context.ledger.active),
        "inexact": [*cursor_problems(trainer), *state_problems(trainer)],
        "experiment": context.scratch.get("experiment"),
        "config": None if config is None else redact(config),
    }
    plain: dict[str, Any] = json.loads(to_json(facts))
    return plain


def _apply_ledger(trainer: Trainer, saved: Mapping[str, Any] | None) -> None:
    if not saved or not saved["entries"]:
        return
    ledger_of(trainer).load_state_dict(saved)


def _journal_position(trainer: Trainer, context: RunContext) -> dict[str, Any]:
    """File and size of this rank's journal at the save: what comes after it belongs to what a resume repeats."""
    if context.run_dir is None:
        return {}
    context.journal.flush()
    try:
        files = journal_files(context.run_dir, rank=trainer.global_rank)
        return {"file": files[-1].name, "bytes": files[-1].stat().st_size} if files else {}
    except OSError:
        return {}


def _prefetched_ids(trainer: Trainer, snapshot: Snapshot) -> list[str]:
    ids: list[str] = []
    for fetched in snapshot.cursor["batches"]:
        batch = fetched[0] if isinstance(fetched, tuple) and len(fetched) == 3 else fetched
        ids += batch_ids(trainer, batch)
    return ids


def batch_ids(trainer: Trainer, batch: Any) -> list[str]:
    """Sample ids of a batch, named as in the journal; empty where it has none that can be named."""
    telemetry = find_callback(trainer, RankTelemetry)
    try:
        return sample_ids(batch, None if telemetry is None else telemetry.sample_id_fn)
    except (TypeError, ValueError, KeyError):
        return []


def _encode_record(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "attempt": record.attempt,
        "tokens": record.tokens,
        "values": torch.from_numpy(record.values.copy()),
        "signals": list(record.signals),
        "learning_rates": [float(r) for r in record.learning_rates],
        "restart_step": record.restart_step,
    }


def _decode_record(data: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=data["step"],
        attempt=data["attempt"],
        tokens=data["tokens"],
        values=data["values"].numpy(),
        signals=tuple(data["signals"]),
        learning_rates=tuple(data["learning_rates"]),
        restart_step=data["restart_step"],
    )


def _named_tensors(value: Any, prefix: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(prefix.rstrip("."), value)]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in _named_tensors(inner, f"{prefix}{key}.")]


def all_finite(value: Tensor) -> bool:
    """True if no value is NaN or infinite; reads the host memory once and takes none, which ``isfinite`` does not."""
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_floating_point() or value.numel() == 0:
        return True
    if value.element_size() == 1:  # eight-bit floats have no arithmetic
        value = value.float()
    least, greatest = value.aminmax()
    return bool(torch.isfinite(least) & torch.isfinite(greatest))
