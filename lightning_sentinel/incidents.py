"""The words of the suite as types: findings, incidents, verdicts and actions.

Everything here is plain data that goes through JSON unchanged (:meth:`to_dict` / :meth:`from_dict`), so that the journal,
the report and a resumed run speak of the same things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding weighs: an ``event`` is written down, an ``alarm`` is shown, an ``incident`` is answered."""

    EVENT = "event"
    ALARM = "alarm"
    INCIDENT = "incident"


class FindingKind(StrEnum):
    """What a detector states."""

    SPIKE = "spike"  # the loss has jumped out of its band; may come back
    LEVEL_SHIFT = "level_shift"  # the loss sits on a higher level and stays
    DIVERGENCE = "divergence"  # the smoothed loss rises
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRADS = "nonfinite_grads"
    NONFINITE_STATE = "nonfinite_state"  # a parameter or buffer, found by the scan at step 0
    NONFINITE_ACTIVATION = "nonfinite_activation"  # found at a watched boundary
    RANK_OUTLIER = "rank_outlier"
    STRAGGLER = "straggler"
    SCALER_OVERFLOW = "scaler_overflow"  # one overflow: a controlled response, an event
    SCALE_COLLAPSE = "scale_collapse"  # k overflows in a row, the scale at its floor, or no applied step in N
    NO_GRADIENT = "no_gradient"  # no parameter received a gradient
    INVALID_BATCH = "invalid_batch"
    NO_SUPERVISED_TOKENS = "no_supervised_tokens"
    REPEATED_SAMPLES = "repeated_samples"
    UNSEEN_SAMPLES = "unseen_samples"  # ids that the data set should not hold
    RESTART_JUMP = "restart_jump"  # rate, schedule, scale or cursor differ from the checkpoint after a resume
    REPLICA_DRIFT = "replica_drift"
    RANGE_TREND = "range_trend"  # a magnitude nears the largest number of its dtype: an early warning


class VerdictKind(StrEnum):
    DATA = "data"
    NUMERICS = "numerics"
    OPTIMIZATION = "optimization"
    INFRASTRUCTURE = "infrastructure"
    UNDETERMINED = "undetermined"


class Action(StrEnum):
    NONE = "none"
    RETRY_STEP = "retry_step"  # same data, same weights, again
    SKIP_STEP = "skip_step"  # no update; data and schedule move on
    ROLLBACK_REPLAY = "rollback_replay"  # back to a snapshot, same data again
    ROLLBACK_SKIP = "rollback_skip"  # back to a snapshot, past the suspect samples
    QUARANTINE = "quarantine"
    REDUCE_LR = "reduce_lr"
    LOWER_LOSS_SCALE = "lower_loss_scale"
    RESTORE_OPTIMIZER = "restore_optimizer"
    STOP = "stop"


class IncidentStatus(StrEnum):
    OPEN = "open"
    RECOVERED = "recovered"  # back on the path after an action (or by itself)
    ESCALATED = "escalated"  # the ladder ended in stop, or the loss did not come back to its path
    RESOLVED = "resolved"  # closed without an action of ours (observe, or a person said so)


def action_name(event: str, fields: Mapping[str, Any]) -> str:
    """Which action an ``action.*`` event tells of; ``action.rollback`` is how several of them are carried out.

    Example:
        >>> action_name("action.skip_step", {}), action_name("action.rollback", {"action": "retry_step"})
        ('skip_step', 'retry_step')
    """
    name = event.removeprefix("action.")
    return str(fields.get("action") or name) if name == "rollback" else name


@dataclass(frozen=True)
class Finding:
    """One detector's statement about one record.

    Attributes:
        kind: What is stated.
        detector: Name of the detector.
        step: Step of the record on which it was made.
        score: The statistic; compare with ``threshold``, both in ``unit``.
        threshold: What the statistic had to exceed.
        message: A sentence that an engineer can check by hand.
        severity: Event, alarm or incident.
        since_step: First step that belongs to it (at most ``step``).
        ranks: Ranks concerned; empty for all.
        culprits: What is already known to be at fault, e.g. ``rank:1``, ``sample:<id>``, ``module:layers.2``, ``cursor``.
        window: Number of records that the statistic rests on.
        unit: Unit of score and threshold, e.g. ``nats`` or ``robust sigma``.
        restart_aligned: True if it starts within N steps of a restart.
        evidence: Numbers and short strings for the report.
    """

    kind: FindingKind
    detector: str
    step: int
    score: float
    threshold: float
    message: str
    severity: Severity = Severity.INCIDENT
    since_step: int = -1
    ranks: tuple[int, ...] = ()
    culprits: tuple[str, ...] = ()
    window: int = 0
    unit: str = ""
    restart_aligned: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.since_step < 0:
            object.__setattr__(self, "since_step", self.step)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"evidence": dict(self.evidence)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        return cls(
            **{
                **data,
                "kind": FindingKind(data["kind"]),
                "severity": Severity(data["severity"]),
                "ranks": tuple(data["ranks"]),
                "culprits": tuple(data["culprits"]),
            }
        )


@dataclass
class Spent:
    """What the examinations of one incident have taken of its budget so far, on this rank.

    Attributes:
        forwards: Forward passes (micro-batches).
        seconds: Time, by this rank's clock.
    """

    forwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Experiment:
    """One experiment of the triage: what was done and what came out of it."""

    name: str
    result: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "result": self.result, "detail": dict(self.detail)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        return cls(**data)


@dataclass(frozen=True)
class Verdict:
    """The cause, the culprits and the experiments that led there.

    ``since_step`` is the first step whose computation is affected: a rollback goes to before it. ``reproducible`` says
    whether the replay showed the fault again (None: not replayed).
    """

    kind: VerdictKind = VerdictKind.UNDETERMINED
    culprits: tuple[str, ...] = ()
    sentence: str = ""
    since_step: int | None = None
    reproducible: bool | None = None
    sample_ids: tuple[str, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "experiments": [e.to_dict() for e in self.experiments],
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(
            **{
                **data,
                "kind": VerdictKind(data["kind"]),
                "culprits": tuple(data["culprits"]),
                "sample_ids": tuple(data["sample_ids"]),
                "experiments": tuple(Experiment.from_dict(e) for e in data["experiments"]),
            }
        )


@dataclass
class Incident:
    """Findings that belong together, with a life.

    Attributes:
        number: 1, 2, 3 ... within the run folder.
        opened_step: Step at which it was detected.
        since_step: First affected step, as far as the findings know.
        actions: What was done, in order, each ``{"action", "step", "attempt", "reason", ...}``.
        path_z: Distance of the recovered loss from the forecast made before the incident, in robust sigma.
        hardware: Counters read when it opened, if there is a provider: ``{"ranks": {rank: {name: number}}, "range": {name:
            [least, median, greatest]}}``; of the named ranks, and over all.
    """

    number: int
    opened_step: int
    since_step: int
    attempt: int
    tokens: int
    findings: list[Finding] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    actions: list[dict[str, Any]] = field(default_factory=list)
    status: IncidentStatus = IncidentStatus.OPEN
    closed_step: int | None = None
    path_z: float | None = None
    closing: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> set[FindingKind]:
        return {f.kind for f in self.findings}

    @property
    def is_open(self) -> bool:
        return self.status is IncidentStatus.OPEN

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "opened_step": self.opened_step,
            "since_step": self.since_step,
            "attempt": self.attempt,
            "tokens": self.tokens,
            "findings": [f.to_dict() for f in self.findings],
            "verdict": self.verdict.to_dict(),
            "actions": [dict(a) for a in self.actions],
            "status": str(self.status),
            "closed_step": self.closed_step,
            "path_z": self.path_z,
            "closing": self.closing,
            "hardware": dict(self.hardware),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        return cls(
            **{
                **data,
                "findings": [Finding.from_dict(f) for f in data["findings"]],
                "verdict": Verdict.from_dict(data["verdict"]),
                "actions": [dict(a) for a in data["actions"]],
                "status": IncidentStatus(data["status"]),
            }
        )
