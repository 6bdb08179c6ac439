"""``lightning-sentinel report``: remake summary, picture and page of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..progress import Progress
from .common import FOUND, OK, USAGE, Commands, add_command, print_json, require_events

NAMED = 3  # culprits on an incident's line
# Whether the run needs a person is what the report is read for, not whether it could be made.
CODES = (
    "Exit codes: 0 made, whatever it tells (--json: status, open_incidents, next_action, written), 1 the page was not made"
    " (--json: notes), 2 wrong usage, unreadable input or a folder that cannot be written to, 130 interrupted."
)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    words = "remake summary, picture and page of a run"
    parser = add_command(commands, "report", run, words, "report runs/a", exit_codes=CODES)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there instead of into the run folder")
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(options: argparse.Namespace) -> int:
    from ..report.build import write_reports

    require_events(options.run)
    with Progress(f"report of {options.run}", unit="B", enabled=not (options.json or options.quiet)) as bar:
        result = write_reports(options.run, out=options.out, progress=bar)
    summary = result.summary
    if options.json:
        print_json(summary | {"written": [str(path) for path in result.written], "notes": result.notes})
    elif not options.quiet:
        print(f"{summary['headline']}\nNext: {summary['next_action']}")
        for incident in summary["incidents"]:
            print(f"  {incident_line(incident)}")
        for line in [*map(str, result.written), *summary["failures"]]:
            print(line)
    for note in result.notes:  # with --quiet, too: what was asked for is not there
        print(f"lightning-sentinel: {note}", file=sys.stderr)
    if not any(path.name == "summary.json" for path in result.written):
        print(f"lightning-sentinel: {summary['failures'][-1]} Give --out a folder that can be.", file=sys.stderr)
        return USAGE
    return OK if any(path.name == "report.html" for path in result.written) else FOUND


def incident_line(row: Mapping[str, Any]) -> str:
    """An incident of a summary on one line."""
    from ..report.summary import in_turn

    culprits = ", ".join(row["culprits"][:NAMED]) or "nobody named"
    if len(row["culprits"]) > NAMED:
        culprits += f" and {len(row['culprits']) - NAMED} more"
    actions = " -> ".join(in_turn(row["actions"])) or "none"
    kinds = ", ".join(row["kinds"])
    return (
        f"#{row['number']} step {row['opened_step']}: {kinds}; {row['verdict']}, {culprits}; {actions}; {row['status']}"
    )
