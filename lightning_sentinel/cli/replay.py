"""``lightning-sentinel replay``: compute an incident's step again from its bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..progress import Progress
from .common import FOUND, OK, Commands, add_command, print_json

if TYPE_CHECKING:
    from ..bundle.replay import ReplayReport

CODES = (
    "Exit codes: 0 reproduced as recorded, 1 not reproduced or different, 2 not done, with a reason, 130 interrupted."
)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    words = "compute the step of an incident again from its bundle, offline, on one device"
    parser = add_command(commands, "replay", run, words, "replay runs/a --incident 3 --dtype float64", exit_codes=CODES)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--incident", type=int, required=True, metavar="N", help="number of the incident")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="compute in this dtype too (float64 is added by itself where the step is not finite)",
    )
    parser.add_argument("--device", default="cpu", help="where, as torch names it (default: cpu)")
    parser.add_argument("--module", metavar="PATH", help="also compute this module alone, from its captured inputs")
    parser.add_argument(
        "--update",
        action="store_true",
        help="also compute the step's update, by the optimizer state of the checkpoint that the bundle refers to",
    )
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="only this rank; may be repeated")
    parser.add_argument(
        "--rebuild",
        metavar="FUNCTION",
        help="package.function(cfg) -> (module, datamodule), in place of the configuration's `rebuild`",
    )
    parser.add_argument(
        "--app-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="import the application's modules from here, not from where the run did; may be repeated",
    )
    parser.add_argument("--no-faults", action="store_true", help="leave out the faults that the configuration injects")


def _check_device(name: str) -> None:
    """Refuse a device that torch does not know, or that is not here, before anything is read."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used: {why}. Give cpu, or a device that is here.") from None


def run(options: argparse.Namespace) -> int:
    from ..bundle.replay import replay_incident

    _check_device(options.device)

    with Progress(f"replaying incident {options.incident}", unit="micro-batches", enabled=not options.json) as bar:

        def tick(words: str, more: int) -> None:
            if more > 0:
                bar.total = (bar.total or 0) + more
            bar.advance(1 if more < 0 else 0, words or bar.note)

        report = replay_incident(
            options.run,
            options.incident,
            dtype=options.dtype,
            device=options.device,
            module=options.module,
            ranks=options.rank,
            rebuild_with=options.rebuild,
            app_dirs=options.app_dir,
            drill=not options.no_faults,
            update=options.update,
            progress=tick,
        )
    if options.json:
        print_json(report.to_dict())
    else:
        print_report(report)
    return OK if report.reproduced else FOUND


def print_report(report: ReplayReport) -> None:
    """The report as text: what was recorded, what came out by rank and dtype, the verdict, what was not as it was."""
    from ..bundle.verdict import in_words

    print(f"Incident {report.incident}, step {report.step}. The run's verdict: {report.recorded_verdict}.")
    for row in report.ranks:
        batch = row.batch if row.batch_equal is not False else "fetched, but not what the step was computed from"
        print(f"  rank {row.rank}: {sum(map(len, row.samples))} samples, {batch}")
        print(
            f"    {'recorded':<16} loss {', '.join(f'{x:.7g}' for x in row.recorded)}  ({' '.join(row.recorded_bits)})"
        )
        for done in row.computed:
            if done.raised:
                print(f"    {done.dtype:<16} {done.raised}")
                continue
            losses = ", ".join(f"{x:.7g}" for x in done.losses)
            equal = "  equal to the bit" if done is row.computed[0] and row.equal else ""
            print(f"    {done.dtype:<16} loss {losses}  grad {done.grad_norm:.6g}  ({done.seconds:.2f} s){equal}")
    if report.module is not None:
        for one in report.module.by_dtype:
            what = one.raised or (
                f"largest output {one.largest:.6g}, {one.output_error:.2g} from float64,"
                f" gradient {one.gradient_error:.2g}"
            )
            print(f"  {report.module.path} in {one.dtype}: {what}")
    print(report.sentence)
    agrees = {True: ", as the run's", False: ", unlike the run's", None: ""}[report.agrees]
    print(f"The replay's verdict: {in_words(report.verdict)}{agrees}: {report.verdict.sentence}")
    for note in report.notes:
        print(f"Note: {note}")
