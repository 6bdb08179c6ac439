"""What triage exchanges between ranks. With one rank everything is a plain call."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

T = TypeVar("T")


class Peers:
    """The ranks of one run, which all call the same methods in the same order."""

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size
        self.device = trainer.strategy.root_device
        self._alone = self.size == 1 or not (dist.is_available() and dist.is_initialized())

    def gather(self, value: T) -> list[T]:
        """This value of every rank, in rank order. Plain data only: it is pickled."""
        if self._alone:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        return self.gather(value)[0]

    def any(self, value: bool) -> bool:
        return any(self.gather(bool(value)))

    def largest(self, value: float) -> float:
        return max(self.gather(float(value)))

    def stack(self, values: Tensor) -> Tensor:
        """A tensor of equal shape from every rank, ``[world_size, ...]``, on the CPU."""
        if self._alone:
            return values.detach().cpu().unsqueeze(0)
        mine = values.detach().to(self.device).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu()
