"""Hardware counters of a rank (memory errors, clocks, temperature), read when an incident opens, by a function of the user's.

Example:
    >>> read(lambda: {"ecc_errors": 3, "sm_clock_mhz": 1410.0})
    {'ecc_errors': 3.0, 'sm_clock_mhz': 1410.0}
    >>> read(lambda: 1 / 0)
    {'error': 'ZeroDivisionError: division by zero'}
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from statistics import median
from typing import Any

from lightning.pytorch import Trainer

from .callbacks.base import gather_objects

Provider = Callable[[], Mapping[str, float]]

# A driver that hangs must not hold up the other ranks, which wait for this one's answer.
SECONDS = 5.0
KEPT_RANKS = 8  # of the named ones, in an incident
# What one rank may say: a line of the journal stays a line.
MOST = 64


def provider_of(given: Provider | str | None) -> Provider | None:
    """The function itself, or the one that ``"package.module.function"`` names.

    Raises:
        ValueError: It is neither a function nor the path of one.
    """
    if not isinstance(given, str):
        if given is not None and not callable(given):
            raise ValueError(
                f"hardware_counters is {given!r}, expected a function without arguments, its path as"
                " 'package.module.function', or None."
            )
        return given
    module, _, name = given.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"hardware_counters is {given!r}, expected the path of a function as 'package.module.function': {error}."
        ) from error
    return provider_of(None if isinstance(found, str) else found)


def read(provider: Provider, seconds: float = SECONDS) -> dict[str, Any]:
    """What the provider says, as numbers; where it raises, hangs or says something else, ``{"error": why}``."""
    answer: list[dict[str, Any]] = []

    def ask() -> None:
        try:
            answer.append({str(k): float(v) for k, v in list(dict(provider()).items())[:MOST]})
        except Exception as error:  # a driver's library may fail in any way
            answer.append({"error": f"{type(error).__name__}: {error}"[:300]})

    thread = threading.Thread(target=ask, name="hardware-counters", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else {"error": f"no answer within {seconds:g} s"}


def in_short(everyone: Sequence[Mapping[str, Any]], named: Sequence[int]) -> dict[str, Any]:
    """What an incident keeps: the answers of the named ranks, and each counter's range over all.

    Example:
        >>> in_short([{"ecc": 0.0}, {"ecc": 7.0}, {"error": "no answer"}], named=[1])
        {'ranks': {'1': {'ecc': 7.0}}, 'range': {'ecc': [0.0, 3.5, 7.0]}, 'failed': [2]}
    """
    values: dict[str, list[float]] = {}
    for answer in everyone:
        for name, value in answer.items():
            if isinstance(value, float) and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {
        "ranks": {str(r): dict(everyone[r]) for r in named[:KEPT_RANKS] if r < len(everyone)},
        "range": {name: [min(v), median(v), max(v)] for name, v in values.items()},
        "failed": [r for r, answer in enumerate(everyone) if "error" in answer][:KEPT_RANKS],
    }


def read_all(trainer: Trainer, provider: Provider, named: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's counters, and what an incident keeps of all ranks'. Every rank calls it alike."""
    mine = read(provider)
    return mine, in_short(gather_objects(trainer, [mine]), named)
