"""Loss spikes in a Trainer."""

from __future__ import annotations

from ..detectors.spike import Spike
from .base import DetectorCallback


class SpikeDetector(DetectorCallback):
    """Finds jumps of the loss at the step where they happen and follows each to its end.

    The maths and the reasons are in :class:`lightning_sentinel.detectors.Spike` and ``docs/detection.md``.

    Example:
        >>> from lightning_sentinel import SpikeDetector
        >>> SpikeDetector(threshold=10.0).detector.threshold
        10.0

    Findings (nothing is logged to ``trainer.loggers``; every finding is journalled):

    ===============  =========  ======================================================================
    kind             severity   meaning
    ===============  =========  ======================================================================
    ``spike``        alarm      one value out of band
    ``spike``        incident   a gross jump, or several values out of band
    ``level_shift``  incident   the spike stays on its level (``evidence["life"]`` is ``escalated``)
    ``divergence``   incident   the spike keeps growing (``evidence["life"]`` is ``escalated``)
    ``spike``        event      the spike is over (``evidence["life"]`` is ``recovered``)
    ===============  =========  ======================================================================

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

    fresh_state = Spike

    def __init__(
        self,
        threshold: float = Spike.threshold,
        tail: float = Spike.tail,
        gross: float = Spike.gross,
        gross_tail: float = Spike.gross_tail,
        gross_relative: float = Spike.gross_relative,
        min_jump: float = Spike.min_jump,
        min_relative: float = Spike.min_relative,
        confirm: int = Spike.confirm,
        window: int = Spike.window,
        level_window: int = Spike.level_window,
        tail_window: int = Spike.tail_window,
        warmup: int = Spike.warmup,
        explosion: float = Spike.explosion,
        scale_floor: float = Spike.scale_floor,
        recover_after: int = Spike.recover_after,
        shift_after: int = Spike.shift_after,
        patience: int = Spike.patience,
        restart_window: int = Spike.restart_window,
    ) -> None:
        self.detector = Spike(
            threshold=threshold,
            tail=tail,
            gross=gross,
            gross_tail=gross_tail,
            gross_relative=gross_relative,
            min_jump=min_jump,
            min_relative=min_relative,
            confirm=confirm,
            window=window,
            level_window=level_window,
            tail_window=tail_window,
            warmup=warmup,
            explosion=explosion,
            scale_floor=scale_floor,
            recover_after=recover_after,
            shift_after=shift_after,
            patience=patience,
            restart_window=restart_window,
        )
