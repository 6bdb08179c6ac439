"""Where an incident's bundle lies and how it is replayed; imported by the report, so nothing heavy here."""

from __future__ import annotations

import shlex
from pathlib import Path


def incidents_dir(run_dir: Path) -> Path:
    return run_dir / "incidents"


def bundle_dir(run_dir: Path, number: int) -> Path:
    """
    Example:
        >>> bundle_dir(Path("runs/a"), 3).as_posix()
        'runs/a/incidents/0003'
    """
    return incidents_dir(run_dir) / f"{number:04d}"


def replay_command(run_dir: Path, number: int) -> str:
    """The command line that replays an incident.

    Example:
        >>> replay_command(Path("runs/my run"), 3)
        "lightning-sentinel replay 'runs/my run' --incident 3"
    """
    return f"lightning-sentinel replay {shlex.quote(str(run_dir))} --incident {number}"
