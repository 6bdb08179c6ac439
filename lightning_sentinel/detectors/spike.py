"""Loss spikes: a value far above what the recent accepted values allow.

The expected value is the smaller of two rolling medians of the accepted values, plus the median of the recent prediction
errors (negative while the loss descends, so the lag of a median does not hide a jump). The scale is the MAD of the prediction
errors with a floor. A value counts as a jump if it passes all of three bounds: ``threshold`` robust sigma, an absolute
minimum in nats, and a minimum relative to the expected value.

Example:
    >>> from lightning_sentinel.record import StepRecord
    >>> detector = Spike()
    >>> for step in range(60):
    ...     assert detector.observe(StepRecord.from_losses(step, [2.0 + 0.05 * (-1) ** step])) == []
    >>> [finding] = detector.observe(StepRecord.from_losses(60, [4.5]))
    >>> str(finding.kind), str(finding.severity)
    ('spike', 'incident')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..incidents import Finding, FindingKind, Severity
from ..record import StepRecord
from .robust import RollingWindow, check_bound, check_count


@dataclass
class _Open:
    """A spike that has not ended."""

    since_step: int
    level: float
    scale: float
    peak: float
    peak_step: int
    rows: int = 1  # records since the first, the first included
    elevated: int = 1  # of these, outside the band
    calm: int = 0  # newest ones in a row inside the band
    incident: bool = False
    shifted: bool = False
    diverged: bool = False
    restart_aligned: bool = False


@dataclass(eq=False)
class Spike:
    """Finds jumps of the mean loss and follows each to its end.

    Args:
        threshold: Robust sigma above the expected value from which a value is out of band (an alarm).
        gross: Robust sigma from which one value alone is an incident.
        gross_relative: Smallest jump that one value alone can make an incident, as a fraction of the expected loss.
        min_jump: Smallest jump that counts, in nats.
        min_relative: Smallest jump that counts, as a fraction of the expected loss.
        confirm: Values in a row out of band that make an incident.
        window: Accepted values that the scale rests on.
        level_window: Accepted values that the expected value rests on.
        warmup: Accepted values before ``threshold`` applies; until then only an explosion is stated.
        explosion: Multiple of the smallest loss so far that is an explosion during warm-up.
        scale_floor: Smallest scale, as a fraction of the expected loss.
        recover_after: Values in a row back inside the band that end a spike.
        shift_after: Values out of band on one level from which the spike is named a level shift.
        patience: Records after which a spike that does not end is taken for the new level.
        restart_window: A spike that starts within this many steps of a restart is marked restart-aligned.
    """

    threshold: float = 8.0
    gross: float = 16.0
    gross_relative: float = 0.25
    min_jump: float = 0.02
    min_relative: float = 0.06
    confirm: int = 3
    window: int = 128
    level_window: int = 15
    warmup: int = 20
    explosion: float = 2.5
    scale_floor: float = 0.002
    recover_after: int = 3
    shift_after: int = 6
    patience: int = 64
    restart_window: int = 20
    name: ClassVar[str] = "spike"

    def __post_init__(self) -> None:
        check_bound("Spike", "threshold", self.threshold, above=0.0)
        check_bound("Spike", "gross", self.gross, least=self.threshold)
        check_bound("Spike", "gross_relative", self.gross_relative, least=0.0)
        check_bound("Spike", "min_jump", self.min_jump, least=0.0)
        check_bound("Spike", "min_relative", self.min_relative, least=0.0)
        check_count("Spike", "confirm", self.confirm, least=1)
        check_count("Spike", "window", self.window, least=16)
        check_count("Spike", "level_window", self.level_window, least=3)
        check_count("Spike", "warmup", self.warmup, least=5)
        check_bound("Spike", "explosion", self.explosion, above=1.0)
        check_bound("Spike", "scale_floor", self.scale_floor, above=0.0)
        check_count("Spike", "recover_after", self.recover_after, least=1)
        check_count("Spike", "shift_after", self.shift_after, least=2)
        check_count("Spike", "patience", self.patience, least=self.shift_after)
        check_count("Spike", "restart_window", self.restart_window, least=0)
        self._level = RollingWindow(self.level_window)
        self._fast = RollingWindow(5)
        self._errors = RollingWindow(self.window)
        self._drift = RollingWindow(31)
        self._recent = RollingWindow(max(8, self.level_window))  # values since the spike opened, accepted or not
        self._accepted = 0
        self._best = math.inf
        self._open: _Open | None = None

    # -- the band ------------------------------------------------------------------------------------------------

    def expected(self) -> tuple[float, float]:
        """Expected loss and scale of the next step, in nats; ``(nan, nan)`` without history."""
        if not len(self._level):
            return math.nan, math.nan
        level = min(self._fast.median, self._level.median)
        if len(self._errors) < 5:
            return level, max(self.scale_floor * abs(level), 1e-12)
        center = level + self._drift.median
        return center, max(self._errors.spread, self.scale_floor * abs(center), 1e-12)

    def _least_jump(self, center: float) -> float:
        return max(self.min_jump, self.min_relative * abs(center))

    @property
    def is_open(self) -> bool:
        """True while a spike has neither ended nor become the new level."""
        return self._open is not None

    # -- one record ----------------------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> list[Finding]:
        loss = record.mean_loss
        if not math.isfinite(loss):
            return []
        if self._open is not None:
            return self._follow(record, loss, self._open)
        if self._accepted < self.warmup:
            return self._cold(record, loss)
        center, scale = self.expected()
        jump = loss - center
        if jump < self.threshold * scale or jump < self._least_jump(center):
            self._accept(loss)
            return []
        return [self._begin(record, loss, center, scale)]

    def _accept(self, loss: float) -> None:
        if len(self._level):
            error = loss - min(self._fast.median, self._level.median)
            self._errors.push(error)
            self._drift.push(error)
        self._level.push(loss)
        self._fast.push(loss)
        self._best = min(self._best, loss)
        self._accepted += 1

    def _cold(self, record: StepRecord, loss: float) -> list[Finding]:
        if self._accepted >= 2 and self._best > 0 and loss > self.explosion * self._best:
            top = max(self._level.values)
            if loss > self.explosion * top or (loss > top and loss > 2 * self.explosion * self._best):
                return [self._begin(record, loss, self._best, self.scale_floor * self._best, exploded=True)]
        self._accept(loss)
        return []

    def _begin(
        self, record: StepRecord, loss: float, center: float, scale: float, *, exploded: bool = False
    ) -> Finding:
        restart = record.restart_step
        aligned = restart is not None and 0 <= record.step - restart <= self.restart_window
        jump = loss - center
        incident = exploded or (jump >= self.gross * scale and jump >= self.gross_relative * abs(center))
        self._open = _Open(record.step, center, scale, loss, record.step, restart_aligned=aligned)
        self._open.incident = incident or self.confirm == 1
        self._recent.clear()
        self._recent.push(loss)
        severity = Severity.INCIDENT if self._open.incident else Severity.ALARM
        if exploded:
            return self._finding(
                record,
                FindingKind.SPIKE,
                severity,
                score=loss / center,
                threshold=self.explosion,
                unit="x smallest loss",
                life="open",
                message=f"Loss {loss:.4g} at step {record.step} is {loss / center:.2f} times the smallest of the first"
                f" {self._accepted} losses, {center:.4g} (limit {self.explosion:g} during warm-up).",
            )
        return self._finding(
            record,
            FindingKind.SPIKE,
            severity,
            score=jump / scale,
            threshold=self.threshold,
            unit="robust sigma",
            life="open",
            message=f"Loss {loss:.4f} at step {record.step} is {jump:.4f} nats or {jump / scale:.1f} robust sigma above the"
            f" expected {center:.4f} (sigma {scale:.4f} from {len(self._errors)} accepted steps; limits"
            f" {self.threshold:g} sigma, {self._least_jump(center):.4f} nats).",
        )

    # -- the life of an open spike -------------------------------------------------------------------------------

    def _follow(self, record: StepRecord, loss: float, spike: _Open) -> list[Finding]:
        spike.rows += 1
        self._recent.push(loss)
        if loss > spike.peak:
            spike.peak, spike.peak_step = loss, record.step
        jump = loss - spike.level
        band = max(0.5 * self.threshold * spike.scale, 0.5 * self._least_jump(spike.level))
        if jump < band:
            spike.calm += 1
            if self._accepted:
                self._accept(loss)
            if spike.calm >= self.recover_after:
                self._open = None
                if spike.peak_step == spike.since_step and spike.elevated == 1 and not spike.incident:
                    return []
                return [self._ended(record, spike)]
            return []
        spike.calm = 0
        spike.elevated += 1
        findings = []
        if not spike.incident and spike.elevated >= self.confirm:
            spike.incident = True
            findings.append(self._confirmed(record, spike, jump))
        if not spike.shifted and spike.elevated >= self.shift_after and self._stays(spike):
            spike.shifted = True
            findings.append(self._shifted(record, spike))
        if spike.rows >= self.patience:
            if not spike.shifted:
                findings.append(self._shifted(record, spike))
            self._settle()
        return findings

    def _stays(self, spike: _Open) -> bool:
        """True if the newest values keep most of the height of the jump: a level, not a decay."""
        newest = self._recent.values[-self.shift_after :]
        return min(newest) - spike.level >= 0.6 * (spike.peak - spike.level)

    def _settle(self) -> None:
        """Take the newest values as the new level."""
        values = self._recent.values
        self._open = None
        for window in (self._level, self._fast):
            window.clear()
        for value in values:
            self._level.push(value)
            self._fast.push(value)
        self._best = min(values)

    def _confirmed(self, record: StepRecord, spike: _Open, jump: float) -> Finding:
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.INCIDENT,
            score=float(spike.elevated),
            threshold=float(self.confirm),
            unit="steps out of band",
            life="open",
            message=f"Loss out of band in {spike.elevated} of {spike.rows} steps since step {spike.since_step} (limit"
            f" {self.confirm}), now {jump:.4f} nats above {spike.level:.4f}.",
        )

    def _shifted(self, record: StepRecord, spike: _Open) -> Finding:
        now = self._recent.median
        return self._finding(
            record,
            FindingKind.LEVEL_SHIFT,
            Severity.INCIDENT,
            score=(now - spike.level) / spike.scale,
            threshold=self.threshold,
            unit="robust sigma",
            life="escalated",
            message=f"Loss has stayed near {now:.4f} for {spike.elevated} steps since step {spike.since_step}; the level before"
            f" was {spike.level:.4f} (sigma {spike.scale:.4f}): {(now - spike.level) / spike.scale:.1f} sigma,"
            f" limit {self.threshold:g}.",
        )

    def _ended(self, record: StepRecord, spike: _Open) -> Finding:
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.EVENT,
            score=(spike.peak - spike.level) / spike.scale,
            threshold=self.threshold,
            unit="robust sigma",
            life="recovered",
            spike=spike,
            message=f"The spike that began at step {spike.since_step} has recovered after {spike.elevated} steps: peak"
            f" {spike.peak:.4f} at step {spike.peak_step}, now {record.mean_loss:.4f} beside {spike.level:.4f} before.",
        )

    def _finding(
        self,
        record: StepRecord,
        kind: FindingKind,
        severity: Severity,
        *,
        score: float,
        threshold: float,
        unit: str,
        life: str,
        message: str,
        spike: _Open | None = None,
    ) -> Finding:
        spike = spike or self._open
        assert spike is not None
        return Finding(
            kind=kind,
            detector=self.name,
            step=record.step,
            score=score,
            threshold=threshold,
            message=message,
            severity=severity,
            since_step=spike.since_step,
            window=len(self._errors),
            unit=unit,
            restart_aligned=spike.restart_aligned,
            evidence={
                "life": life,
                "level_before": spike.level,
                "sigma": spike.scale,
                "peak": spike.peak,
                "peak_step": spike.peak_step,
                "steps": spike.elevated,
            },
        )

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "level": self._level.state_dict(),
            "fast": self._fast.state_dict(),
            "errors": self._errors.state_dict(),
            "drift": self._drift.state_dict(),
            "recent": self._recent.state_dict(),
            "accepted": self._accepted,
            "best": self._best,
            "open": None if self._open is None else dict(vars(self._open)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._level.load_state_dict(state["level"])
        self._fast.load_state_dict(state["fast"])
        self._errors.load_state_dict(state["errors"])
        self._drift.load_state_dict(state["drift"])
        self._recent.load_state_dict(state["recent"])
        self._accepted = int(state["accepted"])
        self._best = float(state["best"])
        self._open = None if state["open"] is None else _Open(**state["open"])
