"""A known-good checkpoint as a restore point in place, where memory holds none that is old enough.

What is found late (a slow divergence, a level that has shifted) began before the snapshots in memory. The checkpoints of this
run reach further back, and the newest known-good one from before the trouble is put back in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lightning.pytorch import Trainer

from ..progress import TRAINING_LOG
from ..state.snapshot import Snapshot
from . import aloud
from .choosing import load_everywhere, told_by_rank_0
from .manifest import Status
from .store import Checkpoint, CheckpointStore

OnPath = Callable[[int, int], bool]


def newest_step(trainer: Trainer, store: CheckpointStore, before_step: int, on_path: OnPath) -> int | None:
    """Step of the newest known-good checkpoint at or before ``before_step``, unverified; the same on every rank.

    Args:
        on_path: Whether attempt and step of a checkpoint lie on the path that the run is on.
    """
    candidates = _candidates(trainer, store, before_step, on_path)
    found: int | None = told_by_rank_0(trainer, lambda: next((c.step for c in candidates), None))
    return found


def load_newest(
    trainer: Trainer, store: CheckpointStore, before_step: int, on_path: OnPath, refuse: Callable[[Path, str], None]
) -> tuple[Snapshot, Path] | None:
    """Read the newest known-good checkpoint at or before ``before_step`` that verifies on every rank; None without one.

    Args:
        refuse: Called on every rank with each checkpoint that cannot be used and the reason.
    """
    looking = _candidates(trainer, store, before_step, on_path)

    def found() -> tuple[str, str]:
        checkpoint = next(looking, None)
        if checkpoint is None:
            return "", ""
        return str(checkpoint.path), "; ".join(aloud.verify(store, checkpoint.path, log=TRAINING_LOG))

    while True:
        path, problem = told_by_rank_0(trainer, found)
        if not path:
            return None
        if not problem:
            loaded, problem = load_everywhere(trainer, store, Path(path))
            if loaded is not None:
                return loaded.snapshot, Path(path)
        refuse(Path(path), problem)


def _candidates(trainer: Trainer, store: CheckpointStore, before_step: int, on_path: OnPath) -> Iterator[Checkpoint]:
    """Newest step first; on rank 0 alone, which decides for all."""
    if not trainer.is_global_zero:
        return
    usable = (
        c
        for c in store.checkpoints()
        if c.status.status is Status.KNOWN_GOOD
        and c.step <= before_step
        and c.manifest.world_size == trainer.world_size
        and on_path(c.manifest.attempt, c.step)
    )
    yield from sorted(usable, key=lambda c: (c.step, c.age_key), reverse=True)
