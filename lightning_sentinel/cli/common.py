"""What every command shares: exit codes, one style of help, JSON on standard output."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

OK, FOUND, USAGE, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = "Exit codes: 0 fine, 1 something needs a person, 2 wrong usage or unreadable input, 130 interrupted."

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers() returns


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line on one line, with what to do, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument \S+: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            known = choice[2].replace("'", "").split(", ")
            close = difflib.get_close_matches(choice[1], known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(known)}."
            message = f"there is no {choice[1]!r} here. {hint}"
        elif not message.endswith("."):
            message += "."
        self.exit(USAGE, f"lightning-sentinel: {message} See `{self.prog} --help`.\n")


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    words: str,
    example: str,
    *,
    exit_codes: str = EXIT_CODES,
) -> argparse.ArgumentParser:
    """Add one command, with ``--json``, an example and its exit codes in the help.

    Args:
        commands: What ``add_subparsers()`` returned.
        name: As it is typed.
        run: Is given the parsed arguments and returns the exit code.
        words: What it does, in the imperative, without a full stop.
        example: A command line without the program's name.
        exit_codes: A line, where the command's own codes say more than the common ones.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog=f"example:\n  lightning-sentinel {example}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)
    return parser


def require_events(run: Path) -> None:
    """Refuse a run folder whose journal holds no event that can be read.

    Raises:
        ValueError: With the first file of the journal.
    """
    from ..journal import iter_events, journal_files

    files = journal_files(run)
    if files and next(iter_events(run, problems=[]), None) is None:
        raise ValueError(
            f"No line of {files[0]} can be read. Give the folder of a run that has begun, and an undamaged copy."
        )


def print_json(value: Any) -> None:
    """Print a value as JSON; non-finite numbers as strings."""
    from ..journal import to_json

    print(json.dumps(json.loads(to_json(value)), indent=2))
