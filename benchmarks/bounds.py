"""``--check`` for benchmarks: every number beside its bound, and an exit status that a person's or a nightly job can use."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def add_check(arguments: argparse.ArgumentParser) -> None:
    """The option ``--check``."""
    arguments.add_argument("--check", action="store_true", help="end with status 1 if a number is beyond its bound")


def beyond(result: Mapping[str, Any], most: Mapping[str, float]) -> list[str]:
    """A sentence for each number that is larger than it may be, or missing.

    Args:
        result: Numbers by name; ``a.b`` is entry ``b`` of ``a``, ``a.1`` the second one of a pair.
        most: The largest allowed value of each.

    Example:
        >>> beyond({"ratio": 1.2, "interval": (1.0, 1.01)}, {"ratio": 1.1, "interval.1": 1.03, "share": 0.01})
        ['ratio is 1.2, at most 1.1 expected', 'share is missing, at most 0.01 expected']
    """
    found = []
    for name, bound in most.items():
        value: Any = result
        for part in name.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, (list, tuple)):
                value = value[int(part)]
        if not isinstance(value, (int, float)):
            found.append(f"{name} is missing, at most {bound:g} expected")
        elif not value <= bound:  # NaN is beyond every bound
            found.append(f"{name} is {value:.4g}, at most {bound:g} expected")
    return found


def verdict(result: Mapping[str, Any], most: Mapping[str, float], check: bool) -> int:
    """Print what is beyond its bound; the exit status, 0 without ``check``."""
    problems = beyond(result, most)
    for problem in problems:
        print(f"BEYOND  {problem}")
    print(f"{len(most) - len(problems)} of {len(most)} bounds kept")
    return int(check and bool(problems))
