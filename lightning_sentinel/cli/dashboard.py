"""What ``watch`` shows on a terminal where rich is installed: the run's state, kept up to date in place."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..incidents import action_name
from ..journal import number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BARS = "▁▂▃▄▅▆▇█"
# Losses in the line of bars, incidents and events shown.
LOSSES, INCIDENTS, EVENTS = 48, 6, 8
STYLES = {"open": "bold red", "escalated": "bold red", "recovered": "green", "resolved": "dim"}


class Dashboard:
    """Takes the journal's events in and draws them.

    Args:
        run_dir: Shown as the title.
        console: Where to draw; None: standard output.
    """

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.run_dir = run_dir
        self.ended: str | None = None
        self.step: Mapping[str, Any] | None = None
        self.losses: deque[float] = deque(maxlen=LOSSES)
        self.incidents: dict[int, Mapping[str, Any]] = {}
        self.lines: deque[str] = deque(maxlen=EVENTS)
        self.last_action = "none"
        self.known_good = "none"
        self._live = Live(console=console or Console(), auto_refresh=False)
        self._live.start()

    def show(self, event: Mapping[str, Any]) -> None:
        """Take one event in."""
        from .watch import SMALL, ended_after, event_line

        name = event["event"]
        self.ended = ended_after(event, self.ended)
        if name == "step":
            self.step = event
            self.losses.append(number(event.get("loss")))
            return
        incident = event.get("incident")
        if name.startswith("incident.") and isinstance(incident, Mapping):
            self.incidents[int(incident.get("number", 0))] = incident
        elif name.startswith("action."):
            self.last_action = f"{action_name(name, event).replace('_', ' ')} at step {event['step']:,}"
        elif name == "checkpoint.known_good":
            step = event.get("checkpoint_step")
            self.known_good = f"step {event['step'] if step is None else step:,}"
        if name not in SMALL:
            self.lines.append(event_line(event))

    def note_silence(self, seconds: float) -> None:
        """Take in for how long nothing has been written."""
        from .watch import ended_in_silence

        self.ended = ended_in_silence(seconds, self.ended)

    def refresh(self) -> None:
        """Draw."""
        self._live.update(self.render(), refresh=True)

    def close(self) -> None:
        """Draw a last time and leave the picture where it is."""
        self.refresh()
        self._live.stop()

    def render(self) -> RenderableType:
        """The picture."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        numbers_open = [n for n, i in self.incidents.items() if i.get("status") == "open"]
        state = self.ended or ("running" if self.step else "waiting for the first step")
        bad = bool(numbers_open) or self.ended not in (None, "finished")
        facts = Table.grid(padding=(0, 2))
        facts.add_row("state", Text(state, style="bold red" if bad else "bold green"))
        facts.add_row("open incidents", Text(", ".join(f"#{n}" for n in numbers_open) or "none"))
        facts.add_row("last action", self.last_action)
        facts.add_row("known-good", self.known_good)
        if self.step is not None:
            from .watch import step_line

            facts.add_row("now", Text(step_line(self.step)))
            facts.add_row("loss", Text(bars(list(self.losses)), style="cyan"))
        parts: list[RenderableType] = [facts]
        if self.incidents:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for title in ("#", "since", "what", "who", "done", "now"):
                table.add_column(title, overflow="fold")
            for n in sorted(self.incidents)[-INCIDENTS:]:
                table.add_row(*_row(n, self.incidents[n]))
            parts += ["", table]
        if self.lines:
            parts += ["", Text("\n".join(self.lines), style="dim", overflow="ellipsis", no_wrap=True)]
        return Panel(
            Group(*parts),
            title=str(self.run_dir),
            subtitle=time.strftime("%H:%M:%SZ", time.gmtime()),
            title_align="left",
        )


def _row(n: int, incident: Mapping[str, Any]) -> list[Any]:
    from rich.text import Text

    findings = incident.get("findings") or []
    verdict = incident.get("verdict") or {}
    actions = incident.get("actions") or []
    status = str(incident.get("status", "open"))
    return [
        str(n),
        str(incident.get("since_step", "?")),
        Text(", ".join(sorted({str(f.get("kind")).replace("_", " ") for f in findings}))),
        Text(", ".join(map(str, (verdict.get("culprits") or [])[:2])) or "nobody named"),
        Text(str(actions[-1].get("action")).replace("_", " ") if actions else "nothing"),
        Text(status, style=STYLES.get(status, "")),
    ]


def bars(values: list[float]) -> str:
    """Values as a line of bars, between the lowest and the highest; an ``x`` where one is not finite.

    Example:
        >>> bars([1.0, 2.0, float("nan"), 8.0])
        '▁▂x█'
    """
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "x" for v in values)
