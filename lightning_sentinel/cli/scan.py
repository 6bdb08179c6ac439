"""``lightning-sentinel scan``: the default detectors over a log that others wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

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
