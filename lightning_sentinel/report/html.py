"""The report: one HTML file that needs nothing else, for people. Everything from the run is escaped."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from .. import __version__
from ..journal import number
from .chart import Chart, build_chart, si
from .curve import subtitle
from .data import RunData
from .summary import newest_incidents, probability_words, sample_list
from .svg import STATUS_CLASSES, chart_svg, glyph_svg, heat_map

MISSING_JINJA = (
    "No report.html: jinja2 is not installed. Install it with `pip install 'lightning-sentinel[report]'`, then run"
    " `lightning-sentinel report RUN`."
)
# What a page holds at most, so that it stays a page: the journal has the rest.
MAX_CARDS, MAX_ROWS, MAX_IDS, MAX_CONFIG = 200, 300, 60, 60_000

# Groups of the chart that the legend switches: class, words, glyph kind or swatch.
_LEGEND = (
    ("mean", "mean loss, the path that counts", "swatch"),
    ("band", "all ranks, lowest to highest", "swatch"),
    ("worst", "the rank furthest out", "swatch"),
    ("abandoned", "abandoned by a rollback", "swatch"),
    ("nonfinite", "not finite", "poisoned"),
    ("fault", "faults injected", "fault"),
    ("incident", "incidents", "incident"),
    ("action", "actions", "skip_step"),
    ("checkpoint", "checkpoints", "known_good"),
    ("scaler", "loss scaler", "overflow"),
    ("run", "restarts, topology", "restart"),
    ("schedule", "rate, mixture", "mixture"),
)


def render_html(run: RunData, summary: Mapping[str, Any]) -> str:
    """The page of a run."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"si": si, "number": _number_words, "clock": _clock, "compact": _compact}
    chart = build_chart(run, summary) if len(run.steps) else None
    heat = heat_map(run.steps)
    started = run.of("run.started")
    config = json.dumps(started[-1].get("config"), indent=1) if started and started[-1].get("config") else ""
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        summary=summary,
        subtitle=subtitle(summary),
        loss_words=probability_words(number(summary["loss_nats"])),
        run_dir="" if run.run_dir is None else str(run.run_dir),
        chart=None if chart is None else Markup(chart_svg(chart, chart_words(chart, summary))),
        legend=[] if chart is None else legend(chart),
        heat=heat,
        cards=cards(run, summary)[:MAX_CARDS],
        scaler=run.of("scaler.")[-MAX_ROWS:],
        started=started[-1] if started else {},
        ended=(run.of("run.ended") or [{}])[-1],
        config=config[:MAX_CONFIG] + (" ... (cut; the journal has it whole)" if len(config) > MAX_CONFIG else ""),
        max_rows=MAX_ROWS,
        version=__version__,
        made=_clock(datetime.now(UTC).timestamp()),
        glyph=lambda kind: Markup(glyph_svg(kind)),
        status_class=lambda status: STATUS_CLASSES.get(status, "grey"),
    )


def chart_words(chart: Chart, summary: Mapping[str, Any]) -> str:
    """The chart as sentences, for those who do not see it."""
    parts = [f"{summary['headline']} {subtitle(summary)}."]
    if chart.worst is not None:
        parts.append(f"Rank {chart.worst[0]} lies furthest above the other ranks.")
    if chart.abandoned:
        parts.append(f"{len(chart.abandoned)} passes were abandoned by rollbacks.")
    parts += [f"{m.detail[0].upper()}{m.detail[1:]}." for m in chart.marks if m.lane != "checkpoint"][:100]
    return " ".join(parts)


def legend(chart: Chart) -> list[dict[str, str]]:
    """What the chart shows and the legend can switch off: key, words, glyph."""
    shown = {"mean"} | set(chart.lanes)
    if chart.band is not None:
        shown.add("band")
    if chart.worst is not None:
        shown.add("worst")
    if chart.abandoned:
        shown.add("abandoned")
    if chart.nonfinite.size:
        shown.add("nonfinite")
    words = {"worst": "" if chart.worst is None else f"rank {chart.worst[0]}, the furthest out"}
    return [{"key": k, "words": words.get(k, w), "glyph": g} for k, w, g in _LEGEND if k in shown]


# ---------------------------------------------------------------------------------------------------------- incident cards


def cards(run: RunData, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One card for each incident: the summary's row, and what led to it and followed."""
    incidents = newest_incidents(run)
    made = []
    for row in summary["incidents"]:
        incident = incidents[row["number"]]
        verdict = incident.get("verdict") or {}
        score, threshold = number(row["statistic"]), number(row["threshold"])
        made.append(
            {
                **row,
                "findings": incident.get("findings") or [],
                "experiments": _experiments(run, row["number"], verdict),
                "evidence": verdict.get("evidence") or {},
                "timeline": timeline(run, row["number"]),
                "times_threshold": round(score / threshold, 1) if threshold > 0 and score == score else None,
                "skipped": row["samples_skipped"][:MAX_IDS],
                "skipped_more": max(0, len(row["samples_skipped"]) - MAX_IDS),
                "quarantined": [q["name"] for q in summary["quarantined"] if q["incident"] == row["number"]][:MAX_IDS],
                "replay": _replay_command(run, row["number"]),
            }
        )
    return made


def _experiments(run: RunData, number_: int, verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the verdict, or, while there is none, those journalled so far."""
    if verdict.get("experiments"):
        return [dict(e) for e in verdict["experiments"]]
    return [e for e in run.of("triage.experiment") if e.get("incident") == number_]


def timeline(run: RunData, number_: int) -> list[dict[str, Any]]:
    """What happened to an incident, in order: time, step, attempt, event, words."""
    lines: list[dict[str, Any]] = []
    for event in run.events:
        name = event["event"]
        if name.startswith("incident."):
            if (event.get("incident") or {}).get("number") != number_:
                continue
        elif event.get("incident") != number_:
            continue
        words = _event_words(event)
        if words is not None:
            lines.append({k: event[k] for k in ("time", "step", "attempt", "event")} | {"words": words})
    return lines[:MAX_ROWS]


def _event_words(event: Mapping[str, Any]) -> str | None:
    """An event of an incident in words; None where another line says it already."""
    name = event["event"]
    if name.startswith("incident."):
        incident = event["incident"]
        if name == "incident.opened":
            return str((incident.get("findings") or [{}])[0].get("message", "opened"))
        return f"{incident.get('status')}: {incident.get('closing', '')}" if name == "incident.closed" else None
    if name == "triage.verdict":
        verdict = event.get("verdict") or {}
        return f"{verdict.get('kind')}: {', '.join(verdict.get('culprits') or ()) or 'nobody named'}"
    if name == "triage.experiment":
        return f"{event.get('name')}: {event.get('result')}"
    if name == "action.rollback":
        return (
            f"back to step {event.get('to_step')}; {len(sample_list(event, 'replayed'))} samples replayed,"
            f" {len(sample_list(event, 'excluded'))} names excluded"
        )
    if name.startswith("quarantine."):
        return f"{', '.join(map(str, (event.get('names') or [])[:5]))}: {event.get('reason', '')}"
    if name.startswith("action."):
        return str(event.get("reason", ""))
    return None


def _replay_command(run: RunData, number_: int) -> str | None:
    """The command that replays an incident, where its bundle exists and this installation can do it."""
    if run.run_dir is None or importlib.util.find_spec("lightning_sentinel.replay") is None:
        return None
    bundle = run.run_dir / "incidents" / f"{number_:04d}"
    return f"lightning-sentinel replay {bundle}" if bundle.is_dir() else None


# ---------------------------------------------------------------------------------------------------------------- filters


def _number_words(value: Any) -> str:
    """A number as a person reads it; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e12):
        return f"{int(value):,}"
    return f"{value:.4g}"


def _clock(seconds: Any) -> str:
    stamp = number(seconds)
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if stamp == stamp else "–"


def _compact(value: Any) -> str:
    """Details of an experiment on one line, cut where they would fill the page."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 600 else text[:600] + " ..."
