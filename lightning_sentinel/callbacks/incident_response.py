"""From findings to an answer: opens incidents, has the cause examined, asks the policy, acts, and watches the recovery."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from ..data.quarantine import QuarantineLedger
from ..detectors.forecast import ForecastBand
from ..incidents import (
    Action,
    Finding,
    FindingKind,
    Incident,
    IncidentStatus,
    Severity,
    Verdict,
    VerdictKind,
)
from ..policy import NEEDS_ROLLBACK, NONFINITE, REPORT_ONLY, Choice, Policy, Situation, case_of
from ..record import SOURCE_LOSS, SOURCE_TOKENS, StepRecord, weighted_mean
from .base import SentinelCallback, find_callback
from .batch_validator import BatchValidator
from .forensic_checkpoint import ForensicCheckpoint
from .rank_telemetry import RankTelemetry
from .rollback import Rollback, RollbackUnavailable

log = logging.getLogger("lightning_sentinel")

EXIT_CODE_STOPPED = 77
MIN_HISTORY = 8  # losses that a forecast needs at least


class TrainingStopped(SystemExit):
    """Raised when the ladder ends in ``stop``; a launcher sees exit code 77 (:data:`EXIT_CODE_STOPPED`)."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE_STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class IncidentResponse(SentinelCallback):
    """The policy at work. ``RankTelemetry`` calls :meth:`decide` at the gate with the record and all findings.

    Example:
        >>> from lightning_sentinel import IncidentResponse
        >>> IncidentResponse(mode="guard").policy.mode
        'guard'

    Journalled:

    ==========================================  ===================================================================
    event                                       when
    ==========================================  ===================================================================
    ``finding``                                 a finding below the level of an incident
    ``incident.opened`` ``.updated`` ``.closed``  with the whole incident
    ``triage.verdict``                          after the experiments
    ``action.<name>``                           before it takes effect
    ``quarantine.added``                        names that will not be drawn again
    ``experiment.started`` ``.ended``           the run is no longer what was planned (reduced rate, permanent change)
    ==========================================  ===================================================================

    Args:
        mode: ``observe`` (default) watches and records; ``guard`` also keeps non-finite updates out of the weights;
            ``recover`` may skip, roll back, quarantine, reduce the rate and stop.
        ladders: Overrides of the response ladders, ``{case: [action, ...]}``; see ``lightning_sentinel.policy``.
        budgets: Overrides of how often each action may be taken within ``budget_steps``, ``{action: count}``.
        budget_steps: Window of the budgets, in steps.
        probation_steps: Healthy steps after which an incident is closed and earlier restore points are known good.
        recovered_z: Largest distance from the forecast made before the incident, in robust sigma, that counts as
            recovered.
        lr_factor: Factor of a temporary reduction of the learning rate.
        lr_steps: Length of that reduction in steps.
        lr_permanent: Keep the reduced rate; this starts a new experiment id in the journal.
        triage: Examine the cause by experiments; without it every verdict rests on the findings alone.
        max_forwards: Budget of the experiments of one incident, in forward passes.
        max_seconds: Budget of the experiments of one incident, in seconds.
        exit_on_stop: Raise :class:`TrainingStopped` (exit code 77) when the ladder ends in ``stop``; otherwise only
            ``trainer.should_stop`` is set.
    """

    rewinds = False

    def __init__(
        self,
        mode: str = "observe",
        ladders: Mapping[str, Sequence[str]] | None = None,
        budgets: Mapping[str, int] | None = None,
        budget_steps: int = 1000,
        probation_steps: int = 20,
        recovered_z: float = 4.0,
        lr_factor: float = 0.1,
        lr_steps: int = 100,
        lr_permanent: bool = False,
        triage: bool = True,
        max_forwards: int = 16,
        max_seconds: float = 60.0,
        exit_on_stop: bool = True,
    ) -> None:
        self.policy = Policy(mode, dict(ladders or {}), dict(budgets or {}), budget_steps)
        for name, value, ok, expected in (
            ("probation_steps", probation_steps, probation_steps >= 1, "at least 1"),
            ("recovered_z", recovered_z, recovered_z > 0, "more than 0"),
            ("lr_factor", lr_factor, 0 < lr_factor < 1, "between 0 and 1"),
            ("lr_steps", lr_steps, lr_steps >= 1, "at least 1"),
            ("max_forwards", max_forwards, max_forwards >= 0, "0 or more"),
            ("max_seconds", max_seconds, max_seconds > 0, "more than 0"),
        ):
            if not ok:
                raise ValueError(f"IncidentResponse: {name} is {value}, expected {expected}.")
        self.probation_steps = probation_steps
        self.recovered_z = recovered_z
        self.lr_factor, self.lr_steps, self.lr_permanent = lr_factor, lr_steps, lr_permanent
        self.triage = triage
        self.max_forwards, self.max_seconds = max_forwards, max_seconds
        self.exit_on_stop = exit_on_stop
        self.stop_reason: str | None = None
        self._watched: dict[int, _Watch] = {}
        self._taken: deque[tuple[int, Action]] = deque()
        self._gates = 0
        self._passed_in_batch = 0
        self._new_scale: float | None = None
        self._scaler_state: dict[str, Any] | None = None
        self._reduction: dict[str, Any] | None = None
        self._plan_until: int | None = None
        self._hooks: list[Any] = []

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and find_callback(trainer, RankTelemetry) is None:
            raise ValueError(
                "IncidentResponse needs RankTelemetry, which gathers the record that it answers; the Trainer has none."
                " Add lightning_sentinel.RankTelemetry() to the Trainer's callbacks, or use"
                " lightning_sentinel.default_callbacks()."
            )
        validator = find_callback(trainer, BatchValidator)
        if validator is not None and self.policy.mode == "recover":
            validator.neutralise = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        if self.triage or self.policy.mode != "observe":
            from ..triage.window import ensure_capture

            ensure_capture(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._passed_in_batch = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and self._scaler_state is not None:
            scaler.load_state_dict(self._scaler_state)
        if scaler is not None and self._new_scale is not None:
            scaler.update(self._new_scale)
        self._scaler_state = self._new_scale = None
        if self.stop_reason is not None:
            trainer.should_stop = True
            if self.exit_on_stop:
                raise TrainingStopped(self.stop_reason)

    # ----------------------------------------------------------------------------------------------------- deciding

    def decide(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        record: StepRecord,
        findings: Sequence[Finding],
    ) -> None:
        """Answer one record. Every rank calls it with the same arguments and takes the same way."""
        self._gates += 1
        self._optimizer = optimizer
        serious = self._serious(findings)
        for finding in findings:
            if finding not in serious:
                self._journal_minor(trainer, finding)
        if serious:
            self._answer(trainer, pl_module, optimizer, record, serious)
        elif record.has_nonfinite and not self._scaler_handles(trainer, record):
            # No detector called it an incident; a non-finite update is kept out all the same.
            if self.policy.mode != "observe":
                self._hold(trainer, optimizer)
        else:
            self._watch_recovery(trainer, record)
            self._keep_plan(trainer, optimizer, record)
            self._mark_healthy(trainer, record)
        if not self.context(trainer).held:
            self._passed_in_batch += 1

    def _serious(self, findings: Sequence[Finding]) -> list[Finding]:
        """Findings that need an answer; an overflow counts while an incident of overflows is open."""
        collapse_open = any(w.case == "numerics/scale" and w.answers for w in self._watched.values())
        serious = []
        for finding in findings:
            if finding.kind is FindingKind.SCALER_OVERFLOW and collapse_open:
                serious.append(replace(finding, severity=Severity.INCIDENT))
            elif finding.severity is Severity.INCIDENT:
                serious.append(finding)
        return serious

    def _answer(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        record: StepRecord,
        findings: list[Finding],
    ) -> None:
        context = self.context(trainer)
        incident = self._incident_for(trainer, record, findings)
        watch = self._watched[incident.number]
        watch.healthy = []
        kinds = {f.kind for f in findings}
        if self._needs_triage(kinds, watch):
            incident.verdict = self._examine(trainer, pl_module, optimizer, incident, record)
            watch.examined = {*watch.examined, *kinds}
            watch.examined_answers = watch.answers
        verdict = incident.verdict
        neutralised = bool(findings) and all(bool(f.evidence.get("neutralised")) for f in findings)
        watch.case = case_of(verdict, incident.kinds | kinds, neutralised=neutralised)
        since = verdict.since_step if verdict.since_step is not None else incident.since_step
        nonfinite = record.has_nonfinite and not self._scaler_handles(trainer, record)
        situation = Situation(
            case=watch.case,
            repetition=watch.answers,
            step_is_held=since >= record.step and self._passed_in_batch == 0,
            nonfinite=nonfinite,
            unavailable=self._unavailable(trainer, since, watch),
            spent=self._spent(),
        )
        choice = self.policy.choose(situation)
        watch.answers += choice.action is not Action.NONE
        watch.last_step, watch.last_attempt = record.step, context.attempt
        self._act(trainer, optimizer, record, incident, watch, choice, since)
        self._journal_incident(trainer, incident, "updated")

    def _incident_for(self, trainer: Trainer, record: StepRecord, findings: list[Finding]) -> Incident:
        """The open incident that these findings continue, or a new one."""
        context = self.context(trainer)
        kinds = {f.kind for f in findings}
        named = {c for f in findings for c in f.culprits if not c.startswith("sample:")}
        for incident in reversed(context.incidents):
            watch = self._watched.get(incident.number)
            if not incident.is_open or watch is None:
                continue
            near = record.step <= watch.last_step + 2
            same = bool(kinds & incident.kinds - REPORT_ONLY) and not (kinds & _SINGLE_STEP)
            same = same or bool(named & set(incident.verdict.culprits))
            if near or same or (watch.case == "numerics/scale" and FindingKind.SCALER_OVERFLOW in kinds):
                incident.findings.extend(findings[: max(0, 64 - len(incident.findings))])
                return incident
        incident = Incident(
            number=1 + max((i.number for i in context.incidents), default=0),
            opened_step=record.step,
            since_step=min(f.since_step for f in findings),
            attempt=context.attempt,
            tokens=record.tokens,
            findings=list(findings),
        )
        context.incidents.append(incident)
        self._watched[incident.number] = _Watch(record.step, context.attempt, list(context.history))
        self._journal_incident(trainer, incident, "opened")
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        if checkpoint is not None and kinds - REPORT_ONLY:
            checkpoint.on_incident(trainer, incident.since_step)
        for finding in findings:
            log.warning("incident %d at step %d: %s", incident.number, record.step, finding.message)
        return incident

    @staticmethod
    def _needs_triage(kinds: set[FindingKind], watch: _Watch) -> bool:
        """Examine when the incident is new, has a new side, or an answer has not helped."""
        if kinds <= REPORT_ONLY:
            return False
        if watch.case == "numerics/scale" and watch.answers:
            return False  # a further overflow of a convicted module tells nothing new
        return bool(kinds - watch.examined) or watch.answers > watch.examined_answers

    def _examine(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        incident: Incident,
        record: StepRecord,
    ) -> Verdict:
        context = self.context(trainer)
        if not self.triage:
            verdict = _verdict_from_findings(incident, record)
        else:
            from ..triage import investigate

            try:
                verdict = investigate(
                    trainer,
                    pl_module,
                    optimizer,
                    incident,
                    record,
                    max_forwards=self.max_forwards,
                    max_seconds=self.max_seconds,
                )
            except Exception as error:  # the examination must never be what ends the run
                if trainer.world_size > 1:
                    raise  # the ranks have parted: going on would end in a time-out somewhere else
                log.exception("the examination of incident %d failed; the verdict stays open", incident.number)
                verdict = Verdict(sentence=f"the examination failed: {type(error).__name__}: {error}")
        context.write(trainer, "triage.verdict", incident=incident.number, verdict=verdict.to_dict())
        if verdict.kind is not VerdictKind.UNDETERMINED or verdict.sentence:
            log.warning(
                "incident %d: %s %s. %s", incident.number, verdict.kind, ", ".join(verdict.culprits), verdict.sentence
            )
        return verdict

    def _unavailable(self, trainer: Trainer, since: int, watch: _Watch) -> dict[Action, str]:
        context = self.context(trainer)
        reasons: dict[Action, str] = {}
        rollback = find_callback(trainer, Rollback)
        why = "there is no Rollback callback" if rollback is None else rollback.unavailable(trainer)
        if why is None and not any(s.params is not None and s.step <= since for s in context.snapshots):
            why = f"no snapshot is older than step {since}"
            reasons |= dict.fromkeys((Action.ROLLBACK_REPLAY, Action.ROLLBACK_SKIP), why)
        elif why is not None:
            reasons |= dict.fromkeys(NEEDS_ROLLBACK, why)
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        saved = checkpoint.saved_schedule(trainer) if checkpoint is not None else None
        if saved is None and not any(s.params is not None and s.step <= since for s in context.snapshots):
            reasons[Action.RESTORE_OPTIMIZER] = "neither a snapshot nor a checkpoint holds an older optimizer state"
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            reasons[Action.LOWER_LOSS_SCALE] = "there is no loss scale"
        return reasons

    def _spent(self) -> dict[Action, int]:
        while self._taken and self._taken[0][0] <= self._gates - self.policy.budget_steps:
            self._taken.popleft()
        return dict(Counter(action for _, action in self._taken))

    # ------------------------------------------------------------------------------------------------------- acting

    def _act(
        self,
        trainer: Trainer,
        optimizer: Optimizer,
        record: StepRecord,
        incident: Incident,
        watch: _Watch,
        choice: Choice,
        since: int,
    ) -> None:
        context = self.context(trainer)
        verdict, action = incident.verdict, choice.action
        names = self._names_to_exclude(record, verdict, watch.case, action)
        if action is not Action.NONE or choice.passed_over:
            self._taken.append((self._gates, action))
            incident.actions.append(
                {
                    "action": str(action),
                    "step": record.step,
                    "attempt": context.attempt,
                    "reason": choice.reason,
                    "passed_over": list(choice.passed_over),
                    "excluded": list(names),
                }
            )
        if self.policy.mode == "observe":
            return
        if action in NEEDS_ROLLBACK:
            self._hold(trainer, optimizer)
            rollback = find_callback(trainer, Rollback)
            assert rollback is not None
            before = record.step if action is Action.RETRY_STEP else min(since, record.step)
            try:
                snapshot = rollback.request(
                    trainer,
                    before_step=before,
                    action=action,
                    incident=incident.number,
                    reason=choice.reason,
                    exclude=names,
                )
            except RollbackUnavailable as error:
                log.warning("incident %d: no rollback: %s; this step is skipped instead", incident.number, error)
                incident.actions[-1] |= {"action": str(Action.SKIP_STEP), "reason": f"{choice.reason}; {error}"}
                self._journal_action(trainer, incident)
                return
            self._announce_exclusion(trainer, incident, names, choice.reason)
            incident.actions[-1]["to_step"] = snapshot.step
            if watch.case == "optimization/lr":
                self._plan_until = record.step + self.probation_steps
            return
        if action is Action.NONE:
            if record.has_nonfinite and not self._scaler_handles(trainer, record):
                self._hold(trainer, optimizer)
            return
        self._journal_action(trainer, incident)
        if action is Action.SKIP_STEP:
            self._hold(trainer, optimizer)
            if watch.case == "numerics/scale":
                self._keep_scale(trainer)
            elif self._passed_in_batch:
                self._undo_earlier_update(trainer, incident, record, choice)
        elif action is Action.REDUCE_LR:
            self._hold(trainer, optimizer)
            self._reduce_rate(trainer, record, incident)
        elif action is Action.LOWER_LOSS_SCALE:
            self._lower_scale(trainer, record)
        elif action is Action.RESTORE_OPTIMIZER:
            self._restore_optimizer(trainer, optimizer, since, watch.case)
        elif action is Action.STOP:
            self._hold(trainer, optimizer)
            self.stop_reason = self._last_words(record, incident)
            log.error("%s", self.stop_reason)
        if names:
            self._quarantine(trainer, incident, names, choice.reason, record.step)

    def _names_to_exclude(self, record: StepRecord, verdict: Verdict, case: str, action: Action) -> tuple[str, ...]:
        if action in (Action.NONE, Action.STOP):
            return ()
        samples = tuple(f"sample:{s}" for s in verdict.sample_ids)
        if case == "data/source":
            return tuple(c for c in verdict.culprits if c.startswith("source:"))
        if case in ("data/samples", "data/neutralised"):
            named = tuple(c for c in verdict.culprits if c.startswith("sample:"))
            return named or samples
        if action is Action.ROLLBACK_SKIP:
            return samples
        return ()

    def _hold(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Keep this step's update out: no gradient, no update. Buffers that the forward changed go back."""
        from ..triage.window import restore_buffers

        self.context(trainer).held = True
        scaled_by_optimizer = getattr(optimizer, "_step_supports_amp_scaling", False)
        if getattr(trainer.precision_plugin, "scaler", None) is not None and scaled_by_optimizer:
            # A fused optimizer with a scaler needs gradients to be there: the step pre-hook raises its own flag.
            self._skip_fused = True
        else:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        restore_buffers(trainer)

    _skip_fused = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._skip_fused and getattr(optimizer, "found_inf", None) is not None:
            optimizer.found_inf = torch.ones_like(optimizer.found_inf)  # type: ignore[attr-defined]
        if self._reduction is not None:
            self._saved_rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._reduction["factor"]

    _saved_rates: list[Any] | None = None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._skip_fused = False
        if self._saved_rates is not None:
            for group, rate in zip(optimizer.param_groups, self._saved_rates, strict=True):
                group["lr"] = rate
            self._saved_rates = None

    def _undo_earlier_update(self, trainer: Trainer, incident: Incident, record: StepRecord, choice: Choice) -> None:
        """Another optimizer has already stepped in this batch: the half-made step goes back as a whole."""
        rollback = find_callback(trainer, Rollback)
        if rollback is None:
            log.warning("an earlier optimizer has already stepped in this batch and there is no Rollback to undo it")
            return
        names = tuple(f"sample:{s}" for s in record.sample_ids)
        before = record.step - self._passed_in_batch
        try:
            rollback.request(
                trainer,
                before_step=before,
                action=Action.ROLLBACK_SKIP,
                incident=incident.number,
                reason=choice.reason,
                exclude=names,
            )
        except RollbackUnavailable as error:
            log.warning("an earlier optimizer has already stepped in this batch; it can't be undone: %s", error)

    def _keep_scale(self, trainer: Trainer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self._scaler_state = dict(scaler.state_dict())

    def _lower_scale(self, trainer: Trainer, record: StepRecord) -> None:
        scale = float(record.column("loss_scale").min())
        self._new_scale = max(1.0, scale / 16.0)

    def _reduce_rate(self, trainer: Trainer, record: StepRecord, incident: Incident) -> None:
        context = self.context(trainer)
        until = None if self.lr_permanent else record.step + self.lr_steps
        factor = self.lr_factor * (self._reduction["factor"] if self._reduction else 1.0)
        self._reduction = {"factor": factor, "from": record.step, "until": until, "incident": incident.number}
        identity = f"lr-{incident.number}-{record.step}" if self.lr_permanent else None
        context.write(trainer, "experiment.started", kind="reduce_lr", **self._reduction, experiment=identity)
        if identity is not None:
            context.scratch["experiment"] = identity

    def _keep_plan(self, trainer: Trainer, optimizer: Optimizer, record: StepRecord) -> None:
        """End a temporary reduction; hold the rate to the scheduler's plan for a while after a wrong one."""
        context = self.context(trainer)
        until = self._reduction["until"] if self._reduction is not None else None
        if self._reduction is not None and until is not None and record.step >= until:
            context.write(trainer, "experiment.ended", kind="reduce_lr", **self._reduction)
            self._reduction = None
        if self._plan_until is None:
            return
        if record.step >= self._plan_until:
            self._plan_until = None
            return
        _, planned, actual = context.rates[-1]
        if planned is not None and planned != actual:
            for group, rate in zip(optimizer.param_groups, planned, strict=True):
                group["lr"] = rate
            context.write(trainer, "lr.changed", old=list(actual), new=list(planned), reason="held to the plan")

    def _restore_optimizer(self, trainer: Trainer, optimizer: Optimizer, since: int, case: str) -> None:
        """State of optimizer and schedule from before: the checkpoint's after a restart, else the newest clean snapshot's."""
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        saved = checkpoint.saved_schedule(trainer) if checkpoint is not None else None
        if case == "optimization/scheduler" and saved is not None:
            for config, state in zip(trainer.lr_scheduler_configs, saved["schedulers"], strict=True):
                config.scheduler.load_state_dict(state)
            for live, rates in zip(trainer.optimizers, saved["rates"], strict=True):
                for group, rate in zip(live.param_groups, rates, strict=True):
                    group["lr"] = rate
            return
        self._hold(trainer, optimizer)
        clean = [s for s in self.context(trainer).snapshots if s.params is not None and s.step <= since]
        for live, state in zip(trainer.optimizers, clean[-1].optimizers, strict=True):
            live.load_state_dict(_clone(state))
        if case == "optimization/scheduler":
            for config, state in zip(trainer.lr_scheduler_configs, clean[-1].schedulers, strict=True):
                config.scheduler.load_state_dict(_clone(state))

    def _quarantine(self, trainer: Trainer, incident: Incident, names: Sequence[str], reason: str, step: int) -> None:
        context = self.context(trainer)
        if context.ledger is None:
            context.ledger = QuarantineLedger()
        context.ledger.add(names, step=step, incident=incident.number, policy=self.policy.mode, reason=reason)
        self._announce_exclusion(trainer, incident, names, reason)
        context.ledger.apply(_loaders(trainer))

    def _announce_exclusion(self, trainer: Trainer, incident: Incident, names: Sequence[str], reason: str) -> None:
        if names:
            self.context(trainer).write(
                trainer, "quarantine.added", names=list(names), incident=incident.number, reason=reason
            )

    def _last_words(self, record: StepRecord, incident: Incident) -> str:
        history = "; ".join(f"step {a['step']}: {a['action']} ({a['reason']})" for a in incident.actions)
        return (
            f"training stops at step {record.step}: incident {incident.number}"
            f" ({incident.verdict.kind} {', '.join(incident.verdict.culprits) or 'no culprit'}) could not be helped."
            f" Tried: {history}. Exit code {EXIT_CODE_STOPPED}."
        )

    # ----------------------------------------------------------------------------------------------------- recovery

    def _watch_recovery(self, trainer: Trainer, record: StepRecord) -> None:
        """Close incidents whose run is back on the path that it was on."""
        context = self.context(trainer)
        for incident in context.incidents:
            watch = self._watched.get(incident.number)
            if not incident.is_open or watch is None or record.step <= watch.last_step:
                continue
            watch.healthy.append((record.step, watch.loss(record, self._gone(trainer))))
            if len(watch.healthy) < self.probation_steps:
                continue
            incident.path_z = watch.path_z(self._gone(trainer))
            incident.closed_step = record.step
            back = incident.path_z is None or incident.path_z <= self.recovered_z
            if not back and len(watch.healthy) < 3 * self.probation_steps:
                continue
            incident.status = IncidentStatus.RECOVERED if back else IncidentStatus.ESCALATED
            incident.closing = _closing_words(incident, self.probation_steps, self.recovered_z)
            del self._watched[incident.number]
            self._journal_incident(trainer, incident, "closed")
            log.warning("incident %d closed: %s", incident.number, incident.closing)
            checkpoint = find_callback(trainer, ForensicCheckpoint)
            if checkpoint is not None:
                checkpoint.on_recovered(trainer, incident.number)

    def _gone(self, trainer: Trainer) -> frozenset[str]:
        """Sources that are quarantined: the path is then compared on the sources that are left."""
        ledger = self.context(trainer).ledger
        if ledger is None:
            return frozenset()
        return frozenset(n.removeprefix("source:") for n in ledger.active if n.startswith("source:"))

    def _mark_healthy(self, trainer: Trainer, record: StepRecord) -> None:
        from ..triage.window import mark_healthy

        mark_healthy(trainer)
        rollback = find_callback(trainer, Rollback)
        if rollback is not None and not any(
            i.is_open and i.kinds - REPORT_ONLY for i in self.context(trainer).incidents
        ):
            rollback.mark_known_good(trainer, record.step - self.probation_steps)

    # ------------------------------------------------------------------------------------------------------ journal

    def _journal_minor(self, trainer: Trainer, finding: Finding) -> None:
        self.context(trainer).write(trainer, "finding", finding=finding.to_dict())
        if finding.severity is Severity.ALARM:
            log.info("%s", finding.message)

    def _journal_incident(self, trainer: Trainer, incident: Incident, what: str) -> None:
        context = self.context(trainer)
        context.write(trainer, f"incident.{what}", incident=incident.to_dict())
        context.journal.flush()

    def _journal_action(self, trainer: Trainer, incident: Incident) -> None:
        context = self.context(trainer)
        entry = dict(incident.actions[-1])
        action = entry.pop("action")
        entry.pop("step"), entry.pop("attempt")
        context.write(trainer, f"action.{action}", incident=incident.number, **entry)
        context.journal.flush()

    def _scaler_handles(self, trainer: Trainer, record: StepRecord) -> bool:
        """A fp16 overflow (finite loss, non-finite gradients under a scaler) is skipped by the scaler itself."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return scaler is not None and scaler.is_enabled() and not record.column("nonfinite_loss").any()

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "gates": self._gates,
            "taken": [(gate, str(action)) for gate, action in self._taken],
            "watched": {number: watch.state_dict() for number, watch in self._watched.items()},
            "reduction": dict(self._reduction) if self._reduction else None,
            "plan_until": self._plan_until,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._gates = state_dict["gates"]
        self._taken = deque((gate, Action(action)) for gate, action in state_dict["taken"])
        self._watched = {int(n): _Watch.from_state(w) for n, w in state_dict["watched"].items()}
        self._reduction = state_dict["reduction"]
        self._plan_until = state_dict["plan_until"]


# A finding of this kind concerns one step; the same kind at a later step is another incident.
_SINGLE_STEP = frozenset(
    {
        FindingKind.SPIKE,
        FindingKind.INVALID_BATCH,
        FindingKind.NO_SUPERVISED_TOKENS,
        FindingKind.NONFINITE_LOSS,
        FindingKind.NONFINITE_GRADS,
    }
)


class _Watch:
    """What the response remembers of an open incident."""

    def __init__(self, step: int, attempt: int, history: Sequence[StepRecord]) -> None:
        self.last_step, self.last_attempt = step, attempt
        self.answers = 0
        self.case = ""
        self.examined: set[FindingKind] = set()
        self.examined_answers = 0
        self.healthy: list[tuple[int, float]] = []
        self.before = [
            {
                "step": r.step,
                "loss": r.mean_loss,
                "sources": {s: (r.source_loss(s), float(r.column(SOURCE_TOKENS + s).sum())) for s in r.sources},
            }
            for r in history
        ]

    @staticmethod
    def loss(record: StepRecord, gone: frozenset[str]) -> float:
        """Mean loss in nats, over the sources that are left."""
        left = [s for s in record.sources if s not in gone]
        if not gone or not left:
            return record.mean_loss
        losses = np.concatenate([record.column(SOURCE_LOSS + s) for s in left])
        tokens = np.concatenate([record.column(SOURCE_TOKENS + s) for s in left])
        return weighted_mean(losses, tokens)

    def path_z(self, gone: frozenset[str]) -> float | None:
        """Distance of the recent median loss from the forecast made before the incident, in robust sigma."""
        steps, losses = [], []
        for entry in self.before:
            loss = entry["loss"]
            if gone and entry["sources"]:
                left = [v for s, v in entry["sources"].items() if s not in gone]
                loss = weighted_mean(np.array([v[0] for v in left]), np.array([v[1] for v in left])) if left else loss
            if np.isfinite(loss):
                steps.append(entry["step"])
                losses.append(loss)
        after = [(s, x) for s, x in self.healthy if np.isfinite(x)]
        if len(losses) < MIN_HISTORY or not after:
            return None
        band = ForecastBand.fit(zip(steps, losses, strict=True))
        return float(np.median([band.z(step, loss) for step, loss in after]))

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"examined": [str(k) for k in self.examined]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Watch:
        watch = cls(state["last_step"], state["last_attempt"], [])
        vars(watch).update(state)
        watch.healthy = [(int(step), float(loss)) for step, loss in state["healthy"]]
        watch.examined = {FindingKind(k) for k in state["examined"]}
        return watch


def _verdict_from_findings(incident: Incident, record: StepRecord) -> Verdict:
    """What the findings alone say, without an experiment."""
    kinds = incident.kinds
    culprits = tuple(dict.fromkeys(c for f in incident.findings for c in f.culprits))
    samples = tuple(c.removeprefix("sample:") for c in culprits if c.startswith("sample:"))
    data = {FindingKind.INVALID_BATCH, FindingKind.NO_SUPERVISED_TOKENS, FindingKind.REPEATED_SAMPLES}
    if kinds & data:
        kind = VerdictKind.DATA
    elif FindingKind.RESTART_JUMP in kinds:
        kind = VerdictKind.OPTIMIZATION
    else:
        kind, samples = VerdictKind.UNDETERMINED, ()
    return Verdict(kind, culprits, "from the findings alone", incident.since_step, sample_ids=samples)


def _closing_words(incident: Incident, probation: int, limit: float) -> str:
    if incident.path_z is None:
        return f"{probation} healthy steps; there was too little history for a forecast"
    if incident.status is IncidentStatus.RECOVERED:
        return (
            f"back on the path: {incident.path_z:+.1f} sigma from the forecast (at most {limit:g}), {probation} steps"
        )
    return f"not back on the path: {incident.path_z:+.1f} sigma from the forecast (at most {limit:g})"


def _loaders(trainer: Trainer) -> list[Any]:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    loaders = trainer.train_dataloader
    return list(loaders.flattened) if isinstance(loaders, CombinedLoader) else [loaders]


def _clone(state: Any) -> Any:
    import copy

    return copy.deepcopy(state)


__all__ = ["EXIT_CODE_STOPPED", "NONFINITE", "IncidentResponse", "TrainingStopped"]
