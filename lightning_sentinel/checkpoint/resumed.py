"""A resumed run held against the one it continues: plan and samples before the first update, then the first losses."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer

from ..callbacks.base import gather_objects
from ..context import context_of
from ..incidents import Finding, FindingKind, Incident, IncidentStatus, Severity
from ..journal import number
from ..record import StepRecord
from .contents import Loaded, batch_ids, load
from .manifest import Status
from .recorded import Recorded, read_recorded
from .restart import DETECTOR, Plan, cursor_finding, differences, ids_agree, rates_finding
from .store import CheckpointError, CheckpointStore

log = logging.getLogger("lightning_sentinel")

LOSS_DIFFERENCE = 1e-2  # relative; below it a repeated step may differ by its kernels alone


@dataclass
class ResumedRun:
    """What is known of the run that is continued.

    Attributes:
        recorded: What its journal says about the steps from here on.
        loaded: The suite's checkpoint, or None after a resume by Lightning's own means.
        next_ids: Ids of samples that had been fetched ahead, if any.
        plan: Schedule and rates in the suite's checkpoint of the very step at which Lightning's own means have resumed.
        file_plan: The same, loss scale and update counts too, in the file that Lightning's own means have resumed from.
        validated: Set when a validation has run since: the user's own schedules may have moved rightly.
    """

    recorded: Recorded = field(default_factory=Recorded)
    loaded: Loaded | None = None
    next_ids: list[str] = field(default_factory=list)
    validated: bool = False
    plan: Plan | None = None
    file_plan: Plan | None = None
    _fresh: bool = True
    _differences: list[float] = field(default_factory=list)
    _equal_ids: int = 0
    _same_data: bool = True
    _steps_left: int = 0
    _last_done: int = -1

    @classmethod
    def from_suite(cls, trainer: Trainer, loaded: Loaded, steps: int) -> ResumedRun:
        snapshot = loaded.snapshot
        recorded = read_recorded(
            context_of(trainer).run_dir,
            trainer.global_rank,
            step=snapshot.step,
            attempt=snapshot.attempt,
            steps=steps,
        )
        # Incidents go on counting alike on every rank, also on one that has no journal yet.
        told = gather_objects(trainer, [recorded.incidents] if trainer.is_global_zero else [])
        recorded.incidents = told[0]
        if loaded.left_out:
            recorded.steps.clear()  # the same samples, but on other ranks
        next_ids = [] if loaded.left_out else loaded.next_sample_ids
        return cls(recorded, loaded, next_ids, _steps_left=steps, _last_done=snapshot.step - 1)

    @classmethod
    def from_lightning(
        cls, trainer: Trainer, store: CheckpointStore, steps: int, file_plan: Plan | None = None
    ) -> ResumedRun:
        """After ``fit(ckpt_path=...)``: what the file and the suite's own records of this run folder say comes next."""
        step, rank = trainer.global_step, trainer.global_rank
        first = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        recorded = read_recorded(
            context_of(trainer).run_dir,
            rank,
            step=step,
            attempt=None,
            steps=steps,
            at_batch=first + trainer.accumulate_grad_batches - 1,
        )
        found = cls(recorded, file_plan=file_plan, _steps_left=steps, _last_done=step - 1)
        for checkpoint in reversed(store.checkpoints()):
            if checkpoint.step != step or checkpoint.manifest.world_size != trainer.world_size:
                continue
            try:
                saved = load(store, checkpoint, rank)
            except CheckpointError as error:
                log.warning("checkpoint %s can't be compared with: %s", checkpoint.path.name, error)
            else:
                found.next_ids = saved.next_sample_ids
                if checkpoint.status.status is not Status.POISONED:
                    found.plan = Plan.of(saved.snapshot.optimizers, saved.snapshot.schedulers, saved.snapshot.precision)
            break
        return found

    def close_lost_incidents(self, trainer: Trainer) -> None:
        """Incidents detected after the checkpoint: the steps that they concern are trained anew."""
        assert self.loaded is not None
        context, step = context_of(trainer), self.loaded.snapshot.step
        known = {incident.number for incident in context.incidents}
        for recorded, data in sorted(self.recorded.incidents.items()):
            if recorded in known:
                continue
            incident = Incident.from_dict(data)
            if incident.is_open:
                incident.status, incident.closed_step = IncidentStatus.RESOLVED, step
                incident.closing = f"the process ended; resumed at step {step}, before the incident was detected"
                context.write(trainer, "incident.closed", incident=incident.to_dict())
            context.incidents.append(incident)
        context.incidents.sort(key=lambda i: i.number)

    def schedule(self, trainer: Trainer) -> dict[str, Any] | None:
        """Scheduler states and rates of the checkpoint while no step has been trained since, else None."""
        if self.loaded is None or trainer.global_step != self.loaded.snapshot.step:
            return None
        return {
            "schedulers": [dict(s) for s in self.loaded.snapshot.schedulers],
            "rates": [[float(g["lr"]) for g in o["param_groups"]] for o in self.loaded.snapshot.optimizers],
        }

    # ---------------------------------------------------------------------------------------------- the first batch

    def first_batch(self, trainer: Trainer, batch: Any) -> list[Finding]:
        """Findings on the first batch, before its forward; the same on every rank. Later batches give none."""
        if not self._fresh:
            return []
        self._fresh = False
        return self._compare_plan(trainer) + self._compare_cursor(trainer, batch)

    def _compare_plan(self, trainer: Trainer) -> list[Finding]:
        live = Plan.of(
            [o.state_dict() for o in trainer.optimizers],
            [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            trainer.precision_plugin.state_dict(),
        )
        if self.loaded is None:
            return self._compare_schedule(trainer, live)
        snapshot = self.loaded.snapshot
        # A plateau schedule, and one that the user's own hooks step, may have moved at the end of an epoch.
        crossed = trainer.current_epoch != self.loaded.run["epoch"] or self.validated
        own_schedule = not trainer.lightning_module.automatic_optimization or any(
            c.reduce_on_plateau for c in trainer.lr_scheduler_configs
        )
        saved = Plan.of(snapshot.optimizers, snapshot.schedulers, snapshot.precision)
        return differences(saved, live, trainer.global_step, compare_rates=not (crossed and own_schedule))

    def _compare_schedule(self, trainer: Trainer, live: Plan) -> list[Finding]:
        """After a resume by Lightning's own means: against the file itself, the suite's checkpoint of this step, the journal.

        Rates only where a schedule alone sets them and moves with the steps: elsewhere a difference may well be right.
        """
        schedules = trainer.lr_scheduler_configs
        planned = trainer.lightning_module.automatic_optimization and all(
            c.interval == "step" and not c.reduce_on_plateau for c in schedules
        )
        found: list[Finding] = []
        step, changes = trainer.global_step, self.recorded.rate_changes
        if self.file_plan is not None:
            found = differences(self.file_plan, live, step, compare_rates=planned)
        rates = [rate for group in live.rates for rate in group]
        before = (self.recorded.steps.get(step) or {}).get("lr")
        if found or not schedules or not planned:
            pass
        elif self.plan is not None:
            # scale and updates may be of another pass over these steps; the schedule is the same in all of them
            found = differences(replace(self.plan, scale=live.scale, updates=live.updates), live, step)
        elif isinstance(before, list) and not changes & {-1, step} and not _close(rates, before):
            found = [rates_finding(step, [number(rate) for rate in before], rates)]
        # every rank journals alike, but a rank's own file may be gone
        told: list[Finding] = gather_objects(trainer, [found] if trainer.is_global_zero else [])[0]
        return told

    def _compare_cursor(self, trainer: Trainer, batch: Any) -> list[Finding]:
        """Is the first batch the one that was fetched ahead, or that the journal recorded? All ranks hear of all."""
        expected, source = self._expected_ids(trainer)
        live = batch_ids(trainer, batch) if expected else []
        mid = self.loaded is not None and self.loaded.snapshot.mid_accumulation
        wrong = bool(expected) and not ids_agree(expected, live, mid_accumulation=mid)
        mine = (wrong, expected, live, source, self._epoch_of(trainer, live) if wrong else "")
        verdicts = gather_objects(trainer, [mine])
        ranks = [rank for rank, verdict in enumerate(verdicts) if verdict[0]]
        if not ranks:
            return []
        self._same_data = False
        _, expected, live, source, note = verdicts[ranks[0]]
        return [cursor_finding(trainer.global_step, expected, live, ranks, source, note)]

    def _epoch_of(self, trainer: Trainer, live: list[str]) -> str:
        """Whose order it is, where the journal has just these samples at the same place of an earlier epoch."""
        for epoch, ids in self.recorded.earlier_epochs.items():
            if epoch != trainer.current_epoch and live and ids[: len(live)] == live:
                return f"resumed at epoch {trainer.current_epoch}, data is epoch {epoch}'s order; "
        return ""

    def _expected_ids(self, trainer: Trainer) -> tuple[list[str], str]:
        ledger = context_of(trainer).ledger
        active = frozenset() if ledger is None else ledger.active
        if not self._order_holds(active):
            return [], ""
        if self.next_ids:
            return self.next_ids, "the checkpoint had fetched ahead"
        row = self.recorded.steps.get(trainer.global_step)
        return (list(row.get("sample_ids") or []), "the journal has at this step") if row else ([], "")

    def _order_holds(self, active: frozenset[str]) -> bool:
        """False if somebody has been quarantined since: then other samples are right."""
        if self.loaded is not None:
            return active == self.loaded.ledger_names
        recorded = {f"sample:{i}" for row in self.recorded.steps.values() for i in row.get("sample_ids") or ()}
        sources = any(name.startswith("source:") for name in active)
        return not (sources or active & {*recorded, *(f"sample:{i}" for i in self.next_ids)})

    # ---------------------------------------------------------------------------------------------- the first steps

    def step_done(self, trainer: Trainer, attempt: int) -> list[Finding]:
        """Hold the step that has just ended against the journal; the summary is journalled when all are compared."""
        context, rows = context_of(trainer), self.recorded.steps
        record = context.record
        if record is None or trainer.global_step <= record.step or context.attempt != attempt:
            return []
        if record.step <= self._last_done or self._steps_left <= 0:  # a further micro-batch, or all are compared
            return []
        # several optimizers take several steps in one batch
        unfinished = bool(rows)
        done = {r.step: r for r in (*context.history, record) if self._last_done < r.step <= record.step}
        self._last_done, self._steps_left = record.step, self._steps_left - len(done)
        found = [finding for step in sorted(done) for finding in self._compare_step(trainer, done[step])]
        if self._differences and unfinished and not rows:
            context.write(
                trainer,
                "run.compared",
                steps=len(self._differences),
                equal_losses=sum(d == 0 for d in self._differences),
                equal_samples=self._equal_ids,
                largest_relative_difference=max(self._differences),
            )
        return found

    def _compare_step(self, trainer: Trainer, record: StepRecord) -> list[Finding]:
        row = self.recorded.steps.pop(record.step, None)
        found = self._compare_ids(trainer, record.step, row, record.sample_ids)
        # after a resume by Lightning's own means dropout differs, and with it the losses
        if row is None or self.loaded is None:
            return found
        before = float(row["loss"])
        difference = _relative(record.mean_loss, before)
        self._differences.append(difference)
        self._equal_ids += list(record.sample_ids) == list(row.get("sample_ids") or [])
        return found + self._compare_loss(record, before, difference)

    def _compare_ids(
        self, trainer: Trainer, step: int, row: dict[str, Any] | None, live: Sequence[str]
    ) -> list[Finding]:
        """Are this step's samples those of the journal? Said once; every rank takes part in each of the first steps."""
        ledger = context_of(trainer).ledger
        known = list((row or {}).get("sample_ids") or [])
        mine: list[Any] = []
        if known and self._order_holds(frozenset() if ledger is None else ledger.active):
            snapshot = None if self.loaded is None else self.loaded.snapshot
            middle = snapshot is not None and snapshot.mid_accumulation and snapshot.step == step
            if not ids_agree(known, live, mid_accumulation=middle) or (not middle and len(known) != len(live)):
                mine = [(trainer.global_rank, known, list(live))]
        told = gather_objects(trainer, mine)
        if not told or not self._same_data:
            return []
        self._same_data = False
        _, expected, got = told[0]
        what = f"the samples of step {step} are not those"
        ranks = [rank for rank, _, _ in told]
        return [cursor_finding(step, expected, got, ranks, "the journal has at this step", what=what)]

    @staticmethod
    def _compare_loss(record: StepRecord, before: float, difference: float) -> list[Finding]:
        if difference <= LOSS_DIFFERENCE:
            return []
        message = f"restart-aligned: step {record.step} had a loss of {before:.6g} nats, now {record.mean_loss:.6g}"
        return [
            Finding(
                kind=FindingKind.RESTART_JUMP,
                detector=DETECTOR,
                step=record.step,
                score=difference,
                threshold=LOSS_DIFFERENCE,
                message=message,
                severity=Severity.ALARM,
                restart_aligned=True,
                unit="relative",
            )
        ]


def _relative(now: float, before: float) -> float:
    """Relative difference; a loss that is not known (a further optimizer of the same batch has none) equals another such."""
    if math.isnan(now) and math.isnan(before):
        return 0.0
    difference = abs(now - before) / max(abs(before), 1e-12)
    return math.inf if math.isnan(difference) else difference


def _close(rates: Sequence[float], recorded: Sequence[Any]) -> bool:
    pairs = zip(rates, map(number, recorded), strict=False)
    return len(rates) == len(recorded) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)
