"""Checkpoints on disk: atomic directories, a manifest with SHA-256, known-good by probation, fallback by name."""

from .atomic import Disk, FileEntry
from .manifest import MANIFEST, STATUS, Manifest, Status, StatusRecord, rank_file
from .store import Checkpoint, CheckpointError, CheckpointStore, PendingCheckpoint, checkpoint_name

__all__ = [
    "MANIFEST",
    "STATUS",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Disk",
    "FileEntry",
    "Manifest",
    "PendingCheckpoint",
    "Status",
    "StatusRecord",
    "checkpoint_name",
    "rank_file",
]
