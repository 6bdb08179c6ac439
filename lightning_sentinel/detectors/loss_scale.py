"""The fp16 loss scale as the record shows it: one overflow is an event, a collapse is an incident.

A scaler multiplies the loss by a scale so that small gradients survive fp16, whose largest finite number is 65,504 (the next
power of two, 65,536, is already infinite). An overflow skips the step and halves the scale: a controlled response. It
is an incident when it does not stop.

Example:
    >>> import numpy as np
    >>> from lightning_sentinel.record import SIGNAL_INDEX, StepRecord
    >>> record = StepRecord.from_losses(step=4, losses=[2.0])
    >>> record.values[0, SIGNAL_INDEX["loss_scale"]] = 65536
    >>> record.values[0, SIGNAL_INDEX["nonfinite_grads"]] = 1
    >>> [finding] = LossScale().observe(record)
    >>> str(finding.kind), str(finding.severity)
    ('scaler_overflow', 'event')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..record import SIGNAL_INDEX, StepRecord
from .nonfinite import is_scaler_overflow

FP16_MAX = 65504.0
LOSS_SCALE = SIGNAL_INDEX["loss_scale"]


def no_scaler(record: StepRecord) -> bool:
    """True where no rank has a loss scale other than 1."""
    return bool((record.values[:, LOSS_SCALE] == 1.0).all())


@dataclass(eq=False)
class LossScale:
    """Counts overflows and applied steps.

    Args:
        max_consecutive: Overflows in a row that make an incident, once a step has been applied. Before the first applied
            step the scaler is still looking for its scale and only ``max_without_step`` counts.
        max_without_step: Steps without one applied update that make an incident.
        floor: A scale at or below this, reached by overflows, is an incident: below 1 it takes away the range it should add.
    """

    max_consecutive: int = 6
    max_without_step: int = 20
    floor: float = 1.0
    name: ClassVar[str] = "loss_scale"

    def __post_init__(self) -> None:
        check_limits("LossScale", vars(self))
        self._consecutive = 0
        self._without_step = 0
        self._applied = 0
        self._overflows = 0
        self._since_step = -1
        self._stated: list[str] = []  # collapse reasons of the current episode, each stated once

    def observe(self, record: StepRecord) -> list[Finding]:
        alone = record.world_size == 1
        if self._overflows == 0 and (record.numbers[LOSS_SCALE] == 1.0 if alone else no_scaler(record)):
            return []
        scale = float(record.values[:, LOSS_SCALE].min())
        overflow = is_scaler_overflow(record)
        lost = overflow or bool(record.column("nonfinite_grads").any())
        if not lost:
            self._consecutive = self._without_step = 0
            self._applied += 1
            self._since_step = -1
            self._stated = []
            return []
        if self._since_step < 0:
            self._since_step = record.step
        self._without_step += 1
        findings = []
        if overflow:
            self._consecutive += 1
            self._overflows += 1
            findings.append(self._overflow(record, scale))
        for reason, score, threshold, unit, sentence in self._collapses(scale):
            if reason not in self._stated:
                self._stated.append(reason)
                findings.append(self._collapse(record, scale, reason, score, threshold, unit, sentence))
        return findings

    def _collapses(self, scale: float) -> list[tuple[str, float, float, str, str]]:
        found = []
        if self._applied and self._consecutive >= self.max_consecutive:
            found.append(
                (
                    "consecutive",
                    float(self._consecutive),
                    float(self.max_consecutive),
                    "overflows in a row",
                    f"{self._consecutive} overflows in a row (at most {self.max_consecutive - 1} are ordinary)",
                )
            )
        if scale <= self.floor and self._consecutive > 0:
            found.append(
                (
                    "floor",
                    scale,
                    self.floor,
                    "loss scale",
                    f"the gradients overflow even at a loss scale of {scale:g}, at or below the floor of {self.floor:g}",
                )
            )
        if self._without_step >= self.max_without_step:
            found.append(
                (
                    "without_step",
                    float(self._without_step),
                    float(self.max_without_step),
                    "steps without an update",
                    f"no update was applied in the last {self._without_step} steps (limit {self.max_without_step})",
                )
            )
        return found

    def _overflow(self, record: StepRecord, scale: float) -> Finding:
        ranks = tuple(int(r) for r in np.flatnonzero(record.column("nonfinite_grads")))
        return Finding(
            kind=FindingKind.SCALER_OVERFLOW,
            detector=self.name,
            step=record.step,
            score=float(self._consecutive),
            threshold=float(self.max_consecutive),
            unit="overflows in a row",
            severity=Severity.EVENT,
            ranks=ranks,
            window=self._consecutive,
            since_step=self._since_step,
            message=f"fp16 gradients overflowed at step {record.step} with a loss scale of {scale:,.0f}: a scaled"
            f" value passed"
            f" {FP16_MAX:,.0f}, the largest finite fp16 number (the next power of two, 65,536, is infinite). The scaler skips"
            f" this step and lowers the scale; overflow {self._consecutive} in a row, {self.max_consecutive} make"
            f" an incident.",
            evidence={"loss_scale": scale, "overflows": self._overflows, "applied_steps": self._applied},
        )

    def _collapse(
        self, record: StepRecord, scale: float, reason: str, score: float, threshold: float, unit: str, sentence: str
    ) -> Finding:
        return Finding(
            kind=FindingKind.SCALE_COLLAPSE,
            detector=self.name,
            step=record.step,
            score=score,
            threshold=threshold,
            unit=unit,
            severity=Severity.INCIDENT,
            ranks=tuple(int(r) for r in np.flatnonzero(record.column("nonfinite_grads"))),
            window=self._without_step,
            since_step=self._since_step,
            message=f"The loss scale collapses at step {record.step}: {sentence}, since step {self._since_step}.",
            evidence={"reason": reason, "loss_scale": scale, "consecutive": self._consecutive},
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "consecutive": self._consecutive,
            "without_step": self._without_step,
            "applied": self._applied,
            "overflows": self._overflows,
            "since_step": self._since_step,
            "stated": list(self._stated),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._consecutive = int(state["consecutive"])
        self._without_step = int(state["without_step"])
        self._applied = int(state["applied"])
        self._overflows = int(state["overflows"])
        self._since_step = int(state["since_step"])
        self._stated = [str(r) for r in state["stated"]]
