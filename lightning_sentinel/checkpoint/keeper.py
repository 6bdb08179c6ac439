"""The checkpoints of one fit: saved, put on probation, promoted, poisoned, rotated away, and every event journalled.

Training waits for the copy to host memory and, with several ranks, for two small messages; everything that touches the disk
is done by the background thread, in the order it was asked for. Only poisoning is done at once: it must not come late.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..callbacks.base import gather_objects
from ..context import context_of
from ..incidents import Action, Incident
from ..policy import REPORT_ONLY
from ..state import lightning_private as private
from ..state.snapshot import Snapshot, take
from ..state.tree import local
from . import contents
from .contents import Contents
from .describe import code_revision, library_versions
from .manifest import Status
from .probation import Probation
from .saving import (
    HURRY_SECONDS,
    Done,
    Patience,
    Rotation,
    StatusAtSave,
    lightning_checkpoint,
    meet,
    publish_dump,
    words,
    write_and_publish,
    write_part,
)
from .store import Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint
from .writer import Writer

log = logging.getLogger("lightning_sentinel")

Moment = tuple[int, int, int]  # step, attempt, tokens


@dataclass(frozen=True)
class Plan:
    """What is kept, as ``ForensicCheckpoint`` was told."""

    keep: int
    keep_every_tokens: int | None
    lightning: bool
    config: Mapping[str, Any] | None


class Keeper:
    """One fit's checkpoints. Every method is called on every rank alike, unless it says otherwise.

    Attributes:
        store: Where they lie.
        probation: Which saves are on probation; the same on every rank.
        candidates: Published ones on probation, oldest first; rank 0 alone has any.
        last_saved: Step of the newest one; -1 before the first.
    """

    def __init__(self, store: CheckpointStore, plan: Plan, probation_steps: int) -> None:
        self.store, self.probation = store, Probation(probation_steps)
        self.candidates: list[Checkpoint] = []
        self.last_saved = -1
        self._plan = plan
        self._writer = Writer()
        self._buffer: Snapshot | None = None
        self._lightning_buffer: dict[str, Any] | None = None
        self._revision: dict[str, Any] | None = None
        self._poison_again: int | None = None
        self._told: set[tuple[str, str]] = set()
        self._rotated: set[Path] = set()  # of the background thread

    # ------------------------------------------------------------------------------------------------------- saving

    def save(self, trainer: Trainer, *, handover: bool = False) -> None:
        """Copy the state, and have it written while training goes on; what fails is journalled, nothing is raised.

        ``handover``: the run has been told to end, and the next one shall go on from here.
        """
        self.settle(wait=True)
        status = _status_at_save(trainer)
        pending, problem = self._begin(trainer)
        if pending is None:
            self.failed(trainer, "saving", problem)
            return
        part = None
        try:
            part = self._copy(trainer)
            part.handover = handover and not open_incidents(trainer)
        except Exception as error:
            problem = words(error)
        problems = gather_objects(trainer, [(trainer.global_rank, problem)] if problem else [])
        if problems or part is None:
            if trainer.is_global_zero:
                self.store.drop(pending)
            alone = trainer.world_size == 1
            self.failed(trainer, "saving", "; ".join(p if alone else f"rank {rank}: {p}" for rank, p in problems))
            return
        if status.status is not Status.POISONED:
            self.probation.begin((part.step, part.attempt))
        lost = partial(self.failed, trainer, "saving", moment=_now(trainer))
        if trainer.is_global_zero:
            patience = Patience(hurry=self._writer.hurry)
            work = partial(self._write, pending, part, status, self._rotation(), patience)
            self._writer.submit(work, partial(self._saved, trainer), lost)
        else:
            self._writer.submit(partial(write_part, self.store, pending, part), lambda _: None, lost)

    def _write(
        self, pending: PendingCheckpoint, part: Contents, status: StatusAtSave, rotation: Rotation, patience: Patience
    ) -> Done:
        done = write_and_publish(self.store, pending, part, status, rotation, self._described, patience)
        self._rotated.update(c.path for c in done.removed)
        return done

    def _begin(self, trainer: Trainer) -> tuple[PendingCheckpoint | None, str]:
        """A directory that rank 0 has made and all ranks know, or why there is none."""
        pending, problem = None, ""
        if trainer.is_global_zero:
            try:
                pending = self.store.begin(trainer.global_step, context_of(trainer).attempt)
            except OSError as error:
                problem = words(error)
        if trainer.world_size == 1:
            return pending, problem
        mine = None if pending is None else str(pending.directory)
        directory, problem = trainer.strategy.broadcast((mine, problem), src=0)
        if directory is None:
            return None, problem
        return pending or self.store.join(directory), ""

    def _copy(self, trainer: Trainer) -> Contents:
        self._buffer = snapshot = take(trainer, into=self._buffer)
        part = contents.collect(trainer, snapshot, self._plan.config)
        if self._plan.lightning:
            self._lightning_buffer = part.lightning = lightning_checkpoint(trainer, self._lightning_buffer)
        return part

    def settle(self, *, wait: bool) -> None:
        """Take note of what the background thread has finished."""
        self._writer.settle(wait=wait)

    @property
    def writing(self) -> bool:
        """True while something is being written."""
        return self._writer.busy

    def _saved(self, trainer: Trainer, done: Done) -> None:
        checkpoint = done.checkpoint
        status, attempt = checkpoint.status, checkpoint.manifest.attempt
        self.last_saved = max(self.last_saved, checkpoint.step)
        self._journal(
            trainer,
            "checkpoint.saved",
            checkpoint,
            (checkpoint.step, attempt, checkpoint.manifest.tokens),
            bytes=sum(e.bytes for e in checkpoint.manifest.files.values()),
            seconds=round(done.seconds, 3),
            status=str(status.status),
        )
        if status.status is Status.POISONED:
            self._journal(
                trainer, "checkpoint.poisoned", checkpoint, reason=status.reason, since_step=status.since_step
            )
            log.warning("checkpoint %s is poisoned: %s", checkpoint.path.name, status.reason)
        elif self.probation.knows((checkpoint.step, attempt)):
            self.candidates.append(checkpoint)
        for removed in done.removed:
            self._journal(trainer, "checkpoint.removed", removed)
        gone = {c.path for c in done.removed}
        self.candidates = [c for c in self.candidates if c.path not in gone]
        if done.rotation_error:
            self.failed(trainer, "rotating", done.rotation_error)

    def failed(
        self,
        trainer: Trainer,
        what: str,
        error: BaseException | str,
        moment: Moment | None = None,
        checkpoint_step: int | None = None,
    ) -> None:
        """Journal that something was not done; said once for each kind. Any rank alone."""
        reason = error if isinstance(error, str) else words(error)
        step, attempt, tokens = moment or _now(trainer)
        context_of(trainer).journal.write(
            "checkpoint.failed",
            step=step,
            attempt=attempt,
            tokens=tokens,
            what=what,
            reason=reason,
            checkpoint_step=step if checkpoint_step is None else checkpoint_step,
        )
        kind = (what, reason.partition(" (")[0])  # without the path, which differs at each step
        if kind not in self._told:
            self._told.add(kind)
            log.warning("checkpoint at step %d: %s failed: %s. Training goes on.", step, what, reason)

    def _rotation(self) -> Rotation:
        return Rotation(self._plan.keep, self._plan.keep_every_tokens, {c.path for c in self.candidates[:1]})

    def _described(self) -> dict[str, Any]:
        """Versions and revision of the program; asks git, so the background thread does."""
        if self._revision is None:
            self._revision = {"versions": library_versions(), "code": code_revision()}
        return self._revision

    # ---------------------------------------------------------------------------------------------------- probation

    def go_back(self, step: int) -> None:
        """A rollback to ``step`` has been carried out: what was saved after it on the abandoned path never passes."""
        self.probation.go_back(step)
        self._forget_candidates()

    def resumed_from(self, trainer: Trainer, checkpoint: Checkpoint, *, candidate: bool) -> None:
        """The run goes on from this checkpoint, whose probation goes on too."""
        if candidate:
            self.probation.begin((checkpoint.step, checkpoint.manifest.attempt))
            if trainer.is_global_zero:
                self.candidates = [checkpoint]
                try:
                    self.store.note_resumed(checkpoint.path)
                except (OSError, CheckpointError) as error:
                    self.failed(trainer, "noting the resume", error, checkpoint_step=checkpoint.step)

    def _forget_candidates(self) -> None:
        self.candidates = [c for c in self.candidates if self.probation.knows((c.step, c.manifest.attempt))]

    def poison_since(self, trainer: Trainer, since_step: int, incident: int | None = None) -> None:
        """Poison every checkpoint that holds an update of ``since_step`` or later, retroactively too."""
        self.settle(wait=True)
        self.probation.clean_from = trainer.global_step
        self.probation.forget_after(since_step)
        self._forget_candidates()
        if trainer.is_global_zero:
            self._mark_poisoned(trainer, since_step, incident)

    def _mark_poisoned(self, trainer: Trainer, since_step: int, incident: int | None = None) -> None:
        number = incident if incident is not None else max((i.number for i in open_incidents(trainer)), default=None)
        reason = f"since step {since_step}" + (f": incident {number}" if number is not None else "")
        try:
            marked = self.store.mark_poisoned_since(since_step, reason=reason, incident=number)
        except (OSError, CheckpointError) as error:
            self._poison_again = since_step
            self.failed(trainer, "marking as poisoned", error)
            return
        for checkpoint in marked:
            self._journal(trainer, "checkpoint.poisoned", checkpoint, reason=reason, since_step=since_step)

    def promote_due(self, trainer: Trainer) -> None:
        """Make known-good what has passed its probation."""
        due = self.probation.due(trainer.global_step)
        # whether it is due is the same on every rank; whether the weights are finite need not be (they may be sharded)
        if due and not open_incidents(trainer) and _weights_finite(trainer):
            self.probation.passed(due)
        if self._poison_again is not None:
            since, self._poison_again = self._poison_again, None
            self.settle(wait=True)
            self._mark_poisoned(trainer, since)
        self._promote_good(trainer)

    def _promote_good(self, trainer: Trainer) -> None:
        """Promote what has passed and is on the disk. Any rank alone; rank 0 has something to do."""
        good = [c for c in self.candidates if (c.step, c.manifest.attempt) in self.probation.good]
        self.candidates = [c for c in self.candidates if c not in good]
        moment = _now(trainer)
        for checkpoint in good:
            self._writer.submit(
                partial(self._promote, checkpoint.path),
                partial(self._promoted, trainer, moment),
                partial(self.failed, trainer, "promoting", moment=moment, checkpoint_step=checkpoint.step),
            )

    def _promote(self, path: Path) -> Checkpoint | None:
        """Known-good from here on; None where a save that was still being written has rotated it away."""
        return None if path in self._rotated else self.store.promote(path)

    def _promoted(self, trainer: Trainer, moment: Moment, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            return
        steps = self.probation.length
        self._journal(trainer, "checkpoint.known_good", checkpoint, moment, probation_steps=steps)

    # ------------------------------------------------------------------------------------------------------- the end

    def finish(self, trainer: Trainer) -> None:
        """The fit ends as planned: when any rank goes on from here, all is written."""
        self.settle(wait=True)
        self.promote_due(trainer)
        self.settle(wait=True)
        if trainer.world_size > 1:
            trainer.strategy.barrier("lightning_sentinel.ForensicCheckpoint")

    def close(self) -> None:
        """Wait for the background thread and end it. Any rank alone."""
        self._writer.close()

    def save_after_exception(self, trainer: Trainer, exception: BaseException, *, dump: bool) -> None:
        """What can still be saved without the other ranks, which may never come. Any rank alone."""
        between_batches = not private.in_batch(trainer) and not trainer.validating
        if isinstance(exception, SIGTERMException) and between_batches:
            self._save_without_collectives(trainer, take(trainer), handover=not open_incidents(trainer))
            return
        if dump:
            part = contents.collect(trainer, take(trainer), self._plan.config)
            left = publish_dump(self.store, part, exception)
            self._journal(trainer, "checkpoint.saved", left, status="exception")
        # The newest restart point in memory: a resume then tries the failing batch again, and repeats little else.
        full = [s for s in context_of(trainer).snapshots if s.params is not None]
        if trainer.world_size == 1 and full and full[-1].step > self.last_saved and not open_incidents(trainer):
            self._save_without_collectives(trainer, full[-1])

    def hurry(self, trainer: Trainer) -> None:
        """The process is about to end: finish what is in hand, but wait no longer than needed for other ranks."""
        self._writer.hurry.set()
        self.settle(wait=True)
        self._promote_good(trainer)
        self.settle(wait=True)

    def _save_without_collectives(self, trainer: Trainer, snapshot: Snapshot, handover: bool = False) -> None:
        """After SIGTERM every rank comes here at the same step, but none may wait for another by a collective."""
        part = contents.collect(trainer, snapshot, self._plan.config)
        part.handover = handover
        alone = trainer.world_size == 1
        pending = self.store.begin(part.step, part.attempt) if alone else meet(self.store, part, HURRY_SECONDS)
        if trainer.is_global_zero:
            patience = Patience(HURRY_SECONDS)
            done = write_and_publish(
                self.store, pending, part, StatusAtSave(), self._rotation(), self._described, patience
            )
            self._saved(trainer, done)
        else:
            write_part(self.store, pending, part)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _journal(
        self,
        trainer: Trainer,
        event: str,
        checkpoint: Checkpoint,
        moment: Moment | None = None,
        **fields: Any,
    ) -> None:
        """``moment``: when it happened, where that is not now."""
        step, attempt, tokens = moment or _now(trainer)
        context_of(trainer).journal.write(
            event,
            step=step,
            attempt=attempt,
            tokens=tokens,
            checkpoint_step=checkpoint.step,
            path=str(checkpoint.path),
            sha256=checkpoint.sha256,
            **fields,
        )


def _now(trainer: Trainer) -> Moment:
    context = context_of(trainer)
    return trainer.global_step, context.attempt, context.tokens


def open_incidents(trainer: Trainer) -> list[Incident]:
    """Open incidents that concern the training state (a straggler does not), and the one that stops the run."""
    return [i for i in context_of(trainer).unsolved() if not i.kinds or i.kinds - REPORT_ONLY]


def _status_at_save(trainer: Trainer) -> StatusAtSave:
    unanswered = [i for i in open_incidents(trainer) if not _is_answered(i)]
    if not unanswered:
        return StatusAtSave()
    since = min(i.since_step for i in unanswered)
    return StatusAtSave(f"since step {since}: incident {unanswered[0].number} is open and unanswered", since)


def _is_answered(incident: Incident) -> bool:
    return any(entry.get("action") not in (None, Action.NONE) for entry in incident.actions)


def _weights_finite(trainer: Trainer) -> bool:
    """On all ranks. Asked only when a checkpoint is about to become known-good, so the cost does not matter."""
    mine = all(contents.all_finite(local(p.detach())) for p in trainer.lightning_module.parameters())
    return mine if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(mine, all=True)
