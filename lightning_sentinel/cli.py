"""``lightning-sentinel``: reports, checks and the quarantine ledger from the command line.

Exit codes, the same for every command:

====  ===========================================================================================
0     done, and nothing needs a person
1     done, and something does: a damaged checkpoint, a finding, a run that failed or was stopped
2     not done: wrong usage, or a file that is missing or cannot be read; one line says what to do
====  ===========================================================================================
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ._version import __version__

OK, FOUND, USAGE = 0, 1, 2

# Commands that live in their own module, which offers ``add_arguments(parser)`` and ``run(arguments) -> int``.
DELEGATES: Mapping[str, tuple[str, str]] = {
    "scan": ("scan", "run the detectors over a finished or growing log"),
    "replay": ("replay", "replay the step of an incident from its bundle"),
    "canary": ("canary", "compute a known step on this machine and compare"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(arguments[0] if arguments else None)
    options = parser.parse_args(arguments)
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
        return 130
    return code


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser. Only the ``chosen`` command's own module is imported, so that help stays quick."""
    parser = argparse.ArgumentParser(
        prog="lightning-sentinel",
        description="See what happened to a training run, since when, who is at fault, and whether it is back on its path.",
        epilog="Exit codes: 0 fine, 1 something needs a person, 2 wrong usage or unreadable input.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-sentinel {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    report = _command(commands, "report", run_report, "remake summary, picture and page of a run", "report runs/a")
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    report.add_argument("--out", type=Path, metavar="DIR", help="write there instead of into the run folder")
    report.add_argument("--quiet", action="store_true", help="print errors only")

    watch = _command(commands, "watch", run_watch, "follow a run in the terminal until it ends", "watch runs/a")
    watch.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    watch.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between looks (default: 1)")
    watch.add_argument("--once", action="store_true", help="print what is there and stop")

    verify = _command(
        commands,
        "verify",
        run_verify,
        "check every hash of a run's checkpoints, or of one, and say which to resume from",
        "verify runs/a",
    )
    verify.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help="run folder or one checkpoint's folder")

    _quarantine_commands(commands)

    config = _command(
        commands, "config", run_config, "print every option with default, type and meaning", "config spike_detector"
    )
    config.add_argument(
        "callback", nargs="?", metavar="CALLBACK", help="only this one, by its name in the configuration"
    )

    for name, (module, words) in DELEGATES.items():
        if importlib.util.find_spec(f"lightning_sentinel.{module}") is None:
            continue
        if name == chosen:
            loaded = importlib.import_module(f"lightning_sentinel.{module}")
            delegate = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
            loaded.add_arguments(delegate)
            delegate.set_defaults(command=loaded.run)
        else:
            commands.add_parser(name, help=words, add_help=False)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    words: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog=f"example:\n  lightning-sentinel {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)
    return parser


def _print_json(value: Any) -> None:
    from .journal import to_json

    print(json.dumps(json.loads(to_json(value)), indent=2))


# ----------------------------------------------------------------------------------------------------------------- report


def run_report(options: argparse.Namespace) -> int:
    from .report.build import write_reports

    result = write_reports(options.run, out=options.out)
    summary = result.summary
    if options.json:
        _print_json(summary)
    elif not options.quiet:
        print(f"{summary['headline']}\nNext: {summary['next_action']}")
        for incident in summary["incidents"]:
            print(f"  {incident_line(incident)}")
        for line in [*map(str, result.written), *result.notes, *summary["failures"]]:
            print(line)
    if not any(path.name == "summary.json" for path in result.written):
        print(f"lightning-sentinel: {summary['failures'][-1]} Give --out a folder that can be.", file=sys.stderr)
        return USAGE
    return OK


def incident_line(row: Mapping[str, Any]) -> str:
    """An incident of a summary on one line."""
    culprits = ", ".join(row["culprits"][:3]) or "nobody named"
    actions = " -> ".join(row["actions"]) or "none"
    kinds = ", ".join(row["kinds"])
    return (
        f"#{row['number']} step {row['opened_step']}: {kinds}; {row['verdict']}, {culprits}; {actions}; {row['status']}"
    )


# ------------------------------------------------------------------------------------------------------------------ watch


def run_watch(options: argparse.Namespace) -> int:
    from .journal import Follower, journal_files

    if options.interval <= 0:
        raise ValueError(f"--interval must be greater than 0 seconds, got {options.interval:g}.")
    if options.once and not journal_files(options.run):
        raise FileNotFoundError(f"No journal in {options.run}. Give the run folder that RunJournal writes.")
    follower, screen = Follower(options.run), _Screen(options.json)
    if not journal_files(options.run):
        print(f"Waiting for a journal in {options.run} ...", file=sys.stderr)
    while True:
        for event in follower.poll():
            screen.show(event)
        screen.refresh()
        if screen.ended is not None or options.once:
            screen.close()
            return OK if screen.ended in (None, "finished") else FOUND
        time.sleep(options.interval)


class _Screen:
    """One line for each event that matters, and, on a terminal, a last line that is kept up to date."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.live = sys.stdout.isatty() and not as_json
        self.ended: str | None = None
        self._step: Mapping[str, Any] | None = None
        self._shown = 0

    def show(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        if name == "run.started":
            self.ended = None
        elif name == "run.ended":
            self.ended = str(event.get("status", "finished"))
        if self.as_json:
            print(json.dumps(event), flush=True)
        elif name == "step":
            self._step = event
        else:
            self._clear()
            print(event_line(event), flush=True)

    def refresh(self) -> None:
        """The newest step's signals on the last line."""
        if not self.live or self._step is None:
            return
        self._clear()
        text = step_line(self._step)
        self._shown = len(text)
        print(text, end="", flush=True)

    def close(self) -> None:
        if self._step is not None and not self.live and not self.as_json:
            print(step_line(self._step), flush=True)
        elif self._shown:
            print()

    def _clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="")
            self._shown = 0


def step_line(event: Mapping[str, Any]) -> str:
    """A step's signals on one line."""
    from .journal import number
    from .report.chart import si

    text = f"step {event['step']:,}  {si(event['tokens'])} tokens  loss {number(event.get('loss')):.4f}"
    if number(event.get("loss_max")) > number(event.get("loss_min")):
        text += f" (rank {event.get('worst_rank')}: {number(event.get('loss_max')):.4f})"
    text += f"  grad {number(event.get('grad_norm')):.3g}"
    return text + (f"  pass {event['attempt']}" if event["attempt"] else "")


def event_line(event: Mapping[str, Any]) -> str:
    """An event on one line of at most 160 characters: time, step, name, what matters."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    incident = event.get("incident")
    if isinstance(incident, Mapping):
        findings = incident.get("findings") or [{}]
        verdict = incident.get("verdict") or {}
        words = f"#{incident.get('number')} {incident.get('status')}: {findings[0].get('message', '')}"
        if verdict.get("culprits"):
            words += f" [{verdict.get('kind')}: {', '.join(verdict['culprits'])}]"
    else:
        skip = ("schema", "time", "rank", "attempt", "step", "tokens", "event", "versions", "config", "callbacks")
        words = "  ".join(f"{k}={_brief(v)}" for k, v in event.items() if k not in skip)
    line = f"{clock}  step {event['step']:>7,}  {event['event']:<20} {words}"
    return line if len(line) <= 160 else line[:157] + "..."


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return str(value)


# ----------------------------------------------------------------------------------------------------------------- verify


def run_verify(options: argparse.Namespace) -> int:
    from .checkpoint.manifest import MANIFEST
    from .checkpoint.store import CheckpointStore

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
        _print_json({"checkpoints": rows, "resume_from": resume, "known_good": bool(good)})
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
    from .checkpoint.store import CheckpointError

    begun = time.monotonic()
    for i, path in enumerate(paths):
        if not quiet and sys.stderr.isatty() and time.monotonic() - begun > 2:
            print(f"\rhashing {i + 1} of {len(paths)}: {path.name}\033[K", end="", file=sys.stderr, flush=True)
        try:
            status = str(store.read(path).status.status)
        except CheckpointError:
            status = "unreadable"
        yield {"path": str(path), "status": status, "problems": store.verify(path)}
    if not quiet and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------- quarantine


def _quarantine_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    words = "list, add to and take back from a run's quarantine ledger"
    group = commands.add_parser("quarantine", help=words, description=f"{words[0].upper()}{words[1:]}.")
    sub = group.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = _command(sub, "list", run_quarantine_list, "list who is quarantined and why", "quarantine list runs/a")
    listing.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    for name, run, what in (
        ("add", run_quarantine_add, "quarantine samples or sources, from the next start on"),
        ("revert", run_quarantine_revert, "let samples or sources be drawn again, from the next start on"),
    ):
        example = f"quarantine {name} runs/a sample:prose/3fa9/4096 --reason 'a table of numbers'"
        parser = _command(sub, name, run, what, example)
        parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
        parser.add_argument("names", nargs="+", metavar="NAME", help="sample:<id> or source:<name>")
        parser.add_argument("--reason", required=True, help="a sentence; the ledger keeps it")


def _ledger(run: Path) -> Any:
    from .data.quarantine import FILE_NAME, QuarantineLedger

    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not a folder. Give the run folder.")
    return QuarantineLedger(run / FILE_NAME)


def run_quarantine_list(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    entries = [e.to_dict() | {"active": e.name in ledger.active} for e in ledger.entries]
    if options.json:
        _print_json({"active": sorted(ledger.active), "entries": entries})
        return OK
    for entry in entries:
        where = "by hand" if entry["step"] is None else f"step {entry['step']}"
        print(f"{entry['event']:<9} {entry['name']}  {where}  {entry['reason']}")
    print(f"{len(ledger.active)} quarantined.")
    return OK


def run_quarantine_add(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    before = ledger.active
    ledger.add(options.names, step=None, incident=None, policy="manual", reason=options.reason)
    return _say_change(options, ledger, sorted(ledger.active - before), "quarantined")


def run_quarantine_revert(options: argparse.Namespace) -> int:
    ledger = _ledger(options.run)
    unknown = [name for name in options.names if name not in ledger.active]
    if unknown:  # before the first of them is taken back: all or nothing
        raise ValueError(f"{unknown[0]} is not quarantined. See `lightning-sentinel quarantine list {options.run}`.")
    for name in options.names:
        ledger.revert(name, options.reason)
    return _say_change(options, ledger, list(options.names), "taken back")


def _say_change(options: argparse.Namespace, ledger: Any, names: list[str], what: str) -> int:
    if ledger.write_error:
        raise OSError(f"The ledger {ledger.path} cannot be written: {ledger.write_error}")
    if options.json:
        _print_json({what.replace(" ", "_"): names})
    else:
        print(f"{what}: {', '.join(names) or 'nothing new'}")
    return OK


# ----------------------------------------------------------------------------------------------------------------- config


def run_config(options: argparse.Namespace) -> int:
    rows = list(config_options())
    names = sorted({row["callback"] for row in rows})
    if options.callback is not None:
        rows = [row for row in rows if row["callback"] == options.callback]
        if not rows:
            raise ValueError(f"No callback {options.callback!r} in the configuration; there are: {', '.join(names)}.")
    if options.json:
        _print_json(rows)
        return OK
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["callback"] != row["callback"]:
            print(("\n" if i else "") + f"{row['target']}  ({row['file']})")
        print(f"  {row['path']}={json.dumps(row['default'])}  {row['type']}\n      {row['meaning']}")
    return OK


def config_options() -> Iterator[dict[str, Any]]:
    """Every option of the shipped configuration: path, default, type, and the comment above it (unit and bound)."""
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    folder = files("lightning_sentinel.conf").joinpath("callbacks", "sentinel")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        text = file.read_text(encoding="utf-8")
        if not file.name.endswith(".yaml") or "_target_" not in text:
            continue
        nodes: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        name, values = next((k, v) for k, v in nodes.items() if "_target_" in v)
        signature = inspect.signature(get_class(values["_target_"])).parameters
        meanings = _comments(text)
        for key, value in values.items():
            if key != "_target_":
                yield {
                    "callback": name,
                    "target": values["_target_"],
                    "file": f"callbacks/sentinel/{file.name}",
                    "path": f"callbacks.{name}.{key}",
                    "default": value,
                    "type": str(signature[key].annotation) if key in signature else "",
                    "meaning": meanings.get(key, ""),
                }


def _comments(text: str) -> dict[str, str]:
    """The comment lines above each key of a YAML file."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped[1:].strip())
        elif ":" in stripped:
            found.setdefault(stripped.split(":", 1)[0], " ".join(comment))
            comment = []
    return found


if __name__ == "__main__":
    sys.exit(main())
