"""Losses that stop returning: a level that shifts and stays, and a trend that rises. (See docs/detection.md.)

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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..incidents import Finding, FindingKind, Severity
from ..record import StepRecord
from .robust import RollingWindow, check_bound, check_count, mann_kendall, theil_sen


@dataclass(eq=False)
class Divergence:
    """A change-point statistic on whitened losses and a trend test on block means.

    Args:
        threshold: Decision bound of the one-sided CUSUM, in standard deviations of the whitened loss.
        shift: Size of the level shift, in marginal sigma, that the CUSUM is tuned to.
        min_shift: Smallest shift that counts, in nats.
        min_relative: Smallest shift that counts, as a fraction of the level before.
        window: Accepted values from which level, scale and autocorrelation are estimated.
        warmup: Accepted values before anything is stated.
        block: Steps averaged to one value of the trend test.
        blocks: Values in the trend test.
        trend_z: Mann-Kendall statistic from which a rising trend is a divergence.
        hold: Steps after an incident in which no second one is stated while the level settles.
    """

    threshold: float = 18.0
    shift: float = 1.5
    min_shift: float = 0.02
    min_relative: float = 0.025
    window: int = 512
    warmup: int = 40
    block: int = 8
    blocks: int = 24
    trend_z: float = 5.0
    hold: int = 100
    name: ClassVar[str] = "divergence"

    def __post_init__(self) -> None:
        check_bound("Divergence", "threshold", self.threshold, above=0.0)
        check_bound("Divergence", "shift", self.shift, above=0.0)
        check_bound("Divergence", "min_shift", self.min_shift, least=0.0)
        check_bound("Divergence", "min_relative", self.min_relative, least=0.0)
        check_count("Divergence", "window", self.window, least=32)
        check_count("Divergence", "warmup", self.warmup, least=16)
        check_count("Divergence", "block", self.block, least=1)
        check_count("Divergence", "blocks", self.blocks, least=8)
        check_bound("Divergence", "trend_z", self.trend_z, above=0.0)
        check_count("Divergence", "hold", self.hold, least=0)
        self._values = RollingWindow(self.window)
        self._model: tuple[float, float, float] | None = None  # level, sigma, phi
        self._age = 0
        self._sum = 0.0
        self._excursion: list[tuple[int, float]] = []
        self._previous = math.nan
        self._hold = 0
        self._block: list[float] = []
        self._means: list[tuple[int, float]] = []
        self._trend_stated = False

    def observe(self, record: StepRecord) -> list[Finding]:
        loss = record.mean_loss
        if not math.isfinite(loss):
            return []
        findings = self._cusum(record.step, loss) + self._trend(record.step, loss)
        return findings

    # -- level shift ---------------------------------------------------------------------------------------------

    def _fit(self) -> tuple[float, float, float]:
        values = np.array(self._values.values)
        n = len(values)
        d1, d2 = np.abs(np.diff(values)), np.abs(values[2:] - values[:-2])
        v1, v2 = float(np.median(d1)) ** 2, float(np.median(d2)) ** 2
        phi = min(0.97, max(0.0, v2 / v1 - 1.0 if v1 > 0 else 0.0) + 1.0 / math.sqrt(n))
        span = int(min(n, max(24, 24 * (1 + phi) / (1 - phi))))
        level = float(np.median(values[-span:]))
        sigma = 1.4826 * math.sqrt(v1) / math.sqrt(2 * (1 - phi))
        recent = values[-span:]
        sigma = max(sigma, 1.4826 * float(np.median(np.abs(recent - level))), 1e-4 * abs(level), 1e-12)
        return level, sigma, phi

    def _cusum(self, step: int, loss: float) -> list[Finding]:
        if self._hold:
            self._hold -= 1
            self._values.push(loss)
            self._previous = loss
            return []
        if len(self._values) < self.warmup:
            self._values.push(loss)
            self._previous = loss
            return []
        if self._model is None or (not self._excursion and self._age >= 8):
            self._model, self._age = self._fit(), 0
        level, sigma, phi = self._model
        self._age += 1
        innovation = (loss - level) - phi * (self._previous - level)
        z = innovation / (sigma * math.sqrt(1 - phi * phi))
        reference = 0.5 * self.shift * (1 - phi) / math.sqrt(1 - phi * phi)
        self._previous = loss
        before = self._sum
        self._sum = max(0.0, self._sum + max(-4.0, min(4.0, z)) - reference)
        if self._sum == 0.0:
            for _, value in self._excursion:
                self._values.push(min(value, level + 4 * sigma))
            self._excursion = []
            self._values.push(loss)
            return []
        if before == 0.0:
            self._excursion = []
        self._excursion.append((step, loss))
        if len(self._excursion) > self.window:
            self._reset_to_excursion()
            return []
        if self._sum < self.threshold:
            return []
        now = float(np.median([v for _, v in self._excursion]))
        if now - level < max(self.min_shift, self.min_relative * abs(level)):
            return []
        since = self._excursion[0][0]
        count = len(self._excursion)
        score = self._sum
        self._reset_to_excursion()
        self._hold = self.hold
        return [
            Finding(
                kind=FindingKind.LEVEL_SHIFT,
                detector=self.name,
                step=step,
                score=score,
                threshold=self.threshold,
                unit="CUSUM sigma",
                severity=Severity.INCIDENT,
                since_step=since,
                window=len(self._values),
                message=f"Loss has moved from {level:.4f} to a median of {now:.4f} over the last {count} steps (since step"
                f" {since}): CUSUM {score:.1f} above its limit {self.threshold:g} (sigma {sigma:.4f}, autocorrelation"
                f" {phi:.2f}, least shift {max(self.min_shift, self.min_relative * abs(level)):.4f} nats).",
                evidence={"level_before": level, "level_now": now, "sigma": sigma, "phi": phi, "steps": count},
            )
        ]

    def _reset_to_excursion(self) -> None:
        values = [v for _, v in self._excursion]
        self._values = RollingWindow(self.window, values)
        self._excursion = []
        self._sum = 0.0
        self._model = None

    # -- trend ---------------------------------------------------------------------------------------------------

    def _trend(self, step: int, loss: float) -> list[Finding]:
        self._block.append(loss)
        if len(self._block) < self.block:
            return []
        self._means.append((step, sum(self._block) / len(self._block)))
        self._block = []
        self._means = self._means[-self.blocks :]
        if len(self._means) < self.blocks:
            return []
        means = [m for _, m in self._means]
        z, _, _ = mann_kendall(means)
        slope = theil_sen(means)
        rise = slope * (len(means) - 1)
        best = min(means)
        if z < self.trend_z or rise < max(self.min_shift, self.min_relative * abs(best)):
            self._trend_stated = self._trend_stated and z > 0.5 * self.trend_z
            return []
        if self._trend_stated:
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

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": self._values.state_dict(),
            "model": None if self._model is None else list(self._model),
            "age": self._age,
            "sum": self._sum,
            "excursion": [list(e) for e in self._excursion],
            "previous": self._previous,
            "hold": self._hold,
            "block": list(self._block),
            "means": [list(m) for m in self._means],
            "trend_stated": self._trend_stated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.load_state_dict(state["values"])
        self._model = None if state["model"] is None else tuple(state["model"])
        self._age = int(state["age"])
        self._sum = float(state["sum"])
        self._excursion = [(int(s), float(v)) for s, v in state["excursion"]]
        self._previous = float(state["previous"])
        self._hold = int(state["hold"])
        self._block = list(state["block"])
        self._means = [(int(s), float(v)) for s, v in state["means"]]
        self._trend_stated = bool(state["trend_stated"])
