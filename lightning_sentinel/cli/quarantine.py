"""``lightning-sentinel quarantine``: the ledger by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import EXIT_CODES, OK, Commands, add_command, print_json

LIST_CODES = "Exit codes: 0 listed, 2 wrong usage or no run folder, 130 interrupted."
CHANGE_CODES = "Exit codes: 0 the ledger says so now, 2 nothing was changed, with a reason, 130 interrupted."


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command and its own three."""
    words = "list, add to and take back from a run's quarantine ledger"
    group = commands.add_parser(
        "quarantine",
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog=f"example:\n  lightning-sentinel quarantine list runs/a\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = group.add_subparsers(title="commands", required=True, metavar="COMMAND")

    what = "list who is quarantined and why"
    listing = add_command(sub, "list", run_list, what, "quarantine list runs/a", exit_codes=LIST_CODES)
    listing.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    for name, run, what, why in (
        ("add", run_add, "quarantine samples or sources, from the next start on", "a table of numbers"),
        ("revert", run_revert, "let samples or sources be drawn again, from the next start on", "rare, but correct"),
    ):
        example = f"quarantine {name} runs/a sample:prose/3fa9/4096 --reason '{why}'"
        parser = add_command(sub, name, run, what, example, exit_codes=CHANGE_CODES)
        parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
        parser.add_argument("names", nargs="+", metavar="NAME", help="sample:<id> or source:<name>")
        parser.add_argument("--reason", required=True, help="a sentence; the ledger keeps it")


def _ledger(run: Path) -> Any:
    from ..data.quarantine import FILE_NAME, QuarantineLedger

    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not a folder. Give the run folder.")
    # A ledger written elsewhere would never be read.
    if not ((run / "journal").is_dir() or (run / FILE_NAME).is_file()):
        raise FileNotFoundError(
            f"{run} is no run folder: it holds neither journal/ nor {FILE_NAME}. Give the run folder."
        )
    return QuarantineLedger(run / FILE_NAME)


def run_list(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    entries = [e.to_dict() | {"active": e.name in ledger.active} for e in ledger.entries]
    if options.json:
        print_json({"active": sorted(ledger.active), "entries": entries})
        return OK
    for entry in entries:
        where = "by hand" if entry["step"] is None else f"step {entry['step']}"
        print(f"{entry['event']:<9} {entry['name']}  {where}  {entry['reason']}")
    print(f"{len(ledger.active)} quarantined.")
    return OK


def _reason(options: argparse.Namespace) -> str:
    reason: str = options.reason.strip()
    if not reason:
        raise ValueError("--reason is empty. Say why in a sentence; the ledger keeps it.")
    return reason


def run_add(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    before = ledger.active
    ledger.add(options.names, step=None, incident=None, policy="manual", reason=_reason(options))
    return _say_change(options, ledger, sorted(ledger.active - before), "quarantined")


def run_revert(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    unknown = [name for name in options.names if name not in ledger.active]
    if unknown:  # before the first of them is taken back: all or nothing
        raise ValueError(f"{unknown[0]} is not quarantined. See `lightning-sentinel quarantine list {options.run}`.")
    reason = _reason(options)
    for name in options.names:
        ledger.revert(name, reason)
    return _say_change(options, ledger, list(options.names), "taken back")


def _say_change(options: argparse.Namespace, ledger: Any, names: list[str], what: str) -> int:
    if ledger.write_error:
        raise OSError(f"The ledger {ledger.path} cannot be written: {ledger.write_error}")
    if options.json:
        print_json({what.replace(" ", "_"): names})
    else:
        print(f"{what}: {', '.join(names) or 'nothing new'}")
    return OK
