"""The collective of the hot path, by whichever name this torch has it; in one stage, or in two for thousands of ranks.

A flat ``all_gather`` is passed on along a ring, from rank to rank: its time grows with the number of ranks, however little
each of them has to say. In two stages the rows go round a ring of ``within`` neighbours, then the blocks of these round
``world_size / within`` rings: as many bytes, and ``within + world_size / within - 2`` passings instead of ``world_size - 1``.
The rows that arrive are the same.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it, and warns about the old name at every call.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class TwoStages:
    """Groups of neighbours, and of those that have the same place among their neighbours.

    Args:
        world_size: All ranks.
        within: Neighbours in a group: the ranks of a node, or about the root of ``world_size``. It must divide it.
        timeout: Of the groups' collectives; None: torch's default.
    """

    def __init__(self, world_size: int, within: int, timeout: timedelta | None = None) -> None:
        if world_size % within:
            raise ValueError(
                f"RankTelemetry: gather_within is {within}, which does not divide the {world_size} ranks. Use the number of"
                " ranks of a node, or 0 for a gather in one stage."
            )
        enumerate_groups: Any = dist.new_subgroups_by_enumeration
        neighbours = [list(range(first, first + within)) for first in range(0, world_size, within)]
        places = [list(range(place, world_size, within)) for place in range(within)]
        self.within, self.between = within, world_size // within
        self._neighbours, _ = enumerate_groups(neighbours, timeout=timeout)
        self._places, _ = enumerate_groups(places, timeout=timeout)

    def gather(self, values: Tensor) -> Tensor:
        """``[n]`` on each rank to ``[world_size * n]`` on all, in rank order."""
        block = values.new_empty(self.within * values.numel())
        _gather(block, values, group=self._neighbours)
        everyone = values.new_empty(self.between * block.numel())
        _gather(everyone, block, group=self._places)
        return everyone


def gather_flat(values: Tensor, world_size: int, stages: TwoStages | None = None) -> Tensor:
    """``[n]`` on each rank to ``[world_size, n]`` on all, in one call (or two) on the tensor's own device.

    Every rank must call it with the same ``n``. A world of one needs no process group.
    """
    if world_size == 1:
        return values.reshape(1, -1)
    flat = values.reshape(-1).contiguous()
    if stages is not None:
        return stages.gather(flat).view(world_size, flat.numel())
    gathered = flat.new_empty(world_size * flat.numel())
    _gather(gathered, flat)
    return gathered.view(world_size, flat.numel())


def gather_object(value: Any, world_size: int) -> list[Any]:
    """A value of every rank, in rank order, on every rank. Plain data, for rare events only: it is pickled and waits."""
    if world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered
