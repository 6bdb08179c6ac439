"""Checkpoints that hold everything, that are checked before they are believed, and that earn being called good."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from ..checkpoint import contents
from ..checkpoint.choosing import choose, next_attempt
from ..checkpoint.keeper import Keeper, Plan, open_incidents
from ..checkpoint.manifest import Status
from ..checkpoint.restart import Plan as RestartPlan
from ..checkpoint.restart import dropped_cursor_finding, empty_epoch_finding
from ..checkpoint.restore_point import OnPath, load_newest, newest_step
from ..checkpoint.resumed import ResumedRun
from ..checkpoint.store import CheckpointStore
from ..distributed import termination
from ..distributed.lost import lost_connection, name_missing
from ..folders import as_folder, root_folder
from ..incidents import Finding
from ..journal import redact
from ..limits import check_limits
from ..state import lightning_private as private
from ..state.snapshot import Snapshot, resume
from .base import (
    SentinelCallback,
    apply_quarantine,
    find_callback,
    gather_objects,
    note_restart,
    poison_lightning_files,
    watch_lightning_files,
)
from .rank_telemetry import RankTelemetry
from .run_journal import RunJournal

log = logging.getLogger("lightning_sentinel")


class ForensicCheckpoint(SentinelCallback):
    """Saves the whole training state of every rank, and resumes from the newest checkpoint that can be trusted.

    A checkpoint is a directory ``<run_dir>/checkpoints/step-00001200/`` with a manifest of SHA-256 sums, written beside and
    renamed. It starts as a *candidate*, becomes *known-good* after ``probation_steps`` healthy steps, or *poisoned* when an
    incident turns out to have begun before it. Resuming restores what Lightning's own checkpoint leaves out: the random
    state and the data position of every rank, batches fetched ahead, and the suite's own incidents and quarantine.

    The state is taken between two batches (where a batch ends the fit or SIGTERM has arrived: at that batch's end).
    Training waits for the copy to host memory; a background thread of low priority hashes and writes it, one checkpoint at
    a time, and says now and then how far it is. With several ranks each writes its own part, and rank 0 publishes the
    checkpoint when all parts are there: the checkpoint folder must be one that all ranks see.

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
    ``run.compared``             steps, equal_losses, equal_samples, largest_relative_difference: the first steps
                                 against the journal
    ``exception``                type, message (secrets redacted), frames
    ===========================  ==================================================================================

    Args:
        every_n_steps: Save each time ``trainer.global_step`` passes a multiple of this; 0: only on SIGTERM and exceptions.
        keep: How many of the newest checkpoints stay. The newest known-good one stays whatever this says.
        keep_every_tokens: Also keep the first checkpoint of each span of so many tokens, for good.
        probation_steps: Healthy steps after a checkpoint that make it known-good.
        resume: ``auto``: from the newest known-good checkpoint that verifies, or the newest candidate if none is
            known-good; a newer one that a healthy run saved on SIGTERM is taken once, and its probation goes on;
            ``latest``: from the newest that verifies and is not poisoned; a path: from that one; None: never.
            A Trainer that has trained already, or ``fit(ckpt_path=...)``, is left alone.
        write_lightning_ckpt: Also write an ordinary ``lightning.ckpt`` into each checkpoint. Where the strategy's own is no
            single file (``ModelParallelStrategy`` without ``save_distributed_checkpoint=False``) it is left out, and said so.
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
        check_limits("ForensicCheckpoint", locals())
        self.every_n_steps, self.keep, self.keep_every_tokens = every_n_steps, keep, keep_every_tokens
        self.probation_steps = probation_steps
        self.resume = resume
        self.write_lightning_ckpt, self.save_on_exception = write_lightning_ckpt, save_on_exception
        self.run_dir = None if run_dir is None else as_folder(run_dir, "ForensicCheckpoint: run_dir")
        self.config, self.compare_steps = config, compare_steps
        self._fit = _Fit()

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit = _Fit()
            if trainer.world_size > 1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._fit.stop_listening = termination.listen(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._fit.ckpt_path = trainer.ckpt_path
        plan = Plan(self.keep, self.keep_every_tokens, self._writes_lightning(trainer), self.config)
        store = CheckpointStore(self._checkpoints_dir(trainer))
        self._fit.keeper = keeper = Keeper(store, plan, self.probation_steps)
        if trainer.is_global_zero:
            try:
                store.clean()
            except OSError as error:
                keeper.failed(trainer, "cleaning up", error)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        note_restart(trainer)
        apply_quarantine(trainer)
        fit, keeper = self._fit, self._fit.keeper
        if keeper is None:
            return
        fit.unwatch = watch_lightning_files(trainer)
        fit.before = partial(self._before_batch, trainer)
        private.advance_control(trainer).before.append(fit.before)
        if trainer.global_step == 0 and fit.ckpt_path is None and self.resume is not None:
            self._resume(trainer, self.resume)
        elif trainer.global_step > 0 and fit.ckpt_path is not None:
            fit.resumed = ResumedRun.from_lightning(trainer, keeper.store, self.compare_steps, fit.file_plan)
            self._say_if_poisoned(trainer, fit.resumed.recorded.poisoned)
            if private.cursor_was_dropped(trainer):
                self._report_at_once(trainer, dropped_cursor_finding(trainer.global_step))
        loaded = None if fit.resumed is None else fit.resumed.loaded
        step = trainer.global_step if loaded is None else loaded.snapshot.step
        fit.bucket = self._bucket(step)
        keeper.probation.clean_from = step
        fit.attempt = self.context(trainer).attempt
        journal = find_callback(trainer, RunJournal)
        if journal is not None:
            journal.tell_changes(trainer, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit.keeper is not None:
            self._fit.keeper.finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._fit.unwatch()
        before = private.advance_control(trainer).before
        if self._fit.before in before:
            before.remove(self._fit.before)
        if self._fit.keeper is not None:
            self._fit.keeper.close()
            self._fit.keeper = None
        if self._fit.stop_listening is not None:
            self._fit.stop_listening()

    # ------------------------------------------------------------------------------------------------------- saving

    def _before_batch(self, trainer: Trainer) -> None:
        """Between two batches: nothing of the last one is pending, a rollback has been carried out."""
        context, fit, keeper = self.context(trainer), self._fit, self._keeper
        keeper.settle(wait=False)
        step = trainer.global_step
        if context.attempt != fit.attempt:
            fit.attempt = context.attempt
            keeper.go_back(step)
            fit.bucket = self._bucket(step)
        if open_incidents(trainer):
            keeper.probation.clean_from = step
        if self._due(trainer) or fit.terminated:
            fit.bucket = self._bucket(step)
            keeper.save(trainer, handover=fit.terminated)
        keeper.promote_due(trainer)
        if fit.terminated:
            self._leave(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit.keeper is None:
            return
        self._fit.batches_in_epoch += 1
        if self._fit.resumed is not None:
            self._report_restart(trainer, self._fit.resumed.step_done(trainer, self._fit.attempt))
        several = trainer.world_size > 1
        if several and termination.agreed(trainer, find_callback(trainer, RankTelemetry) is not None):
            self._fit.terminated = True
        if open_incidents(trainer) or self.context(trainer).attempt != self._fit.attempt:
            return  # a rollback may be pending; a bad state is no restart point
        terminated = self._fit.terminated if several else bool(trainer.received_sigterm)
        if terminated or (_is_last_batch(trainer) and self._due(trainer)):
            self._fit.bucket = self._bucket(trainer.global_step)
            self._fit.keeper.save(trainer, handover=terminated)
        if not terminated:
            return
        if several and not _is_last_batch(trainer):
            self._leave(trainer)
        self._fit.keeper.settle(wait=True)
        self._fit.saved_on_signal = True

    def _leave(self, trainer: Trainer) -> None:
        """SIGTERM: what had to be saved is saved, all ranks go at once."""
        self._keeper.settle(wait=True)
        self._fit.saved_on_signal = True
        termination.leave(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save now. Call it between two batches or in ``on_train_batch_end``, on every rank alike."""
        self._keeper.save(trainer)

    @property
    def writing(self) -> bool:
        """True while a checkpoint is being written beside the training."""
        return self._fit.keeper is not None and self._fit.keeper.writing

    # ---------------------------------------------------------------------------------------------------- probation

    def on_incident(self, trainer: Trainer, since_step: int, incident: int | None = None) -> None:
        """Poison every checkpoint that holds an update of ``since_step`` or later, retroactively too."""
        if self._fit.keeper is not None:
            self._fit.keeper.poison_since(trainer, since_step, incident)
            number = (
                incident if incident is not None else max((i.number for i in open_incidents(trainer)), default=None)
            )
            poison_lightning_files(trainer, since_step, number, f"since step {since_step}: incident {number}")

    def on_recovered(self, trainer: Trainer, incident: int | None = None) -> None:
        """The incident is over: probation counts healthy steps from here on."""
        if self._fit.keeper is not None:
            self._fit.keeper.probation.clean_from = trainer.global_step

    # ------------------------------------------------------------------------------------------------------- resume

    def _resume(self, trainer: Trainer, source: str | Path) -> None:
        store = self._keeper.store
        loaded = choose(trainer, store, source, partial(self._refuse, trainer))
        if loaded is None:
            return
        context, snapshot, checkpoint = self.context(trainer), loaded.snapshot, loaded.checkpoint
        contents.apply(trainer, loaded)
        self._fit.resumed = resumed = ResumedRun.from_suite(trainer, loaded, self.compare_steps)
        context.restart_step = snapshot.step
        status = trainer.strategy.broadcast(checkpoint.status.status, src=0)
        context.scratch["known_good_step"] = snapshot.step if status is Status.KNOWN_GOOD else None
        context.load_path_state(snapshot.path)
        # A kill costs each rank other lines of its journal: the furthest of them counts.
        furthest = max(gather_objects(trainer, [(resumed.recorded.attempt, resumed.recorded.last_step)]))
        context.attempt = trainer.strategy.broadcast(next_attempt(store, checkpoint, *furthest), src=0)
        resumed.close_lost_incidents(trainer)
        self._keeper.resumed_from(trainer, checkpoint, candidate=status is Status.CANDIDATE)
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
        if missing := [*loaded.run["inexact"], *loaded.left_out]:
            self._incomplete(trainer, checkpoint.path, missing)
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

    def restore_step(self, trainer: Trainer, before_step: int, on_path: OnPath) -> int | None:
        """Step of the newest known-good checkpoint from before ``before_step``, or None. Every rank must ask alike."""
        keeper = self._fit.keeper
        if keeper is None:
            return None
        keeper.settle(wait=True)
        return newest_step(trainer, keeper.store, before_step, on_path)

    def restore_point(self, trainer: Trainer, before_step: int, on_path: OnPath) -> tuple[Snapshot, Path] | None:
        """The newest known-good checkpoint from before ``before_step``, verified and read by every rank, or None."""
        keeper = self._fit.keeper
        if keeper is None:
            return None
        return load_newest(trainer, keeper.store, before_step, on_path, partial(self._refuse, trainer))

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

    def _report_at_once(self, trainer: Trainer, finding: Finding) -> None:
        """Journal a finding that the next gate, which opens an incident for it, may never see or see too late."""
        self.context(trainer).scratch.setdefault("restart_findings", []).append(finding)
        self.context(trainer).write(trainer, "finding", finding=finding.to_dict())
        log.error("%s", finding.message)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.batches_in_epoch = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fit = self._fit
        if fit.keeper is None or fit.ckpt_path is None or fit.batches_in_epoch or fit.told_empty:
            return
        fit.told_empty = True
        self._report_at_once(trainer, empty_epoch_finding(trainer.global_step, trainer.current_epoch))

    # ----------------------------------------------------------------------------- resuming by Lightning's own means

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self._fit.file_plan = RestartPlan.of_file(checkpoint)
        missing = ["the random state: shuffles, dropout and augmentation will differ from an uninterrupted run"]
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        if not loops.get("state_dict", {}).get("combined_loader"):
            missing.append("the data position: the epoch's batches are drawn anew")
        elif trainer.world_size > 1:
            missing.append(f"the data position of ranks 1 to {trainer.world_size - 1}: only that of rank 0 is saved")
        self._incomplete(trainer, Path(str(trainer.ckpt_path)), missing)

    def _say_if_poisoned(self, trainer: Trainer, poisoned: Mapping[str, str]) -> None:
        """The file that Lightning's own means have resumed from may be one that an incident has damaged."""
        path = Path(str(trainer.ckpt_path))
        reason = next((r for p, r in poisoned.items() if Path(p) in (path, path.parent)), None)
        if reason is not None:
            note = f"fit(ckpt_path=...) goes on from it all the same; {reason}"
            self.context(trainer).write(trainer, "checkpoint.poisoned", path=str(path), reason=note)
            log.warning("%s is poisoned (%s), and training goes on from it; resume='auto' would not", path, reason)

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
        lost = lost_connection(trainer, exception)
        if lost:
            name_missing(trainer, exception)
        keeper = self._fit.keeper
        if keeper is None or self._fit.before is None:
            return
        keeper.hurry(trainer)
        if self._fit.saved_on_signal:
            return
        try:
            # where another rank is the cause, this one's state holds nothing to look for
            keeper.save_after_exception(trainer, exception, dump=self.save_on_exception and not lost)
        except Exception as error:  # whatever goes wrong here must not replace the exception that ended the run
            keeper.failed(trainer, "saving after an exception", error)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _checkpoints_dir(self, trainer: Trainer) -> Path:
        default = root_folder(trainer.default_root_dir) / "sentinel"
        return (self.run_dir or self.context(trainer).run_dir or default) / "checkpoints"

    def _writes_lightning(self, trainer: Trainer) -> bool:
        if not self.write_lightning_ckpt or private.saves_one_file(trainer):
            return self.write_lightning_ckpt
        if trainer.is_global_zero:
            distributed = isinstance(trainer.strategy, ModelParallelStrategy)
            hint = " (set save_distributed_checkpoint=False for one)" if distributed else ""
            log.warning(
                "ForensicCheckpoint(write_lightning_ckpt=True): checkpoints are saved without %s, because the checkpoint of"
                " %s is no single file%s; ModelCheckpoint writes it beside the suite's.",
                contents.LIGHTNING,
                type(trainer.strategy).__name__,
                hint,
            )
        return False

    @property
    def _keeper(self) -> Keeper:
        if self._fit.keeper is None:
            raise RuntimeError("ForensicCheckpoint has no checkpoint folder yet: it is opened when training starts.")
        return self._fit.keeper

    def _bucket(self, step: int) -> int:
        return step // self.every_n_steps if self.every_n_steps else 0

    def _due(self, trainer: Trainer) -> bool:
        return self._bucket(trainer.global_step) > self._fit.bucket and not private.window_open(trainer)


@dataclass
class _Fit:
    """What the callback knows about the fit that is going on."""

    ckpt_path: Any = None
    before: partial[None] | None = None
    keeper: Keeper | None = None
    bucket: int = 0
    attempt: int = 0
    saved_on_signal: bool = False
    terminated: bool = False  # SIGTERM on some rank, as all ranks know
    stop_listening: Callable[[], None] | None = None
    resumed: ResumedRun | None = None
    file_plan: RestartPlan | None = None
    unwatch: Callable[[], None] = lambda: None
    batches_in_epoch: int = 0
    told_empty: bool = False


def _is_last_batch(trainer: Trainer) -> bool:
    """True where no further batch follows in this fit, as far as the limits say."""
    if trainer.max_steps >= 0 and trainer.global_step >= trainer.max_steps:
        return True
    epochs = trainer.max_epochs
    return trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1


def _frames(exception: BaseException) -> list[str]:
    """Where it was raised, innermost last: file names and lines, no source text and no values."""
    frames = traceback.extract_tb(exception.__traceback__)
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-12:]]
