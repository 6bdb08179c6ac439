"""What two legs of a canary show, from their journals alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..journal import number, read_journal
from ..report.summary import incident_rows
from .drill import EXERCISES, SEEN_WITHIN, Timeline


@dataclass(frozen=True)
class LegEnd:
    """How a leg ended.

    Attributes:
        folder: Its run folder.
        exit_code: 0 where it finished.
        error: The last lines that it left, where it did not.
    """

    folder: Path
    exit_code: int = 0
    error: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that must hold before the long run: its name, whether it does, and the numbers."""

    name: str
    passed: bool
    words: str


@dataclass
class Drilled:
    """What became of one fault.

    Attributes:
        fault: Its name.
        step: Where it was to strike.
        fired: How often it did.
        seen_step: Step at which the incident was opened, or None.
        verdict: Kind of the verdict.
        culprits: What it names.
        answers: What was done, in order.
        refused: Answers that were right and could not be given, with the reason.
        status: How the incident ended.
        path: How the losses compare with the clean leg's afterwards.
        passed: Whether all of that is as it should be.
        why: What is not, in a sentence; empty where it passed.
    """

    fault: str
    step: int
    fired: int = 0
    seen_step: int | None = None
    verdict: str = ""
    culprits: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    status: str = ""
    path: str = ""
    passed: bool = False
    why: str = ""


@dataclass
class CanaryReport:
    """The page as data.

    Attributes:
        passed: Whether the long run may start: all checks hold and every drilled fault was answered.
        checks: About the pilot itself.
        drill: By fault.
        false_incidents: Incidents that no fault explains, a sentence each.
        facts: Steps, seconds a step, losses, world size, precision, versions.
        folder: Where legs and page lie.
    """

    passed: bool
    checks: list[Check]
    drill: list[Drilled]
    false_incidents: list[str]
    facts: dict[str, Any]
    folder: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(folder: Path, plan: Timeline, clean: LegEnd, drill: LegEnd, *, progress: bool = False) -> CanaryReport:
    """Compare both legs with what should have happened; ``progress`` shows what takes long."""
    quiet, loud = _Leg.of(clean), _Leg.of(drill)
    false = [f"clean leg, {_line(i)}" for i in quiet.incidents]
    false += [f"drill leg, {_line(i)}" for i in loud.incidents if loud.cause(i) is None]
    checks = [
        _finished("clean leg", quiet, plan.steps),
        _finished("drill leg", loud, plan.steps),
        _finite(quiet),
        Check("false incidents", not false, f"{len(false)} without a fault" if false else "none"),
        *_warnings(quiet),
        *_checkpoint(quiet, progress),
    ]
    order = sorted(plan.faults, key=plan.faults.__getitem__)
    drilled = [_drilled(name, plan, order, quiet, loud) for name in order]
    passed = all(c.passed for c in checks) and all(d.passed for d in drilled)
    return CanaryReport(passed, checks, drilled, false, _facts(quiet), str(folder))


@dataclass
class _Leg:
    """One leg's journal."""

    end: LegEnd
    events: list[dict[str, Any]]
    incidents: list[dict[str, Any]]
    steps: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, end: LegEnd) -> _Leg:
        from ..report.data import load_run

        try:
            events, incidents = read_journal(end.folder, problems=[]), incident_rows(load_run(end.folder))
        except FileNotFoundError:
            events, incidents = [], []
        steps: dict[int, dict[str, Any]] = {}
        for event in events:
            if event["event"] == "step" and event["rank"] == 0:
                for later in [s for s in steps if s >= event["step"]]:  # the run went back: that path is given up
                    del steps[later]
                steps[event["step"]] = event
        return cls(end, events, incidents, steps)

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] in names]

    def strikes(self, fault: str) -> list[dict[str, Any]]:
        return [e for e in self.named("fault.injected") if e["name"] == fault]

    def opened(self, incident: Mapping[str, Any]) -> float:
        times = [e["time"] for e in self.named("incident.opened") if e["incident"]["number"] == incident["number"]]
        return float(times[0]) if times else math.inf

    def cause(self, incident: Mapping[str, Any]) -> str | None:
        """The newest fault that had struck when an incident was opened; None before any."""
        began: dict[str, float] = {}
        for event in self.named("fault.injected"):
            began.setdefault(str(event["name"]), float(event["time"]))
        before = [name for name, time in began.items() if time <= self.opened(incident)]
        return max(before, key=began.__getitem__) if before else None

    def full(self, number_: int) -> dict[str, Any]:
        """The newest state of an incident as it was journalled."""
        found: dict[str, Any] = {}
        for event in self.events:
            incident = event.get("incident")
            if isinstance(incident, dict) and incident.get("number") == number_:
                found = incident
        return found


def _drilled(name: str, plan: Timeline, order: Sequence[str], quiet: _Leg, loud: _Leg) -> Drilled:
    exercise, step = EXERCISES[name], plan.faults[name]
    row = Drilled(name, step)
    strikes = loud.strikes(name)
    row.fired = max((int(e["fired"]) for e in strikes), default=0)
    mine = [loud.full(i["number"]) for i in loud.incidents if loud.cause(i) == name]
    if not row.fired:
        row.why = f"the drill leg ended before step {step}" if step not in loud.steps else "the fault did not strike"
        return row
    if not mine:
        row.why = "nobody saw it"
        return row
    first = mine[0]
    row.seen_step = int(first["opened_step"])
    row.verdict, row.culprits = str(first["verdict"]["kind"]), list(first["verdict"]["culprits"])
    row.answers = [str(a["action"]) for i in mine for a in i["actions"]]
    row.refused = list(dict.fromkeys(str(p) for i in mine for a in i["actions"] for p in a.get("passed_over", ())))
    row.status = next((str(i["status"]) for i in mine if i["status"] != "recovered"), "recovered")
    later = [plan.faults[n] for n in order if plan.faults[n] > step]
    differs = _first_difference(quiet, loud, row.seen_step, min(later, default=plan.steps))
    if exercise.exact:
        row.path = "equal to the clean leg's to the bit" if differs is None else differs
    else:
        z = first.get("path_z")
        row.path = "" if z is None else f"{number(z):.2g} robust sigma from the forecast"
    row.why = _what_is_wrong(row, name, differs if exercise.exact else None)
    row.passed = not row.why
    return row


def _what_is_wrong(row: Drilled, name: str, differs: str | None) -> str:
    exercise = EXERCISES[name]
    assert row.seen_step is not None
    if row.seen_step > row.step + SEEN_WITHIN:
        return f"seen at step {row.seen_step}, {row.seen_step - row.step} steps late"
    missing = [c for c in exercise.culprits if not any(x.startswith(c) for x in row.culprits)]
    if row.verdict != exercise.verdict or missing:
        named = ", ".join(row.culprits[:3]) or "nobody"
        wanted = f"{exercise.verdict} ({', '.join(exercise.culprits)} ...)"
        return f"the verdict is {row.verdict}, {named}; expected {wanted}"
    if row.refused:
        return f"refused: {row.refused[0]}"
    if not row.answers or row.answers[0] not in exercise.answers:
        return f"answered {row.answers[0] if row.answers else 'not at all'}, expected {' or '.join(sorted(exercise.answers))}"
    if row.status != "recovered":
        return f"the incident ended {row.status}"
    if differs is not None:
        return f"recovered, but {differs}"
    return ""


def _first_difference(quiet: _Leg, loud: _Leg, start: int, end: int) -> str | None:
    """The first step in ``start .. end - 1`` whose loss differs between the legs in a bit; None where none does."""
    for step in range(start, end):
        a, b = quiet.steps.get(step), loud.steps.get(step)
        if a is None or b is None:
            return f"step {step} is in the {'clean' if a is None else 'drill'} leg's journal not"
        if a["loss_bits"] != b["loss_bits"] or a["sample_ids"] != b["sample_ids"]:
            which = "other samples" if a["sample_ids"] != b["sample_ids"] else f"loss {b['loss']} for {a['loss']}"
            return f"step {step} differs from the clean leg's ({which})"
    return None


def _finished(name: str, leg: _Leg, steps: int) -> Check:
    last = max(leg.steps, default=-1) + 1
    fine = leg.end.exit_code == 0 and last >= steps
    words = f"{last} of {steps} steps"
    if leg.end.exit_code:
        words += f", exit code {leg.end.exit_code}"
        if leg.end.error:
            words += f": {leg.end.error}"
    return Check(name, fine, words)


def _finite(leg: _Leg) -> Check:
    losses = [number(e["loss"]) for _, e in sorted(leg.steps.items())]
    bad = [s for s, e in sorted(leg.steps.items()) if not math.isfinite(number(e["loss"]))]
    if not losses:
        return Check("losses", False, "no step was journalled")
    words = f"from {losses[0]:.4g} to {losses[-1]:.4g}" + (f"; not finite at step {bad[0]}" if bad else "")
    return Check("losses", not bad, words)


def _warnings(leg: _Leg) -> list[Check]:
    """What ``Preflight`` says about the set-up. Its warnings are for a person to weigh; they fail no canary."""
    if not leg.named("preflight.done"):
        return []
    words = list(dict.fromkeys(f"{e['check']}: {e['message']}" for e in leg.named("preflight.warning")))
    return [Check("preflight", True, "; ".join(words) or "no warning")]


def _checkpoint(leg: _Leg, progress: bool) -> list[Check]:
    """Where checkpoints are saved: that one was, and that its every byte is as written."""
    from ..checkpoint import aloud
    from ..checkpoint.store import CheckpointStore

    started = leg.named("run.started")
    if not started or "ForensicCheckpoint" not in started[0].get("callbacks", ()):
        return []
    store = CheckpointStore(leg.end.folder / "checkpoints")
    paths = store.paths()
    if not paths:
        failed = leg.named("checkpoint.failed")
        why = f": {failed[-1].get('reason') or failed[-1].get('error') or ''}" if failed else ""
        return [Check("checkpoint", False, f"none was saved{why}")]
    problems = aloud.verify(store, paths[-1], enabled=progress)
    saved = [e for e in leg.named("checkpoint.saved") if e["rank"] == 0]
    seconds = f", {number(saved[-1].get('seconds')):.1f} s" if saved and "seconds" in saved[-1] else ""
    size = sum(f.stat().st_size for f in paths[-1].iterdir())
    words = f"{paths[-1].name}, {size:,} bytes{seconds}, every hash right" if not problems else "; ".join(problems)
    return [Check("checkpoint", not problems, words)]


def _facts(leg: _Leg) -> dict[str, Any]:
    started = leg.named("run.started")
    first = started[0] if started else {}
    seconds = sorted(number(e["step_seconds"]) for s, e in leg.steps.items() if s > 1)
    known = ("world_size", "precision", "strategy", "model", "parameters", "versions", "command")
    return {
        **{name: first.get(name) for name in known},
        "steps": len(leg.steps),
        "median_step_seconds": seconds[len(seconds) // 2] if seconds else None,
    }


def _line(incident: Mapping[str, Any]) -> str:
    return f"step {incident['opened_step']}: {', '.join(incident['kinds'])}: {incident['message']}"
