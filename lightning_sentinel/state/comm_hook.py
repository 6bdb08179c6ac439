"""What a communication hook of DDP remembers from step to step: PowerSGD's error feedback and its projections.

PowerSGD adds to each gradient what the compression of the one before has left out. A NaN in one gradient therefore stays in
its memory for good, whatever becomes of the update; and a run that goes back without it is another run. It is as large as
the gradients that it compresses, on every rank its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from . import lightning_private as private
from .tree import HostCopies, clone

_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # each by bucket


def states_of(trainer: Trainer) -> list[Any]:
    """The ``PowerSGDState`` of each such hook that is registered; empty elsewhere."""
    module = sys.modules.get(_MODULE)  # who uses it has imported it
    if module is None:
        return []
    return [state for state in private.comm_hook_states(trainer) if isinstance(state, module.PowerSGDState)]


def memory_of(state: Any) -> dict[str, Tensor]:
    """Its tensors, by ``<memory>.<bucket>``."""
    return {f"{name}.{bucket}": t for name in _MEMORIES for bucket, t in getattr(state, name).items()}


def take(trainer: Trainer, copies: HostCopies | None = None, old: Any = None) -> list[dict[str, Any]]:
    """A copy of each hook's memory: where it lies, or to host memory by ``copies``; ``old`` is reused."""
    taken: list[dict[str, Any]] = []
    for i, state in enumerate(states_of(trainer)):
        memory = memory_of(state)
        before = old[i]["memory"] if old is not None and i < len(old) else {}
        if copies is not None:
            kept = copies.tree(memory, before)
        elif memory.keys() == before.keys() and all(before[n].shape == t.shape for n, t in memory.items()):
            kept = before
            if kept:
                torch._foreach_copy_(list(kept.values()), list(memory.values()))
        else:
            kept = {n: t.detach().clone() for n, t in memory.items()}
        taken.append({"memory": kept, "iter": state.iter, "rng": clone(list(state.rng.get_state()))})
    return taken


@torch.no_grad()
def put_back(trainer: Trainer, taken: list[dict[str, Any]], where: Tensor | None = None) -> None:
    """Put the memory of each hook back; other hooks than those at the time are left alone.

    ``where``: a 0-dim bool on the device; tensors go back only if it is true, and without reading it. What there was none of
    before becomes zero then.
    """
    states = states_of(trainer)
    for state, saved in zip(states, taken, strict=True) if len(states) == len(taken) else ():
        live = memory_of(state)
        for name, tensor in live.items():
            before = saved["memory"].get(name)
            fits = before is not None and before.shape == tensor.shape
            if where is not None:
                tensor.copy_(torch.where(where.to(tensor.device), before if fits else torch.zeros_like(tensor), tensor))
            elif fits:
                tensor.copy_(before)
            else:
                _memory(state, name).pop(_bucket(name))
        if where is None:
            for name in saved["memory"].keys() - memory_of(state).keys():
                kept = saved["memory"][name]
                _memory(state, name)[_bucket(name)] = kept.detach().clone().to(trainer.strategy.root_device)
            state.iter = saved["iter"]
            state.rng.set_state(tuple(saved["rng"]))


def _memory(state: Any, name: str) -> dict[int, Tensor]:
    memory: dict[int, Tensor] = getattr(state, name.split(".")[0])
    return memory


def _bucket(name: str) -> int:
    return int(name.split(".")[1])
