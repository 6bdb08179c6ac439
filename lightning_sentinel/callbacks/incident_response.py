"""From findings to an answer: opens incidents, has the cause examined, asks the policy, acts, and watches the recovery."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from .. import recovery
from ..actuator import Actuator
from ..bundle.writing import BundleWriter
from ..context import RunContext
from ..hardware import Provider, provider_of, read_all
from ..incidents import Action, Finding, FindingKind, Incident, IncidentStatus, Severity, Verdict, VerdictKind
from ..limits import check_limits
from ..policy import NEEDS_ROLLBACK, REPORT_ONLY, Choice, Policy, Situation, case_of
from ..record import StepRecord
from ..recovery import IncidentWatch
from ..state.cursor import apply_ledger
from ..state.lightning_private import scaler_of, train_loaders
from ..triage.nonfinite import first_bad_boundary
from ..triage.window import StepWindow, ensure_capture, mark_healthy
from .base import SentinelCallback, find_callback, gather_objects, ledger_of, log_of, look
from .batch_validator import BatchValidator
from .forensic_checkpoint import ForensicCheckpoint
from .rank_telemetry import RankTelemetry
from .rollback import Rollback, RollbackUnavailable

log = logging.getLogger("lightning_sentinel")

EXIT_CODE_STOPPED = 77


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
    ``incident.bundle`` ``.bundle_failed``      where the incident's bundle lies and how to replay it, or why there is none
    ``triage.verdict``                          after the experiments
    ``action.<name>``                           before it takes effect
    ``infra.hardware``                          when an incident opens: this rank's hardware counters
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
        max_forwards: Budget of the experiments of one incident, in forward passes; an incident that is examined again,
            because an answer did not help, has what is left of it.
        max_seconds: Budget of the experiments of one incident, in seconds, likewise.
        capture_state: Write the parameters into an incident's bundle, so that its step can be replayed offline: one copy
            of the weights on disk for each incident (no optimizer state), made in host memory at the gate and written
            beside the training.
        capture_batch: Write the micro-batches too; otherwise only the ids of their samples, to fetch them again. A bundle's
            files can be read by their owner alone (mode 0600).
        bundle_bytes: What the bundles of one fit may take on disk together; later incidents leave evidence, ids and random
            states only.
        exit_on_stop: Raise :class:`TrainingStopped` (exit code 77) when the ladder ends in ``stop``; otherwise only
            ``trainer.should_stop`` is set.
        hardware_counters: A function without arguments that gives numbers by name (memory errors, clocks, temperature), or
            its path as ``package.module.function``; asked on every rank when an incident opens. What it raises is noted.
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
        capture_state: bool = True,
        capture_batch: bool = False,
        bundle_bytes: int = 8 * 2**30,
        exit_on_stop: bool = True,
        hardware_counters: Provider | str | None = None,
    ) -> None:
        check_limits("IncidentResponse", locals())
        self.policy = Policy(mode, dict(ladders or {}), dict(budgets or {}), budget_steps)
        self.probation_steps = probation_steps
        self.recovered_z = recovered_z
        self.lr_factor, self.lr_steps, self.lr_permanent = lr_factor, lr_steps, lr_permanent
        self.triage = triage
        self.max_forwards, self.max_seconds = max_forwards, max_seconds
        self.bundles = BundleWriter(capture_state, capture_batch, bundle_bytes)
        self.exit_on_stop = exit_on_stop
        self.hardware_counters = provider_of(hardware_counters)
        self.stop_reason: str | None = None
        self.actuator = Actuator()
        self._watched: dict[int, IncidentWatch] = {}
        self._context: RunContext | None = None
        self._rollback: Rollback | None = None
        self._saved_incidents: list[dict[str, Any]] = []
        self._neutralises: BatchValidator | None = None
        self._taken: deque[tuple[int, Action]] = deque()
        self._gates = 0
        self._passed_in_batch = 0
        self._look: _Look | None = None

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and find_callback(trainer, RankTelemetry) is None:
            raise ValueError(
                "IncidentResponse needs RankTelemetry, which gathers the record that it answers; the Trainer has none."
                " Add lightning_sentinel.RankTelemetry() to the Trainer's callbacks, or use"
                " lightning_sentinel.default_callbacks()."
            )
        validator = find_callback(trainer, BatchValidator)
        if validator is not None and self.policy.mode == "recover" and not validator.neutralise:
            validator.neutralise = True
            self._neutralises = validator

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop_reason = None
        self._passed_in_batch = 0  # an exception may have ended the last fit within a batch
        self._context = self.context(trainer)
        self._rollback = find_callback(trainer, Rollback)
        self._context.stopped_by = None
        self.actuator.attach(trainer)
        ensure_capture(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bundles.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.bundles.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.actuator.detach()
        if self._neutralises is not None:
            self._neutralises.neutralise = False
            self._neutralises = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._passed_in_batch = 0
        self.actuator.finish_batch(trainer)
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
        self._match_watches(record)
        serious, slow = self._serious(findings)
        for finding in findings:
            if finding not in (*serious, *slow):
                self._journal_minor(trainer, finding)
        look, self._look = self._look, None
        if look is not None and look.record.step == record.step and not serious:
            self._explain(trainer, look, record)
        if serious:
            self._answer(trainer, pl_module, optimizer, record, serious)
        elif record.has_nonfinite and not self._scaler_handles(trainer, record):
            # No detector called it an incident; a non-finite update is kept out all the same.
            if self.policy.mode != "observe":
                self.actuator.hold(trainer, optimizer)
        else:
            self._watch_recovery(trainer, record)
            self.actuator.keep_plan(trainer, optimizer, record.step)
            self._mark_healthy(trainer, record)
        if slow:
            self._answer(trainer, pl_module, optimizer, record, slow)
        if not self.context(trainer).held:
            self._passed_in_batch += 1

    def decide_late(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer | None,
        record: StepRecord,
        findings: Sequence[Finding],
        *,
        kept_out: bool,
        window: StepWindow | None,
    ) -> None:
        """Answer a record that is read at the gate of the next step (``RankTelemetry(sync="lagged")``).

        Every rank calls it alike. Where something may have to be done, the run goes back to before that step, which runs
        again under the gate: there :meth:`decide` sees it before its update. Where the run cannot go back, what was found
        is written down; a replay would meet other weights, so the verdict rests on the findings.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            optimizer: The optimizer of the present step, or None after the last one.
            record: Of the step before.
            findings: On that record.
            kept_out: Its update was kept out of the weights on the device.
            window: Its captured micro-batches.
        """
        self._match_watches(record)
        serious, slow = self._serious(findings)
        if not serious and not kept_out and not record.has_nonfinite:
            self._gates += 1
            self._watch_recovery(trainer, record)
            if optimizer is not None:
                self.actuator.keep_plan(trainer, optimizer, record.step)
            self._mark_healthy(trainer, record, window)
        elif optimizer is not None and self._look_again(trainer, optimizer, record, serious, kept_out, window):
            return
        else:
            self._gates += 1
        for finding in findings:
            if finding not in (*serious, *slow):
                self._journal_minor(trainer, finding)
        for group in (serious, slow):
            if group:
                self._note_late(trainer, record, group, window)

    def _note_late(
        self, trainer: Trainer, record: StepRecord, findings: list[Finding], window: StepWindow | None
    ) -> None:
        """Write down an incident of the step before, with what the findings alone say of it."""
        incident = self._incident_for(trainer, record, findings)
        watch = self._watched[incident.number]
        watch.healthy, watch.last_step = [], record.step
        kinds = {f.kind for f in findings}
        if self._needs_triage(kinds, incident, watch):
            watch.examined = {*watch.examined, *kinds}
            boundary = first_bad_boundary(window) if window is not None else None
            incident.verdict = _verdict_from_findings(incident, record, boundary[1] if boundary else "")
            self.context(trainer).write(
                trainer, "triage.verdict", incident=incident.number, verdict=incident.verdict.to_dict()
            )
        self._journal_incident(trainer, incident, "updated")

    def _look_again(
        self,
        trainer: Trainer,
        optimizer: Optimizer,
        record: StepRecord,
        serious: list[Finding],
        kept_out: bool,
        window: StepWindow | None,
    ) -> bool:
        """Go back to before the step of this record, so that it runs again under the gate; False where that cannot be."""
        rollback, telemetry = find_callback(trainer, Rollback), find_callback(trainer, RankTelemetry)
        if self.policy.mode != "recover" or rollback is None or telemetry is None or rollback.unavailable(trainer):
            return False
        number = self._next_number(trainer) if serious else 0
        try:
            snapshot = rollback.request(
                trainer,
                before_step=record.step,
                action=Action.RETRY_STEP,
                incident=number,
                reason=f"the record of step {record.step} is read one step late: the step runs again before it is answered",
                untouched=kept_out,
            )
        except RollbackUnavailable as error:
            log.warning("step %d cannot run again: %s", record.step, error)
            return False
        boundary = first_bad_boundary(window) if window is not None else None
        self._look = _Look(record, serious, boundary[1] if boundary else "", snapshot.light)
        telemetry.lag.look_closer(record.step)
        self.actuator.hold(trainer, optimizer)
        return True

    def _explain(self, trainer: Trainer, look: _Look, record: StepRecord) -> None:
        """The step has run again, with the same data and from the same state, and nothing is wrong: that was the answer."""
        if not look.findings:
            return  # its loss was only near what would have been a finding
        incident = self._incident_for(trainer, record, look.findings)
        watch = self._watched[incident.number]
        kinds = {f.kind for f in look.findings}
        incident.verdict = look.verdict(record, incident)
        watch.examined = {*watch.examined, *kinds}
        context = self.context(trainer)
        context.write(trainer, "triage.verdict", incident=incident.number, verdict=incident.verdict.to_dict())
        watch.case = case_of(incident.verdict, kinds, neutralised=False, scaled=False)
        action = Action.RETRY_STEP if look.light else Action.ROLLBACK_REPLAY
        self._taken.append((self._gates, action))
        incident.actions.append(
            {
                "action": str(action),
                "step": record.step,
                "attempt": look.record.attempt,
                "reason": "the step has run again, and what was found did not come again",
                "passed_over": [],
                "excluded": [],
            }
        )
        watch.answers += 1
        watch.last_step = record.step
        self._journal_incident(trainer, incident, "updated")

    def _next_number(self, trainer: Trainer) -> int:
        context = self.context(trainer)
        return 1 + max([int(context.scratch.get("first_incident", 0)), *(i.number for i in context.incidents)])

    def _match_watches(self, record: StepRecord) -> None:
        """After a resume: incidents come back with this callback's state unless a checkpoint has brought them already."""
        context = self._context
        if context is None or not (context.incidents or self._watched or self._saved_incidents):
            return
        if self._saved_incidents:
            known = {i.number for i in context.incidents}
            saved = [Incident.from_dict(i) for i in self._saved_incidents]
            context.incidents = sorted(
                [*context.incidents, *(i for i in saved if i.number not in known)], key=lambda i: i.number
            )
            self._saved_incidents = []
        still_open = {i.number for i in context.unsolved()}
        if self._watched.keys() != still_open:
            self._watched = {n: w for n, w in self._watched.items() if n in still_open}
            for number in still_open - self._watched.keys():
                self._watched[number] = IncidentWatch(record.step, context.history)

    def _serious(self, findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Findings that need an answer, and slow ranks, which are an incident of their own: they touch no weights.

        An overflow counts while an incident of overflows is open.
        """
        serious: list[Finding] = []
        slow: list[Finding] = []
        if not findings:
            return serious, slow
        collapse_open = any(w.case == "numerics/scale" and w.answers for w in self._watched.values())
        for finding in findings:
            if finding.kind is FindingKind.SCALER_OVERFLOW and collapse_open:
                serious.append(replace(finding, severity=Severity.INCIDENT))
            elif finding.severity is Severity.INCIDENT:
                (slow if finding.kind is FindingKind.STRAGGLER else serious).append(finding)
        return serious, slow

    def _answer(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        record: StepRecord,
        findings: list[Finding],
    ) -> None:
        incident = self._incident_for(trainer, record, findings)
        watch = self._watched[incident.number]
        watch.healthy = []
        kinds = {f.kind for f in findings}
        if kinds - REPORT_ONLY:
            # Before the examination: should that end the run, the bundle is what is left to examine.
            self.bundles.capture(trainer, pl_module, optimizer, incident, record)
        if self._needs_triage(kinds, incident, watch):
            incident.verdict = self._examine(trainer, pl_module, optimizer, incident, record, watch)
            watch.examined = {*watch.examined, *kinds}
            watch.examined_answers = watch.answers
        verdict = incident.verdict
        neutralised = bool(findings) and all(bool(f.evidence.get("neutralised")) for f in findings)
        scaled = scaler_of(trainer) is not None
        watch.case = case_of(verdict, incident.kinds | kinds, neutralised=neutralised, scaled=scaled)
        since = verdict.since_step if verdict.since_step is not None else incident.since_step
        watch.before = [p for p in watch.before if p.step < since]
        if watch.case in _STATE_AT_FAULT and watch.blames_restore_point(record.step):
            assert watch.restored is not None
            since = min(since, watch.restored - 1)
        # Not the slow rank's: what is not finite in the same record is answered for itself.
        nonfinite = kinds != _SLOW and record.has_nonfinite and not self._scaler_handles(trainer, record)
        untouched = self.context(trainer).weights_untouched_since(min(since, record.step), record.step)
        situation = Situation(
            case=watch.case,
            repetition=watch.answers,
            step_is_held=untouched and self._passed_in_batch == 0,
            nonfinite=nonfinite,
            unavailable=self._unavailable(trainer, since, watch),
            spent=self._spent(),
        )
        choice = self.policy.choose(situation)
        watch.answers += choice.action is not Action.NONE
        watch.last_step = record.step
        was_open = incident.is_open
        self._act(trainer, optimizer, record, incident, watch, choice, since)
        named = frozenset(c for f in incident.findings for c in f.culprits)
        told = (frozenset(incident.kinds), named, incident.verdict, len(incident.actions))
        # Replicas that differ are looked at again and again: the same once more, with nothing done about it, is no news.
        if was_open and not incident.is_open:
            self._journal_incident(trainer, incident, "closed")
        elif not (kinds == {FindingKind.REPLICA_DRIFT} and told == watch.told):
            self._journal_incident(trainer, incident, "updated")
        watch.told = told

    def _incident_for(self, trainer: Trainer, record: StepRecord, findings: list[Finding]) -> Incident:
        """The open incident that these findings continue, or a new one."""
        context = self.context(trainer)
        kinds = {f.kind for f in findings}
        named = {c for f in findings for c in f.culprits if not c.startswith("sample:")}
        # A replay that passes an earlier incident's step may meet that trouble again: it is not what made the run go back.
        unsolved = context.unsolved()
        over = [i for i in context.incidents if not i.is_open and i.number != context.stopped_by]
        earlier = any(i.opened_step == record.step and kinds & i.kinds for i in over)
        for incident in reversed(unsolved):
            if earlier and not (incident.opened_step == record.step and kinds & incident.kinds):
                continue
            watch = self._watched.get(incident.number)
            if watch is None or (kinds == _SLOW) is not (incident.kinds == _SLOW):
                continue
            near = min(f.since_step for f in findings) <= watch.last_step + 1
            same = bool(kinds & incident.kinds - REPORT_ONLY) and not (kinds & _SINGLE_STEP)
            same = same or bool(named & set(incident.verdict.culprits))
            # The run went back and comes to the same trouble at the same step, whatever the way there has brought.
            returned = incident.opened_step == record.step and record.attempt > incident.attempt
            same = same or (returned and bool(kinds & incident.kinds - REPORT_ONLY))
            if near or same or (watch.case == "numerics/scale" and FindingKind.SCALER_OVERFLOW in kinds):
                incident.findings.extend(findings[: max(0, 64 - len(incident.findings))])
                return incident
        incident = Incident(
            number=self._next_number(trainer),
            opened_step=record.step,
            since_step=min(f.since_step for f in findings),
            attempt=context.attempt,
            tokens=record.tokens,
            findings=list(findings),
        )
        if self.hardware_counters is not None:
            mine, incident.hardware = read_all(
                trainer, self.hardware_counters, sorted({r for f in findings for r in f.ranks})
            )
            context.write(trainer, "infra.hardware", incident=incident.number, counters=mine)
        context.incidents.append(incident)
        self._watched[incident.number] = IncidentWatch(record.step, context.history)
        self._journal_incident(trainer, incident, "opened")
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        if checkpoint is not None and kinds - REPORT_ONLY:
            checkpoint.on_incident(trainer, incident.since_step)
        said = " ".join(f.message if f.message.endswith(".") else f"{f.message}." for f in findings)
        log_of(trainer).warning("incident %d at step %d: %s%s", incident.number, record.step, said, look(trainer))
        return incident

    def _needs_triage(self, kinds: set[FindingKind], incident: Incident, watch: IncidentWatch) -> bool:
        """Examine when the incident is new, has a new side, or an answer has not helped."""
        if watch.case == "numerics/scale" and watch.answers:
            return False  # a further overflow of a convicted module tells nothing new
        unanswered = self.policy.mode == "recover" and watch.answers > watch.examined_answers
        # Where nothing was done about a cause that is known, what is found later is its consequence.
        known = bool(incident.verdict.culprits) and watch.case != "report_only"
        settled = known and watch.answers == watch.examined_answers
        return (bool(kinds - watch.examined) and not settled) or unanswered

    def _examine(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        incident: Incident,
        record: StepRecord,
        watch: IncidentWatch,
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
                    spent=watch.spent,
                )
            except Exception as error:  # the examination must never be what ends the run
                if trainer.world_size > 1:
                    raise  # the ranks have parted: going on would end in a time-out somewhere else
                log.exception("the examination of incident %d failed; the verdict stays open", incident.number)
                sentence = f"the examination failed: {type(error).__name__}: {error}"
                verdict = Verdict(sentence=sentence, evidence=_comparisons(record, f"not measured: {sentence}"))
        context.write(trainer, "triage.verdict", incident=incident.number, verdict=verdict.to_dict())
        if verdict.kind is not VerdictKind.UNDETERMINED or verdict.sentence:
            log_of(trainer).warning(
                "incident %d: %s, %s. %s",
                incident.number,
                verdict.kind,
                ", ".join(verdict.culprits) or "nobody named",
                verdict.sentence,
            )
        return verdict

    def _unavailable(self, trainer: Trainer, since: int, watch: IncidentWatch) -> dict[Action, str]:
        context = self.context(trainer)
        reasons: dict[Action, str] = {}
        rollback = find_callback(trainer, Rollback)
        why = "there is no Rollback callback" if rollback is None else rollback.unavailable(trainer)
        if rollback is not None and why is None and not rollback.reaches(trainer, since):
            why = f"no snapshot and no known-good checkpoint is older than step {since}"
            reasons |= dict.fromkeys((Action.ROLLBACK_REPLAY, Action.ROLLBACK_SKIP), why)
        elif why is not None:
            reasons |= dict.fromkeys(NEEDS_ROLLBACK, why)
        if rollback is not None and (problem := rollback.replay_problem(trainer, since)) is not None:
            reasons.setdefault(Action.ROLLBACK_REPLAY, problem)
        loaders = train_loaders(trainer)
        if not any(hasattr(loader, "exclude") for loader in loaders):
            names = ", ".join(sorted({type(loader).__name__ for loader in loaders}))
            reasons.setdefault(Action.ROLLBACK_SKIP, f"{names} has no exclude(names), so nothing can be left out")
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        saved = checkpoint.saved_schedule(trainer) if checkpoint is not None else None
        if saved is None and not any(s.params is not None and s.step <= since for s in context.snapshots):
            reasons[Action.RESTORE_OPTIMIZER] = "neither a snapshot nor a checkpoint holds an older optimizer state"
        if scaler_of(trainer) is None:
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
        watch: IncidentWatch,
        choice: Choice,
        since: int,
    ) -> None:
        context = self.context(trainer)
        verdict, action = incident.verdict, choice.action
        names = self._names_to_exclude(trainer, record, verdict, watch.case, action)
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
            self.actuator.hold(trainer, optimizer)
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
                log_of(trainer).warning(
                    "incident %d: no rollback: %s; this step is skipped instead", incident.number, error
                )
                incident.actions[-1] |= {"action": str(Action.SKIP_STEP), "reason": f"{choice.reason}; {error}"}
                self._journal_action(trainer, incident, record)
                return
            self._announce_exclusion(trainer, incident, names, choice.reason)
            incident.actions[-1]["to_step"] = watch.restored = snapshot.step
            if watch.case == "optimization/lr":
                self.actuator.plan_until = record.step + self.probation_steps
            return
        if action is Action.NONE:
            if record.has_nonfinite and not self._scaler_handles(trainer, record):
                self.actuator.hold(trainer, optimizer)
            return
        self._journal_action(trainer, incident, record)
        if action is Action.SKIP_STEP:
            self.actuator.hold(trainer, optimizer)
            if self._passed_in_batch and self.policy.mode == "recover":
                self._undo_earlier_update(trainer, incident, record, choice)
        elif action is Action.REDUCE_LR:
            self.actuator.hold(trainer, optimizer)
            steps = None if self.lr_permanent else self.lr_steps
            self.actuator.reduce_rate(trainer, record.step, incident.number, self.lr_factor, steps)
        elif action is Action.LOWER_LOSS_SCALE:
            self.actuator.lower_scale(float(record.column("loss_scale").min()))
        elif action is Action.RESTORE_OPTIMIZER:
            self._restore_optimizer(trainer, optimizer, since, watch.case)
        elif action is Action.STOP:
            self.actuator.hold(trainer, optimizer)
            if incident.is_open:
                context.stopped_by = incident.number
                recovery.give_up(incident, record.step, watch.case)
                self._say_closed(trainer, incident)
            self.stop_reason = self._last_words(record, incident)
            log_of(trainer).error("%s%s", self.stop_reason, look(trainer))
        if names:
            self._quarantine(trainer, incident, names, choice.reason, record.step)

    def _names_to_exclude(
        self, trainer: Trainer, record: StepRecord, verdict: Verdict, case: str, action: Action
    ) -> tuple[str, ...]:
        """What shall not be drawn again: ``sample:<id>`` and ``source:<name>``, the same on every rank."""
        if action in (Action.NONE, Action.STOP) or self.policy.mode != "recover":
            return ()
        if case == "data/source":
            return tuple(c for c in verdict.culprits if c.startswith("source:"))
        if case in ("data/samples", "data/neutralised"):
            named = tuple(c for c in verdict.culprits if c.startswith("sample:"))
            if named:
                return named
        elif action is not Action.ROLLBACK_SKIP:
            return ()
        samples = verdict.sample_ids or tuple(gather_objects(trainer, list(record.sample_ids)))
        return tuple(f"sample:{s}" for s in samples)

    def _undo_earlier_update(self, trainer: Trainer, incident: Incident, record: StepRecord, choice: Choice) -> None:
        """Another optimizer has already stepped in this batch: the half-made step goes back as a whole."""
        rollback = find_callback(trainer, Rollback)
        if rollback is None:
            log_of(trainer).warning(
                "an earlier optimizer has already stepped in this batch and there is no Rollback to undo it"
            )
            return
        names = tuple(f"sample:{s}" for s in gather_objects(trainer, list(record.sample_ids)))
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
            log_of(trainer).warning(
                "an earlier optimizer has already stepped in this batch; it can't be undone: %s", error
            )

    def _restore_optimizer(self, trainer: Trainer, optimizer: Optimizer, since: int, case: str) -> None:
        """State of optimizer and schedule from before: the checkpoint's after a restart, else the newest clean snapshot's."""
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        saved = checkpoint.saved_schedule(trainer) if checkpoint is not None else None
        if case == "optimization/scheduler" and saved is not None:
            self.actuator.restore_schedule(trainer, saved)
            return
        self.actuator.hold(trainer, optimizer)
        clean = [s for s in self.context(trainer).snapshots if s.params is not None and s.step <= since][-1]
        self.actuator.restore_optimizers(trainer, clean.optimizers)
        if case == "optimization/scheduler":
            rates = [[group["lr"] for group in state["param_groups"]] for state in clean.optimizers]
            self.actuator.restore_schedule(trainer, {"schedulers": clean.schedulers, "rates": rates})

    def _quarantine(self, trainer: Trainer, incident: Incident, names: Sequence[str], reason: str, step: int) -> None:
        ledger = ledger_of(trainer)
        ledger.add(names, step=step, incident=incident.number, policy=self.policy.mode, reason=reason)
        self._announce_exclusion(trainer, incident, names, reason)
        for problem in apply_ledger(trainer, ledger):
            self.context(trainer).write(trainer, "quarantine.refused", reason=problem)
            log.warning("incident %d: %s", incident.number, problem)

    def _announce_exclusion(self, trainer: Trainer, incident: Incident, names: Sequence[str], reason: str) -> None:
        if names:
            self.context(trainer).write(
                trainer, "quarantine.added", names=list(names), incident=incident.number, reason=reason
            )

    def _last_words(self, record: StepRecord, incident: Incident) -> str:
        history = "; ".join(
            f"step {a['step']}: {a['action']} ({a['reason']})"
            + (f", passed over {', '.join(a['passed_over'])}" if a["passed_over"] else "")
            for a in incident.actions
        )
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
            watch.add(record)
            if len(watch.healthy) < self.probation_steps:
                continue
            path_z = watch.path_z(self._gone(trainer))
            back = path_z is None or path_z <= self.recovered_z or incident.kinds == _SLOW
            if not back and len(watch.healthy) < 3 * self.probation_steps:
                continue
            recovery.close(incident, record.step, path_z, self.recovered_z, len(watch.healthy))
            del self._watched[incident.number]
            self._journal_incident(trainer, incident, "closed")
            self._say_closed(trainer, incident)
            checkpoint = find_callback(trainer, ForensicCheckpoint)
            if checkpoint is not None:
                checkpoint.on_recovered(trainer, incident.number)

    @staticmethod
    def _say_closed(trainer: Trainer, incident: Incident) -> None:
        level = logging.INFO if incident.status is IncidentStatus.RECOVERED else logging.ERROR
        words = (incident.number, incident.status, incident.closing, look(trainer))
        log_of(trainer).log(level, "incident %d %s: %s.%s", *words)

    def _gone(self, trainer: Trainer) -> frozenset[str]:
        """Sources that are quarantined: the path is then compared on the sources that are left."""
        ledger = self.context(trainer).ledger
        if ledger is None:
            return frozenset()
        return frozenset(n.removeprefix("source:") for n in ledger.active if n.startswith("source:"))

    def _mark_healthy(self, trainer: Trainer, record: StepRecord, window: StepWindow | None = None) -> None:
        mark_healthy(trainer, window)
        context = self.context(trainer)
        if not context.snapshots or (context.incidents and any(i.kinds - REPORT_ONLY for i in context.unsolved())):
            return
        if self._rollback is not None:
            self._rollback.mark_known_good(trainer, record.step - self.probation_steps)

    # ------------------------------------------------------------------------------------------------------ journal

    def _journal_minor(self, trainer: Trainer, finding: Finding) -> None:
        self.context(trainer).write(trainer, "finding", finding=finding.to_dict())
        if finding.severity is Severity.ALARM:
            log_of(trainer).info("%s", finding.message)

    def _journal_incident(self, trainer: Trainer, incident: Incident, what: str) -> None:
        context = self.context(trainer)
        context.write(trainer, f"incident.{what}", incident=incident.to_dict())
        context.journal.flush()
        self.bundles.update(trainer, incident)

    def _journal_action(self, trainer: Trainer, incident: Incident, record: StepRecord) -> None:
        context = self.context(trainer)
        entry = dict(incident.actions[-1])
        action = entry.pop("action")
        entry.pop("step"), entry.pop("attempt")
        if action == Action.SKIP_STEP:  # no sample is passed over without a line that names it
            entry["samples"] = list(dict.fromkeys(gather_objects(trainer, list(record.sample_ids))))
        context.write(trainer, f"action.{action}", incident=incident.number, **entry)
        context.journal.flush()

    @staticmethod
    def _scaler_handles(trainer: Trainer, record: StepRecord) -> bool:
        """A fp16 overflow (finite loss, non-finite gradients under a scaler) is skipped by the scaler itself."""
        return scaler_of(trainer) is not None and not record.column("nonfinite_loss").any()

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "gates": self._gates,
            "taken": [(gate, str(action)) for gate, action in self._taken],
            "watched": {number: watch.state_dict() for number, watch in self._watched.items()},
            "incidents": self._saved_incidents
            or [i.to_dict() for i in (self._context.incidents if self._context else [])],
            "actuator": self.actuator.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._gates = state_dict["gates"]
        self._taken = deque((gate, Action(action)) for gate, action in state_dict["taken"])
        self._watched = {int(n): IncidentWatch.from_state(w) for n, w in state_dict["watched"].items()}
        self._saved_incidents = list(state_dict["incidents"])
        self.actuator.load_state_dict(state_dict["actuator"])


# Cases in which the state that was gone back to may be the damaged one.
_STATE_AT_FAULT = frozenset(
    {
        "data/cursor",
        "infrastructure/rank",
        "optimization/lr",
        "optimization/state",
        "optimization/other",
        "undetermined/nonfinite",
        "undetermined/loss",
    }
)


_SLOW = frozenset({FindingKind.STRAGGLER})


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


@dataclass(frozen=True)
class _Look:
    """A step that runs again under the gate, because its record was read one step late.

    Attributes:
        record: As it was first.
        findings: Those that need an answer.
        module: First watched module whose output was not finite; empty if none.
        light: Only the step itself runs again.
    """

    record: StepRecord
    findings: list[Finding]
    module: str
    light: bool

    def verdict(self, again: StepRecord, incident: Incident) -> Verdict:
        """What follows from the step having come out healthy the second time."""
        given = _verdict_from_findings(incident, again)
        if given.kind is not VerdictKind.UNDETERMINED:
            return given
        before, now = self.record.column("loss_nats"), again.column("loss_nats")
        ranks = np.flatnonzero(~((before == now) | (np.isnan(before) & np.isnan(now)))).tolist()
        bad = np.flatnonzero(self.record.column("nonfinite_loss")).tolist()
        ranks = bad or ranks
        if not ranks:
            return given
        named = f"module:{self.module}" if self.module else ""
        culprits = tuple(c for c in (named, *(f"rank:{r}" for r in ranks)) if c)
        what = "was not finite" if bad else "had another loss"
        where = f", first in the output of {self.module}" if self.module else ""
        return Verdict(
            VerdictKind.INFRASTRUCTURE,
            culprits,
            f"The step {what} on rank {', '.join(map(str, ranks))}{where}; run again from the same state with the same"
            " data it is healthy.",
            again.step,
            reproducible=False,
            evidence=_comparisons(
                self.record, "not measured: the step is over, and came out healthy when it ran again"
            ),
        )


def _verdict_from_findings(incident: Incident, record: StepRecord, module: str = "") -> Verdict:
    """What the findings alone say, without an experiment; ``module``: first one whose output was not finite, if known."""
    kinds = incident.kinds
    culprits = tuple(dict.fromkeys(c for f in incident.findings for c in f.culprits))
    if module:
        culprits = (f"module:{module}", *culprits)
    samples = tuple(c.removeprefix("sample:") for c in culprits if c.startswith("sample:"))
    data = {FindingKind.INVALID_BATCH, FindingKind.NO_SUPERVISED_TOKENS, FindingKind.REPEATED_SAMPLES}
    if kinds & data:
        kind = VerdictKind.DATA
    elif FindingKind.RESTART_JUMP in kinds:
        kind = VerdictKind.OPTIMIZATION
    elif kinds == _SLOW:
        kind = VerdictKind.INFRASTRUCTURE
    else:
        kind, samples = VerdictKind.UNDETERMINED, ()
    # of this step: an incident that is met again after an answer does not reach back to before that answer
    since = min((f.since_step for f in incident.findings if f.step == record.step), default=incident.since_step)
    why = "not measured: the verdict rests on the findings alone"
    return Verdict(
        kind, culprits, "from the findings alone", since, sample_ids=samples, evidence=_comparisons(record, why)
    )


def _comparisons(record: StepRecord, why: str) -> dict[str, Any]:
    """The five comparisons that each verdict lists, where there was no examination that could have made them."""
    from ..triage.causes.comparisons import unmeasured

    return {"comparisons": unmeasured(record, why)}
