"""Norms of gradients, weights and updates by group, and the range of an optimizer's state. Device work only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.tree import local
from .observer import block_lists

NAMED = 32  # names in one list of the event


class Groups:
    """Which parameter belongs to which groups: its block (or its module), and its group in the optimizer.

    Attributes:
        names: Parameter names, in the order in which all vectors of this class are.
        groups: Group names.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        names = {id(p): n for n, p in module.named_parameters()}
        blocks = block_lists(module)
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        owners: list[tuple[str, str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                name = names.get(id(p), f"group {number}, parameter {len(self.names)}")
                block = next((b for b in blocks if name.startswith(f"{b}.")), name.rpartition(".")[0] or name)
                self.parameters.append(p)
                self.names.append(name)
                owners.append((block, f"optimizer group {number}"))
        self.groups = list(dict.fromkeys(o for pair in owners for o in pair))
        self._index = [torch.tensor([self.groups.index(pair[k]) for pair in owners]) for k in (0, 1)]
        self._sharded = [hasattr(p, "_local_tensor") for p in self.parameters]

    def norms(self, tensors: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, Tensor]:
        """Norms by group ``[groups]`` and by parameter ``[parameters]``; None counts as zero."""
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        held = [(i, _dense(t)) for i, t in enumerate(tensors) if t is not None]
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for i, t in held:
            by_device.setdefault(t.device, []).append((i, t))
        for where, some in by_device.items():
            norms = torch.stack(torch._foreach_norm([t for _, t in some], 2, dtype=torch.float64))
            squares[torch.tensor([i for i, _ in some], device=where).to(device)] = norms.square().to(device)
        if any(self._sharded):
            # Each rank holds a part of a vector; whole vectors are the same everywhere and must not be counted again.
            parts = torch.tensor(self._sharded, device=device)
            whole = torch.where(parts, squares, 0.0)
            dist.all_reduce(whole)
            squares = torch.where(parts, whole, squares)
        total = torch.zeros(len(self.groups), dtype=torch.float64, device=device)
        for index in self._index:
            total.index_add_(0, index.to(device), squares)
        return total.sqrt(), squares.sqrt()


def _dense(tensor: Tensor) -> Tensor:
    tensor = local(tensor.detach())
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def moments(optimizer: Optimizer, device: torch.device) -> dict[str, tuple[list[int], Tensor, Tensor]]:
    """By state key: places of the parameters that have it, and the least and the largest value of each, ``[n]``."""
    found: dict[str, tuple[list[int], list[Tensor], list[Tensor]]] = {}
    place = -1
    for group in optimizer.param_groups:
        for p in group["params"]:
            place += 1
            for key, value in optimizer.state.get(p, {}).items():
                value = local(value) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.numel():
                    low, high = value.detach().aminmax()
                    places, lows, highs = found.setdefault(key, ([], [], []))
                    places.append(place)
                    lows.append(low.to(device, torch.float64))
                    highs.append(high.to(device, torch.float64))
    return {key: (places, torch.stack(lows), torch.stack(highs)) for key, (places, lows, highs) in found.items()}


def moment_report(
    names: Sequence[str], places: Sequence[int], lows: Sequence[float], highs: Sequence[float]
) -> Mapping[str, Any]:
    """Least and largest value of one state key over all parameters, and where each lies."""
    low = min(range(len(lows)), key=lambda i: lows[i])
    high = max(range(len(highs)), key=lambda i: highs[i])
    return {"min": lows[low], "min_at": names[places[low]], "max": highs[high], "max_at": names[places[high]]}
