"""Draws the pictures of the story: ``python docs/pictures.py`` writes ``docs/images/averaging.png``.

``images/bad_rank.png`` is the ``loss.png`` of the run whose command stands on the page.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from lightning_sentinel.detectors import RankOutlier
from lightning_sentinel.record import StepRecord

HEALTHY, BAD, NOISE = 2.30, 40.0, 0.03


def rank_score(ranks: int) -> float:
    """Robust sigma at which the real detector sees the bad rank, after fifty healthy steps."""
    draw = np.random.default_rng(ranks)
    detector = RankOutlier()
    for step in range(50):
        assert not detector.observe(
            StepRecord.from_losses(step, (HEALTHY + NOISE * draw.standard_normal(ranks)).tolist())
        )
    losses = HEALTHY + NOISE * draw.standard_normal(ranks)
    losses[ranks // 2] = BAD
    [finding] = detector.observe(StepRecord.from_losses(50, losses.tolist()))
    return finding.score


def main() -> None:
    ranks = 4 ** np.arange(2, 8)  # 16 to 16,384
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    left.plot(ranks, (BAD - HEALTHY) / ranks, "o-", color="#0072b2")
    left.axhspan(0, 3 * NOISE, color="#d9ecf7", label="three sigma of the mean's own noise")
    left.set(xscale="log", yscale="log", title="In the mean", ylabel="rise of the mean loss, nats", xlabel="ranks")
    left.legend(frameon=False, loc="lower left")
    right.plot(ranks, [rank_score(int(n)) for n in ranks], "o-", color="#d55e00")
    right.axhline(7.5, color="#555555", linestyle="--", label="threshold of the rank outlier detector")
    right.set(xscale="log", yscale="log", title="In the rank's own number", ylabel="robust sigma", xlabel="ranks")
    right.set_ylim(1, None)
    right.legend(frameon=False, loc="lower left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks], rotation=30)
        axes.minorticks_off()
    fig.savefig(Path(__file__).parent / "images" / "averaging.png", dpi=130)


if __name__ == "__main__":
    main()
