"""Rolling robust statistics in constant memory: order statistics of the last values, kept sorted as they come.

Adding a value costs one binary search and one short memory move; median, quantiles and MAD cost O(log window). All of it
is plain Python on floats, which for windows of a few hundred values is faster than NumPy's per-call overhead.

Example:
    >>> window = RollingWindow(5)
    >>> for x in [1.0, 2.0, 3.0, 4.0, 100.0, 5.0]:
    ...     window.push(x)
    >>> window.median, window.mad
    (4.0, 1.0)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# A normal distribution's standard deviation in units of its median absolute deviation.
MAD_TO_SIGMA = 1.4826022185056018


def sorted_median(ordered: Sequence[float]) -> float:
    """Median of a non-empty sorted sequence."""
    n = len(ordered)
    return ordered[n // 2] if n % 2 else 0.5 * (ordered[n // 2 - 1] + ordered[n // 2])


def sorted_mad(ordered: Sequence[float], center: float) -> float:
    """Median absolute deviation from ``center`` of a non-empty sorted sequence, in O(log n).

    The deviations below and above ``center`` are two sorted sequences; their common median is found by bisection.
    """
    n = len(ordered)
    split = bisect_left(ordered, center)
    upper = _kth_deviation(ordered, center, split, n // 2)
    return upper if n % 2 else 0.5 * (upper + _kth_deviation(ordered, center, split, n // 2 - 1))


def _kth_deviation(ordered: Sequence[float], center: float, split: int, k: int) -> float:
    """The ``k``-th (from 0) smallest of ``|x - center|``; ``ordered[:split]`` lies below ``center``."""
    n_low, n_high = split, len(ordered) - split
    # The k smallest deviations are the `i` nearest below and the `k - i` nearest above: bisect on i.
    lo, hi = max(0, k - n_high), min(k, n_low)
    while lo < hi:
        i = (lo + hi) // 2
        j = k - i
        below = center - ordered[split - 1 - i]  # nearest value below that is not among the i
        above = ordered[split + j - 1] - center if j > 0 else -math.inf  # farthest value above that is taken
        if below < above:
            lo = i + 1
        else:
            hi = i
    i, j = lo, k - lo
    below = center - ordered[split - 1 - i] if i < n_low else math.inf
    above = ordered[split + j] - center if j < n_high else math.inf
    return min(below, above)


class RollingWindow:
    """The last ``size`` values, both in order of arrival and sorted.

    Args:
        size: Number of values kept.
        values: Initial values, oldest first.
    """

    __slots__ = ("_ordered", "_queue", "size")

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._queue: deque[float] = deque()
        self._ordered: list[float] = []
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, value: float) -> None:
        """Take in a finite value; the oldest one leaves a full window."""
        queue, ordered = self._queue, self._ordered
        if len(queue) == self.size:
            del ordered[bisect_left(ordered, queue.popleft())]
        queue.append(value)
        insort(ordered, value)

    def clear(self) -> None:
        self._queue.clear()
        self._ordered.clear()

    @property
    def values(self) -> list[float]:
        """Oldest first."""
        return list(self._queue)

    @property
    def ordered(self) -> list[float]:
        """Smallest first; not to be changed."""
        return self._ordered

    @property
    def median(self) -> float:
        return sorted_median(self._ordered)

    @property
    def mad(self) -> float:
        """Median absolute deviation from the median."""
        return sorted_mad(self._ordered, self.median)

    @property
    def sigma(self) -> float:
        """Robust standard deviation: MAD scaled to a normal distribution."""
        return MAD_TO_SIGMA * self.mad

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._queue)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = [float(v) for v in state["values"]][-self.size :]
        self._queue = deque(values)
        self._ordered = sorted(values)


def theil_sen(values: npt.ArrayLike) -> float:
    """Median slope over all pairs of equally spaced values, per spacing (Theil 1950, Sen 1968)."""
    y = np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(y), k=1)
    return float(np.median((y[j] - y[i]) / (j - i)))


def mann_kendall(values: npt.ArrayLike) -> tuple[float, float, float]:
    """Mann-Kendall trend test with the variance correction of Hamed and Rao (1998) for autocorrelated data.

    Ranks of the values, detrended by the Theil-Sen slope, give the autocorrelations that count (beyond the two-sided 5
    % limit), and these inflate the variance of Kendall's S.

    Returns:
        ``(z, s, variance)``: the normal statistic with continuity correction, Kendall's S, and the corrected variance.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    signs = np.sign(x[None, :] - x[:, None])
    s = float(np.triu(signs, 1).sum())
    _, ties = np.unique(x, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    detrended = x - np.arange(1, n + 1) * theil_sen(x)
    ranks = average_ranks(detrended)
    ranks = ranks - ranks.mean()
    power = float((ranks * ranks).sum())
    inflation = 0.0
    if power > 0:
        limit = 1.959963984540054 / math.sqrt(n)
        for lag in range(1, n):
            rho = float((ranks[lag:] * ranks[:-lag]).sum()) / power
            if abs(rho) > limit:
                inflation += (n - lag) * (n - lag - 1) * (n - lag - 2) * rho
    variance *= 1 + 2.0 / (n * (n - 1) * (n - 2)) * inflation
    if s == 0 or variance <= 0:
        return 0.0, s, variance
    return (s - math.copysign(1.0, s)) / math.sqrt(variance), s, variance


def average_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks from 1, ties sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse], dtype=np.float64)
