"""Loss spikes: a value far above what the recent accepted values allow.

**Expected value.** The smaller of two rolling medians of the accepted losses (short and long: the short one follows a
descent), plus the median of their recent errors (negative in a descent).

**Scale.** The larger of MAD and inter-decile range of the recent prediction errors, as a normal standard deviation, with a
floor.

**Band.** A value is out of band if its jump ``loss - expected`` passes three bounds: ``threshold`` times the scale; the jump
that this run's own tail would pass with probability ``tail`` (:meth:`Spike.tail_bound`; a run with heavy tails sets its own
measure); and a minimum, ``min_jump`` nats or ``min_relative`` of the expected value. One value out of band is an alarm. It is
an incident at once if it passes ``gross``, ``gross_tail`` and ``gross_relative`` too, else when ``confirm`` values have been
out of band.

Example:
    >>> from lightning_sentinel.record import StepRecord
    >>> detector = Spike()
    >>> for step in range(60):
    ...     assert detector.observe(StepRecord.from_losses(step, [2.0 + 0.05 * (step * 7 % 11) / 11])) == []
    >>> [finding] = detector.observe(StepRecord.from_losses(60, [4.5]))
    >>> str(finding.kind), str(finding.severity)
    ('spike', 'incident')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..record import StepRecord
from .robust import MAD_TO_SIGMA, RollingWindow, sorted_mad, sorted_median

FAST = 5  # values in the short median
FEW = 5  # accepted losses from which their spread says something
COLD_SIGMA = 4.0  # robust sigma of the logarithm of the loss, above the largest of them, that is no chance
CORRELATION_MEMORY = 256  # steps over which the autocorrelation is averaged
# The tail of the accepted jumps: the part of them that counts as tail, the fewest, and Hill's index of a normal distribution
# there with the number of values that it weighs as much as.
TAIL_PART, TAIL_LEAST, TAIL_PRIOR, TAIL_PRIOR_WEIGHT = 0.02, 5, 0.12, 20


@dataclass
class _Open:
    """A spike that has not ended."""

    since_step: int
    level: float  # expected value at its start
    scale: float
    band: float  # jump from which a value was out of band at its start
    peak: float
    peak_step: int
    rows: int = 1  # records since the first, the first included
    elevated: int = 1  # of these, out of band
    lasting: int = 1  # of these, not just the decay of the one before
    jump: float = 0.0  # newest one above the level
    calm: int = 0  # newest ones in a row back near the level
    incident: bool = False
    shifted: bool = False
    restart_aligned: bool = False


@dataclass(eq=False)
class Spike:
    """Finds jumps of the mean loss and follows each to its end.

    Args:
        threshold: Robust sigma above the expected value from which a value is out of band (an alarm).
        tail: Probability that a healthy step leaves the band, by the tail of this run's own accepted jumps.
        gross: Robust sigma from which one value alone is an incident.
        gross_tail: The same probability for one value alone being an incident.
        gross_relative: Smallest jump that one value alone can make an incident, as a fraction of the expected loss.
        min_jump: Smallest jump that counts, in nats.
        min_relative: Smallest jump that counts, as a fraction of the expected loss.
        confirm: Values out of band, each more than the decay of the one before, that make an incident.
        window: Prediction errors that the scale rests on.
        level_window: Accepted losses in the long median.
        tail_window: Accepted jumps that the tail rests on.
        warmup: Accepted losses before the band applies; until then only an explosion is stated.
        explosion: Multiple of the newest accepted losses that is an explosion: an incident at once, during warm-up or
            where the jump is also twice the band.
        scale_floor: Smallest scale, as a fraction of the expected loss.
        recover_after: Values in a row back near the level that end a spike.
        shift_after: Values out of band that keep their height, from which the spike is named a level shift.
        patience: Records after which a spike that does not end is taken for the new level.
        restart_window: A spike that starts within this many steps of a restart is marked restart-aligned.
    """

    threshold: float = 8.0
    tail: float = 1e-3
    gross: float = 8.0
    gross_tail: float = 1e-7
    gross_relative: float = 0.2
    min_jump: float = 0.005
    min_relative: float = 0.08
    confirm: int = 3
    window: int = 41
    level_window: int = 15
    tail_window: int = 2048
    warmup: int = 20
    explosion: float = 2.5
    scale_floor: float = 0.002
    recover_after: int = 3
    shift_after: int = 6
    patience: int = 48
    restart_window: int = 20
    name: ClassVar[str] = "spike"

    def __post_init__(self) -> None:
        check_limits("Spike", vars(self))
        self._level = RollingWindow(self.level_window)
        self._fast = RollingWindow(FAST)
        self._lag = RollingWindow(FAST)  # loss - expected: how far the medians trail behind a descent
        self._errors = RollingWindow(self.window)  # the same without that lag
        self._jumps = RollingWindow(self.tail_window)  # standardised jumps of steps that were no incident
        self._recent = RollingWindow(self.shift_after)  # newest losses of an open spike
        self._before = self._square = self._product = 0.0  # last clipped jump; running mean square and lag-1 product
        self._accepted = 0
        self._open: _Open | None = None

    # -- the band ------------------------------------------------------------------------------------------------

    def expected(self) -> tuple[float, float]:
        """Expected loss and scale of the next step, in nats; ``(nan, nan)`` without history."""
        if not len(self._level):
            return math.nan, math.nan
        fast, slow = self._fast.median, self._level.median
        floor = max(self.scale_floor * abs(slow), 1e-12)
        scale = max(self._errors.sigma, floor) if len(self._errors) >= FAST else floor
        if fast < slow and self._accepted >= self.warmup and slow - fast > self._band(slow, scale):
            return slow, scale  # a few low outliers are no new level
        return min(fast, slow), scale

    def tail_bound(self, probability: float) -> float:
        """Standardised jump that a healthy step passes with this probability, in robust sigma.

        Extrapolates the largest accepted jumps as a power law: ``x_k (k / (n p))^xi``, with ``xi`` Hill's (1975) mean
        log excess of the ``k`` largest over the k-th, shrunk towards that of a normal distribution while there are few.
        """
        ordered = self._jumps.ordered
        n = len(ordered)
        k = max(TAIL_LEAST, int(TAIL_PART * n))
        if n <= k or ordered[-k - 1] <= 0:
            return 0.0
        anchor = ordered[-k - 1]
        excess = sum(math.log(jump / anchor) for jump in ordered[-k:])
        xi = (excess + TAIL_PRIOR_WEIGHT * TAIL_PRIOR) / (k + TAIL_PRIOR_WEIGHT)
        return float(anchor * max(1.0, k / (n * probability)) ** xi)

    def _band(self, center: float, scale: float) -> float:
        return max(self.threshold * scale, self._least_jump(center))

    def _least_jump(self, center: float) -> float:
        return max(self.min_jump, self.min_relative * abs(center))

    @property
    def correlation(self) -> float:
        """Lag-1 autocorrelation of the accepted standardised jumps, at least 0."""
        return max(0.0, min(0.95, self._product / self._square)) if self._square > 0 else 0.0

    @property
    def is_open(self) -> bool:
        """True while a spike has neither ended nor become the new level."""
        return self._open is not None

    def limit(self) -> float:
        """Below this the next loss is certainly no finding, in nats; ``-inf`` where that cannot be said of any loss.

        That is so during warm-up and while a spike is open.
        """
        if self._open is not None or self._accepted < self.warmup:
            return -math.inf
        center, scale = self.expected()
        return center + self._band(center, scale)

    # -- one record ----------------------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> list[Finding]:
        loss = record.mean_loss
        if not math.isfinite(loss):
            return []
        if self._open is not None:
            return self._follow(record, loss, self._open)
        center, scale = self.expected()
        if self._accepted < self.warmup:
            return self._cold(record, loss, center, scale)
        jump = loss - center
        band = self._band(center, scale)
        if jump >= band:  # rarely: the tail costs more than the rest
            band = max(band, self.tail_bound(self.tail) * scale)
        if jump < band:
            self._accept(loss, center, scale)
            return []
        return [self._begin(record, loss, center, scale, band)]

    def _accept(self, loss: float, center: float, scale: float) -> None:
        if len(self._level):
            error = loss - center
            if len(self._lag):
                self._errors.push(error - self._lag.median)
            self._lag.push(error)
            if self._accepted >= self.warmup and self._open is None:
                jump = error / scale
                self._jumps.push(jump)
                clipped = max(-3.0, min(3.0, jump))
                rate = max(1.0 / len(self._jumps), 1.0 / CORRELATION_MEMORY)
                self._square += rate * (clipped * clipped - self._square)
                self._product += rate * (clipped * self._before - self._product)
                self._before = clipped
        self._level.push(loss)
        self._fast.push(loss)
        self._accepted += 1

    def _cold(self, record: StepRecord, loss: float, center: float, scale: float) -> list[Finding]:
        """Too little history for a band: only a multiple of everything seen so far is stated."""
        limit = self._explosion_limit()
        if loss > limit * max(self._level.values, default=math.inf):
            return [self._exploded(record, loss, max(self._level.values), limit)]
        self._accept(loss, center, scale)
        return []

    def _explosion_limit(self) -> float:
        """Multiple of the largest accepted loss that is an explosion; infinite while nothing can be said.

        A loss of small batches with a heavy tail passes ``explosion`` times its largest of a few by chance. What it
        must pass is as many times more as the losses so far differ among themselves, in robust sigma of their logarithms
        (and in plain ones: a loss near zero has no meaningful ratio); of fewer than five, the square of ``explosion``.
        """
        losses = self._level.values
        if len(losses) < 2 or max(losses) <= 0:
            return math.inf
        top = max(losses)
        if len(losses) < FEW:
            return self.explosion**2
        limit = max(self.explosion, (self._level.median + self.gross * self._level.sigma) / top)
        if min(losses) > 0:
            logs = sorted(math.log(x) for x in losses)
            spread = MAD_TO_SIGMA * sorted_mad(logs, sorted_median(logs))
            limit = max(limit, math.exp(COLD_SIGMA * spread))
        return limit

    def _start(self, record: StepRecord, loss: float, center: float, scale: float, band: float, incident: bool) -> None:
        restart = record.restart_step
        aligned = restart is not None and 0 <= record.step - restart <= self.restart_window
        self._open = _Open(record.step, center, scale, band, loss, record.step, restart_aligned=aligned)
        self._open.jump = loss - center
        self._open.incident = incident or self.confirm == 1
        self._recent.clear()
        self._recent.push(loss)

    def _exploded(self, record: StepRecord, loss: float, top: float, limit: float) -> Finding:
        self._start(record, loss, top, self.scale_floor * top, 0.5 * (limit - 1) * top, incident=True)
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.INCIDENT,
            score=loss / top,
            threshold=limit,
            unit="x largest loss",
            life="open",
            message=f"Loss {loss:.4g} at step {record.step} is {loss / top:.2f} times the largest of the last"
            f" {len(self._level)} losses, {top:.4g} (limit {limit:.3g} during warm-up).",
        )

    def _begin(self, record: StepRecord, loss: float, center: float, scale: float, band: float) -> Finding:
        jump = loss - center
        gross = max(self.gross, self.tail_bound(self.gross_tail)) * scale
        incident = jump >= gross and jump >= self.gross_relative * abs(center)
        # A tail extrapolated from a short history may reach further than anything a loss can do.
        incident = incident or (loss > self.explosion * max(self._level.values) and jump >= 2 * band)
        self._start(record, loss, center, scale, band, incident)
        return self._jumped(record, loss, center, scale, band)

    def _jumped(self, record: StepRecord, loss: float, center: float, scale: float, band: float) -> Finding:
        assert self._open is not None
        jump = loss - center
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.INCIDENT if self._open.incident else Severity.ALARM,
            score=jump / scale,
            threshold=band / scale,
            unit="robust sigma",
            life="open",
            message=f"Loss {loss:.4f} at step {record.step} is {jump:.4f} nats or {jump / scale:.1f} robust sigma above the"
            f" expected {center:.4f} (sigma {scale:.4f} from {len(self._errors)} steps; the limit {band:.4f} is the"
            f" largest of"
            f" {self.threshold:g} sigma, the {self.tail_bound(self.tail):.1f} sigma that this run's tail passes once in"
            f" {1 / self.tail:,.0f} steps, and {self._least_jump(center):.4f} nats).",
        )

    # -- the life of an open spike -------------------------------------------------------------------------------

    def _follow(self, record: StepRecord, loss: float, spike: _Open) -> list[Finding]:
        again = self._again(record, loss, spike)
        if again is not None:
            return [again]
        spike.rows += 1
        self._recent.push(loss)
        if loss > spike.peak:
            spike.peak, spike.peak_step = loss, record.step
        jump = loss - spike.level
        if jump < max(0.5 * spike.band, min(spike.band, 0.1 * (spike.peak - spike.level))):
            spike.calm += 1
            center, scale = self.expected()
            self._accept(loss, center, scale)
            return self._recovered(record, spike) if spike.calm >= self.recover_after else []
        spike.calm = 0
        findings = []
        if jump >= spike.band:
            spike.elevated += 1
            # A shock in correlated noise falls by phi a step; what confirms a spike is what falls more slowly.
            spike.lasting += jump >= 0.5 * (1.0 + self.correlation) * spike.jump
            if not spike.incident and spike.lasting >= self.confirm:
                spike.incident = True
                findings.append(self._confirmed(record, spike, jump))
            if not spike.shifted and spike.elevated >= self.shift_after and self._stays(spike):
                spike.shifted = True
                findings.append(self._shifted(record, spike))
        spike.jump = jump
        if spike.rows >= self.patience:
            if spike.incident and not spike.shifted:
                findings.append(self._shifted(record, spike))
            self._settle()
        return findings

    def _again(self, record: StepRecord, loss: float, spike: _Open) -> Finding | None:
        """A second jump on the flank of the first: as far above the newest losses as a spike must be above its level."""
        if spike.rows < FAST:
            return None
        center = max(self._recent.values[-FAST:])
        if self._accepted < self.warmup:  # the scale is not known yet
            limit = self._explosion_limit()
            return self._exploded(record, loss, center, limit) if loss > limit * max(center, spike.peak) else None
        if loss - center < max(spike.band, 0.5 * (spike.peak - spike.level), self._least_jump(center)):
            return None
        level = self._recent.median
        self._start(record, loss, spike.level, spike.scale, spike.band, incident=True)
        return self._jumped(record, loss, level, spike.scale, spike.band)

    def _stays(self, spike: _Open) -> bool:
        """True if the newest losses keep most of the height of the jump: a level, not a decay."""
        return min(self._recent.values) - spike.level >= 0.6 * (spike.peak - spike.level)

    def _recovered(self, record: StepRecord, spike: _Open) -> list[Finding]:
        self._open = None
        if not spike.incident:  # this run does that: the next one has to be larger
            self._jumps.push((spike.peak - spike.level) / spike.scale)
        return [self._ended(record, spike)]

    def _settle(self) -> None:
        """Take the newest losses as the new level."""
        self._open = None
        self._lag.clear()
        for window in (self._level, self._fast):
            values = self._recent.values
            window.clear()
            for value in values:
                window.push(value)

    def _confirmed(self, record: StepRecord, spike: _Open, jump: float) -> Finding:
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.INCIDENT,
            score=float(spike.lasting),
            threshold=float(self.confirm),
            unit="steps out of band",
            life="open",
            message=f"Loss out of band in {spike.elevated} of {spike.rows} steps since step {spike.since_step},"
            f" {spike.lasting} of them more than the decay of the one before (limit {self.confirm}), now {jump:.4f}"
            f" nats above {spike.level:.4f}; the band ends {spike.band:.4f} above.",
        )

    def _shifted(self, record: StepRecord, spike: _Open) -> Finding:
        now = self._recent.median
        return self._finding(
            record,
            FindingKind.LEVEL_SHIFT,
            Severity.INCIDENT,
            score=(now - spike.level) / spike.scale,
            threshold=spike.band / spike.scale,
            unit="robust sigma",
            life="escalated",
            message=f"Loss has stayed near {now:.4f} since step {spike.since_step} ({spike.elevated} of"
            f" {spike.rows} steps out"
            f" of band); the level before was {spike.level:.4f} (sigma {spike.scale:.4f}):"
            f" {(now - spike.level) / spike.scale:.1f} sigma, limit {spike.band / spike.scale:.1f}.",
        )

    def _ended(self, record: StepRecord, spike: _Open) -> Finding:
        return self._finding(
            record,
            FindingKind.SPIKE,
            Severity.EVENT,
            score=(spike.peak - spike.level) / spike.scale,
            threshold=spike.band / spike.scale,
            unit="robust sigma",
            life="recovered",
            spike=spike,
            message=f"The spike that began at step {spike.since_step} has recovered: {spike.elevated} steps out of band, peak"
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
            "lag": self._lag.state_dict(),
            "errors": self._errors.state_dict(),
            "recent": self._recent.state_dict(),
            "jumps": self._jumps.state_dict(),
            "correlation": [self._before, self._square, self._product],
            "accepted": self._accepted,
            "open": None if self._open is None else dict(vars(self._open)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._level.load_state_dict(state["level"])
        self._fast.load_state_dict(state["fast"])
        self._lag.load_state_dict(state["lag"])
        self._errors.load_state_dict(state["errors"])
        self._recent.load_state_dict(state["recent"])
        self._jumps.load_state_dict(state["jumps"])
        self._before, self._square, self._product = (float(v) for v in state["correlation"])
        self._accepted = int(state["accepted"])
        self._open = None if state["open"] is None else _Open(**state["open"])
