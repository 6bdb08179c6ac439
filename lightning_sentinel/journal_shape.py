"""What the fields of a journal's line must be for its readers to go by it.

One flipped bit, a tool that rewrote the file or a disk's bad block may leave a line that is still JSON. A line whose header
or whose known fields are of another kind than the writer's is no event: it is skipped and reported, so that everything that
reads a journal may take the kinds for granted. Fields that are missing or null are left to the reader, and what is not
listed here is only ever shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Whole numbers up to here are exact as float64, which the columns are made of.
MOST = 2**53
# Seconds since the epoch at which the year 10000 begins: no calendar goes further.
TIME_ENDS = 253_402_300_800.0
_NONFINITE = frozenset({"nan", "inf", "-inf"})

# Tells what was expected, after the field's place; None for a value that is as it should be.
Check = Callable[[Any], str | None]


def whole(value: Any) -> str | None:
    return None if type(value) is int and -MOST <= value <= MOST else ": a whole number was expected"


def count(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value <= MOST else ": a whole number from 0 on was expected"


def amount(value: Any) -> str | None:
    """A number, or one of the strings for those that JSON does not have."""
    if type(value) is float or (type(value) is int and -MOST <= value <= MOST):
        return None
    known = isinstance(value, str) and value in _NONFINITE
    return None if known else ': a number, "nan", "inf" or "-inf" was expected'


def text(value: Any) -> str | None:
    return None if isinstance(value, str) else ": text was expected"


def mapping(value: Any) -> str | None:
    return None if isinstance(value, dict) else ": an object was expected"


def each(check: Check) -> Check:
    """A list whose entries are all as ``check`` wants them."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, list):
            return ": a list was expected"
        wrong = ((i, check(v)) for i, v in enumerate(value))
        return next((f".{i}{what}" for i, what in wrong if what is not None), None)

    return checked


def table(fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> Check:
    """An object with these fields; those not required may be missing or null."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, dict):
            return ": an object was expected"
        for name in required:
            if value.get(name) is None:
                return f".{name} is missing"
        return wrong_field(value, fields)

    return checked


def wrong_field(values: Mapping[str, Any], fields: Mapping[str, Check]) -> str | None:
    """The first of ``fields`` that is there and not what it should be, with what was expected."""
    for name, check in fields.items():
        value = values.get(name)
        if value is not None and (what := check(value)) is not None:
            return f".{name}{what}"
    return None


def incident_or_number(value: Any) -> str | None:
    return whole(value) if not isinstance(value, dict) else wrong_field(value, {"number": whole})


_EXPERIMENT = table({"name": text})
_VERDICT = table(
    {
        "kind": text,
        "sentence": text,
        "culprits": each(text),
        "experiments": each(_EXPERIMENT),
        "evidence": table({"comparisons": mapping}),
    }
)
_FINDING = table(
    {
        "kind": text,
        "detector": text,
        "step": whole,
        "since_step": whole,
        "score": amount,
        "threshold": amount,
        "message": text,
        "unit": text,
        "ranks": each(whole),
        "culprits": each(text),
    }
)
_INCIDENT = table(
    {
        "number": count,
        "opened_step": whole,
        "since_step": whole,
        "closed_step": whole,
        "attempt": count,
        "tokens": count,
        "findings": each(_FINDING),
        "verdict": _VERDICT,
        "actions": each(table({"action": text})),
        "status": text,
        "path_z": amount,
        "closing": text,
    },
    required=("number",),
)
_INCIDENT_EVENTS = frozenset({"incident.opened", "incident.updated", "incident.closed"})
# By name, else by what comes before the dot.
_FIELDS: Mapping[str, Mapping[str, Check]] = {
    "run.started": {"world_size": count, "segment": count, "host": text},
    "run.resumed": {"checkpoint": text, "path": text, "status": text},
    "run.ended": {"status": text, "message": text},
    "incident.opened": {"incident": _INCIDENT},
    "incident.updated": {"incident": _INCIDENT},
    "incident.closed": {"incident": _INCIDENT},
    "triage.verdict": {"verdict": _VERDICT},
    "triage.experiment": {"name": text},
    "action": {"incident": whole, "action": text, "reason": text, "from_step": whole, "to_step": whole},
    "quarantine.added": {"incident": whole, "names": each(text), "reason": text},
    "scaler": {"parameters": each(text), "old_scale": amount, "new_scale": amount},
    "checkpoint": {"checkpoint_step": count, "event_step": count, "path": text, "sha256": text, "reason": text},
    "mixture.changed": {"weights": mapping, "old": mapping},
    "experiment": {"until": whole, "factor": amount},
    "fault": {"name": text, "fired": whole},
    "topology": {"old_world_size": count, "world_size": count},
    "infra.event": {"kind": text, "text": text},
    "exception": {"type": text, "message": text},
}


def what_is_wrong(event: dict[str, Any]) -> str | None:
    """Why a line with name and schema is no event; None where its fields are what the readers go by.

    Example:
        >>> head = {"schema": 1, "time": 5.0, "rank": 0, "attempt": 0, "step": 3, "tokens": 96, "event": "step"}
        >>> what_is_wrong(head | {"loss": "nan"}), what_is_wrong(head | {"loss": 2.5, "step": None})
        (None, 'has "step" None: a whole number from 0 on was expected')
        >>> what_is_wrong(head | {"event": "incident.closed", "incident": {"number": 1, "findings": [{"score": "x"}]}})
        'has "incident.findings.0.score": a number, "nan", "inf" or "-inf" was expected'
    """
    name = event["event"]
    # Most lines are steps, and a report reads a hundred thousand of them: no loop here.
    step, attempt, tokens, rank = event.get("step"), event.get("attempt"), event.get("tokens"), event.get("rank")
    time = event.get("time")
    if not (
        type(step) is type(attempt) is type(tokens) is type(rank) is int
        and -1 <= step <= MOST
        and 0 <= attempt <= MOST
        and 0 <= tokens <= MOST
        and 0 <= rank <= MOST
        and (type(time) is float or type(time) is int)
        and 0 <= time < TIME_ENDS
    ):
        return _wrong_header(event)
    if name == "step":
        loss = event.get("loss", "nan")
        if type(loss) is not float and amount(loss) is not None:
            return f'has "loss" {_brief(loss)}{amount(loss)}'
        return None if step >= 0 else _wrong_header(event)
    if name in _INCIDENT_EVENTS and event.get("incident") is None:
        return 'has no "incident"'
    fields = _FIELDS.get(name) or _FIELDS.get(name.partition(".")[0])
    wrong = wrong_field(event, fields) if fields is not None else None
    if wrong is None and (fields is None or "incident" not in fields):
        wrong = wrong_field(event, {"incident": incident_or_number})
    if wrong is None:
        return None
    place, _, expected = wrong[1:].partition(":")
    return f'has "{place}":{expected}' if expected else f'has no "{place.removesuffix(" is missing")}"'


def _wrong_header(event: Mapping[str, Any]) -> str:
    for name in ("step", "attempt", "tokens", "rank"):
        value = event.get(name)
        least = -1 if name == "step" and event["event"] != "step" else 0
        if name not in event:
            return f'has no "{name}"'
        if not (type(value) is int and least <= value <= MOST):
            return f'has "{name}" {_brief(value)}: a whole number from {least} on was expected'
    if "time" not in event:
        return 'has no "time"'
    return f'has "time" {_brief(event["time"])}: seconds since 1970 were expected'


def _brief(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 40 else words[:37] + "..."
