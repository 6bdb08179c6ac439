"""Hashing a checkpoint with progress: a large one takes minutes, in which nobody should wonder what the run waits for."""

from __future__ import annotations

import logging
from pathlib import Path

from ..progress import Progress
from .store import Checkpoint, CheckpointError, CheckpointStore


def verify(store: CheckpointStore, path: Path, *, log: logging.Logger | None = None, enabled: bool = True) -> list[str]:
    """As :meth:`CheckpointStore.verify`, with progress.

    Args:
        store: Where it lies.
        path: The checkpoint's folder.
        log: Say it here instead of on standard error.
        enabled: False keeps it silent.
    """
    try:
        total = sum(entry.bytes for entry in store.read(path).manifest.files.values())
    except CheckpointError:
        total = 0  # what is wrong is for the verification to say
    with Progress(f"verifying {path.name}", total=total, unit="B", log=log, enabled=enabled) as bar:
        return store.verify(path, bar.advance)


def loading(checkpoint: Checkpoint, names: list[str], *, log: logging.Logger | None, enabled: bool) -> Progress:
    """Progress of reading these files of a checkpoint, which hashes them once more."""
    files = checkpoint.manifest.files
    total = sum(files[name].bytes for name in names if name in files)
    return Progress(f"loading {checkpoint.path.name}", total=total, unit="B", log=log, enabled=enabled)
