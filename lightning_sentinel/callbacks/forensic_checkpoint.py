"""Checkpoints that hold everything, that are checked before they are believed, and that earn being called good."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..checkpoint import contents
from ..checkpoint.choosing import choose, next_attempt
from ..checkpoint.contents import Contents
from ..checkpoint.describe import code_revision, library_versions
from ..checkpoint.manifest import Status
from ..checkpoint.restart import empty_epoch_finding
from ..checkpoint.resumed import ResumedRun
from ..checkpoint.saving import (
    Done,
    Progress,
    Rotation,
    StatusAtSave,
    exchange,
    meet,
    publish,
    publish_dump,
    words,
    write_and_publish,
    write_lightning_checkpoint,
)
from ..checkpoint.store import Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint
from ..incidents import Action, Finding, Incident
from ..journal import redact
from ..policy import REPORT_ONLY
from ..state import lightning_private as private
from ..state.snapshot import Snapshot, resume, take
from .base import SentinelCallback, gather_objects, note_restart

log = logging.getLogger("lightning_sentinel")

_MEETING_SECONDS = 30.0


class ForensicCheckpoint(SentinelCallback):
    """Saves the whole training state of every rank, and resumes from the newest checkpoint that can be trusted.

    A checkpoint is a directory ``<run_dir>/checkpoints/step-00001200/`` with a manifest of SHA-256 sums, written beside and
    renamed. It starts as a *candidate*, becomes *known-good* after ``probation_steps`` healthy steps, or *poisoned* when an
    incident turns out to have begun before it. Resuming restores what Lightning's own checkpoint leaves out: the random
    state and the data position of every rank, batches fetched ahead, and the suite's own incidents and quarantine.

    The state is taken between two batches (where a batch ends the fit or SIGTERM has arrived: at that batch's end) and
    copied to host memory; one background thread hashes and writes it, one checkpoint at a time. With several ranks all
    of them write at once, in step with the training, because their hashes meet in one manifest.

    Example:
        >>> from lightning_sentinel import ForensicCheckpoint
        >>> ForensicCheckpoint(every_n_steps=500, keep=3, probation_steps=100).resume
        'auto'

    Journalled:

    ===========================  ==================================================================================
    event                        fields (each with ``checkpoint_step``, ``path``, ``sha256`` where they are known)
    ===========================  ==================================================================================
    ``checkpoint.saved``         bytes, seconds, status
    ``checkpoint.known_good``    probation_steps
    ``checkpoint.poisoned``      reason, since_step
    ``checkpoint.removed``       by rotation
    ``checkpoint.failed``        what, reason: nothing was saved or changed, training goes on
    ``checkpoint.refused``       reason: found while looking for one to resume from
    ``checkpoint.incomplete``    missing: a checkpoint was resumed from that does not hold the whole state
    ``run.resumed``              status, attempt
    ``run.compared``             steps, equal_losses, largest_relative_difference: the first steps against the journal
    ``exception``                type, message (secrets redacted), frames
    ===========================  ==================================================================================

    Args:
        every_n_steps: Save each time ``trainer.global_step`` passes a multiple of this; 0: only on SIGTERM and exceptions.
        keep: How many of the newest checkpoints stay. The newest known-good one stays whatever this says.
        keep_every_tokens: Also keep the first checkpoint of each span of so many tokens, for good.
        probation_steps: Healthy steps after a checkpoint that make it known-good.
        resume: ``auto``: from the newest known-good checkpoint that verifies, or the newest candidate if none is
            known-good; ``latest``: from the newest that verifies and is not poisoned; a path: from that one; None: never.
            A Trainer that has trained already, or ``fit(ckpt_path=...)``, is left alone.
        write_lightning_ckpt: Also write an ordinary ``lightning.ckpt`` into each checkpoint.
        save_on_exception: Leave a dump of the state in ``checkpoints/exception-rank-00000/`` when training raises.
        config: The run's resolved configuration, to be kept in the checkpoint with secrets redacted.
        run_dir: Run folder; by default that of ``RunJournal``, or ``<trainer.default_root_dir>/sentinel`` without one.
        compare_steps: How many steps after a resume are compared with what the journal recorded before.
    """

    rewinds = False

    def __init__(
        self,
        every_n_steps: int = 500,
        keep: int = 3,
        keep_every_tokens: int | None = None,
        probation_steps: int = 50,
        resume: str | Path | None = "auto",
        write_lightning_ckpt: bool = False,
        save_on_exception: bool = True,
        config: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        compare_steps: int = 8,
    ) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 0),
            ("keep", keep, 1),
            ("probation_steps", probation_steps, 0),
            ("compare_steps", compare_steps, 0),
            ("keep_every_tokens", 1 if keep_every_tokens is None else keep_every_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"ForensicCheckpoint: {name} is {value}, expected at least {least}.")
        self.every_n_steps, self.keep, self.keep_every_tokens = every_n_steps, keep, keep_every_tokens
        self.probation_steps = probation_steps
        self.resume = resume
        self.write_lightning_ckpt, self.save_on_exception = write_lightning_ckpt, save_on_exception
        self.config, self.run_dir, self.compare_steps = config, run_dir, compare_steps
        self._store: CheckpointStore | None = None
        self._fit = _Fit()

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit = _Fit()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._store = None
            return
        self._fit.ckpt_path = trainer.ckpt_path
        self._store = CheckpointStore(self._checkpoints_dir(trainer))
        if trainer.is_global_zero:
            try:
                self._store.clean()
            except OSError as error:
                self._failed(trainer, "cleaning up", error)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        note_restart(trainer)
        if self._store is None:
            return
        self._fit.before = partial(self._before_batch, trainer)
        private.advance_control(trainer).before.append(self._fit.before)
        self._fit.writer = ThreadPoolExecutor(1, thread_name_prefix="ForensicCheckpoint")
        if trainer.global_step == 0 and self._fit.ckpt_path is None and self.resume is not None:
            self._resume(trainer, self.resume)
        elif trainer.global_step > 0 and self._fit.ckpt_path is not None:
            self._fit.resumed = ResumedRun.from_lightning(trainer, self._require_store(), self.compare_steps)
        loaded = None if self._fit.resumed is None else self._fit.resumed.loaded
        step = trainer.global_step if loaded is None else loaded.snapshot.step
        self._fit.bucket = self._bucket(step)
        self._fit.clean_from = step
        self._fit.attempt = self.context(trainer).attempt

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._store is not None:
            self._settle(trainer, wait=True)
            self._promote_due(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        before = private.advance_control(trainer).before
        if self._fit.before in before:
            before.remove(self._fit.before)
        if self._fit.writer is not None:
            self._fit.writer.shutdown(wait=True)
            self._fit.writer = None

    # ------------------------------------------------------------------------------------------------------- saving

    def _before_batch(self, trainer: Trainer) -> None:
        """Between two batches: nothing of the last one is pending, a rollback has been carried out."""
        self._settle(trainer, wait=False)
        context, fit = self.context(trainer), self._fit
        step = trainer.global_step
        if context.attempt != fit.attempt:  # a rollback: candidates of the abandoned path will never pass
            fit.attempt = context.attempt
            fit.candidates = [c for c in fit.candidates if c.step <= step]
            fit.bucket, fit.clean_from = self._bucket(step), step
        if _open_incidents(trainer):
            fit.clean_from = step
        if self._due(trainer):
            fit.bucket = self._bucket(step)
            self.save(trainer)
        self._promote_due(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._store is None:
            return
        self._fit.batches_in_epoch += 1
        if self._fit.resumed is not None:
            self._report_restart(trainer, self._fit.resumed.step_done(trainer, self._fit.attempt))
        if _open_incidents(trainer) or self.context(trainer).attempt != self._fit.attempt:
            return  # a rollback may be pending; a bad state is no restart point
        terminated = trainer.received_sigterm and trainer.world_size == 1
        if terminated or (_is_last_batch(trainer) and self._due(trainer)):
            self._fit.bucket = self._bucket(trainer.global_step)
            self.save(trainer)
        if terminated:
            self._settle(trainer, wait=True)
            self._fit.saved_on_signal = True

    def save(self, trainer: Trainer) -> None:
        """Save now. Call it between two batches or in ``on_train_batch_end``, on every rank alike."""
        self._settle(trainer, wait=True)
        store = self._require_store()
        status = self._status_at_save(trainer)
        if trainer.world_size > 1:
            self._save_together(trainer, store, status)
            return
        pending: PendingCheckpoint | None = None
        try:
            self._fit.buffer = snapshot = take(trainer, into=self._fit.buffer)
            part = contents.collect(trainer, snapshot, self.config)
            pending = store.begin(part.step, part.attempt, progress=Progress(part.step))
            if self.write_lightning_ckpt and (problem := write_lightning_checkpoint(trainer, pending)):
                raise CheckpointError(problem)
        except Exception as error:
            if pending is not None:
                store.drop(pending)
            self._failed(trainer, "saving", error)
            return
        assert self._fit.writer is not None
        self._fit.in_flight_step = part.step
        self._fit.in_flight = self._fit.writer.submit(
            write_and_publish, store, pending, part, status, self._rotation(), self._revision()
        )

    def _save_together(self, trainer: Trainer, store: CheckpointStore, status: StatusAtSave) -> None:
        """All ranks write their parts; one gather brings hashes and errors together, so that all succeed or none."""
        pending: PendingCheckpoint | None = None
        part: Contents | None = None
        problem: str | None = None
        if trainer.is_global_zero:
            try:
                pending = store.begin(
                    trainer.global_step, self.context(trainer).attempt, progress=Progress(trainer.global_step)
                )
            except OSError as error:
                problem = words(error)
        mine = None if pending is None else str(pending.directory)
        directory, problem = trainer.strategy.broadcast((mine, problem), src=0)
        if directory is None:
            self._failed(trainer, "saving", problem or "rank 0 could not begin")
            return
        pending = pending or store.join(directory)
        if self.write_lightning_ckpt:
            problem = write_lightning_checkpoint(trainer, pending)
        try:
            self._fit.buffer = snapshot = take(trainer, into=self._fit.buffer)
            part = contents.collect(trainer, snapshot, self.config)
            part.write(pending)
        except Exception as error:
            problem = problem or words(error)
        gathered: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(gathered, (pending.entries, problem, part and part.nonfinite()))
        problems = [f"rank {r}: {p}" for r, (_, p, _) in enumerate(gathered) if p]
        nonfinite = next((f"rank {r}: {n}" for r, (_, _, n) in enumerate(gathered) if n), None)
        if problems or part is None:
            if trainer.is_global_zero:
                store.drop(pending)
            self._failed(trainer, "saving", "; ".join(problems))
            return
        if trainer.is_global_zero:
            entries = {name: entry for found, _, _ in gathered for name, entry in found.items()}
            status = status.or_nonfinite(nonfinite, part.step)
            try:
                self._saved(
                    trainer,
                    publish(store, pending, part, status, self._rotation(), self._revision(), entries=entries),
                )
            except Exception as error:
                store.drop(pending)
                self._failed(trainer, "saving", error)

    def _settle(self, trainer: Trainer, *, wait: bool) -> None:
        """Take note of a save that the background thread has finished."""
        future = self._fit.in_flight
        if future is None or not (wait or future.done()):
            return
        self._fit.in_flight = None
        try:
            self._saved(trainer, future.result())
        except Exception as error:
            self._failed(trainer, "saving", error, checkpoint_step=self._fit.in_flight_step)

    def _saved(self, trainer: Trainer, done: Done) -> None:
        checkpoint = done.checkpoint
        status = checkpoint.status
        self._fit.last_saved = max(self._fit.last_saved, checkpoint.step)
        self._journal(
            trainer,
            "checkpoint.saved",
            checkpoint,
            at_step=checkpoint.step,
            bytes=sum(e.bytes for e in checkpoint.manifest.files.values()),
            seconds=round(done.seconds, 3),
            status=str(status.status),
        )
        if status.status is Status.POISONED:
            self._journal(
                trainer, "checkpoint.poisoned", checkpoint, reason=status.reason, since_step=status.since_step
            )
            log.warning("checkpoint %s is poisoned: %s", checkpoint.path.name, status.reason)
        else:
            self._fit.candidates.append(checkpoint)
        for removed in done.removed:
            self._journal(trainer, "checkpoint.removed", removed)
        gone = {c.path for c in done.removed}
        self._fit.candidates = [c for c in self._fit.candidates if c.path not in gone]
        if done.rotation_error:
            self._failed(trainer, "rotating", done.rotation_error)

    def _failed(self, trainer: Trainer, what: str, error: BaseException | str, **fields: Any) -> None:
        reason = error if isinstance(error, str) else words(error)
        fields.setdefault("checkpoint_step", trainer.global_step)
        self.context(trainer).write(trainer, "checkpoint.failed", what=what, reason=reason, **fields)
        kind = (what, reason.partition(" (")[0])  # without the path, which differs at each step
        if kind not in self._fit.told:
            self._fit.told.add(kind)
            log.warning("checkpoint at step %d: %s failed: %s. Training goes on.", trainer.global_step, what, reason)

    def _status_at_save(self, trainer: Trainer) -> StatusAtSave:
        unanswered = [i for i in _open_incidents(trainer) if not _is_answered(i)]
        if not unanswered:
            return StatusAtSave()
        since = min(i.since_step for i in unanswered)
        return StatusAtSave(f"since step {since}: incident {unanswered[0].number} is open and unanswered", since)

    def _rotation(self) -> Rotation:
        protected = {c.path for c in self._fit.candidates[:1]}
        return Rotation(self.keep, self.keep_every_tokens, protected)

    def _revision(self) -> dict[str, Any]:
        if self._fit.revision is None:
            self._fit.revision = {"versions": library_versions(), "code": code_revision()}
        return self._fit.revision

    # ---------------------------------------------------------------------------------------------------- probation

    def on_incident(self, trainer: Trainer, since_step: int, incident: int | None = None) -> None:
        """Poison every checkpoint that holds an update of ``since_step`` or later, retroactively too."""
        if self._store is None:
            return
        self._settle(trainer, wait=True)
        self._fit.clean_from = trainer.global_step
        self._fit.candidates = [c for c in self._fit.candidates if c.step <= since_step]
        if not trainer.is_global_zero:
            return
        number = incident if incident is not None else max((i.number for i in _open_incidents(trainer)), default=None)
        reason = f"since step {since_step}" + (f": incident {number}" if number is not None else "")
        try:
            marked = self._store.mark_poisoned_since(since_step, reason=reason, incident=number)
        except (OSError, CheckpointError) as error:
            self._fit.poison_again = since_step
            self._failed(trainer, "marking as poisoned", error)
            return
        for checkpoint in marked:
            self._journal(trainer, "checkpoint.poisoned", checkpoint, reason=reason, since_step=since_step)

    def on_recovered(self, trainer: Trainer, incident: int | None = None) -> None:
        """The incident is over: probation counts healthy steps from here on."""
        self._fit.clean_from = trainer.global_step

    def _promote_due(self, trainer: Trainer) -> None:
        fit = self._fit
        if fit.poison_again is not None:
            since, fit.poison_again = fit.poison_again, None
            self.on_incident(trainer, since)
        due = [c for c in fit.candidates if trainer.global_step >= max(c.step, fit.clean_from) + self.probation_steps]
        if not due or _open_incidents(trainer) or not _weights_finite(trainer):
            return
        fit.candidates = [c for c in fit.candidates if c not in due]
        for checkpoint in due:
            try:
                promoted = self._require_store().promote(checkpoint.path)
            except (OSError, CheckpointError) as error:
                self._failed(trainer, "promoting", error, checkpoint_step=checkpoint.step)
                continue
            self._journal(trainer, "checkpoint.known_good", promoted, probation_steps=self.probation_steps)

    # ------------------------------------------------------------------------------------------------------- resume

    def _resume(self, trainer: Trainer, source: str | Path) -> None:
        store = self._require_store()
        loaded = choose(trainer, store, source, partial(self._refuse, trainer))
        if loaded is None:
            return
        context, snapshot, checkpoint = self.context(trainer), loaded.snapshot, loaded.checkpoint
        contents.apply(trainer, loaded)
        self._fit.resumed = resumed = ResumedRun.from_suite(trainer, loaded, self.compare_steps)
        context.restart_step = snapshot.step
        good = trainer.strategy.broadcast(checkpoint.status.status is Status.KNOWN_GOOD, src=0)
        context.scratch["known_good_step"] = snapshot.step if good else None
        context.load_path_state(snapshot.path)
        # A kill costs each rank other lines of its journal: the furthest of them counts.
        furthest = max(gather_objects(trainer, [(resumed.recorded.attempt, resumed.recorded.last_step)]))
        context.attempt = trainer.strategy.broadcast(next_attempt(store, checkpoint, *furthest), src=0)
        resumed.close_lost_incidents(trainer)
        if checkpoint.status.status is Status.CANDIDATE and trainer.is_global_zero:
            self._fit.candidates = [checkpoint]
        resume(trainer, snapshot)
        context.journal.write(
            "run.resumed",
            step=snapshot.step,
            attempt=context.attempt,
            tokens=context.tokens,
            path=str(checkpoint.path),
            checkpoint=str(checkpoint.path),
            checkpoint_step=snapshot.step,
            sha256=checkpoint.sha256,
            status=str(checkpoint.status.status),
            epoch=loaded.run["epoch"],
        )
        if loaded.run["inexact"]:
            self._incomplete(trainer, checkpoint.path, list(loaded.run["inexact"]))
        log.info("resumed at step %d from %s (%s)", snapshot.step, checkpoint.path, checkpoint.status.status)

    def _refuse(self, trainer: Trainer, path: Path, problem: str) -> None:
        if trainer.is_global_zero:
            self.context(trainer).write(trainer, "checkpoint.refused", path=str(path), reason=problem)
            log.warning("checkpoint %s refused: %s; trying the one before it", path.name, problem)

    def saved_schedule(self, trainer: Trainer) -> dict[str, Any] | None:
        """Scheduler states and learning rates as the checkpoint holds them, until the first update after a resume.

        Returns:
            ``{"schedulers": [state_dict, ...], "rates": [[rate of each group], ...]}`` by scheduler and by optimizer, or
            None where this process has not resumed or has already trained a step.
        """
        return None if self._fit.resumed is None else self._fit.resumed.schedule(trainer)

    # -------------------------------------------------------------------------------------- comparing after a resume

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit.resumed is not None:
            self._report_restart(trainer, self._fit.resumed.first_batch(trainer, batch))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit.resumed is not None:
            self._fit.resumed.validated = True

    def _report_restart(self, trainer: Trainer, findings: list[Finding]) -> None:
        """Leave findings where ``RankTelemetry`` picks them up at the next gate."""
        if findings:
            self.context(trainer).scratch.setdefault("restart_findings", []).extend(findings)
            for finding in findings:
                log.warning("%s", finding.message)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.batches_in_epoch = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fit = self._fit
        if self._store is None or fit.ckpt_path is None or fit.batches_in_epoch or fit.told_empty:
            return
        fit.told_empty = True
        finding = empty_epoch_finding(trainer.global_step, trainer.current_epoch)
        self.context(trainer).scratch.setdefault("restart_findings", []).append(finding)
        self.context(trainer).write(trainer, "finding", finding=finding.to_dict())
        log.warning("%s", finding.message)

    # ----------------------------------------------------------------------------- resuming by Lightning's own means

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        missing = ["the random state: shuffles, dropout and augmentation will differ from an uninterrupted run"]
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        if not loops.get("state_dict", {}).get("combined_loader"):
            missing.append("the data position: the epoch's batches are drawn anew")
        elif trainer.world_size > 1:
            missing.append(f"the data position of ranks 1 to {trainer.world_size - 1}: only that of rank 0 is saved")
        self._incomplete(trainer, Path(str(trainer.ckpt_path)), missing)

    def _incomplete(self, trainer: Trainer, path: Path, missing: list[str]) -> None:
        self.context(trainer).write(trainer, "checkpoint.incomplete", path=str(path), missing=missing)
        log.warning("%s does not hold the whole state: %s", path, "; ".join(missing))

    # ---------------------------------------------------------------------------------------------------- exceptions

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # No collective here: the other ranks may never come, and a time-out would hide this exception.
        context = self.context(trainer)
        context.write(
            trainer,
            "exception",
            type=type(exception).__name__,
            message=redact(str(exception))[:2000],
            frames=_frames(exception),
        )
        context.journal.flush()
        if self._store is None or self._fit.writer is None:
            return
        self._settle(trainer, wait=True)
        if self._fit.saved_on_signal:
            return
        try:
            self._save_after_exception(trainer, exception)
        except Exception as error:  # whatever goes wrong here must not replace the exception that ended the run
            self._failed(trainer, "saving after an exception", error)

    def _save_after_exception(self, trainer: Trainer, exception: BaseException) -> None:
        between_batches = not private.in_batch(trainer) and not trainer.validating
        if isinstance(exception, SIGTERMException) and between_batches:
            self._save_without_collectives(trainer, take(trainer))
            return
        if self.save_on_exception:
            part = contents.collect(trainer, take(trainer), self.config)
            dump = publish_dump(self._require_store(), part, exception)
            self._journal(trainer, "checkpoint.saved", dump, status="exception")
        # The newest restart point in memory: a resume then tries the failing batch again, and repeats little else.
        full = [s for s in self.context(trainer).snapshots if s.params is not None]
        if trainer.world_size == 1 and full and full[-1].step > self._fit.last_saved and not _open_incidents(trainer):
            self._save_without_collectives(trainer, full[-1])

    def _save_without_collectives(self, trainer: Trainer, snapshot: Snapshot) -> None:
        """After SIGTERM every rank comes here at the same step, but none may wait for another by a collective."""
        store = self._require_store()
        part = contents.collect(trainer, snapshot, self.config)
        if trainer.world_size == 1:
            done = write_and_publish(
                store, store.begin(part.step, part.attempt), part, StatusAtSave(), self._rotation(), self._revision()
            )
            self._saved(trainer, done)
            return
        pending = meet(store, part, _MEETING_SECONDS)
        try:
            part.write(pending)
            entries = exchange(store, pending, part, _MEETING_SECONDS)
            if entries is not None:
                self._saved(
                    trainer,
                    publish(store, pending, part, StatusAtSave(), self._rotation(), self._revision(), entries=entries),
                )
        except Exception:
            if trainer.is_global_zero:
                store.drop(pending)
            raise

    # ------------------------------------------------------------------------------------------------------- helpers

    def _journal(
        self, trainer: Trainer, event: str, checkpoint: Checkpoint, at_step: int | None = None, **fields: Any
    ) -> None:
        context = self.context(trainer)
        context.journal.write(
            event,
            step=trainer.global_step if at_step is None else at_step,
            attempt=context.attempt,
            tokens=context.tokens if at_step is None else checkpoint.manifest.tokens,
            checkpoint_step=checkpoint.step,
            path=str(checkpoint.path),
            sha256=checkpoint.sha256,
            **fields,
        )

    def _checkpoints_dir(self, trainer: Trainer) -> Path:
        run_dir = self.run_dir or self.context(trainer).run_dir or Path(trainer.default_root_dir) / "sentinel"
        return Path(run_dir) / "checkpoints"

    def _require_store(self) -> CheckpointStore:
        if self._store is None:
            raise RuntimeError("ForensicCheckpoint has no checkpoint folder yet: it is opened when a fit starts.")
        return self._store

    def _bucket(self, step: int) -> int:
        return step // self.every_n_steps if self.every_n_steps else 0

    def _due(self, trainer: Trainer) -> bool:
        return self._bucket(trainer.global_step) > self._fit.bucket and not private.window_open(trainer)


@dataclass
class _Fit:
    """What the callback knows about the fit that is going on."""

    ckpt_path: Any = None
    before: partial[None] | None = None
    writer: ThreadPoolExecutor | None = None
    in_flight: Future[Done] | None = None
    in_flight_step: int = -1
    buffer: Snapshot | None = None
    revision: dict[str, Any] | None = None
    bucket: int = 0
    attempt: int = 0
    clean_from: int = 0
    last_saved: int = -1
    candidates: list[Checkpoint] = field(default_factory=list)
    poison_again: int | None = None
    told: set[tuple[str, str]] = field(default_factory=set)
    saved_on_signal: bool = False
    resumed: ResumedRun | None = None
    batches_in_epoch: int = 0
    told_empty: bool = False


def _open_incidents(trainer: Trainer) -> list[Incident]:
    """Open incidents that concern the training state (a straggler does not)."""
    incidents = SentinelCallback.context(trainer).incidents
    return [i for i in incidents if i.is_open and (not i.kinds or i.kinds - REPORT_ONLY)]


def _is_answered(incident: Incident) -> bool:
    return any(entry.get("action") not in (None, Action.NONE) for entry in incident.actions)


def _is_last_batch(trainer: Trainer) -> bool:
    """True where no further batch follows in this fit, as far as the limits say."""
    if trainer.max_steps >= 0 and trainer.global_step >= trainer.max_steps:
        return True
    epochs = trainer.max_epochs
    return trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1


def _weights_finite(trainer: Trainer) -> bool:
    """Asked only when a checkpoint is about to become known-good, so the cost does not matter."""
    return all(bool(torch.isfinite(p).all()) for p in map(_local, trainer.lightning_module.parameters()))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local.detach()


def _frames(exception: BaseException) -> list[str]:
    """Where it was raised, innermost last: file names and lines, no source text and no values."""
    frames = traceback.extract_tb(exception.__traceback__)
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-12:]]
