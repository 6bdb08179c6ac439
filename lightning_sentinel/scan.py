"""The default detectors on a finished or growing log."""

from __future__ import annotations

import math

from .detectors import Detector, Divergence, LossScale, NonFinite, RankOutlier, Spike
from .incidents import Finding, Severity
from .record import StepRecord


def default_detectors() -> list[Detector]:
    """The shipped detectors with the shipped thresholds, in the order in which a Trainer runs them."""
    return [NonFinite(), Spike(), Divergence(), RankOutlier(), LossScale()]


class Watch:
    """The default suite on one loss per step."""

    def __init__(self) -> None:
        self.detectors = default_detectors()

    def observe(self, record: StepRecord) -> list[Finding]:
        return [f for d in self.detectors for f in d.observe(record)]

    def update(self, step: float, loss: float, grad_norm: float | None) -> bool:
        """True if anything worth looking at begins at this row."""
        record = StepRecord.from_losses(int(step), [loss], grad_norm=math.nan if grad_norm is None else grad_norm)
        return any(f.severity is not Severity.EVENT for f in self.observe(record))


def watch(n_rows: int) -> Watch:
    """A fresh suite; ``n_rows`` is not used (a detector sees nothing ahead)."""
    return Watch()
