"""``lightning-sentinel watch``: follow a run in the terminal."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import FOUND, OK, Commands, add_command, require_events

if TYPE_CHECKING:
    from .dashboard import Dashboard

# Events that repeat what another line says, or that only a page has room for.
SMALL = frozenset({"probe.deep", "incident.updated"})


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(commands, "watch", run, "follow a run in the terminal until it ends", "watch runs/a")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print what is there and stop")
    parser.add_argument(
        "--plain", action="store_true", help="one line for each event, on a terminal with rich installed too"
    )


def run(options: argparse.Namespace) -> int:
    from ..journal import Follower, journal_files

    if options.interval <= 0:
        raise ValueError(f"--interval must be greater than 0 seconds, got {options.interval:g}.")
    if options.once and not journal_files(options.run):
        raise FileNotFoundError(f"No journal in {options.run}. Give the run folder that RunJournal writes.")
    if options.once:
        require_events(options.run)
    if not options.run.parent.is_dir():  # the run folder itself may still be made by a run that is about to begin
        raise FileNotFoundError(f"There is no folder {options.run.parent}. Give the run folder that RunJournal writes.")
    follower, screen = Follower(options.run), _screen(options)
    if not journal_files(options.run):
        print(f"Waiting for a journal in {options.run} ...", file=sys.stderr)
    newest: float | None = None
    try:
        while True:
            for event in follower.poll():
                screen.show(event)
                newest = float(event["time"])
            for problem in follower.problems:
                print(f"lightning-sentinel: {problem}", file=sys.stderr)
            follower.problems.clear()
            if newest is not None:
                screen.note_silence(time.time() - newest)
            screen.refresh()
            if screen.ended is not None or options.once:
                return OK if screen.ended in (None, "finished") else FOUND
            time.sleep(options.interval)
    finally:
        screen.close()  # after an interrupt, too: the terminal gets its cursor back


def _screen(options: argparse.Namespace) -> Dashboard | _Screen:
    """A picture kept up to date on a terminal where rich is there, else a line for each event."""
    if sys.stdout.isatty() and not (options.json or options.plain) and importlib.util.find_spec("rich") is not None:
        from .dashboard import Dashboard

        return Dashboard(options.run)
    return _Screen(options.json)


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
        self.ended = ended_after(event, self.ended)
        if self.as_json:
            print(json.dumps(event), flush=True)
        elif name == "step":
            self._step = event
        elif name not in SMALL:
            self._clear()
            print(event_line(event), flush=True)

    def note_silence(self, seconds: float) -> None:
        """Take in for how long nothing has been written."""
        ended = ended_in_silence(seconds, self.ended)
        if ended != self.ended and not self.as_json:
            self._clear()
            print(f"lost: nothing has been written for {seconds / 60:.0f} minutes, and no end of the run.", flush=True)
        self.ended = ended

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


def ended_after(event: Mapping[str, Any], before: str | None) -> str | None:
    """How the run has ended as of this event; None while it goes on."""
    if event["event"] == "run.started":
        return None
    return str(event.get("status", "finished")) if event["event"] == "run.ended" else before


def ended_in_silence(seconds: float, ended: str | None) -> str | None:
    """``lost`` for a run that has written nothing for so long that the report calls it lost, too."""
    from ..report.summary import LOST_AFTER_SECONDS

    return "lost" if ended is None and seconds >= LOST_AFTER_SECONDS else ended


def step_line(event: Mapping[str, Any]) -> str:
    """A step's signals on one line."""
    from ..journal import number
    from ..report.chart import si

    text = f"step {event['step']:,}  {si(event['tokens'])} tokens  loss {number(event.get('loss')):.4f}"
    if number(event.get("loss_max")) > number(event.get("loss_min")):
        text += f" (rank {event.get('worst_rank')}: {number(event.get('loss_max')):.4f})"
    text += f"  grad {number(event.get('grad_norm')):.3g}"
    return text + (f"  pass {event['attempt']}" if event["attempt"] else "")


def event_line(event: Mapping[str, Any]) -> str:
    """An event on one line of at most 160 characters: time (UTC), step, name, what matters."""
    from ..report.html import event_words

    clock = time.strftime("%H:%M:%SZ", time.gmtime(event["time"]))
    incident = event.get("incident")
    if isinstance(incident, Mapping) and event["event"] == "incident.closed":
        words = f"#{incident.get('number')} {event_words(event)}"
    elif isinstance(incident, Mapping):
        findings = incident.get("findings") or [{}]
        verdict = incident.get("verdict") or {}
        words = f"#{incident.get('number')} {incident.get('status')}: {findings[0].get('message', '')}"
        if verdict.get("culprits"):
            words += f" [{verdict.get('kind')}: {', '.join(verdict['culprits'])}]"
    else:
        words = event_words(event) or _values(event)
        if isinstance(incident, int):
            words = f"#{incident} {words}"
    line = f"{clock}  step {event['step']:>7,}  {event['event']:<20} {words}"
    return line if len(line) <= 160 else line[:157] + "..."


def _values(event: Mapping[str, Any]) -> str:
    """An event's values, those that say something on one line."""
    skip = (
        "schema",
        "time",
        "rank",
        "attempt",
        "step",
        "tokens",
        "event",
        "versions",
        "config",
        "callbacks",
        "incident",
    )
    said = {k: _brief(v) for k, v in event.items() if k not in skip}
    return "  ".join(f"{k}={text}" for k, text in said.items() if text)


def _brief(value: Any) -> str:
    """A value in a few characters; nothing for what is empty, unknown or a table."""
    from ..journal import number

    if isinstance(value, Mapping):
        numbers = all(isinstance(v, int | float) for v in value.values())
        return ", ".join(f"{k} {number(v):.3g}" for k, v in value.items()) if numbers and len(value) <= 6 else ""
    if value is None or (isinstance(value, list | str) and not value):
        return ""
    if isinstance(value, list):
        plain = [str(v) for v in value if not isinstance(v, Mapping | list)]
        return f"[{', '.join(plain[:3])}{', ...' if len(plain) > 3 else ''}]" if plain else f"{len(value)} entries"
    return str(value)
