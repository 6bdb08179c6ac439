"""Collects statistics on the device and reads them once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LONGEST = 128  # numbers in one value; a longer one is told by its least, median and largest


@dataclass
class Stats:
    """Values by path and name, kept on their device until :meth:`read`.

    Attributes:
        values: ``(path, name, value)``, each of no dimension or one.
        kinds: What kind of thing lies at a path, for people.
        ranges: ``(path, largest magnitude, limit of its dtype)``; a path may have several.
    """

    values: list[tuple[str, str, Tensor]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    ranges: list[tuple[str, Tensor, float]] = field(default_factory=list)

    def add(self, path: str, values: Mapping[str, Tensor], kind: str = "") -> None:
        """Take up values. One with more dimensions than one is flattened."""
        if kind:
            self.kinds.setdefault(path, kind)
        for name, value in values.items():
            value = value.detach().reshape(-1) if value.dim() > 1 else value.detach()
            if value.dim() == 1 and len(value) > LONGEST:
                value = torch.stack([value.amin(), value.median(), value.amax()])
            self.values.append((path, name, value.double()))

    def read(self, device: torch.device) -> dict[str, dict[str, float | list[float]]]:
        """All values by path and name; the one copy to the host."""
        if not self.values:
            return {}
        flat = torch.cat([v.reshape(-1).to(device) for _, _, v in self.values]).tolist()
        found: dict[str, dict[str, float | list[float]]] = {}
        place = 0
        for path, name, value in self.values:
            numbers = [rounded(x) for x in flat[place : place + value.numel()]]
            place += value.numel()
            found.setdefault(path, {})[name] = numbers if value.dim() else numbers[0]
        return found


def rounded(x: float) -> float:
    """Six significant digits: enough to see by, half the size in the journal.

    Example:
        >>> rounded(0.123456789), rounded(65503.9)
        (0.123457, 65503.9)
    """
    return float(f"{x:.6g}") if math.isfinite(x) else x


def limit_of(dtype: torch.dtype) -> float:
    """Largest finite number of a dtype."""
    return float(torch.finfo(dtype).max)


def in_turns(items: list[Any], most: int) -> list[Any]:
    """At most so many, spread evenly, first and last included.

    Example:
        >>> in_turns(list(range(10)), 4)
        [0, 3, 6, 9]
    """
    if len(items) <= most:
        return items
    if most <= 1:
        return items[:most]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
