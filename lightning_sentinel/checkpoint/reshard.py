"""Weights and moments that were divided among one number of ranks, divided among another.

A checkpoint of a sharded model holds each rank's parts and where they lie in the whole. A start with more or fewer ranks, or
with one that is not sharded, reads all ranks' files, one after the other, and takes from each what belongs to its own parts;
nobody ever holds a whole model that is not his own.

The ranks of a tensor-parallel replica draw the same random numbers; which ranks these are changes with the number of ranks,
so such a checkpoint is only taken up by as many.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from ..distributed.mesh import speaks_for_unit
from ..state.shards import Assembly, Part
from ..state.snapshot import Snapshot, from_payload
from .contents import Loaded
from .manifest import rank_file
from .store import CheckpointError, CheckpointStore

_Key = tuple[Any, ...]


def reshard(trainer: Trainer, store: CheckpointStore, loaded: Loaded) -> None:
    """Put this rank's parts together from those of all saved ranks, in place.

    Raises:
        ValueError: The checkpoint can't be divided anew; the message says why.
    """
    saved = loaded.checkpoint.manifest.world_size
    module = trainer.lightning_module
    live = dict(module.named_parameters())
    names = {id(p): name for name, p in live.items()}
    steps = [[names.get(id(p), "") for g in o.param_groups for p in g["params"]] for o in trainer.strategy.optimizers]
    parts = {name: Part.of(p) for name, p in live.items()}
    whole: dict[_Key, Assembly] = {}
    if not speaks_for_unit(module.device_mesh):
        raise ValueError(f"this run is tensor parallel; start it as it was saved, with {saved} ranks")
    for rank in range(saved):
        own = store.load_torch(loaded.checkpoint, rank_file(rank))
        if "layout" not in own:
            raise ValueError(f"it does not say how its weights are divided; start it with {saved} ranks")
        if not own["speaks"]:
            raise ValueError(f"it is of a tensor-parallel run; start it with {saved} ranks")
        for key, name, tensor, given in _tensors(from_payload(own["snapshot"]), own["layout"], steps):
            if name not in parts:
                raise ValueError(f"it has a parameter {name}, this model has none")
            if key not in whole:
                whole[key] = Assembly(parts[name], tensor.dtype)
            try:
                whole[key].add(tensor, given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    for key, assembly in whole.items():
        if assembly.missing:
            raise CheckpointError(f"{assembly.missing} values of {' '.join(map(str, key))} are on none of its ranks")
        _put(loaded.snapshot, key, assembly)


def _tensors(snapshot: Snapshot, layout: dict[str, Any], steps: list[list[str]]) -> Any:
    """Each tensor that is divided as its parameter is: key, parameter's name, tensor, where it lies."""
    parts = {}
    for name, tensor in (snapshot.params or {}).items():
        parts[name] = Part.at(layout[name], tensor) if name in layout else Part.all_of(tensor)
        yield ("params", name), name, tensor, parts[name]
    for name, tensor in (snapshot.grads or {}).items():
        yield ("grads", name), name, tensor, parts[name]
    for i, (state, ordered) in enumerate(zip(snapshot.optimizers, steps, strict=True)):
        indices = [index for group in state["param_groups"] for index in group["params"]]
        if len(indices) != len(ordered):
            raise ValueError(f"optimizer {i} has {len(indices)} parameters there, {len(ordered)} here")
        for index, name in zip(indices, ordered, strict=True):
            for key, value in state["state"].get(index, {}).items():
                # step counts and the like are the same on every rank
                if getattr(value, "shape", None) == parts[name].shape and parts[name].shape:
                    yield ("optimizers", i, index, key), name, value, parts[name]


def _put(snapshot: Snapshot, key: _Key, assembly: Assembly) -> None:
    if key[0] == "optimizers":
        _, optimizer, index, name = key
        snapshot.optimizers[optimizer]["state"].setdefault(index, {})[name] = assembly.tensor
    else:
        getattr(snapshot, key[0])[key[1]] = assembly.tensor
