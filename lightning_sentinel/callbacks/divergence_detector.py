"""Level shifts and rising trends of the loss in a Trainer."""

from __future__ import annotations

from ..detectors.divergence import Divergence
from .base import DetectorCallback


class DivergenceDetector(DetectorCallback):
    """Finds finite losses that stop returning: a level that shifts and stays, a trend that rises.

    The maths and the reasons are in :class:`lightning_sentinel.detectors.Divergence` and ``docs/detection.md``.

    Example:
        >>> from lightning_sentinel import DivergenceDetector
        >>> DivergenceDetector(min_relative=0.05).detector.min_relative
        0.05

    Findings (nothing is logged to ``trainer.loggers``; every finding is journalled):

    ===============  =========  ======================================================================
    kind             severity   meaning
    ===============  =========  ======================================================================
    ``level_shift``  incident   the loss sits on a higher level; ``since_step``, ``level_before``
    ``divergence``   incident   the smoothed loss rises; ``since_step``, ``slope_per_1000_steps``, ``best``
    ===============  =========  ======================================================================

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

    fresh_state = Divergence

    def __init__(
        self,
        threshold: float = Divergence.threshold,
        shift: float = Divergence.shift,
        clip: float = Divergence.clip,
        margin: float = Divergence.margin,
        min_shift: float = Divergence.min_shift,
        min_relative: float = Divergence.min_relative,
        sigma_floor: float = Divergence.sigma_floor,
        window: int = Divergence.window,
        warmup: int = Divergence.warmup,
        short: int = Divergence.short,
        lost_relative: float = Divergence.lost_relative,
        lost_sigma: float = Divergence.lost_sigma,
        block: int = Divergence.block,
        blocks: int = Divergence.blocks,
        trend_z: float = Divergence.trend_z,
        hold: int = Divergence.hold,
    ) -> None:
        self.detector = Divergence(
            threshold=threshold,
            shift=shift,
            clip=clip,
            margin=margin,
            min_shift=min_shift,
            min_relative=min_relative,
            sigma_floor=sigma_floor,
            window=window,
            warmup=warmup,
            short=short,
            lost_relative=lost_relative,
            lost_sigma=lost_sigma,
            block=block,
            blocks=blocks,
            trend_z=trend_z,
            hold=hold,
        )
