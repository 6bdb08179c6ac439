"""The report: one HTML file that needs nothing else, for people. Everything from the run is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from .. import __version__
from ..bundle.place import bundle_dir, replay_command
from ..journal import number
from .chart import Chart, build_chart, experiment_words, si, switch
from .curve import subtitle
from .data import RunData
from .heat import heat_map
from .summary import in_turn, newest_incidents, probability_words, sample_list
from .svg import NARROW, STATUS_CLASSES, WIDE, chart_svg, glyph_svg

MISSING_JINJA = (
    "No report.html: jinja2 is not installed. Install it with `pip install 'lightning-sentinel[report]'`, then run"
    " `lightning-sentinel report RUN`."
)
# What a page holds at most, so that it stays a page: the journal has the rest.
MAX_CARDS, MAX_ROWS, MAX_IDS, MAX_CONFIG, MAX_FINDINGS = 200, 300, 60, 60_000, 20
URGENT = ("open", "escalated")  # states of an incident that needs somebody

# Groups of the chart that the legend switches: class, words, glyph kind or swatch.
_LEGEND = (
    ("mean", "mean loss, the path that counts", "swatch"),
    ("band", "all ranks, lowest to highest", "swatch"),
    ("worst", "the rank furthest out", "swatch"),
    ("abandoned", "abandoned: rolled back, or lost in a restart", "swatch"),
    ("nonfinite", "not finite", "poisoned"),
    ("fault", "faults injected", "fault"),
    ("incident", "incidents (square: needs somebody)", "incident"),
    ("rollback", "rollbacks", "rollback"),
    ("action", "other actions", "skip_step"),
    ("checkpoint-known-good", "known-good", "known_good"),
    ("checkpoint-candidate", "candidate", "candidate"),
    ("checkpoint-poisoned", "poisoned", "poisoned"),
    ("checkpoint-failed", "failed", "failed"),
    ("checkpoint-removed", "removed", "removed"),
    ("scaler", "loss scaler", "overflow"),
    ("restart", "restarts", "restart"),
    ("topology", "number of ranks", "topology"),
    ("machines", "machines", "infra"),
    ("rate", "learning rate set", "rate"),
    ("mixture", "mixture", "mixture"),
    ("experiment", "experiments", "experiment"),
)


def render_html(run: RunData, summary: Mapping[str, Any]) -> str:
    """The page of a run."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Callable[[Any], str]] = {
        "si": si,
        "number": _number_words,
        "clock": _clock,
        "compact": _compact,
        "outline": _outline,
        "experiment": experiment_words,
    }
    environment.filters |= filters
    made = cards(run, summary)
    linked = {card["number"] for card in made}
    drawn = {}
    chart = None
    if len(run.steps):
        chart = build_chart(run, summary)
        words = chart_words(chart, summary)
        # On a phone the points of a wide screen would lie on each other.
        drawn = {WIDE: chart, NARROW: build_chart(run, summary, points=500)}
    heat = heat_map(run.steps, named_ranks(summary), sheets=(WIDE, NARROW))
    started = run.of("run.started")
    config = json.dumps(started[-1].get("config"), indent=1) if started and started[-1].get("config") else ""
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        summary=summary,
        subtitle=subtitle(summary),
        loss_words=probability_words(number(summary["loss_nats"])),
        run_dir="" if run.run_dir is None else str(run.run_dir),
        charts=[Markup(chart_svg(c, words, sheet, linked)) for sheet, c in drawn.items()],
        legend=[] if chart is None else legend(chart),
        heat=heat,
        heat_pictures=[] if heat is None else [Markup(svg) for svg in heat.svg],
        cards=made,
        linked=linked,
        glance=glance(made),
        state_class=state_class(summary),
        times=times_words(run),
        scaler=run.of("scaler.")[-MAX_ROWS:],
        scaler_events=len(run.of("scaler.")),
        started=started[-1] if started else {},
        ended=(run.of("run.ended") or [{}])[-1],
        config=config[:MAX_CONFIG] + (" ... (cut; the journal has it whole)" if len(config) > MAX_CONFIG else ""),
        max_rows=MAX_ROWS,
        max_findings=MAX_FINDINGS,
        version=__version__,
        made_at=_clock(datetime.now(UTC).timestamp()),
        glyph=lambda kind: Markup(glyph_svg(kind)),
        status_class=lambda status: STATUS_CLASSES.get(status, "grey"),
    )


def glance(rows: Sequence[Mapping[str, Any]], most: int = 12) -> list[dict[str, Any]]:
    """Of incidents at most so many: those that need somebody, the newest first, then the newest others.

    So many cards as by default has the table at the top.
    """
    newest_first = sorted(rows, key=lambda row: (row["status"] not in URGENT, -int(row["number"])))
    return [dict(row) for row in newest_first[:most]]


def times_words(run: RunData) -> str:
    """When the run began, wrote its newest step and ended, in UTC."""
    begun, marks = run.of("run.started"), run.of("run.started", "run.ended")
    parts = [
        f"Started {_clock(begun[0].get('time') if begun else None)}",
        f"last step written {_clock(run.last_step_time)}",
    ]
    if len(begun) > 1:
        parts.insert(1, f"started again {_clock(begun[-1].get('time'))}")
    ended = bool(marks) and marks[-1]["event"] == "run.ended"
    return ", ".join([*parts, f"ended {_clock(marks[-1].get('time'))}" if ended else "no end written"]) + "."


def state_class(summary: Mapping[str, Any]) -> str:
    """Colour of the run's state: red needs somebody, blue goes on, green is over."""
    urgent = any(i["status"] in URGENT for i in summary["incidents"])
    if urgent or summary["status"] in ("failed", "lost", "stopped"):
        return "red"
    return {"running": "blue", "finished": "green"}.get(summary["status"], "grey")


def named_ranks(summary: Mapping[str, Any]) -> set[int]:
    """The ranks that incidents name as culprits."""
    names = [c.removeprefix("rank:") for row in summary["incidents"] for c in row["culprits"] if c.startswith("rank:")]
    return {int(name) for name in names if name.isdecimal()}


def chart_words(chart: Chart, summary: Mapping[str, Any]) -> str:
    """The chart as sentences, for those who do not see it."""
    parts = [f"{summary['headline']} {subtitle(summary)}."]
    if chart.worst is not None:
        parts.append(f"Rank {chart.worst[0]} lies furthest above the other ranks.")
    if chart.abandoned:
        n = len(chart.abandoned)
        parts.append(f"{n} pass{' was' if n == 1 else 'es were'} abandoned: rolled back, or lost in a restart.")
    parts += [f"{m.detail[0].upper()}{m.detail[1:]}." for m in chart.marks if m.lane != "checkpoint"][:100]
    return " ".join(parts)


def legend(chart: Chart) -> list[dict[str, str]]:
    """What the chart shows and the legend can switch off: key, words, glyph."""
    shown = {"mean"} | {switch(mark) for mark in chart.marks}
    if chart.band is not None:
        shown.add("band")
    if chart.worst is not None:
        shown.add("worst")
    if chart.abandoned:
        shown.add("abandoned")
    if chart.nonfinite.size:
        shown.add("nonfinite")
    words = {"worst": "" if chart.worst is None else f"rank {chart.worst[0]}, the furthest out"}
    states = [key for key, _, _ in _LEGEND if key in shown and key.startswith("checkpoint-")]
    words |= {key: f"checkpoint, {key.removeprefix('checkpoint-')}" for key in states[:1]}  # the others follow it
    return [{"key": k, "words": words.get(k, w), "glyph": g} for k, w, g in _LEGEND if k in shown]


# ---------------------------------------------------------------------------------------------------------- incident cards


def cards(run: RunData, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One card for each incident, by number: the summary's row, and what led to it and followed.

    Of more than :data:`MAX_CARDS` incidents those that need somebody have a card, then the newest.
    """
    incidents = newest_incidents(run)
    made = []
    for row in sorted(glance(summary["incidents"], MAX_CARDS), key=lambda row: int(row["number"])):
        incident = incidents[row["number"]]
        verdict = incident.get("verdict") or {}
        happened = timeline(run, row["number"])
        out = [q["name"] for q in summary["quarantined"] if q["incident"] == row["number"]]
        made.append(
            {
                **row,
                "findings": finding_rows(incident),
                "experiments": _experiments(run, row["number"], verdict),
                "evidence": verdict.get("evidence") or {},
                "timeline": happened,
                "opened_at": next((line["time"] for line in happened if line["event"] == "incident.opened"), None),
                "layer": layer_words(verdict),
                "done": in_turn(row["actions"]),
                "skipped": row["samples_skipped"][:MAX_IDS],
                "skipped_more": max(0, len(row["samples_skipped"]) - MAX_IDS),
                "quarantined": out[:MAX_IDS],
                "quarantined_more": max(0, len(out) - MAX_IDS),
                "replay": _replay_command(run, row["number"]),
            }
        )
    return made


def finding_rows(incident: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything that was seen of an incident: each finding as it was journalled, and how many times its threshold it was."""
    rows = []
    for finding in incident.get("findings") or ():
        score, threshold = number(finding.get("score")), number(finding.get("threshold"))
        times = round(score / threshold, 1) if threshold > 0 and math.isfinite(score) else None
        rows.append({**finding, "times_threshold": times})
    return rows


def layer_words(verdict: Mapping[str, Any]) -> str | None:
    """The first layer in which the failing rank is unlike the healthy ones; where nothing was compared, why not.

    None where nothing was compared and the verdict names no rank either: there is nobody to be unlike the others.
    """
    compared = (verdict.get("evidence") or {}).get("comparisons") or {}
    found = compared.get("first_deviating_layer")
    if not isinstance(found, Mapping):
        if not any(str(name).startswith("rank:") for name in verdict.get("culprits") or ()):
            return None
        reason = compared.get("activation_norms")
        if isinstance(reason, str):
            return reason
        return "not measured: " + (
            "there are the layers of one rank, of no other" if reason else "the verdict compares no layers"
        )
    if found.get("module") is None:
        return f"none: every layer of rank {found.get('rank')} is like those of the healthy ranks"
    failing, healthy = number(found.get("failing_rms")), number(found.get("healthy_rms"))
    return (
        f"{found['module']}: activations of {failing:.3g} (root mean square) on rank {found.get('rank')}, {healthy:.3g} on"
        " the healthy ranks"
    )


def _experiments(run: RunData, number_: int, verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the verdict, or, while there is none, those journalled so far."""
    if verdict.get("experiments"):
        return [dict(e) for e in verdict["experiments"]]
    return [e for e in run.of("triage.experiment") if e.get("incident") == number_]


def timeline(run: RunData, number_: int) -> list[dict[str, Any]]:
    """What happened to an incident, in order: time, step, attempt, event, words."""
    lines: list[dict[str, Any]] = []
    for event in run.events:
        incident = event.get("incident")
        if (incident.get("number") if isinstance(incident, Mapping) else incident) != number_:
            continue
        words = event_words(event)
        if words is not None:
            lines.append({k: event[k] for k in ("time", "step", "attempt", "event")} | {"words": words})
    return lines


def event_words(event: Mapping[str, Any]) -> str | None:
    """An event of an incident in words; None where another line says it already."""
    name = event["event"]
    if name == "incident.bundle":
        return f"{event.get('path')}: {event.get('command')}"
    if name == "incident.bundle_failed":
        return f"no bundle: {event.get('reason')}"
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
    """The command that replays an incident, where its bundle is there."""
    if run.run_dir is None or not bundle_dir(run.run_dir, number_).is_dir():
        return None
    return replay_command(run.run_dir, number_)


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
    """Details of an experiment on one line, numbers rounded, cut where they would fill the page."""
    text = "; ".join(_outline_lines(value)) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 600 else text[:600] + " ..."


def _outline(value: Any) -> str:
    """A nested mapping as indented lines, cut where they would fill the page."""
    lines = _outline_lines(value, nested=True)
    return "\n".join(
        lines[:MAX_ROWS] + [f"... {len(lines) - MAX_ROWS} more lines in the journal"] * (len(lines) > MAX_ROWS)
    )


def _outline_lines(value: Mapping[str, Any], *, nested: bool = False, indent: str = "") -> list[str]:
    lines: list[str] = []
    for key, item in value.items():
        if nested and isinstance(item, Mapping) and item:
            lines += [f"{indent}{key}:", *_outline_lines(item, nested=True, indent=indent + "  ")]
        else:
            text = _plain(item)
            lines.append(f"{indent}{key}: {text if len(text) <= 400 else text[:400] + ' ...'}")
    return lines


def _plain(value: Any) -> str:
    """A value without JSON's quotation marks, numbers to four digits."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value[:12]) + (f", and {len(value) - 12} more" if len(value) > 12 else "")
    return str(value)
