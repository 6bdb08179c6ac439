"""``lightning-sentinel``: reports, checks and the quarantine ledger from the command line.

One module for each command, with ``add_parser(commands)``, which adds the command, and ``run(args) -> int``.
What a command needs is imported in ``run``, so that help and usage errors come at once.

Exit codes, the same for every command:

====  ===========================================================================================
0     done, and nothing needs a person
1     done, and something does: a damaged checkpoint, a finding, a run that failed or was stopped
2     not done: wrong usage, or a file that is missing or cannot be read; one line says what to do
130   interrupted from the keyboard
====  ===========================================================================================
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from .common import EXIT_CODES, INTERRUPTED, OK, USAGE, Parser

# In the order of the help. A command whose module is not there is not offered.
COMMANDS = ("report", "watch", "scan", "verify", "replay", "quarantine", "canary", "config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(argv)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: the reader has seen enough; nothing more can be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, KeyError) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        print(f"lightning-sentinel: {' '.join(text.split())}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = Parser(
        prog="lightning-sentinel",
        description="See what happened to a training run, since when, who is at fault, and whether it is back on its path.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"lightning-sentinel {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            importlib.import_module(f"{__name__}.{name}").add_parser(commands)
    return parser
