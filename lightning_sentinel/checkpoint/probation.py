"""Which saves are on probation, and which have passed: pure, and the same on every rank.

It counts saves that were begun. Whether one has reached the disk is known to rank 0 alone, at a time of its own.

Example:
    >>> probation = Probation(length=6)
    >>> for step in (4, 8): probation.begin((step, 0))
    >>> probation.due(9), probation.due(10)
    ([], [(4, 0)])
    >>> probation.passed([(4, 0)])
    >>> probation.waiting, probation.good
    ([(8, 0)], {(4, 0)})
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Save = tuple[int, int]  # step and attempt


@dataclass
class Probation:
    """Attributes:
    length: Healthy steps after a save that make it known-good.
    clean_from: Only steps from here on count: the newest incident ended, or a rollback arrived, here.
    waiting: The saves on probation, oldest first.
    good: The saves that have passed, on the present path.
    """

    length: int
    clean_from: int = 0
    waiting: list[Save] = field(default_factory=list)
    good: set[Save] = field(default_factory=set)

    def begin(self, save: Save) -> None:
        self.waiting.append(save)

    def knows(self, save: Save) -> bool:
        """False for a save that belongs to an abandoned path or is poisoned."""
        return save in self.waiting or save in self.good

    def go_back(self, step: int) -> None:
        """A rollback to ``step``: saves of the abandoned path never pass."""
        self.forget_after(step)
        self.clean_from = step

    def forget_after(self, step: int) -> None:
        """Saves that hold an update of ``step`` or later are out."""
        self.waiting = [save for save in self.waiting if save[0] <= step]
        self.good = {save for save in self.good if save[0] <= step}

    def due(self, step: int) -> list[Save]:
        """Saves that have seen enough healthy steps when ``step`` is about to begin."""
        return [save for save in self.waiting if step >= max(save[0], self.clean_from) + self.length]

    def passed(self, saves: Iterable[Save]) -> None:
        self.good.update(saves)
        self.waiting = [save for save in self.waiting if save not in self.good]
