"""From a run's events to the numbers a person or a machine asks for first. Pure functions; no torch, no drawing.

``summary.json``, schema 1::

    {"schema": 1, "status": "finished", "headline": "...", "next_action": "...", "steps": 400, "applied_steps": 398,
     "attempts": 2, "tokens": 409600, "loss_nats": 2.051, "loss_steps": 20, "token_probability": 0.1286, "incidents": [...],
     "open_incidents": [], "actions": {"skip_step": 1}, "rollbacks": 1, "checkpoints": [...], "last_known_good": {...},
     "quarantined": [...], "scaler": {...}, "faults": [...], "restarts": [...], "experiments": [...], "failures": [...]}
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..data.quarantine import FILE_NAME, read_ledger
from ..incidents import Action
from ..journal import number
from .data import RunData, Steps, load_run

SCHEMA = 1
# The loss of a run is the mean over its newest steps: one step alone is noise.
LOSS_STEPS = 20
# Without an end line a run that wrote nothing for this long is called lost, not running.
LOST_AFTER_SECONDS = 600.0

_ACTIONS = {a.value for a in Action}


def summarise_run(run_dir: str | Path, *, failures: Sequence[str] = (), now: float | None = None) -> dict[str, Any]:
    """Summary of a run folder; see the module's docstring for its shape."""
    return summarise(load_run(run_dir), failures=failures, now=now)


def summarise(run: RunData, *, failures: Sequence[str] = (), now: float | None = None) -> dict[str, Any]:
    """Summary of what a journal says.

    Args:
        run: The journal.
        failures: Sentences about what could not be written, put before those found in the journal.
        now: The time, seconds since the epoch, against which a run without an end is judged running or lost.
    """
    steps, incidents = run.steps, incident_rows(run)
    loss, loss_steps = final_loss(steps)
    checkpoints = checkpoint_rows(run)
    good = [c for c in checkpoints if c["state"] == "known_good"]
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "status": run_status(run, time.time() if now is None else now),
        "steps": int(steps.step[-1]) + 1 if len(steps) else 0,
        "applied_steps": applied_steps(steps),
        "attempts": int(max([*steps.attempt.tolist(), *(e.get("attempt", 0) for e in run.events)], default=0)) + 1,
        "tokens": int(steps.tokens[-1]) if len(steps) else 0,
        "loss_nats": _rounded(loss),
        "loss_steps": loss_steps,
        "token_probability": _rounded(math.exp(-loss)) if math.isfinite(loss) else None,
        "incidents": incidents,
        "open_incidents": [i["number"] for i in incidents if i["status"] == "open"],
        "actions": action_counts(run),
        "rollbacks": len(run.of("action.rollback")),
        "checkpoints": checkpoints,
        "last_known_good": good[-1] if good else None,
        "quarantined": quarantine_rows(run),
        "scaler": scaler_numbers(run),
        "faults": fault_rows(run),
        "restarts": restart_rows(run),
        "experiments": [_detail(e) for e in run.of("experiment.", "infra.event") if is_experiment(e)],
        "failures": [*failures, *journal_failures(run)],
    }
    summary["headline"] = headline(summary)
    summary["next_action"] = next_action(summary)
    return summary


# ------------------------------------------------------------------------------------------------------- state of the run


def run_status(run: RunData, now: float) -> str:
    """As the newest fit's end says: finished, stopped, failed, interrupted; without one ``running`` or ``lost``."""
    marks = run.of("run.started", "run.ended")
    if marks and marks[-1]["event"] == "run.ended":
        return str(marks[-1].get("status", "finished"))
    return "running" if now - run.last_time < LOST_AFTER_SECONDS else "lost"


def final_loss(steps: Steps) -> tuple[float, int]:
    """Mean loss in nats over the newest live steps, and how many it rests on; (NaN, 0) without a finite one."""
    loss = steps["loss"][steps.live][-LOSS_STEPS:]
    finite = loss[np.isfinite(loss)]
    return (float(finite.mean()), int(finite.size)) if finite.size else (math.nan, 0)


def applied_steps(steps: Steps) -> int:
    """Steps on the live path that changed the weights: as counted while training, else counted from the lines."""
    if not len(steps):
        return 0
    counted = steps["applied_steps"][-1]
    return int(counted) if math.isfinite(counted) else int(steps.applied[steps.live].sum())


def probability_words(loss_nats: float, vocabulary: int | None = None) -> str:
    """What a loss in nats means as a probability, without saying more than it does.

    Example:
        >>> probability_words(2.05)
        '2.050 nats per token: the geometric mean of the probabilities given to the right tokens is 0.129'
        >>> probability_words(2.05, vocabulary=256)[-67:]
        '; guessing evenly among 256 tokens, a baseline, would be 5.545 nats'
    """
    if not math.isfinite(loss_nats):
        return "no finite loss"
    text = (
        f"{loss_nats:.3f} nats per token: the geometric mean of the probabilities given to the right tokens is"
        f" {math.exp(-loss_nats):.3f}"
    )
    if vocabulary is not None:
        text += f"; guessing evenly among {vocabulary} tokens, a baseline, would be {math.log(vocabulary):.3f} nats"
    return text


def headline(summary: Mapping[str, Any]) -> str:
    """The run in one sentence."""
    number_open, total = len(summary["open_incidents"]), len(summary["incidents"])
    words = {
        "finished": "The run finished",
        "stopped": "The run was stopped by the policy",
        "failed": "The run failed",
        "interrupted": "The run was interrupted",
        "running": "The run is going on",
        "lost": "The run wrote no end and has been silent for over ten minutes: killed, hung, or its folder lost",
    }
    text = words.get(summary["status"], f"The run ended as {summary['status']}")
    if not total:
        return f"{text}; no incident."
    closed = Counter(i["status"] for i in summary["incidents"] if i["status"] != "open")
    parts = [f"{n} {status}" for status, n in sorted(closed.items())]
    if number_open:
        parts.insert(0, f"{number_open} open")
    return f"{text}; {total} incident{'s' * (total > 1)}: {', '.join(parts)}."


def next_action(summary: Mapping[str, Any]) -> str:
    """What a person should do next."""
    good = summary["last_known_good"]
    resume = (
        f"resume from {good['path'] or 'step ' + str(good['step'])}"
        if good
        else "choose a restore point: no checkpoint has passed probation"
    )
    if summary["status"] in ("stopped", "failed", "lost"):
        return f"Find out why it {'stopped' if summary['status'] != 'lost' else 'went silent'}, then {resume}."
    if summary["open_incidents"]:
        numbers = ", ".join(str(n) for n in summary["open_incidents"])
        if summary["status"] in ("finished", "interrupted"):  # no loss will come any more
            return f"Look at open incident {numbers}, which the run's end left undecided; to take it back, {resume}."
        return f"Look at open incident {numbers}; if the loss does not come back, {resume}."
    if any(i["status"] == "escalated" for i in summary["incidents"]):
        return f"An incident escalated: decide whether to go on; {resume}."
    active = [q["name"] for q in summary["quarantined"] if q["active"]]
    if active:
        return f"Review {len(active)} quarantined name{'s' * (len(active) > 1)}; training needs nothing."
    if summary["failures"]:
        return "Read the failures below: something could not be written."
    return "Nothing."


# -------------------------------------------------------------------------------------------------------------- incidents


def newest_incidents(run: RunData) -> dict[int, dict[str, Any]]:
    """Each incident's newest state in the journal, by number."""
    newest: dict[int, dict[str, Any]] = {}
    for event in run.of("incident."):
        incident = event.get("incident")
        if isinstance(incident, Mapping) and isinstance(incident.get("number"), int):
            newest[incident["number"]] = dict(incident)
    return {number_: newest[number_] for number_ in sorted(newest)}


def incident_rows(run: RunData) -> list[dict[str, Any]]:
    """One row for each incident."""
    return [incident_row(incident, run) for incident in newest_incidents(run).values()]


def incident_row(incident: Mapping[str, Any], run: RunData) -> dict[str, Any]:
    """The answers about one incident: when, who, why, what was done, and whether it is over."""
    findings = list(incident.get("findings") or ())
    first = findings[0] if findings else {}
    verdict = dict(incident.get("verdict") or {})
    actions = [dict(a) for a in incident.get("actions") or ()]
    number_ = incident["number"]
    rollbacks = [e for e in run.of("action.rollback") if e.get("incident") == number_]
    skips = [e for e in run.of("action.skip_step", "action.quarantine") if e.get("incident") == number_]
    skipped = _names(
        [n.removeprefix("sample:") for e in [*rollbacks, *skips] for n in sample_list(e, "excluded")],
        [n for e in skips for n in sample_list(e, "sample")],
    )
    opened, attempt = incident.get("opened_step"), incident.get("attempt")
    return {
        "number": number_,
        "status": str(incident.get("status", "open")),
        "since_step": incident.get("since_step"),
        "opened_step": -1 if opened is None else int(opened),
        "closed_step": incident.get("closed_step"),
        "attempt": 0 if attempt is None else int(attempt),
        "tokens": incident.get("tokens"),
        "detector": first.get("detector"),
        "kinds": sorted({str(f.get("kind")) for f in findings}),
        "statistic": first.get("score"),
        "threshold": first.get("threshold"),
        "unit": first.get("unit", ""),
        "message": first.get("message", ""),
        "verdict": str(verdict.get("kind", "undetermined")),
        "verdict_sentence": verdict.get("sentence", ""),
        "culprits": list(verdict.get("culprits") or ()),
        "action": str(actions[-1].get("action")) if actions else "none",
        "actions": [str(a.get("action")) for a in actions],
        "samples_skipped": [n for n in skipped if not n.startswith("source:")],
        "sources_excluded": [n.removeprefix("source:") for n in skipped if n.startswith("source:")],
        "samples_replayed": len(_names(*(sample_list(e, "replayed") for e in rollbacks))),
        "path_z": incident.get("path_z"),
        "closing": incident.get("closing", ""),
    }


def in_turn(actions: Sequence[str]) -> list[str]:
    """Actions in their order, what was done several times in a row once, with how often.

    Example:
        >>> in_turn(["rollback_skip", "skip_step", "skip_step", "skip_step"])
        ['rollback_skip', '3 x skip_step']
    """
    runs = [(name, sum(1 for _ in run)) for name, run in groupby(actions)]
    return [name if n == 1 else f"{n} x {name}" for name, n in runs]


def sample_list(event: Mapping[str, Any], word: str) -> list[str]:
    """The ids that an event lists under a field whose name begins with ``word``."""
    return [str(v) for k, value in event.items() if k.startswith(word) and isinstance(value, list) for v in value]


def false_incidents(
    summary: Mapping[str, Any], faults: Iterable[tuple[int, int]] | None = None, *, slack_steps: int = 50
) -> list[int]:
    """Numbers of the incidents that no fault explains.

    Args:
        summary: As :func:`summarise` made it.
        faults: Injected faults as (first step, last step); None: those of the summary.
        slack_steps: How long after a fault's last step an incident still counts as its consequence.
    """
    spans = [(f["first_step"], f["last_step"]) for f in summary["faults"]] if faults is None else list(faults)
    return [
        i["number"]
        for i in summary["incidents"]
        if not any(first <= i["opened_step"] <= last + slack_steps for first, last in spans)
    ]


# ---------------------------------------------------------------------------------------------------------- other tables


def action_counts(run: RunData) -> dict[str, int]:
    """How often each action was taken, by the incidents' own lists and by the journal's lines, whichever knows of more."""
    told = Counter(str(a.get("action")) for i in newest_incidents(run).values() for a in i.get("actions") or ())
    written = Counter(e["event"].removeprefix("action.") for e in run.of("action."))
    return {n: max(told[n], written[n]) for n in sorted(told.keys() | written.keys()) if n in _ACTIONS and n != "none"}


def checkpoint_rows(run: RunData) -> list[dict[str, Any]]:
    """Each checkpoint with its newest state: candidate, known_good, poisoned, removed or failed; by step."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    states = {"saved": "candidate"}
    for event in run.of("checkpoint."):
        state = event["event"].removeprefix("checkpoint.")
        if state not in ("saved", "known_good", "poisoned", "removed", "failed"):
            continue
        told = (event.get("checkpoint_step"), event.get("event_step"), event["step"])
        step = next(int(s) for s in told if s is not None)
        # Passes over a step may each have saved one; their folders differ.
        key = (step, Path(str(event.get("path", ""))).name)
        row = rows.setdefault(key, {"step": step, "path": None, "sha256": None, "tokens": event["tokens"]})
        row["state"] = states.get(state, state)
        row |= {k: event[k] for k in ("path", "sha256") if event.get(k)}
        if event.get("reason"):
            row["reason"] = event["reason"]
    return [rows[key] for key in sorted(rows)]


def quarantine_rows(run: RunData) -> list[dict[str, Any]]:
    """Each name that was ever quarantined, since when, why, and whether it is still out.

    The journal knows what the run itself decided; the run folder's ledger also what was added and taken back by hand (there
    ``step`` is None), so where both know a name the ledger counts.
    """
    rows: dict[str, dict[str, Any]] = {}
    for event in run.of("quarantine.added"):
        for name in event.get("names") or ():
            rows[name] = {
                "name": name,
                "step": event["step"],
                "incident": event.get("incident"),
                "reason": event.get("reason", ""),
                "active": True,
            }
    for entry in () if run.run_dir is None else read_ledger(Path(run.run_dir) / FILE_NAME)[0]:
        if entry.event == "added":
            told = {"step": entry.step, "incident": entry.incident, "reason": entry.reason, "active": True}
            rows[entry.name] = {"name": entry.name, **told}
        elif entry.name in rows:
            rows[entry.name] |= {"active": False, "revert_reason": entry.reason}
    return list(rows.values())


def scaler_numbers(run: RunData) -> dict[str, Any]:
    """Counts of scaler events, and the scale at the first and the newest step (None without a scaler)."""
    counts = Counter(e["event"].removeprefix("scaler.") for e in run.of("scaler."))
    scale = run.steps["loss_scale"]
    scale = scale[np.isfinite(scale)]
    used = bool(counts) or bool(scale.size and (scale != 1).any())
    return {
        "overflows": counts["overflow"],
        "backoffs": counts["backoff"],
        "growths": counts["growth"],
        "changes": counts["changed"],
        "first_scale": float(scale[0]) if used and scale.size else None,
        "last_scale": float(scale[-1]) if used and scale.size else None,
        "smallest_scale": float(scale.min()) if used and scale.size else None,
    }


def fault_rows(run: RunData) -> list[dict[str, Any]]:
    """Injected faults by name: first and last step, and how often they fired."""
    rows: dict[str, dict[str, Any]] = {}
    for event in run.of("fault.injected"):
        name = str(event.get("name"))
        row = rows.setdefault(name, {"name": name, "first_step": event["step"], "last_step": event["step"], "fired": 0})
        row["first_step"] = min(row["first_step"], event["step"])
        row["last_step"] = max(row["last_step"], event["step"])
        fired = event.get("fired")
        row["fired"] = max(row["fired"] + 1, fired) if isinstance(fired, int) else row["fired"] + 1
    return list(rows.values())


def restart_rows(run: RunData) -> list[dict[str, Any]]:
    """Fits after the first one: the step each began at and the checkpoint it came from."""
    rows: list[dict[str, Any]] = []
    for event in run.of("run.started", "run.resumed"):
        if event["event"] == "run.started":
            rows.append({"step": event["step"], "tokens": event["tokens"], "time": event["time"], "checkpoint": None})
        elif rows:
            rows[-1] |= {"step": event["step"], "tokens": event["tokens"] or rows[-1]["tokens"]}
            rows[-1]["checkpoint"] = event.get("checkpoint") or rows[-1]["checkpoint"]
    return [r for i, r in enumerate(rows) if i > 0 or r["checkpoint"]]


def journal_failures(run: RunData) -> list[str]:
    """What the journal itself says it lacks."""
    lost = [
        f"{e.get('lost_events', '?')} events of rank {e['rank']} were lost: {e.get('reason')}"
        for e in run.of("journal.gap")
    ]
    return [*lost, *_checkpoint_failures(run), *(str(p) for p in run.problems)]


def _checkpoint_failures(run: RunData) -> list[str]:
    """One sentence for each kind of failure: a full disk fails every save from then on."""
    kinds: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for event in run.of("checkpoint.failed"):
        reason = str(event.get("reason") or event.get("error"))
        kind = (str(event.get("what")), reason.partition(" (")[0])  # without the path, which differs at each step
        kinds.setdefault(kind, []).append((event["step"], reason))
    sentences = []
    for found in kinds.values():
        steps = sorted({step for step, _ in found})
        reason = found[0][1]
        if len(steps) == 1:
            sentences.append(f"A checkpoint at step {steps[0]} failed: {reason}")
        else:
            sentences.append(f"{len(steps)} checkpoints failed, steps {steps[0]} to {steps[-1]}; the first: {reason}")
    return sentences


def _names(*lists: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def is_experiment(event: Mapping[str, Any]) -> bool:
    """Whether the run was no longer what was planned: by an answer of the suite, or by a person's note."""
    return event["event"] != "infra.event" or event.get("kind") == "experiment"


def _detail(event: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in event.items() if k not in ("schema", "time", "rank")}


def _rounded(value: float, digits: int = 6) -> float | None:
    return round(number(value), digits) if math.isfinite(value) else None
