"""One rank away from the others, in a Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..detectors.rank_outlier import RankOutlier
from .base import DetectorCallback


class RankOutlierDetector(DetectorCallback):
    """Names the rank whose loss leaves its usual place among the ranks, and ranks that compute slowly.

    The maths and the reasons are in :class:`lightning_sentinel.detectors.RankOutlier` and ``docs/detection.md``.

    Example:
        >>> from lightning_sentinel import RankOutlierDetector
        >>> RankOutlierDetector(threshold=9.0).detector.threshold
        9.0

    Findings (nothing is logged to ``trainer.loggers``; every finding is journalled). Silent on one rank:

    ================  =========  =====================================================================
    kind              severity   meaning
    ================  =========  =====================================================================
    ``rank_outlier``  incident   ``ranks`` and ``culprits`` (``rank:<r>``) name it, worst first
    ``straggler``     alarm      a rank is slower than the median rank, step after step
    ..                incident   the same, and the others are seen to wait for it by 20 ms a step or more
    ================  =========  =====================================================================

    Args:
        threshold: Score of one step, in robust sigma, from which a rank is named.
        false_per_step: Probability that a step names any healthy rank, were the scores normal; sets the thresholds of
            the sums over two and three steps by the number of ranks.
        tail: Multiple of the largest recent score of a healthy rank that a score must pass.
        cold_threshold: Same while there is too little history, in sigma of the spread between ranks.
        cold_relative: Smallest distance that counts without history, as a fraction of the median loss.
        min_jump: Smallest distance that counts, in nats.
        min_relative: Smallest distance that counts, as a fraction of the median loss.
        warmup: Records of history before offsets and noise are trusted.
        memory: Records over which offsets and noise are averaged.
        max_named: Ranks named in one finding, worst first.
        straggler: Multiple of the median rank's time from which a rank is slow.
        straggler_steps: Steps in a row that make a slow rank a straggler.
    """

    fresh_state = compares_ranks = RankOutlier

    def __init__(
        self,
        threshold: float = RankOutlier.threshold,
        false_per_step: float = RankOutlier.false_per_step,
        tail: float = RankOutlier.tail,
        cold_threshold: float = RankOutlier.cold_threshold,
        cold_relative: float = RankOutlier.cold_relative,
        min_jump: float = RankOutlier.min_jump,
        min_relative: float = RankOutlier.min_relative,
        warmup: int = RankOutlier.warmup,
        memory: int = RankOutlier.memory,
        max_named: int = RankOutlier.max_named,
        straggler: float = RankOutlier.straggler,
        straggler_steps: int = RankOutlier.straggler_steps,
    ) -> None:
        self.detector = RankOutlier(
            threshold=threshold,
            false_per_step=false_per_step,
            tail=tail,
            cold_threshold=cold_threshold,
            cold_relative=cold_relative,
            min_jump=min_jump,
            min_relative=min_relative,
            warmup=warmup,
            memory=memory,
            max_named=max_named,
            straggler=straggler,
            straggler_steps=straggler_steps,
        )

    def state_dict(self) -> dict[str, Any]:
        # Tensors, because a checkpoint is read back with weights_only=True, which refuses NumPy arrays.
        state = self.detector.state_dict()
        return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.detector.load_state_dict(
            {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in state_dict.items()}
        )
