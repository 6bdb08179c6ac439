"""Where the loss would be now, had the incident not happened: the band that says whether a run has recovered.

From the newest accepted losses before the incident, a robust line in the logarithm of the step (Theil-Sen) gives a
level now and a descent to come. A later loss is fine anywhere between the continued descent and no descent at all, so

    ``z = (loss - level) / s`` above the level at the incident, ``(loss - line) / s`` below the continued line, 0 between,

with ``s`` the MAD scale of the residuals around the line (at least a floor), times ``sqrt(1 + (pi / 2) / n)`` for the
uncertainty of a level that is the median of ``n`` values.

Example:
    >>> band = ForecastBand.fit([(s, 2.0 + 0.01 * (-1) ** s) for s in range(100)])
    >>> abs(band.z(120, 2.0)) < 1.5, band.z(120, 3.0) > 30
    (True, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .robust import MAD_TO_SIGMA


@dataclass(frozen=True)
class ForecastBand:
    """Centre and scale of later losses.

    Attributes:
        step: Last step of the history.
        level: Level of the loss at ``step``, in nats.
        slope: Descent in nats per unit of log(step), at most 0.
        scale: Robust standard deviation of one loss around the band, in nats.
        count: Values that it rests on.
    """

    step: int
    level: float
    slope: float
    scale: float
    count: int

    @classmethod
    def fit(cls, history: Iterable[tuple[int, float]], *, window: int = 64, scale_floor: float = 0.005) -> ForecastBand:
        """Fit to ``(step, loss)`` pairs, oldest first; only the newest ``window`` finite ones count.

        Raises:
            ValueError: With fewer than 5 finite losses.
        """
        pairs = [(int(s), float(v)) for s, v in history if math.isfinite(v)][-window:]
        if len(pairs) < 5:
            raise ValueError(f"ForecastBand.fit needs at least 5 finite losses, found {len(pairs)}.")
        steps = np.array([p[0] for p in pairs], dtype=np.float64)
        losses = np.array([p[1] for p in pairs])
        x = np.log1p(np.maximum(steps, 0.0))
        i, j = np.triu_indices(len(x), k=1)
        apart = x[j] > x[i]
        slope = float(np.median((losses[j] - losses[i])[apart] / (x[j] - x[i])[apart])) if apart.any() else 0.0
        slope = min(slope, 0.0)
        level = float(np.median(losses - slope * (x - x[-1])))
        residual = losses - level - slope * (x - x[-1])
        sigma = MAD_TO_SIGMA * float(np.median(np.abs(residual - np.median(residual))))
        sigma = max(sigma, scale_floor * abs(level), 1e-12)
        return cls(pairs[-1][0], level, slope, sigma * math.sqrt(1.0 + math.pi / 2 / len(pairs)), len(pairs))

    def center(self, step: int) -> float:
        """The continued descent at ``step``, in nats."""
        ahead = math.log1p(max(step, 0)) - math.log1p(max(self.step, 0))
        return self.level + self.slope * max(0.0, ahead)

    def z(self, step: int, loss: float) -> float:
        """Distance from the band in robust sigma, positive above it; infinite for a non-finite loss."""
        if not math.isfinite(loss):
            return math.inf
        low = self.center(step)
        if loss > self.level:
            return (loss - self.level) / self.scale
        return min(0.0, (loss - low) / self.scale)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ForecastBand:
        return cls(**state)
