"""Is the run back on the path that it was on? Decided by the forecast made from the losses before the incident.

A user has no clean run to compare with: the trajectory before the incident is continued, and the healthy steps after the
answer are measured against it. Where a source of the mixture was quarantined, both sides are taken over the sources that are
left, because the mixture's mean is then another quantity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .detectors.forecast import ForecastBand
from .incidents import Action, FindingKind, Incident, IncidentStatus, Spent
from .record import SOURCE_TOKENS, StepRecord, weighted_mean

MIN_HISTORY = 8  # losses that a forecast needs at least


class IncidentWatch:
    """What is remembered of an open incident until it is closed.

    Attributes:
        last_step: Newest step with a finding of this incident, or on which it was answered.
        answers: How many answers it has had.
        case: The ladder that answers it.
        restored: Step of the restore point that the newest rollback went to, or None.
        examined: Kinds of findings that the triage has seen.
        spent: What the triage has taken of the incident's budget.
        healthy: Losses of the healthy steps since ``last_step``, ``(step, loss over all sources, by source)``.
        before: The same for the steps before the incident.
        told: What was journalled of it last, to tell whether there is news.
    """

    def __init__(self, step: int, history: Sequence[StepRecord] = ()) -> None:
        self.last_step = step
        self.answers = 0
        self.examined_answers = 0
        self.case = ""
        self.restored: int | None = None
        self.examined: set[FindingKind] = set()
        self.spent = Spent()
        self.before = [_Point.of(r) for r in history]
        self.healthy: list[_Point] = []
        self.told: object = None

    def add(self, record: StepRecord) -> None:
        """One more healthy step. Steps that another incident's rollback repeats count once."""
        while self.healthy and self.healthy[-1].step >= record.step:
            self.healthy.pop()
        self.healthy.append(_Point.of(record))

    def blames_restore_point(self, step: int) -> bool:
        """True if trouble at ``step`` says that the restore point gone back to holds the damage already.

        It does where the trouble comes back on the way on which it came before, or soon after: within as many steps again
        as had led from the restore point to it. What comes later has passed that way in good health; its restore
        points are the ones taken since.

        Example:
            >>> watch = IncidentWatch(50)
            >>> watch.restored = 40
            >>> watch.blames_restore_point(50), watch.blames_restore_point(60), watch.blames_restore_point(61)
            (True, True, False)
        """
        return self.restored is not None and step <= self.last_step + max(self.last_step - self.restored, 1)

    def path_z(self, gone: frozenset[str] = frozenset()) -> float | None:
        """Median distance of the healthy steps from the forecast, in robust sigma; None without enough history."""
        before = [(p.step, loss) for p in self.before if math.isfinite(loss := p.loss(gone))]
        after = [(p.step, loss) for p in self.healthy if math.isfinite(loss := p.loss(gone))]
        if len(before) < MIN_HISTORY or not after:
            return None
        band = ForecastBand.fit(before)
        return float(np.median([band.z(step, loss) for step, loss in after]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self.last_step,
            "answers": self.answers,
            "examined_answers": self.examined_answers,
            "case": self.case,
            "restored": self.restored,
            "examined": sorted(str(k) for k in self.examined),
            "spent": vars(self.spent).copy(),
            "before": [p.state() for p in self.before],
            "healthy": [p.state() for p in self.healthy],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> IncidentWatch:
        watch = cls(state["last_step"])
        watch.answers, watch.examined_answers = state["answers"], state["examined_answers"]
        watch.case, watch.restored = state["case"], state["restored"]
        watch.examined = {FindingKind(k) for k in state["examined"]}
        watch.spent = Spent(**state.get("spent", {}))  # checkpoints of earlier versions have none
        watch.before = [_Point(*p) for p in state["before"]]
        watch.healthy = [_Point(*p) for p in state["healthy"]]
        return watch


class _Point:
    """Loss of one step, in all and by source."""

    __slots__ = ("mean", "sources", "step")

    def __init__(self, step: int, mean: float, sources: dict[str, tuple[float, float]]) -> None:
        self.step, self.mean = step, mean
        self.sources = {name: (float(loss), float(tokens)) for name, (loss, tokens) in sources.items()}

    @classmethod
    def of(cls, record: StepRecord) -> _Point:
        by_source = {s: (record.source_loss(s), float(record.column(SOURCE_TOKENS + s).sum())) for s in record.sources}
        return cls(record.step, record.mean_loss, by_source)

    def loss(self, gone: frozenset[str]) -> float:
        if not gone or not self.sources:
            return self.mean
        left = [v for name, v in self.sources.items() if name not in gone]
        return weighted_mean(np.array([v[0] for v in left]), np.array([v[1] for v in left])) if left else math.nan

    def state(self) -> tuple[int, float, dict[str, tuple[float, float]]]:
        return self.step, self.mean, dict(self.sources)


def close(incident: Incident, step: int, path_z: float | None, limit: float, probation: int) -> None:
    """Close an incident as recovered or escalated, with the number and a sentence."""
    incident.path_z, incident.closed_step = path_z, step
    if incident.kinds == {FindingKind.STRAGGLER}:
        incident.status = IncidentStatus.RESOLVED
        incident.closing = "reported: a rank that is slow leaves nothing in the weights, so nothing was to be undone"
    elif path_z is None:
        incident.status = IncidentStatus.RECOVERED
        incident.closing = f"{probation} healthy steps; there was too little history for a forecast"
    elif path_z <= limit:
        incident.status = IncidentStatus.RECOVERED
        incident.closing = (
            f"back on the path: {path_z:+.1f} sigma from the forecast made before the incident (at most {limit:g}),"
            f" over {probation} healthy steps"
        )
    else:
        incident.status = IncidentStatus.ESCALATED
        incident.closing = (
            f"not back on the path: {path_z:+.1f} sigma from the forecast made before the incident (at most {limit:g})"
        )


def give_up(incident: Incident, step: int, case: str) -> None:
    """Close an incident as escalated: its ladder has ended in ``stop``, the newest of its actions."""
    incident.status, incident.closed_step = IncidentStatus.ESCALATED, step
    tried = [str(a["action"]) for a in incident.actions[:-1] if a["action"] != Action.NONE]
    if tried:
        why = f"{', '.join(tried)} did not help"
    else:  # the answers that there are were not to be had, or their budgets are spent by other incidents
        passed_over = incident.actions[-1].get("passed_over") if incident.actions else None
        why = "; ".join(map(str, passed_over)) if passed_over else "nothing could be done"
    incident.closing = f"the run stops at step {step}: {why}, and {case} has no further answer"
