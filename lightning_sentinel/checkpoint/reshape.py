"""Going on with another number of ranks: what of a checkpoint belongs to all, what to one rank, and what must be left out.

Weights that lie whole on every rank (one process, DDP) stay as they are; those that are divided (FSDP2) are divided anew.
It is possible where the data position is global: each loader says so by ``global_cursor = True``, and
:class:`~lightning_sentinel.data.MixtureLoader` does. Then each remaining sample is drawn once, by whichever rank. Each saved
rank's own random state and records go to the rank of the same number; ranks that are new begin with rank 0's records and
with a random state derived from rank 0's.

Keep the *global* batch (``batch_size`` times ranks) as it was: then steps, schedules and epochs mean the same as before.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from ..state import lightning_private as private
from ..state import rng
from .contents import MODEL, Loaded
from .reshard import reshard
from .store import CheckpointStore


def source_rank(rank: int, saved_ranks: int) -> int:
    """Whose part this rank takes up."""
    return rank if rank < saved_ranks else 0


def problem(trainer: Trainer, store: CheckpointStore, path: Path) -> str:
    """Why the checkpoint can't be resumed from with this run's number of ranks; empty if it can. Verify it before."""
    manifest = store.read(path).manifest
    saved, here = manifest.world_size, trainer.world_size
    if saved == here:
        return ""
    holds = f"holds the state of {saved} ranks, this run has {here}"
    if saved < 1:
        return "was left by one rank after an exception, for people to look at; resume from another"
    loaders = private.train_loaders(trainer)
    own = sorted({type(x).__name__ for x in loaders if not getattr(x, "global_cursor", False)})
    if own:
        return (
            f"{holds}, and {', '.join(own)} keeps a data position for each rank; start it with {saved} ranks, or use a"
            " loader with a global position (lightning_sentinel.data.MixtureLoader)"
        )
    return ""


def adapt(trainer: Trainer, store: CheckpointStore, loaded: Loaded) -> list[str]:
    """Fit a checkpoint of another number of ranks to this one, in place.

    Returns:
        What could not be kept, a sentence each; the same on every rank.

    Raises:
        ValueError: The checkpoint can't be used here; the message says why.
    """
    saved, here, rank = loaded.checkpoint.manifest.world_size, trainer.world_size, trainer.global_rank
    if saved == here:
        return []
    snapshot = loaded.snapshot
    if snapshot.mid_accumulation:
        raise ValueError(
            f"it was taken inside an accumulation, whose gradients belong to {saved} ranks; start it with {saved} ranks"
        )
    if MODEL not in loaded.checkpoint.manifest.files:
        reshard(trainer, store, loaded)
    _draw_again(trainer, snapshot.cursor)
    lost_memory = any(comm["memory"] for comm in snapshot.comm)
    snapshot.comm = []  # each rank's is of the gradients of its own data
    if rank >= saved:
        snapshot.rng = _derived(snapshot.rng, rank)
    said = [f"from {saved} to {here} ranks"]
    if here < saved:
        gone = _ranks(here, saved)
        said.append(f"the random state of {gone} has no counterpart")
        said.append(f"averages of the running epoch leave out what {gone} had logged")
    else:
        new = _ranks(saved, here)
        said.append(f"the random state of {new} is derived from that of rank 0")
        said.append(f"in averages of the running epoch, what rank 0 had logged counts for {new} too")
    if lost_memory:
        said.append("the error feedback of PowerSGD begins anew")
    return said


def _draw_again(trainer: Trainer, cursor: dict[str, Any]) -> None:
    """Batches that had been fetched ahead were cut for the old ranks: go back before them, and fetch anew."""
    ahead = len(cursor["batches"])
    if not ahead:
        return
    loaders = [x for x in private.train_loaders(trainer) if private.is_stateful(x)]
    cursor["loaders"] = [
        loader.state_before(state, ahead) for loader, state in zip(loaders, cursor["loaders"], strict=True)
    ]
    cursor["batches"] = []
    cursor["fetched"] -= ahead
    cursor["index"] -= ahead
    cursor["fetch_ahead"] = ahead


def _derived(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """A random state for a rank that did not exist: the same in each resume, different for each rank."""
    bits = state["torch"].numpy().tobytes() + str(rank).encode()
    seed = int.from_bytes(hashlib.blake2b(bits, digest_size=4).digest(), "big")
    before = rng.capture()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        derived = rng.capture()
    finally:
        rng.restore(before)
    if "device" in state:
        generator = torch.Generator(torch.accelerator.current_accelerator() or "cpu").manual_seed(seed)
        derived["device"] = generator.get_state()
    return derived


def _ranks(first: int, end: int) -> str:
    return f"rank {first}" if end - first == 1 else f"ranks {first} to {end - 1}"
