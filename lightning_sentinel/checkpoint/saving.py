"""From one rank's contents to a published checkpoint: what the background thread does, and meeting without collectives."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer

from .atomic import FileEntry, replace_file
from .contents import LIGHTNING, Contents
from .manifest import Status
from .store import Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint, checkpoint_name

log = logging.getLogger("lightning_sentinel")

PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class StatusAtSave:
    """``reason`` why the checkpoint is poisoned from the start, or empty for a candidate."""

    reason: str = ""
    since_step: int | None = None

    @property
    def status(self) -> Status:
        return Status.POISONED if self.reason else Status.CANDIDATE

    def or_nonfinite(self, nonfinite: str | None, step: int) -> StatusAtSave:
        if self.reason or nonfinite is None:
            return self
        return StatusAtSave(f"non-finite at step {step}: {nonfinite}", step)


@dataclass(frozen=True)
class Rotation:
    keep: int
    keep_every_tokens: int | None
    protect: Set[Path] = frozenset()


@dataclass(frozen=True)
class Done:
    """A published checkpoint, what rotation removed after it, and what went wrong there."""

    checkpoint: Checkpoint
    seconds: float
    removed: list[Checkpoint] = field(default_factory=list)
    rotation_error: str = ""


class Progress:
    """Says every ten seconds how far a long save has come."""

    def __init__(self, step: int) -> None:
        self._step, self._bytes, self._said = step, 0, time.monotonic()

    def __call__(self, more: int) -> None:
        self._bytes += more
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            log.info("checkpoint of step %d: %.1f GiB written", self._step, self._bytes / 2**30)


def write_and_publish(
    store: CheckpointStore,
    pending: PendingCheckpoint,
    part: Contents,
    status: StatusAtSave,
    rotation: Rotation,
    revision: Mapping[str, Any],
) -> Done:
    """The whole save of a single rank; nothing is left behind if it fails."""
    begun = time.monotonic()
    try:
        status = status.or_nonfinite(part.nonfinite(), part.step)
        part.write(pending)
        return publish(store, pending, part, status, rotation, revision, begun=begun)
    except BaseException:
        store.drop(pending)
        raise


def publish(
    store: CheckpointStore,
    pending: PendingCheckpoint,
    part: Contents,
    status: StatusAtSave,
    rotation: Rotation,
    revision: Mapping[str, Any],
    *,
    entries: Mapping[str, FileEntry] | None = None,
    begun: float | None = None,
) -> Done:
    """Publish what all ranks have written, then rotate."""
    begun = time.monotonic() if begun is None else begun
    checkpoint = store.publish(
        pending,
        step=part.step,
        attempt=part.attempt,
        tokens=part.tokens,
        world_size=part.world_size,
        entries=entries,
        versions=revision["versions"],
        status=status.status,
        reason=status.reason,
        since_step=status.since_step,
        extra={"code": revision["code"], "experiment": part.run.get("experiment")},
    )
    seconds = time.monotonic() - begun
    try:
        removed = store.rotate(rotation.keep, rotation.keep_every_tokens, protect=rotation.protect)
    except OSError as error:
        return Done(checkpoint, seconds, rotation_error=words(error))
    return Done(checkpoint, seconds, removed)


def publish_dump(store: CheckpointStore, part: Contents, exception: BaseException) -> Checkpoint:
    """One rank's state in the middle of a step, for people: never resumed from by itself, never rotated away."""
    name = type(exception).__name__
    pending = store.begin(part.step, part.attempt, name=f"exception-rank-{part.rank:05d}")
    try:
        part.write(pending)
        return store.publish(
            pending,
            step=part.step,
            attempt=part.attempt,
            tokens=part.tokens,
            world_size=0,
            status=Status.POISONED,
            reason=f"{name} on rank {part.rank} at step {part.step}",
            extra={"exception": name, "rank": part.rank},
        )
    except BaseException:
        store.drop(pending)
        raise


def write_lightning_checkpoint(trainer: Trainer, pending: PendingCheckpoint) -> str | None:
    """``trainer.save_checkpoint`` into the pending directory, on every rank alike; a problem in words, or None.

    The file goes through the same hashing writer as all others. An error of the disk is kept until all ranks are through:
    raised inside, it would leave the others waiting for rank 0.
    """
    io = _HashingIO(pending)
    own = trainer.strategy.checkpoint_io
    trainer.strategy.checkpoint_io = io
    try:
        trainer.save_checkpoint(pending.directory / LIGHTNING)
    finally:
        trainer.strategy.checkpoint_io = own
    if io.problem is None and trainer.is_global_zero and LIGHTNING not in pending.entries:
        return (
            f"{type(trainer.strategy).__name__} does not write {LIGHTNING} as one file; set write_lightning_ckpt=False"
        )
    return io.problem


class _HashingIO(TorchCheckpointIO):
    def __init__(self, pending: PendingCheckpoint) -> None:
        self.problem: str | None = None
        self._pending = pending

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        try:
            self._pending.write_torch(Path(path).name, checkpoint)
        except Exception as error:
            self.problem = words(error)


# ------------------------------------------------------------------------------- several ranks without a collective


def meet(store: CheckpointStore, part: Contents, seconds: float) -> PendingCheckpoint:
    """Rank 0 begins, the others wait until its directory is there."""
    if part.rank == 0:
        return store.begin(part.step, part.attempt)
    pattern = f".tmp-{checkpoint_name(part.step, part.attempt)}*"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for directory in store.root.glob(pattern):
            return store.join(directory)
        time.sleep(_POLL_SECONDS)
    raise CheckpointError(f"rank 0 has not begun a checkpoint of step {part.step} within {seconds:g} s")


def exchange(
    store: CheckpointStore, pending: PendingCheckpoint, part: Contents, seconds: float
) -> dict[str, FileEntry] | None:
    """Hashes of all ranks through small files: rank 0 gets them, the others have done their part and get None."""
    if part.rank != 0:
        mine = {n: [e.sha256, e.bytes] for n, e in pending.entries.items()}
        replace_file(store.disk, pending.directory / _part_name(part.rank), json.dumps(mine).encode())
        return None
    deadline = time.monotonic() + seconds
    entries: dict[str, FileEntry] = {}
    for rank in range(1, part.world_size):
        path = pending.directory / _part_name(rank)
        while not path.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {rank} has not written its part of step {part.step} within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        entries |= {n: FileEntry(n, sha256, size) for n, (sha256, size) in json.loads(path.read_bytes()).items()}
        store.disk.remove(path)
    return entries


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def words(error: BaseException) -> str:
    """An error as one clause."""
    with contextlib.suppress(Exception):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
        if isinstance(error, CheckpointError):
            return str(error)
    return f"{type(error).__name__}: {error}"
