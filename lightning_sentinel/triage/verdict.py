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

from ..incidents import FindingKind, Incident, Verdict, VerdictKind
from ..record import StepRecord
from .causes.comparisons import Comparisons
from .causes.data import Data
from .causes.known import Known
from .causes.nonfinite import NonFiniteCause
from .causes.replayed import Replayed
from .causes.replicas import Replicas
from .causes.state import State
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
    """
    case = Investigation(trainer, module, optimizer, incident, record, max_forwards, max_seconds)
    return case.run()


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
        evidence = {**verdict.evidence, "comparisons": self.comparisons(), "forwards": self.forwards}
        verdict = dataclasses.replace(verdict, experiments=tuple(self.experiments), evidence=evidence)
        return self.peers.from_first(verdict)


__all__ = ["NOT_REPRODUCED", "Investigation", "investigate"]
