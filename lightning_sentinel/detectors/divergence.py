"""Losses that stop returning: a level that shifts and stays, and a trend that rises.

**Level shift.** The accepted losses give a level, a marginal sigma and a lag-1 autocorrelation phi. Each new loss is
whitened,

    ``z = ((x - level) - phi (x_before - level)) / (sigma sqrt(1 - phi^2))``, clipped to +-``clip``,

in which a shift of ``shift`` sigma is worth ``d = shift (1 - phi) / sqrt(1 - phi^2)``. The one-sided CUSUM (Page 1954)
of the log likelihood ratio, ``S = max(0, S + d z - d^2 / 2)``, is the evidence in nats for "the level has risen"; it
is a level shift when it passes ``threshold`` and the median since ``S`` was last 0 lies far enough above the level.

**Lost ground.** The median of the newest ``short`` losses is compared with the smallest one so far. It is a level shift when
the rise is at least ``lost_relative`` of that, ``lost_sigma`` times the noise and ``LOST_RANGE`` times the range of
these losses without the extremes. The noise is the MAD of differences from step to step, with a long history also the
sigma above. This needs little history, so it also sees what happens before there is a baseline.

**Trend.** Means of ``block`` steps go through the Mann-Kendall test with Hamed and Rao's correction for autocorrelation; a
Theil-Sen slope gives its size.

Example:
    >>> import numpy as np
    >>> from lightning_sentinel.record import StepRecord
    >>> rng = np.random.default_rng(0)
    >>> detector = Divergence()
    >>> findings = []
    >>> for step in range(400):
    ...     level = 2.05 if step < 300 else 2.25
    ...     findings += detector.observe(StepRecord.from_losses(step, [level + 0.05 * rng.standard_normal()]))
    >>> str(findings[0].kind), 300 <= findings[0].step <= 320
    ('level_shift', True)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..record import FloatArray, StepRecord
from .robust import MAD_TO_SIGMA, RollingWindow, mann_kendall, sorted_median, theil_sen

# Spans over which a level is a median: the newest few in a descent, all of them on a plateau.
SPANS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# Rise over the range of the newest losses from which they sit apart from the best level.
LOST_RANGE = 3.0
# Fewest values that sigma and autocorrelation rest on.
NEWEST = 64
# Part of the margin that every halving of the span adds.
SHORT_MARGIN = 0.03
# Part of its first height that a rise must have kept to be a level and not a spike on its way back.
STAYS = 0.6
# Most steps over which a descent counts as straight.
BLOCK = 256
# Efficiency of a median: its variance over that of the mean of as many normal values.
MEDIAN_VARIANCE = math.pi / 2


@dataclass(frozen=True)
class Baseline:
    """What the accepted losses say: an upper bound of their level, marginal sigma, lag-1 autocorrelation."""

    level: float
    median: float
    sigma: float
    phi: float
    count: int

    @property
    def step_sigma(self) -> float:
        """Standard deviation of the whitened innovation, in nats."""
        return self.sigma * math.sqrt(1.0 - self.phi * self.phi)

    @classmethod
    def fit(cls, values: FloatArray, margin: float, floor: float) -> Baseline:
        """Fit to losses, oldest first.

        Sigma and phi come from the newer half (the noise changes as the loss falls), a straight line taken out of every block
        of at most ``BLOCK`` and values clipped at 3 robust sigma. Both are corrected for what the line takes with it: phi by
        ``(2 + 4 phi) / length``, the variance by ``1 - 2 (1 + phi) / (1 - phi) / length``. The level is the smallest upper
        confidence bound, ``margin`` standard errors above the median, over the spans.
        """
        n = len(values)
        sigma, phi = noise_of(values[-max(NEWEST, n // 2) :])
        inflation = (1.0 + phi) / (1.0 - phi)
        best = math.inf
        median = math.nan
        for span in SPANS:
            span = min(span, n)
            middle = _median(values[n - span :])
            error = sigma * math.sqrt(MEDIAN_VARIANCE * inflation / span)
            # The smallest of many short spans is low by chance more often than the one long span.
            bound = middle + margin * (1.0 + SHORT_MARGIN * math.log2(SPANS[-1] / span)) * min(error, sigma)
            if bound < best:
                best, median = bound, middle
            if span == n:
                break
        return cls(best, median, max(sigma, floor * abs(median), 1e-12), phi, n)


def _median(values: FloatArray) -> float:
    """``np.median`` at a fifth of its cost for so few values."""
    return float(sorted_median(np.sort(values)))  # type: ignore[arg-type]


def noise_of(values: FloatArray) -> tuple[float, float]:
    """Marginal sigma and lag-1 autocorrelation of a slowly falling series; see :meth:`Baseline.fit`."""
    length = min(BLOCK, len(values))
    blocks = values[len(values) % length :].reshape(-1, length)
    time = np.arange(length) - 0.5 * (length - 1)
    centred = blocks - blocks.mean(axis=1, keepdims=True)
    residual = centred - np.outer(centred @ time, time / float(time @ time))
    limit = 3.0 * MAD_TO_SIGMA * _median(np.abs(residual).reshape(-1))
    if limit > 0:
        residual = np.clip(residual, -limit, limit)
    power = float(np.square(residual).mean())
    if power <= 0:
        return 0.0, 0.0
    phi = float((residual[:, 1:] * residual[:, :-1]).mean()) / power
    phi = max(phi, 0.0)
    phi = min(0.97, phi + (2.0 + 4.0 * phi) / length + math.sqrt((1.0 - phi * phi) / len(values)))
    kept = max(0.3, 1.0 - 2.0 * (1.0 + phi) / (1.0 - phi) / length)
    return math.sqrt(power / kept), phi


@dataclass(eq=False)
class Divergence:
    """A change-point statistic on the whitened loss and a trend test on block means.

    Args:
        threshold: Evidence for a risen level, in nats of log likelihood ratio, from which it is stated.
        shift: Size of the rise, in marginal sigma, that the evidence is computed for.
        clip: Whitened values beyond this many sigma count as this many.
        margin: Standard errors that the level is taken above its median.
        min_shift: Smallest rise that counts, in nats.
        min_relative: Smallest rise that counts, as a fraction of the level before.
        sigma_floor: Smallest sigma, as a fraction of the level.
        window: Accepted losses that the level, sigma and autocorrelation rest on.
        warmup: Accepted losses before anything is stated.
        short: Newest losses that are compared with the best level so far.
        lost_relative: Rise above the best level so far that is stated, as a fraction of it.
        lost_sigma: Rise above the best level so far that is stated, in sigma.
        block: Steps averaged to one value of the trend test.
        blocks: Values in the trend test.
        trend_z: Mann-Kendall statistic from which a rising trend is a divergence.
        hold: Steps after a finding in which no second one is made while the new level settles.
    """

    threshold: float = 16.0
    shift: float = 1.5
    clip: float = 2.5
    margin: float = 2.0
    min_shift: float = 0.005
    min_relative: float = 0.025
    sigma_floor: float = 0.002
    window: int = 2048
    warmup: int = 32
    short: int = 8
    lost_relative: float = 0.2
    lost_sigma: float = 5.0
    block: int = 8
    blocks: int = 24
    trend_z: float = 5.5
    hold: int = 100
    name: ClassVar[str] = "divergence"

    def __post_init__(self) -> None:
        check_limits("Divergence", vars(self))
        self._values: deque[float] = deque(maxlen=self.window)
        self._baseline: Baseline | None = None
        self._age = 0  # accepted losses since the baseline was fitted
        self._evidence = 0.0
        self._rise: list[tuple[int, float]] = []  # (step, loss) since the evidence was last 0
        self._previous = math.nan
        self._hold = 0
        self._newest = RollingWindow(self.short)
        self._moves = RollingWindow(64)  # absolute differences from step to step
        self._last = math.nan
        self._best = math.inf  # smallest median of the newest losses so far
        self._best_step = -1
        self._block: list[float] = []
        self._means: deque[tuple[int, float]] = deque(maxlen=self.blocks)
        self._trend_stated = False
        self._earlier, self._later = np.triu_indices(self.blocks, k=1)
        self._variance = self.blocks * (self.blocks - 1) * (2 * self.blocks + 5) / 18.0

    def observe(self, record: StepRecord) -> list[Finding]:
        loss = record.mean_loss
        if not math.isfinite(loss):
            return []
        return self._level(record.step, loss) or self._lost_ground(record.step, loss) or self._trend(record.step, loss)

    # -- level shift ---------------------------------------------------------------------------------------------

    def _level(self, step: int, loss: float) -> list[Finding]:
        if self._hold or len(self._values) < self.warmup:
            self._hold = max(0, self._hold - 1)
            self._accept(loss)
            return []
        # A fit costs some 100 us; its error falls with the root of the history, so old histories need few.
        if self._baseline is None or (not self._rise and self._age >= max(8, len(self._values) // 32)):
            self._baseline = Baseline.fit(np.array(self._values), self.margin, self.sigma_floor)
            self._age = 0
        base = self._baseline
        innovation = (loss - base.level) - base.phi * (self._previous - base.level)
        z = max(-self.clip, min(self.clip, innovation / base.step_sigma))
        worth = self.shift * (1.0 - base.phi) / math.sqrt(1.0 - base.phi * base.phi)
        self._evidence = max(0.0, self._evidence + worth * z - 0.5 * worth * worth)
        self._previous = loss
        if self._evidence == 0.0:
            for _, value in self._rise:
                self._values.append(value)
            self._rise = []
            self._accept(loss)
            return []
        self._rise.append((step, loss))
        if len(self._rise) > self.window:
            self._restart()
            return []
        if self._evidence < self.threshold:
            return []
        half = len(self._rise) // 2
        earlier = float(np.median([v for _, v in self._rise[: half + 1]]))
        now = float(np.median([v for _, v in self._rise[half:]]))
        least = max(self.min_shift, self.min_relative * abs(base.median))
        if now - base.median < max(least, STAYS * (earlier - base.median)):
            return []  # too small, or on its way back
        finding = self._shifted(step, base, now, least)
        self._restart()
        self._hold = self.hold
        return [finding]

    def _accept(self, loss: float) -> None:
        self._values.append(loss)
        self._previous = loss
        self._age += 1

    def _restart(self) -> None:
        """Take the risen values as the history of a new level."""
        self._values = deque((v for _, v in self._rise), maxlen=self.window)
        self._rise = []
        self._evidence = 0.0
        self._baseline = None

    def _shifted(self, step: int, base: Baseline, now: float, least: float) -> Finding:
        count = len(self._rise)
        return Finding(
            kind=FindingKind.LEVEL_SHIFT,
            detector=self.name,
            step=step,
            score=self._evidence,
            threshold=self.threshold,
            unit="nats of evidence",
            severity=Severity.INCIDENT,
            since_step=self._rise[0][0],
            window=base.count,
            message=f"Loss has moved from {base.median:.4f} (median of accepted steps, sigma {base.sigma:.4f},"
            f" autocorrelation {base.phi:.2f}) to a median of {now:.4f} in the newer half of the {count} steps since"
            f" step {self._rise[0][0]}: evidence {self._evidence:.1f} nats (limit {self.threshold:g}), rise"
            f" {now - base.median:.4f} nats (least {least:.4f}).",
            evidence={
                "level_before": base.median,
                "level_now": now,
                "sigma": base.sigma,
                "autocorrelation": base.phi,
                "steps": count,
            },
        )

    # -- lost ground ---------------------------------------------------------------------------------------------

    def _lost_ground(self, step: int, loss: float) -> list[Finding]:
        if self._last == self._last:
            self._moves.push(abs(loss - self._last))
        self._last = loss
        self._newest.push(loss)
        if len(self._newest) < self.short:
            return []
        now = self._newest.median
        if now <= self._best:
            self._best, self._best_step = now, step
            return []
        rise = now - self._best
        least = max(self.min_shift, self.lost_relative * abs(self._best))
        if rise < least:
            return []
        noise = MAD_TO_SIGMA * self._moves.median / math.sqrt(2.0)
        if self._baseline is not None and self._baseline.count >= BLOCK:
            noise = max(noise, self._baseline.sigma)
        inner = self._newest.ordered[-2] - self._newest.ordered[1]
        if rise < max(self.lost_sigma * noise, LOST_RANGE * inner):
            return []
        best, best_step = self._best, self._best_step
        self._best, self._best_step = now, step
        return [
            Finding(
                kind=FindingKind.LEVEL_SHIFT,
                detector=self.name,
                step=step,
                score=rise,
                threshold=least,
                unit="nats",
                severity=Severity.INCIDENT,
                since_step=best_step,
                window=self.short,
                message=f"The median of the newest {self.short} losses, {now:.4f}, is {rise:.4f} nats above the best one so"
                f" far, {best:.4f} at step {best_step} (limit {least:.4f}, {self.lost_relative:g} of it); {self.lost_sigma:g}"
                f" sigma are {self.lost_sigma * noise:.4f}, {LOST_RANGE:g} times their range without the extremes"
                f" {LOST_RANGE * inner:.4f}.",
                evidence={"level_before": best, "level_now": now, "steps": self.short},
            )
        ]

    # -- trend ---------------------------------------------------------------------------------------------------

    def _trend(self, step: int, loss: float) -> list[Finding]:
        self._block.append(loss)
        if len(self._block) < self.block:
            return []
        self._means.append((step, sum(self._block) / len(self._block)))
        self._block = []
        if len(self._means) < self.blocks:
            return []
        means = [m for _, m in self._means]
        plain = self._kendall(means)
        self._trend_stated = self._trend_stated and plain > 0.5 * self.trend_z
        if self._trend_stated or plain < self.trend_z:  # the correction can only lower it
            return []
        _, s, variance = mann_kendall(means)
        z = (s - 1.0) / math.sqrt(max(variance, self._variance))
        slope = theil_sen(means)
        rise = slope * (len(means) - 1)
        best = min(means)
        if z < self.trend_z or rise < max(self.min_shift, self.min_relative * abs(best)):
            return []
        self._trend_stated = True
        per_thousand = 1000 * slope * (len(means) - 1) / max(1, self._means[-1][0] - self._means[0][0])
        since = self._means[int(np.argmin(means))][0]
        return [
            Finding(
                kind=FindingKind.DIVERGENCE,
                detector=self.name,
                step=step,
                score=z,
                threshold=self.trend_z,
                unit="Mann-Kendall z",
                severity=Severity.INCIDENT,
                since_step=since,
                window=self.block * len(means),
                message=f"Loss has risen since step {since}: {per_thousand:+.3g} nats per 1,000 steps (Theil-Sen over"
                f" {len(means)} means of {self.block} steps), Mann-Kendall z {z:.1f} above {self.trend_z:g}; best"
                f" mean before {best:.4f}, now {means[-1]:.4f}.",
                evidence={"slope_per_1000_steps": per_thousand, "best": best, "level_now": means[-1]},
            )
        ]

    def _kendall(self, means: list[float]) -> float:
        """Mann-Kendall z of a rise without the correction for autocorrelation."""
        values = np.array(means)
        s = float((values[self._later] > values[self._earlier]).sum()) * 2.0 - len(self._later)
        return (s - 1.0) / math.sqrt(self._variance)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self._values),
            "baseline": None if self._baseline is None else dict(vars(self._baseline)),
            "age": self._age,
            "evidence": self._evidence,
            "rise": [list(r) for r in self._rise],
            "previous": self._previous,
            "hold": self._hold,
            "newest": self._newest.state_dict(),
            "moves": self._moves.state_dict(),
            "last": self._last,
            "best": self._best,
            "best_step": self._best_step,
            "block": list(self._block),
            "means": [list(m) for m in self._means],
            "trend_stated": self._trend_stated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = deque((float(v) for v in state["values"]), maxlen=self.window)
        self._baseline = None if state["baseline"] is None else Baseline(**state["baseline"])
        self._age = int(state["age"])
        self._evidence = float(state["evidence"])
        self._rise = [(int(s), float(v)) for s, v in state["rise"]]
        self._previous = float(state["previous"])
        self._hold = int(state["hold"])
        self._newest.load_state_dict(state["newest"])
        self._moves.load_state_dict(state["moves"])
        self._last = float(state["last"])
        self._best = float(state["best"])
        self._best_step = int(state["best_step"])
        self._block = [float(v) for v in state["block"]]
        self._means = deque(((int(s), float(v)) for s, v in state["means"]), maxlen=self.blocks)
        self._trend_stated = bool(state["trend_stated"])
