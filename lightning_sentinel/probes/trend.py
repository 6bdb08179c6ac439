"""Whether a magnitude that grows will leave the range of its dtype. Pure: numbers in, warnings out."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

CLOSE_BITS = 1.0  # half the limit
WATCHED_BITS = 8.0  # beyond 1/256 of the limit growth is nobody's business: 256 in float16
RISES = 3  # looks in a row that must each lie higher than the one before
KEPT = 8  # looks that the growth rests on


@dataclass(frozen=True)
class Approach:
    """A magnitude that is close to the limit, or will be.

    Attributes:
        path: Which value.
        magnitude: Largest magnitude at the newest look.
        limit: Largest finite number of its dtype.
        bits: Doublings left, ``log2(limit / magnitude)``.
        bits_per_step: Growth in doublings a step; 0 where it is close without growing.
        steps_left: Steps until the limit at that growth; infinite without growth.
    """

    path: str
    magnitude: float
    limit: float
    bits: float
    bits_per_step: float
    steps_left: float


class RangeTrend:
    """Follows magnitudes over the looks and warns once where one nears its limit.

    The growth is the median of the slopes between all pairs of looks (Theil and Sen) of ``log2``: one wild batch does not
    make a trend.

    Example:
        >>> trend = RangeTrend(horizon_steps=100)
        >>> for step in range(0, 40, 10):
        ...     warned = trend.look(step, {"layers.0": (256.0 * 2 ** (step / 10), 65504.0)})
        >>> warned[0].path, round(warned[0].steps_left)
        ('layers.0', 50)
    """

    def __init__(self, horizon_steps: int) -> None:
        self.horizon_steps = horizon_steps
        self._looks: dict[str, deque[tuple[int, float]]] = {}
        self._warned: set[str] = set()
        self.closest: tuple[str, float] | None = None
        self._dumped: str | None = None

    def look(self, step: int, magnitudes: Mapping[str, tuple[float, float]]) -> list[Approach]:
        """Take up one look, ``{path: (magnitude, limit)}``; what is newly close or will be within the horizon."""
        found = []
        self.closest = self._dumped = None
        for path, (magnitude, limit) in magnitudes.items():
            # At the limit itself stands a mask; what is not finite is an incident already.
            if not 0.0 < magnitude < limit:
                continue
            looks = self._looks.setdefault(path, deque(maxlen=KEPT))
            looks.append((step, math.log2(magnitude)))
            bits = math.log2(limit) - looks[-1][1]
            if self.closest is None or bits < self.closest[1]:
                self.closest = (path, bits)
            slope = self._growth(looks)
            left = bits / slope if slope > 0.0 else math.inf
            near = bits <= CLOSE_BITS or (bits <= WATCHED_BITS and left <= self.horizon_steps)
            if near and path not in self._warned:
                self._warned.add(path)
                found.append(Approach(path, magnitude, limit, bits, slope, left))
            elif bits > CLOSE_BITS + 1.0 and not near and left > 2 * self.horizon_steps:
                self._warned.discard(path)
        return found

    @staticmethod
    def _growth(looks: deque[tuple[int, float]]) -> float:
        """Doublings a step; 0 unless the newest looks have each risen."""
        newest = list(looks)[-RISES - 1 :]
        if len(newest) <= RISES or any(b[1] <= a[1] for a, b in pairwise(newest)):
            return 0.0
        return median((b - a) / (t - s) for (s, a), (t, b) in combinations(looks, 2) if t > s)

    def dumps(self) -> str:
        """The state as one string: a restore point of every step copies it, and a string costs nothing to copy."""
        if self._dumped is None:
            looks = {path: list(looks) for path, looks in self._looks.items()}
            self._dumped = json.dumps({"looks": looks, "warned": sorted(self._warned)})
        return self._dumped

    def loads(self, text: str) -> None:
        """Take back what :meth:`dumps` gave."""
        state = json.loads(text)
        self._dumped = text
        self._looks = {
            path: deque(((int(s), float(b)) for s, b in looks), maxlen=KEPT) for path, looks in state["looks"].items()
        }
        self._warned = set(state["warned"])
