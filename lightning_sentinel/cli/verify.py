"""``lightning-sentinel verify``: check checkpoints' hashes and say which to resume from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..progress import Progress
from .common import FOUND, OK, Commands, add_command, print_json


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    words = "check every hash of a run's checkpoints, or of one, and say which to resume from"
    parser = add_command(commands, "verify", run, words, "verify runs/a")
    parser.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="run folder or one checkpoint's folder")


def run(options: argparse.Namespace) -> int:
    from ..checkpoint.manifest import MANIFEST
    from ..checkpoint.store import CheckpointStore

    path: Path = options.path
    beside = CheckpointStore(path.parent)
    if (path / MANIFEST).exists() or path in beside.paths():  # the latter: one that has lost its manifest
        store, paths = beside, [path]
    else:
        store = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        paths = store.paths()
    if not paths:
        raise FileNotFoundError(
            f"No checkpoint in {path}. Give a run folder that has checkpoints/, or one checkpoint's folder."
        )
    rows = [*_verified(store, paths, quiet=options.json)]
    usable = [r for r in rows if not r["problems"] and r["status"] != "poisoned"]
    good = [r for r in usable if r["status"] == "known_good"]
    # A candidate has not passed its probation; it is named only where nothing better is left.
    resume = (good or usable)[-1]["path"] if usable else None
    damaged = any(r["problems"] for r in rows)
    if options.json:
        print_json({"checkpoints": rows, "resume_from": resume, "known_good": bool(good)})
    else:
        for row in rows:
            print(f"{'damaged' if row['problems'] else 'whole':<8} {row['status']:<11} {row['path']}")
            for problem in row["problems"]:
                print(f"         {problem}")
        if resume is None:
            print("Resume from: none of them.")
        else:
            print(f"Resume from: {resume}" + ("" if good else " (a candidate: nothing here has passed probation)"))
    return FOUND if damaged or resume is None else OK


def _verified(store: Any, paths: Sequence[Path], *, quiet: bool) -> Iterator[dict[str, Any]]:
    """Each checkpoint with its status and what is wrong with it; says where it is when that takes time."""
    from ..checkpoint.store import CheckpointError

    total, states = 0, []
    for path in paths:
        try:
            read = store.read(path)
        except CheckpointError:
            states.append("unreadable")
        else:
            states.append(str(read.status.status))
            total += sum(entry.bytes for entry in read.manifest.files.values())
    with Progress("hashing", total=total, unit="B", enabled=not quiet) as bar:
        for path, status in zip(paths, states, strict=True):
            problems = store.verify(path, partial(bar.advance, note=path.name))
            yield {"path": str(path), "status": status, "problems": problems}
