"""``lightning-sentinel canary``: a short pilot and a fault drill before the long run."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .common import FOUND, OK, Commands, add_command, print_json

CODES = "Exit codes: 0 passed, 1 failed: see the page, 2 not done, with a reason, 130 interrupted."


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    from ..canary.drill import DEFAULT, EXERCISES, WARM_STEPS

    words = "run a short pilot of a Hydra application twice, once with faults, and say whether the long run may start"
    example = "canary --app examples/pretrain.py -- model=tiny"
    parser = add_command(commands, "canary", run, words, example, exit_codes=CODES)
    parser.add_argument("--app", type=Path, required=True, metavar="SCRIPT", help="the application's script")
    parser.add_argument("--out", type=Path, metavar="DIR", help="legs and page (default: canary/<time stamp>)")
    parser.add_argument(
        "--drill",
        default=",".join(DEFAULT),
        metavar="FAULTS",
        help=f"faults, with commas (default: {','.join(DEFAULT)}); there are {', '.join(EXERCISES)}",
    )
    parser.add_argument(
        "--warm-steps", type=int, default=WARM_STEPS, metavar="N", help=f"steps before the first fault ({WARM_STEPS})"
    )
    parser.add_argument(
        "--steps-key", default="trainer.max_steps", metavar="KEY", help="key of the steps (default: trainer.max_steps)"
    )
    parser.add_argument(
        "--timeout-minutes", type=float, default=60.0, metavar="M", help="for each of the two legs (default: 60)"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="behind `--`: the long run's command line")


def run(options: argparse.Namespace) -> int:
    from ..canary.app import run_app
    from ..canary.drill import timeline
    from ..canary.page import text

    folder = options.out or Path("canary") / time.strftime("%Y-%m-%d_%H-%M-%S")
    plan = timeline([name for name in options.drill.split(",") if name], options.warm_steps)
    report = run_app(
        options.app,
        options.overrides,
        folder,
        plan,
        timeout_minutes=options.timeout_minutes,
        steps_key=options.steps_key,
        quiet=options.json,
    )
    if options.json:
        print_json(report.to_dict())
    else:
        print(text(report))
    return OK if report.passed else FOUND
