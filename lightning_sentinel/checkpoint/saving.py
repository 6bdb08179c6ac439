"""From one rank's contents to a published checkpoint: what the background thread does, and meeting without collectives."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from ..state import lightning_private as private
from ..state.tree import HostCopies
from .atomic import FileEntry, replace_file
from .contents import Contents
from .manifest import Status, rank_file
from .store import HANDOVER, Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint, checkpoint_name

PART_SECONDS = 600.0  # how much later than rank 0 another rank may have written its files
HURRY_SECONDS = 10.0  # the same where the process is about to end; torchrun kills after 30 s
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


@dataclass(frozen=True)
class Patience:
    """How long rank 0 waits for the parts of the others: ``seconds``, or little once ``hurry`` is set."""

    seconds: float = PART_SECONDS
    hurry: threading.Event = field(default_factory=threading.Event)


def write_and_publish(
    store: CheckpointStore,
    pending: PendingCheckpoint,
    part: Contents,
    status: StatusAtSave,
    rotation: Rotation,
    revision: Callable[[], Mapping[str, Any]],
    patience: Patience,
) -> Done:
    """All that rank 0 has to do; nothing is left behind if it, or another rank, fails."""
    begun = time.monotonic()
    try:
        nonfinite = part.nonfinite()
        part.write(pending)
        others = collect_parts(store, pending, part, patience)
        for rank, told in others.items():
            nonfinite = nonfinite or (told.nonfinite and f"rank {rank}: {told.nonfinite}")
        entries = {name: entry for told in others.values() for name, entry in told.entries.items()}
        status = status.or_nonfinite(nonfinite, part.step)
        return publish(store, pending, part, status, rotation, revision(), entries=entries, begun=begun)
    except BaseException:
        store.drop(pending)
        raise


def write_part(store: CheckpointStore, pending: PendingCheckpoint, part: Contents) -> None:
    """All that another rank has to do. What goes wrong is told to rank 0, too."""
    try:
        nonfinite = part.nonfinite()
        part.write(pending)
        told = Part(pending.entries, nonfinite)
    except Exception as error:
        for path in pending.directory.glob(f"{rank_file(part.rank)}*"):
            with contextlib.suppress(OSError):
                store.disk.remove(path)  # on a full disk this makes room for what is to be told
        with contextlib.suppress(OSError):
            leave_part(store, pending, part.rank, Part(problem=words(error)))
        raise
    leave_part(store, pending, part.rank, told)


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
        extra={"code": revision["code"], "experiment": part.run.get("experiment"), HANDOVER: part.handover},
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


def lightning_checkpoint(trainer: Trainer, old: dict[str, Any] | None) -> dict[str, Any] | None:
    """Lightning's own checkpoint in host memory, for rank 0 to write; None on the other ranks. Call it on every rank.

    Only for strategies whose checkpoint is one file (``private.saves_one_file``).
    """
    live = private.dump_checkpoint(trainer)
    if not trainer.is_global_zero:
        return None
    copies = HostCopies()
    copied: dict[str, Any] = copies.tree(live, old)
    copies.run()
    return copied


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


@dataclass(frozen=True)
class Part:
    """What a rank tells rank 0 about its files, through a small file beside them."""

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    nonfinite: str | None = None
    problem: str = ""

    def to_bytes(self) -> bytes:
        files = {name: [entry.sha256, entry.bytes] for name, entry in self.entries.items()}
        return json.dumps({"files": files, "nonfinite": self.nonfinite, "problem": self.problem}).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Part:
        told = json.loads(raw)
        entries = {name: FileEntry(name, sha256, size) for name, (sha256, size) in told["files"].items()}
        return cls(entries, told["nonfinite"], told["problem"])


def leave_part(store: CheckpointStore, pending: PendingCheckpoint, rank: int, told: Part) -> None:
    """Tell rank 0 that this rank is through."""
    replace_file(store.disk, pending.directory / part_name(rank), told.to_bytes())


def collect_parts(
    store: CheckpointStore, pending: PendingCheckpoint, part: Contents, patience: Patience
) -> dict[int, Part]:
    """What the other ranks tell, when all of them have written their files; empty for a single rank.

    Raises:
        CheckpointError: A rank has failed, or has told nothing in time.
    """
    found: dict[int, Part] = {}
    begun, hurried = time.monotonic(), None
    while len(found) < part.world_size - 1:
        for rank in set(range(1, part.world_size)) - set(found):
            path = pending.directory / part_name(rank)
            if path.exists():
                found[rank] = Part.from_bytes(path.read_bytes())
                store.disk.remove(path)
        now = time.monotonic()
        if patience.hurry.is_set() and hurried is None:
            hurried = now
        late = now - begun > patience.seconds or (hurried is not None and now - hurried > HURRY_SECONDS)
        missing = sorted(set(range(1, part.world_size)) - set(found))
        if missing and late:
            raise CheckpointError(
                f"{_ranks(missing)} not told within {now - begun:.0f} s that the files of step {part.step} are written"
            )
        if missing:
            time.sleep(_POLL_SECONDS)
    if problems := [f"rank {rank}: {told.problem}" for rank, told in sorted(found.items()) if told.problem]:
        raise CheckpointError("; ".join(problems))
    return found


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _ranks(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"rank {shown} has" if len(missing) == 1 else f"ranks {shown} have"


def words(error: BaseException) -> str:
    """An error as one clause."""
    with contextlib.suppress(Exception):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
        if isinstance(error, CheckpointError):
            return str(error)
    return f"{type(error).__name__}: {error}"
