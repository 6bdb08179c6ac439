"""Which faults a canary lets loose, when, and what the suite should make of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_STEPS = 26  # before the first fault: the detectors' warm-up
PROBATION_STEPS = 8  # healthy steps that close an incident in the pilot
MARGIN_STEPS = 6  # between the end of a probation and the next fault
ROLLBACK_EVERY = 10  # steps between two restore points in the pilot
SEEN_WITHIN = 4  # steps from a fault to its incident
TIGHTER = 0.75  # factor on the detectors' thresholds


@dataclass(frozen=True)
class Exercise:
    """A fault, and what is right for it.

    Attributes:
        verdict: Kind of the verdict.
        culprits: Beginnings of what the verdict must name, all of them.
        answers: The first answer must be one of these.
        exact: After the recovery the drill's losses equal the clean leg's to the bit.
        settings: The fault's arguments beside ``step``.
    """

    verdict: str
    culprits: tuple[str, ...]
    answers: frozenset[str]
    exact: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def _exercise(verdict: str, culprits: str, answers: str, *, exact: bool = False, **settings: Any) -> Exercise:
    return Exercise(verdict, tuple(culprits.split()), frozenset(answers.split()), exact, settings)


EXERCISES: dict[str, Exercise] = {
    "transient_nan": _exercise("infrastructure", "module:", "retry_step", exact=True, target="auto"),
    "cursor_rewind": _exercise("data", "cursor", "rollback_replay", exact=True),
    "nan_forward": _exercise("numerics", "module:", "skip_step rollback_skip", target="auto"),
    "nan_backward": _exercise("numerics", "module:", "skip_step rollback_skip", target="auto"),
    "no_supervised_tokens": _exercise("data", "sample:", "skip_step quarantine rollback_skip"),
    "out_of_range_token": _exercise("data", "sample:", "quarantine skip_step rollback_skip"),
    "corrupt_batch": _exercise("data", "sample:", "skip_step quarantine rollback_skip"),
    "lr_spike": _exercise("optimization", "optimizer:lr", "rollback_replay", exact=True),
    "optimizer_corruption": _exercise(
        "optimization", "optimizer:exp_avg_sq", "rollback_replay restore_optimizer", exact=True
    ),
}

# Faults that show whatever the model has learned yet, and apply to any model and loader. The last three in the table above
# show in the loss alone: they need a run that is past its warm-up.
DEFAULT = ("transient_nan", "cursor_rewind", "nan_forward", "nan_backward")


@dataclass(frozen=True)
class Timeline:
    """When each fault strikes, and how long the pilot is.

    Example:
        >>> timeline(("transient_nan", "nan_forward"))
        Timeline(faults={'transient_nan': 26, 'nan_forward': 41}, steps=56)
    """

    faults: dict[str, int]
    steps: int


def timeline(names: Sequence[str], warm: int = WARM_STEPS, every: int = ROLLBACK_EVERY) -> Timeline:
    """Faults so far apart that an incident is over before the next begins, those that keep the path exact first.

    None strikes at a step at which a restore point is taken: the usual case is drilled, not the luckiest.
    """
    unknown = sorted(set(names) - EXERCISES.keys())
    if unknown:
        raise ValueError(f"drill has {', '.join(unknown)}; there are {', '.join(EXERCISES)}.")
    if warm < 2:
        raise ValueError(f"warm is {warm} steps, expected at least 2.")
    faults: dict[str, int] = {}
    step = warm
    for name in sorted(dict.fromkeys(names), key=lambda n: not EXERCISES[n].exact):
        step += step % every == 0
        faults[name] = step
        step += PROBATION_STEPS + MARGIN_STEPS + 1
    return Timeline(faults, step)


def injector(faults: Mapping[str, int]) -> dict[str, Any]:
    """The configuration node of a ``FaultInjector`` with these faults at these steps."""
    from ..faults.catalogue import CATALOGUE

    return {
        "_target_": "lightning_sentinel.FaultInjector",
        "_convert_": "all",
        "journal": True,
        "faults": {
            name: {
                "_target_": f"lightning_sentinel.faults.{CATALOGUE[name].__name__}",
                "step": step,
                **EXERCISES[name].settings,
            }
            for name, step in faults.items()
        },
    }
