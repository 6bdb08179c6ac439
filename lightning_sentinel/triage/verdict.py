"""The ladder of experiments: cheapest first, each journalled, until one of them convicts.

Every rank climbs the same rungs: whatever is decided rests on gathered values, and an experiment that fails on one rank is
not available on any. A cause is named only where a measurement leaves no other; otherwise the verdict is
*undetermined*, with all that was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from ..incidents import FindingKind, Incident, Spent, Verdict, VerdictKind
from ..record import StepRecord
from .causes.comparisons import Comparisons
from .causes.data import Data
from .causes.known import Known
from .causes.nonfinite import NonFiniteCause
from .causes.replayed import Replayed
from .causes.replicas import Replicas
from .causes.state import State
from .ladder import BUDGET_SPENT
from .nonfinite import NOT_REPRODUCED

NONFINITE = frozenset(
    {
        FindingKind.NONFINITE_LOSS,
        FindingKind.NONFINITE_GRADS,
        FindingKind.NONFINITE_ACTIVATION,
        FindingKind.SCALE_COLLAPSE,
    }
)


def investigate(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    incident: Incident,
    record: StepRecord,
    *,
    max_forwards: int = 12,
    max_seconds: float = 60.0,
    spent: Spent | None = None,
) -> Verdict:
    """Find the cause of an incident at the gate of its step, before the update.

    Every rank calls it with the same incident and record, and gets the same verdict. Weights, gradients, random states,
    buffers, metrics, logs and data position are as before when it returns.

    Args:
        trainer: The Trainer.
        module: The LightningModule, not wrapped by the strategy.
        optimizer: The optimizer that is about to step.
        incident: What was found, and since when.
        record: The current step's record.
        max_forwards: At most so many forward passes (micro-batches) on each rank; 0 allows none.
        max_seconds: No further experiment starts after so many seconds, by the slowest rank's clock.
        spent: What earlier examinations of this incident have taken of both; this one's part is added, whatever becomes
            of it.
    """
    case = Investigation(trainer, module, optimizer, incident, record, max_forwards, max_seconds, spent)
    try:
        return case.run()
    finally:
        if spent is not None:
            spent.forwards, spent.seconds = case.forwards, case.seconds


class Investigation(Known, State, NonFiniteCause, Replicas, Replayed, Data, Comparisons):
    """One incident's examination; each rung is a method that returns a verdict or None to climb on."""

    def run(self) -> Verdict:
        nonfinite = bool(self.kinds & NONFINITE) or self.record.has_nonfinite
        rungs: list[Callable[[], Verdict | None]] = [
            self.inputs,
            self.restart,
            self.stragglers,
            self.no_gradient,
            self.given_state,
            self.learning_rate,
            self.replicas,
            self.initialization,
            self.moments,
            self.weights,
            *([self.nonfinite] if nonfinite else [self.replay_step, self.same_batch, self.reduction, self.computation]),
            *([] if nonfinite else [self.sources, self.other_state]),
        ]
        verdict = None
        for rung in rungs:
            verdict = next((v for v in self.peers.gather(rung()) if v is not None), None)
            if verdict is not None:
                break
        if verdict is None:
            verdict = self.verdict(VerdictKind.UNDETERMINED, (), "No experiment convicted anybody.")
        verdict = self._with_budget(verdict)
        forwards = self.forwards - self.before.forwards
        evidence = {**verdict.evidence, "comparisons": self.comparisons(), "forwards": forwards}
        verdict = dataclasses.replace(verdict, experiments=tuple(self.experiments), evidence=evidence)
        return self.peers.from_first(verdict)

    def _with_budget(self, verdict: Verdict) -> Verdict:
        """The verdict says what it lacks where the incident's budget did not cover an experiment.

        A culprit that an earlier examination has named stands where this one could not look. Samples do not: those of
        this step are others.
        """
        missing = list(dict.fromkeys(e.name for e in self.experiments if e.result == BUDGET_SPENT))
        if not missing:
            return verdict
        standing = self.incident.verdict
        if verdict.kind is VerdictKind.UNDETERMINED and standing.culprits and standing.kind is not VerdictKind.DATA:
            said = standing.evidence.get("stands", standing.sentence)
            verdict = dataclasses.replace(
                standing,
                sentence=f"As found before: {said}",
                since_step=verdict.since_step,
                sample_ids=(),
                evidence={**verdict.evidence, "stands": said},
            )
        sentence = (
            f"{verdict.sentence} The budget of this incident is spent ({self.forwards} of {self.max_forwards} forward"
            f" passes, {self.seconds:.1f} of {self.max_seconds:g} s), not run: {', '.join(missing)}."
        )
        return dataclasses.replace(verdict, sentence=sentence)


__all__ = ["NOT_REPRODUCED", "Investigation", "investigate"]
