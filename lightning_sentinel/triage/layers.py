"""In which layer a failing rank first differs from the healthy ones: the same weights, each rank on its own batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Healthy ranks on batches of one distribution agree within a few per cent in the root mean square of an activation: a factor
# below this is no deviation, nor is one within so many times the healthy ranks' own spread.
FACTOR, SPREADS = 1.5, 6.0
# Gradients of single batches differ more than activations do.
GRADIENT_FACTOR = 3.0


def first_deviation(
    norms: Sequence[Mapping[str, float] | str], failing: int, factor: float = FACTOR
) -> dict[str, Any] | None:
    """The first layer, in the order computed, whose activations on the failing rank are unlike the healthy ranks'.

    Args:
        norms: For each rank the root mean square of each layer's activations in order, or a sentence why there is none.
        failing: The rank in question.
        factor: Up to which a layer counts as like the others'.

    Returns:
        ``{"module", "rank", "healthy_rank", "failing_rms", "healthy_rms"}``, with ``module`` None where every layer is like
        the others'; None where there is nobody to compare with.

    Example:
        >>> healthy = {"layers.0": 1.0, "layers.1": 1.02}
        >>> first_deviation([healthy, {"layers.0": 1.01, "layers.1": 9.0}], failing=1)["module"]
        'layers.1'
    """
    mine = norms[failing]
    others = {rank: n for rank, n in enumerate(norms) if rank != failing and isinstance(n, Mapping)}
    if not isinstance(mine, Mapping) or not others:
        return None
    found: dict[str, Any] = {"rank": failing, "healthy_rank": min(others), "module": None}
    for module, rms in mine.items():
        logs = np.array([math.log(v) for n in others.values() if math.isfinite(v := n.get(module, math.nan)) and v > 0])
        if not logs.size:
            continue
        middle = float(np.median(logs))
        limit = max(math.log(factor), SPREADS * float(np.abs(logs - middle).max()))
        if not (math.isfinite(rms) and rms > 0) or abs(math.log(rms) - middle) > limit:
            return found | {"module": module, "failing_rms": rms, "healthy_rms": math.exp(middle)}
    return found
