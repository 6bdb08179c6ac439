"""Unit and bounds of every number that can be configured: the constructors check by this table, and ``config`` prints it.

Example:
    >>> check_limits("Rollback", {"every_n_steps": 25, "keep": 1})
    Traceback (most recent call last):
    ValueError: Rollback: keep must be at least 2 (one known-good snapshot and one candidate), found 1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Edge = float | str  # a number, or the name of the option next to it that is the bound


@dataclass(frozen=True)
class Limit:
    """One number.

    Attributes:
        unit: What it counts or measures.
        least, above, most, below: Bounds; a name stands for that option's value.
        whole: An ``int`` is expected.
        optional: None is a value, too.
        why: Added to the bound, in brackets.
    """

    unit: str
    least: Edge | None = None
    above: Edge | None = None
    most: Edge | None = None
    below: Edge | None = None
    whole: bool = False
    optional: bool = False
    why: str = ""

    def words(self, values: Mapping[str, Any] | None = None) -> str:
        """The bounds as words; with ``values`` a named bound shows its value.

        Example:
            >>> Limit("probability", above=0, most="tail").words()
            'greater than 0 and at most tail'
        """
        edges = {"at least": self.least, "greater than": self.above, "at most": self.most, "less than": self.below}
        parts = [f"{word} {_shown(edge, values)}" for word, edge in edges.items() if edge is not None]
        bounds = " and ".join(parts)
        return f"{bounds} ({self.why})" if bounds and self.why else bounds or self.why

    def allows(self, value: float, values: Mapping[str, Any]) -> bool:
        """Whether a number is within the bounds."""
        return not (
            (self.least is not None and value < _value(self.least, values))
            or (self.above is not None and value <= _value(self.above, values))
            or (self.most is not None and value > _value(self.most, values))
            or (self.below is not None and value >= _value(self.below, values))
        )


def check_limits(owner: str, values: Mapping[str, Any]) -> None:
    """Check the numbers and the words that ``owner`` was given.

    Args:
        owner: Key of :data:`LIMITS`; the message begins with it.
        values: By option; what the table does not know is passed over.

    Raises:
        ValueError: With the option, its bound and what was found.
    """
    for name, limit in LIMITS[owner].items():
        if name not in values or (values[name] is None and limit.optional):
            continue
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"{owner}: {name} must be a {'whole ' * limit.whole}number, found {value!r}.")
        if limit.whole and not isinstance(value, int):
            raise ValueError(f"{owner}: {name} must be a whole number, found {value!r}.")
        if not limit.allows(value, values):
            none = " or None" if limit.optional else ""
            raise ValueError(f"{owner}: {name} must be {limit.words(values)}{none}, found {value!r}.")
    for name, words in CHOICES.get(owner, {}).items():
        if name in values and values[name] not in words:
            raise ValueError(
                f"{owner}: {name} is {values[name]!r}, expected one of {', '.join(words)}.{nearest(values[name], words)}"
            )


def nearest(name: object, valid: Iterable[str], cutoff: float = 0.4) -> str:
    """The end of an error message: the valid name that was meant, or nothing; with ``cutoff=0`` the most similar in any case.

    Example:
        >>> nearest("recver", ("observe", "guard", "recover"))
        " Nearest valid name: 'recover'."
    """
    close = difflib.get_close_matches(str(name), [*map(str, valid)], n=1, cutoff=cutoff)
    return f" Nearest valid name: {close[0]!r}." if close else ""


def _value(edge: Edge, values: Mapping[str, Any]) -> float:
    return float(values[edge]) if isinstance(edge, str) else edge


def _shown(edge: Edge, values: Mapping[str, Any] | None) -> str:
    if isinstance(edge, str):
        return edge if values is None or edge not in values else f"{edge} ({values[edge]:g})"
    return f"{edge:,}" if isinstance(edge, int) else f"{edge:g}"


def _count(unit: str, least: Edge = 0, *, optional: bool = False, why: str = "") -> Limit:
    return Limit(unit, least=least, whole=True, optional=optional, why=why)


def _positive(unit: str) -> Limit:
    return Limit(unit, above=0)


def _fraction_of(what: str) -> Limit:
    return Limit(f"fraction of {what}", least=0)


_VOCABULARY = _count("tokens", 2, optional=True)

# By the name with which errors begin; a detector's name where the callback hands its options on to it.
LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "Spike": {
        "threshold": _positive("robust sigma"),
        "tail": Limit("probability", above=0, most=1),
        "gross": _positive("robust sigma"),
        "gross_tail": Limit("probability", above=0, most="tail"),
        "gross_relative": _fraction_of("the expected loss"),
        "min_jump": Limit("nats", least=0),
        "min_relative": _fraction_of("the expected loss"),
        "confirm": _count("steps", 1),
        "window": _count("steps", 16),
        "level_window": _count("steps", 5),
        "tail_window": _count("steps", 16),
        "warmup": _count("steps", 5),
        "explosion": Limit("times the newest losses", above=1),
        "scale_floor": Limit("fraction of the expected loss", above=0),
        "recover_after": _count("steps", 1),
        "shift_after": _count("steps", 2),
        "patience": _count("steps", "shift_after"),
        "restart_window": _count("steps"),
    },
    "Divergence": {
        "threshold": _positive("sigma, summed"),
        "shift": _positive("sigma"),
        "clip": Limit("sigma", above="shift"),
        "margin": Limit("sigma", least=0),
        "min_shift": Limit("nats", least=0),
        "min_relative": _fraction_of("the level"),
        "sigma_floor": Limit("fraction of the level", above=0),
        "window": _count("steps", 32),
        "warmup": _count("steps", 16),
        "short": _count("steps", 4),
        "lost_relative": Limit("fraction of the best level", above=0),
        "lost_sigma": _positive("sigma"),
        "block": _count("steps", 1),
        "blocks": _count("blocks", 8),
        "trend_z": _positive("Mann-Kendall z"),
        "hold": _count("steps"),
    },
    "RankOutlier": {
        "threshold": _positive("sigma"),
        "false_per_step": Limit("probability", above=0, most=0.1),
        "tail": Limit("times the largest healthy score", least=0),
        "cold_threshold": _positive("sigma between ranks"),
        "cold_relative": Limit("fraction of the median loss", above=0),
        "min_jump": Limit("nats", least=0),
        "min_relative": _fraction_of("the median loss"),
        "warmup": _count("steps", 4),
        "memory": _count("steps", "warmup"),
        "max_named": _count("ranks", 1),
        "straggler": Limit("times the median rank's time", above=1),
        "straggler_steps": _count("steps", 1),
    },
    "LossScale": {
        "max_consecutive": _count("steps", 2),
        "max_without_step": _count("steps", 2),
        "floor": _positive("loss scale"),
    },
    "BatchValidator": {
        "vocabulary_size": _count("tokens", 1, optional=True),
        "ignore_index": Limit("token", whole=True, why="any whole number that is no token of the vocabulary"),
        "max_remembered": _count("samples", 2),
    },
    "DeepProbe": {
        "every_n_steps": _count("steps", why="0: only at incidents"),
        "horizon_steps": _count("steps", 1, optional=True),
        "max_modules": _count("modules", 1),
        "max_incidents": _count("incidents"),
    },
    "ForensicCheckpoint": {
        "every_n_steps": _count("steps"),
        "keep": _count("checkpoints", 1),
        "keep_every_tokens": _count("tokens", 1, optional=True),
        "probation_steps": _count("steps"),
        "compare_steps": _count("steps"),
    },
    "IncidentResponse": {
        "budget_steps": _count("steps", 1),
        "probation_steps": _count("steps", 1),
        "recovered_z": _positive("robust sigma"),
        "lr_factor": Limit("times the learning rate", above=0, below=1),
        "lr_steps": _count("steps", 1),
        "max_forwards": _count("forward passes"),
        "max_seconds": _positive("seconds"),
        "bundle_bytes": _count("bytes"),
    },
    "NonFiniteTracer": {
        "every_n": _count("steps", 1, optional=True),
        "max_traces": _count("traces"),
    },
    "Preflight": {
        "vocabulary_size": _VOCABULARY,
        "checkpoints": _count("checkpoints", optional=True),
    },
    "RankTelemetry": {
        "update_norm_every_n_steps": _count("steps", why="0: never"),
        "vocabulary_size": _VOCABULARY,
        "gather_within": _count("ranks", why="0: in one stage"),
    },
    "ReplicaConsistency": {"every_n_steps": _count("steps", 1)},
    "Rollback": {
        "every_n_steps": _count("steps", 1, optional=True),
        "keep": _count("snapshots", 2, why="one known-good snapshot and one candidate"),
    },
    "RunJournal": {
        "step_interval": _count("steps", why="0: no step lines"),
        "report_every_seconds": Limit("seconds", least=0),
        "max_bytes": _count("bytes", 1),
        "webhook_timeout_seconds": _positive("seconds"),
        "webhook_retries": _count("tries"),
    },
}

# The words that an option may be, where it is one of a few.
CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "BatchValidator": {"repeats": ("report", "allow")},
    "RankTelemetry": {"sync": ("gate", "lagged")},
    "ReplicaConsistency": {"buffers": ("auto", "all", "none")},
    "Rollback": {"cursor": ("auto", "require")},
    "policy": {"mode": ("observe", "guard", "recover")},
}

# Which of these a callback's options are checked by, where it is not its own name.
CHECKED_BY = {
    "SpikeDetector": "Spike",
    "DivergenceDetector": "Divergence",
    "RankOutlierDetector": "RankOutlier",
    "LossScaleMonitor": "LossScale",
}


def limits_of(callback: str) -> Mapping[str, Limit]:
    """Limits by option of a callback's class name; empty for one without numbers.

    Example:
        >>> limits_of("SpikeDetector")["confirm"].unit
        'steps'
    """
    return LIMITS.get(CHECKED_BY.get(callback, callback), {})
