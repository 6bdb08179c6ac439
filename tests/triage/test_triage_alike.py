"""Four causes with the same peak loss, and four verdicts: the height of a spike says nothing about its cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from test_triage_verdicts import STEP, Smooth, run
from triage_models import fit

from lightning_sentinel import RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import VerdictKind

PEAK = 400.0  # the loss of the spike, in the units of this regression; without a fault it is about 1
CLOSE = 0.01
Hurt = Callable[[Any, Any, Any], None]


def _data(size: float) -> Hurt:
    def hurt(trainer: Any, module: Any, batch: Any) -> None:
        batch["y"] = batch["y"] + size

    return hurt


def _infrastructure(size: float) -> Hurt:
    def hurt(trainer: Any, module: Any, batch: Any) -> None:
        fired: list[int] = []
        module.head.register_forward_hook(lambda m, a, y: y if fired else (fired.append(1), y + size)[1])

    return hurt


def _numerics(size: float) -> Hurt:
    def hurt(trainer: Any, module: Any, batch: Any) -> None:
        module.blocks[2].mixer.wide.register_forward_hook(lambda m, a, y: y * size)

    return hurt


def _optimization(size: float) -> Hurt:
    def hurt(trainer: Any, module: Any, batch: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= size

    return hurt


# cause: how it is done, step of the strike, verdict, culprits
CAUSES: dict[str, tuple[Callable[[float], Hurt], int, VerdictKind, tuple[str, ...]]] = {
    "data": (
        _data,
        STEP,
        VerdictKind.DATA,
        tuple(f"sample:s{i}" for i in range((STEP % 12) * 4, (STEP % 12) * 4 + 4)),
    ),
    "infrastructure": (_infrastructure, STEP, VerdictKind.INFRASTRUCTURE, ("rank:0",)),
    "numerics": (_numerics, STEP, VerdictKind.NUMERICS, ("module:blocks.2.mixer",)),
    "optimization": (_optimization, STEP - 1, VerdictKind.OPTIMIZATION, ("optimizer:lr",)),
}


def _peak(hurt: Hurt, at: int) -> float:
    """Loss of the step at which the verdict is asked for, in a run without an examination."""
    from test_triage_verdicts import Case

    trainer = fit(Smooth(), [Case(hurt, at, examine=False), RankTelemetry()], steps=STEP + 1)
    [loss] = [r.mean_loss for r in context_of(trainer).history if r.step == STEP]
    return float(loss)


def _size_for(make: Callable[[float], Hurt], at: int) -> float:
    """Size of the fault that gives the peak. By regula falsi on logarithmic scales, on which the peak is nearly a line."""
    target = math.log(PEAK)

    def miss_of(size: float) -> float:
        return math.log(_peak(make(math.exp(size)), at)) - target

    low, below = 0.0, -target  # without a fault the loss is about 1
    high = math.log(5.0)
    while (above := miss_of(high)) < 0.0:
        low, below, high = high, above, high + math.log(4.0)
    ends = [(low, below), (high, above)]
    for _ in range(12):
        (low, below), (high, above) = ends
        size = low - below * (high - low) / (above - below)
        miss = miss_of(size)
        if abs(miss) < CLOSE:
            return math.exp(size)
        # The end that stays counts half the next time, or it would stay for long (the Illinois rule).
        ends = [(size, miss), (high, above / 2)] if miss < 0 else [(low, below / 2), (size, miss)]
    raise AssertionError(f"no size gives a peak of {PEAK}: {ends}")


@pytest.mark.slow
def test_four_causes_with_the_same_peak_loss_and_four_verdicts() -> None:
    """What the ladder makes of them: the finding that asks for the examination is made by hand, at the step of the peak."""
    peaks, verdicts = {}, {}
    for name, (make, at, _, _) in CAUSES.items():
        hurt = make(_size_for(make, at))
        peaks[name] = _peak(hurt, at)
        verdict, _ = run(hurt, at=STEP, hurt_at=at)
        assert verdict is not None
        verdicts[name] = (verdict.kind, verdict.culprits)
    assert peaks == {name: pytest.approx(PEAK, rel=0.02) for name in CAUSES}
    assert verdicts == {name: (kind, culprits) for name, (_, _, kind, culprits) in CAUSES.items()}
    assert len({kind for kind, _ in verdicts.values()}) == 4
