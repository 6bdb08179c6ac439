"""What a checkpoint says about the program that wrote it: versions, code revision, topology."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
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
    """What git says, or None.

    Called on a background thread, while the training thread may fork a loader's workers. Such a worker inherits whatever
    pipe is open at that moment, and who reads the pipe to its end then waits for the worker's. Hence a file in place of a
    pipe, and ``close_fds=False`` with the program's whole path: only so does ``subprocess`` start a child without a pipe of
    its own (by posix_spawn).
    """
    program = shutil.which("git")
    if program is None:
        return None
    command = [program, "-C", str(folder), *arguments]
    try:
        with tempfile.TemporaryFile() as said:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                timeout=_GIT_SECONDS,
                check=True,
            )
            said.seek(0)
            return said.read().decode().strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
