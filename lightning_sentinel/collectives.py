"""The one collective of the hot path, by whichever name this torch has it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it, and warns about the old name at every call.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def gather_flat(values: Tensor, world_size: int) -> Tensor:
    """``[n]`` on each rank to ``[world_size, n]`` on all, in one call on the tensor's own device.

    Every rank must call it with the same ``n``. A world of one needs no process group.
    """
    if world_size == 1:
        return values.reshape(1, -1)
    gathered = values.new_empty(world_size * values.numel())
    _gather(gathered, values.reshape(-1).contiguous())
    return gathered.view(world_size, values.numel())
