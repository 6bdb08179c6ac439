"""``lightning-sentinel scan``: the default detectors over a log that others wrote."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..progress import Progress
from .common import FOUND, OK, Commands, add_command, print_json


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    words = "run the detectors over a finished or growing log"
    parser = add_command(commands, "scan", run, words, "scan metrics.csv --png metrics.png")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="log file or run folder")
    parser.add_argument("--step", metavar="COLUMN", help="column of the step (default: guessed)")
    parser.add_argument("--loss", metavar="COLUMN", help="column of the training loss (default: guessed)")
    parser.add_argument("--grad-norm", metavar="COLUMN", help="column of the gradient norm (default: guessed)")
    parser.add_argument("--loss-scale", metavar="COLUMN", help="column of the fp16 loss scale (default: guessed)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a threshold by its name in Hydra, e.g. callbacks.spike_detector.threshold=10; repeatable",
    )
    parser.add_argument("--follow", action="store_true", help="go on reading as the (one) file grows")
    parser.add_argument(
        "--idle", type=float, metavar="SECONDS", help="with --follow: stop when nothing new has come for so long"
    )
    parser.add_argument(
        "--png", type=Path, metavar="PATH", help="write an annotated picture (a folder for several files)"
    )


def run(args: argparse.Namespace) -> int:
    """Scan the files; 0 nothing found, 1 alarms or incidents found.

    Raises:
        ValueError, OSError: Wrong usage or unreadable input.
    """
    from .. import scan

    if args.follow and len(args.files) > 1:
        raise ValueError(f"--follow takes one file, found {len(args.files)}.")
    overrides = scan.parse_overrides(args.set)
    scan.Watch(overrides)  # a value out of bounds is an error before anything is read
    if args.png is not None:
        _check_picture(args.png, several=len(args.files) > 1)
    results = []
    for path in args.files:
        wanted = scan.Columns(args.step, args.loss, args.grad_norm, args.loss_scale)
        reader = scan.LogReader(path, wanted, follow=args.follow, idle_seconds=args.idle)
        quiet = args.follow or args.json
        with Progress(f"scanning {path.name}", unit="rows", enabled=not quiet) as bar:
            scanner = scan.Scanner(reader, scan.Watch(overrides), keep=args.png is not None, each_row=bar.advance)
            try:
                for finding in scanner:
                    if args.follow and not args.json:
                        print(scan.finding_line(finding), flush=True)
            except KeyboardInterrupt:
                if not args.follow:
                    raise
        result = scanner.finish()
        if not result.rows and not args.follow:
            # "Nothing found" would be an all-clear about what nobody has looked at.
            raise ValueError(f"{path}: {_why_no_rows(result)}")
        results.append(result)
        if not args.json:
            print(scan.summary(result))
        if args.png is not None:
            target = args.png
            if len(args.files) > 1 or target.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                target = target / f"{len(results):03d}-{path.name}.png"
            scan.draw(result, target)
    found = any(r.episodes for r in results)
    if args.json:
        print_json({"schema": 1, "found": found, "files": [r.to_dict() for r in results]})
    return FOUND if found else OK


def _check_picture(path: Path, *, several: bool) -> None:
    """Refuse a place for the picture before anything is read."""
    if several and path.exists() and not path.is_dir():
        raise ValueError(f"--png {path} is a file, and several logs are drawn into a folder. Give a folder.")
    folder = path if several or path.is_dir() else path.parent
    while several and not folder.exists():  # is made
        folder = folder.parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--png {path}: there is no folder {folder}. Make it, or give a path in one that is there."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"--png {path}: the folder {folder} cannot be written to. Give one that can be.")


def _why_no_rows(result: Any) -> str:
    """What was found instead of a row with a loss, and what to do."""
    if result.problems:
        first = result.problems[0]
        why = first.reason.removesuffix("; skipped")
        found = f"none of its {len(result.problems)} rows can be read, the first: line {first.line}, {why}"
    else:
        found = "it holds no row with a training loss"
    loss = None if result.columns is None else result.columns.loss
    column = f" (the loss was looked for in {loss!r}; --loss COLUMN names another)" if loss else ""
    return f"{found}{column}. Give a log that holds steps and losses, or a run folder."
