"""No collective of a test may take longer than the limit, in whichever group of ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as L
import torch

LIMIT = timedelta(seconds=60)


def groups() -> list[Any]:
    """The default group of this process and every other one that it is in: a mesh's, and those of the two stages."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", None) or [torch.distributed.group.WORLD])


class CollectiveLimit(L.Callback):
    """From the first batch on every collective has this time-out; groups made later have it from the next batch on."""

    def __init__(self, limit: timedelta = LIMIT) -> None:
        self.limit, self.limited = limit, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.world_size > 1:
            torch.distributed.barrier()  # ranks of a loaded machine may meet late
            self._limit()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.world_size > 1 and len(groups()) != self.limited:
            self._limit()

    def _limit(self) -> None:
        self.limited = limit_groups(self.limit)


def limit_groups(limit: timedelta = LIMIT) -> int:
    """Gives every group that this process is in the time-out; how many that are."""
    for group in (found := groups()):
        torch.distributed.distributed_c10d._set_pg_timeout(limit, group)
    return len(found)


def limited(callbacks: list[L.Callback], options: dict[str, Any]) -> list[L.Callback]:
    """The callbacks of a Trainer with these options: where it has several ranks, with the limit."""
    return callbacks if options.get("devices", 1) == 1 else [CollectiveLimit(), *callbacks]
