"""What a checkpoint says about the program that wrote it: versions, code revision, topology."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

_PACKAGES = ("lightning-sentinel", "lightning", "torch", "torchmetrics", "torchdata", "numpy")
_GIT_SECONDS = 5.0


def library_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code_revision(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the working tree that the started script lies in, and whether it has changes; None without git."""
    if folder is None:
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
        folder = script.resolve().parent if script.is_file() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def topology(trainer: Trainer) -> dict[str, Any]:
    return {
        "world_size": trainer.world_size,
        "nodes": trainer.num_nodes,
        "strategy": type(trainer.strategy).__name__,
        "accelerator": type(trainer.accelerator).__name__,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
