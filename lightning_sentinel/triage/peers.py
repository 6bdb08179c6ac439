"""What triage exchanges between ranks. With one rank everything is a plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Trainer

from ..collectives import gather_object

T = TypeVar("T")


class Peers:
    """The ranks of one run, which all call the same methods in the same order."""

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size
        self._alone = self.size == 1 or not (dist.is_available() and dist.is_initialized())

    def gather(self, value: T) -> list[T]:
        """This value of every rank, in rank order. Plain data only: it is pickled."""
        return gather_object(value, 1 if self._alone else self.size)

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        return self.gather(value)[0]

    def any(self, value: bool) -> bool:
        return any(self.gather(bool(value)))

    def measured(self, measure: Callable[[], T]) -> tuple[list[T], str]:
        """What ``measure`` gives on every rank, in rank order; where it fails on any rank, nothing and why.

        A failure on one rank alone must not leave the others waiting in an exchange that it never reaches: it is
        exchanged like a result. ``measure`` itself must not exchange anything.
        """
        mine: Any = None
        error = ""
        try:
            mine = measure()
        except Exception as failure:  # the user's data, state and code: they may fail in any way
            error = f"{type(failure).__name__}: {failure}"
        everyone = self.gather((mine, error))
        errors = [f"rank {rank}: {e}" if self.size > 1 else e for rank, (_, e) in enumerate(everyone) if e]
        return ([] if errors else [value for value, _ in everyone]), "; ".join(errors)[:500]
