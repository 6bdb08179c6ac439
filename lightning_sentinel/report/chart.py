"""What the loss chart shows, ready to be drawn: lines thinned to what a picture can hold, marks with their words.

The PNG (:mod:`.curve`) and the page's SVG (:mod:`.svg`) draw the same :class:`Chart`. The x axis is tokens everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..journal import number
from .data import BoolArray, FloatArray, RunData, Steps
from .summary import is_experiment

# Lines of the strip under the loss, top to bottom.
LANES: Mapping[str, str] = {
    "fault": "faults injected",
    "incident": "incidents",
    "action": "actions",
    "checkpoint": "checkpoints",
    "scaler": "loss scaler",
    "run": "restarts",
    "schedule": "rate, mixture",
    "experiment": "experiments",
}
# Events of the machines bear their kind in words unless there are more than this.
FEW = 12
# How an action is written where there is room for two words at most.
ACTION_WORDS = {
    "retry_step": "retry",
    "skip_step": "skip step",
    "rollback_replay": "rollback",
    "rollback_skip": "rollback, skip",
    "quarantine": "quarantine",
    "reduce_lr": "reduce rate",
    "lower_loss_scale": "lower scale",
    "restore_optimizer": "restore optimizer",
    "stop": "stop",
}
EXPERIMENT_WORDS = {"reduce_lr": "reduced rate"}


@dataclass(frozen=True)
class Line:
    """A polyline; NaN in ``y`` breaks it. ``x`` in tokens, both ``[n]``."""

    x: FloatArray
    y: FloatArray


@dataclass(frozen=True)
class Band:
    x: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Attributes:
        lane: Key of :data:`LANES`.
        kind: Which glyph and colour, e.g. ``known_good``.
        x: Tokens at which it happened or began.
        end: Tokens at which it ended; of a rollback: where it went back to. None for a point.
        step: Step at which it happened.
        label: A word or two for the picture, may be empty.
        detail: A sentence for the page's text alternative.
        number: Of an incident, or the incident that it belongs to.
    """

    lane: str
    kind: str
    x: float
    step: int
    label: str
    detail: str
    end: float | None = None
    number: int | None = None


def switch(mark: Mark) -> str:
    """The switch of the legend that a mark belongs to: its lane, or its kind where a lane holds several.

    Example:
        >>> switch(Mark("checkpoint", "known_good", 0.0, 0, "", "")), switch(Mark("fault", "fault", 0.0, 0, "", ""))
        ('checkpoint-known-good', 'fault')
    """
    if mark.lane == "checkpoint":
        return f"checkpoint-{mark.kind.replace('_', '-')}"
    if mark.lane == "run":
        return "machines" if mark.kind == "infra" else mark.kind
    return mark.kind if mark.lane == "schedule" or mark.kind == "rollback" else mark.lane


@dataclass
class Chart:
    """Everything drawn.

    Attributes:
        mean: Mean loss on the live path.
        band: Smallest and largest rank's loss, None for one rank.
        worst: The line of the rank that lies furthest above the others, with its number; None for one rank.
        abandoned: Mean loss of the passes that were rolled back.
        nonfinite: Tokens at which the loss was not finite, live or abandoned.
        gradient: Gradient norm: the live line, then the abandoned ones.
        update: Norm of the update where it was measured, None where no positive one was: its axis is logarithmic.
        rate: Learning rate, as ``gradient``.
        scale: Loss scale on the live path, None where it is always the same.
        x_range: Smallest and largest token count.
        loss_range: Limits of the loss axis.
        log_loss: Whether the loss axis is logarithmic.
        clipped: Values above ``loss_range`` exist.
        steps: Step against tokens on the live path, for an axis of steps.
        marks: What happened, by lane and tokens.
    """

    mean: Line
    band: Band | None
    worst: tuple[int, Line] | None
    abandoned: list[Line]
    nonfinite: FloatArray
    gradient: tuple[Line, list[Line]]
    update: Line | None
    rate: tuple[Line, list[Line]]
    scale: Line | None
    x_range: tuple[float, float]
    loss_range: tuple[float, float]
    log_loss: bool
    clipped: bool
    steps: Line
    marks: list[Mark] = field(default_factory=list)

    @property
    def lanes(self) -> list[str]:
        """Lanes in use."""
        used = {m.lane for m in self.marks}
        return [lane for lane in LANES if lane in used]


def build_chart(run: RunData, summary: Mapping[str, Any], *, points: int = 1500) -> Chart:
    """The chart of a run, every line thinned to about ``points`` places in which no extreme is lost."""
    steps = run.steps
    live, tokens = steps.live, steps.tokens.astype(np.float64)
    loss = steps["loss"]
    mean = thin(tokens[live], loss[live], points)
    band = worst = None
    if (steps["loss_max"][live] > steps["loss_min"][live]).any():
        band = thin_band(tokens[live], steps["loss_min"][live], steps["loss_max"][live], points)
        worst = _worst_rank(steps, points)
    abandoned_masks = _abandoned(steps)
    abandoned = [
        thin(tokens[m], loss[m], n) for m, n in zip(abandoned_masks, shares(abandoned_masks, points), strict=True)
    ]
    scale, update, measured = steps["loss_scale"], steps["update_norm"], _measured(steps)
    limits, log_loss, clipped = loss_limits(steps)
    span = (float(tokens.min()), float(tokens.max())) if len(steps) else (0.0, 1.0)
    return Chart(
        mean=mean,
        band=band,
        worst=worst,
        abandoned=abandoned,
        nonfinite=tokens[~np.isfinite(loss)],
        gradient=_panel(steps, steps["grad_norm"], abandoned_masks, points),
        update=thin(tokens[measured], update[measured], points) if (update[measured] > 0).any() else None,
        rate=_panel(steps, steps.learning_rate, abandoned_masks, points),
        scale=thin(tokens[live], scale[live], points) if np.unique(scale[np.isfinite(scale)]).size > 1 else None,
        x_range=span if span[1] > span[0] else (span[0] - 1, span[1] + 1),
        loss_range=limits,
        log_loss=log_loss,
        clipped=clipped,
        steps=thin(tokens[live], steps.step[live].astype(np.float64), 200),
        marks=build_marks(run, summary),
    )


# --------------------------------------------------------------------------------------------------------------- thinning


def thin(x: FloatArray, y: FloatArray, points: int) -> Line:
    """At most about ``points`` places; each bucket keeps its first, lowest and highest value, and a gap stays a gap.

    Example:
        >>> line = thin(np.arange(1000.0), np.where(np.arange(1000) == 500, 9.0, 1.0), 30)
        >>> len(line.x) <= 40, float(line.y.max())
        (True, 9.0)
    """
    if len(x) <= points:
        return Line(x, y)
    keep: set[int] = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), max(1, points // 3)):
        values = y[bucket]
        finite = np.isfinite(values)
        keep.add(int(bucket[0]))
        if finite.any():
            keep.add(int(bucket[int(np.nanargmin(np.where(finite, values, np.nan)))]))
            keep.add(int(bucket[int(np.nanargmax(np.where(finite, values, np.nan)))]))
        if not finite.all():
            keep.add(int(bucket[int(np.argmin(finite))]))
    index = np.array(sorted(keep))
    return Line(x[index], y[index])


def thin_band(x: FloatArray, low: FloatArray, high: FloatArray, points: int) -> Band:
    """The hull of a band in at most ``points`` buckets."""
    if len(x) <= points:
        return Band(x, low, high)
    starts = np.unique(np.linspace(0, len(x), points + 1).astype(np.int64)[:-1])
    lowest = np.minimum.reduceat(np.where(np.isfinite(low), low, np.inf), starts)
    highest = np.maximum.reduceat(np.where(np.isfinite(high), high, -np.inf), starts)
    empty = ~np.isfinite(lowest) | ~np.isfinite(highest)
    return Band(x[starts], np.where(empty, np.nan, lowest), np.where(empty, np.nan, highest))


def shares(masks: Sequence[BoolArray], points: int) -> list[int]:
    """Places for each of several branches, by their lengths, so that all together have about ``points``.

    Example:
        >>> shares([np.ones(3000, dtype=bool), np.ones(1000, dtype=bool), np.ones(2, dtype=bool)], 400)
        [299, 99, 12]
    """
    lengths = [int(mask.sum()) for mask in masks]
    return [max(12, points * length // max(1, sum(lengths))) for length in lengths]


def _abandoned(steps: Steps) -> list[BoolArray]:
    """A mask for each branch that was left, its last live step included so that the fork is seen."""
    masks = []
    for branch in np.unique(steps.branch[~steps.live]):
        index = np.flatnonzero((steps.branch == branch) & ~steps.live)
        mask = np.zeros(len(steps), dtype=np.bool_)
        mask[index] = True
        before = index[0] - 1
        if before >= 0 and steps.step[before] < steps.step[index[0]]:
            mask[before] = True
        masks.append(mask)
    return masks


def _measured(steps: Steps) -> BoolArray:
    """The live steps at which the update norm was measured: between two measurements the newest is repeated.

    After a rollback that may be one of the abandoned pass. It counts from the step at which it was first journalled: the
    steps that are measured are chosen by their number, so there it was measured again, and came out the same.
    """
    update = steps["update_norm"]
    new = update != np.concatenate([[np.nan], update[:-1]])  # NaN is unlike everything
    first = np.maximum.accumulate(np.where(new, np.arange(len(update)), 0))
    known = np.flatnonzero(steps.live & np.isfinite(update) & (steps.step >= steps.step[first]))
    measured = np.zeros(len(update), dtype=np.bool_)
    measured[known[np.concatenate([[True], np.diff(first[known]) != 0])[: len(known)]]] = True
    return measured


def _panel(steps: Steps, values: FloatArray, abandoned: Sequence[BoolArray], points: int) -> tuple[Line, list[Line]]:
    tokens = steps.tokens.astype(np.float64)
    return (
        thin(tokens[steps.live], values[steps.live], points),
        [thin(tokens[m], values[m], n) for m, n in zip(abandoned, shares(abandoned, points), strict=True)],
    )


def _worst_rank(steps: Steps, points: int) -> tuple[int, Line] | None:
    """The rank with the largest excess over the median of the ranks at any step, abandoned passes included."""
    losses = steps.rank_losses
    if losses is None:
        return None
    with np.errstate(invalid="ignore"):
        excess = losses - steps["loss_median"][:, None]
    excess = np.where(np.isfinite(excess), excess, -np.inf)
    if not np.isfinite(excess).any():
        return None
    column = int(np.unravel_index(int(np.argmax(excess)), excess.shape)[1])
    # In the order written, so that the line shows the excursion too; a jump back in tokens breaks it.
    y, x = losses[:, column], steps.tokens.astype(np.float64)
    breaks = np.flatnonzero(np.diff(x) < 0) + 1
    return int(steps.ranks[column]), thin(np.insert(x, breaks, x[breaks]), np.insert(y, breaks, np.nan), points)


def loss_limits(steps: Steps) -> tuple[tuple[float, float], bool, bool]:
    """Limits of the loss axis, whether it is logarithmic, and whether something lies above it.

    Everything up to ten times the live path's median is shown. What is larger would flatten the rest: it is shown up to
    fifty times on a logarithmic axis, and beyond that as clipped.
    """
    everything = np.concatenate([steps["loss"], steps["loss_max"], steps["loss_min"]])
    everything = everything[np.isfinite(everything)]
    if not everything.size:
        return (0.0, 1.0), False, False
    live = steps["loss"][steps.live]
    live = live[np.isfinite(live)]
    middle = float(np.median(live)) if live.size else float(np.median(everything))
    low, high = float(everything.min()), float(everything.max())
    if middle <= 0 or low <= 0:  # not a loss in nats; no ratio has a meaning
        margin = 0.05 * (high - low) or 1.0
        return (low - margin, high + margin), False, False
    log_loss = high > 4 * middle
    top = min(high, 50 * middle)
    if log_loss:
        return (low * 0.92, top * (top / low) ** 0.17), True, high > top
    margin = 0.06 * (top - low) or 0.1
    return (low - margin, top + 3 * margin), False, high > top


# ------------------------------------------------------------------------------------------------------------------ marks


def build_marks(run: RunData, summary: Mapping[str, Any]) -> list[Mark]:
    """All marks by lane and tokens."""
    marks = [
        *_fault_marks(run),
        *_incident_marks(run, summary),
        *_action_marks(run),
        *_checkpoint_marks(run, summary),
        *_scaler_marks(run),
        *_run_marks(run, summary),
        *_schedule_marks(run),
        *_experiment_marks(run),
    ]
    order = list(LANES)
    return sorted((m for m in marks if math.isfinite(m.x)), key=lambda m: (order.index(m.lane), m.x))


def _at(run: RunData, event: Mapping[str, Any]) -> float:
    return run.steps.tokens_at(event["step"], event.get("attempt"))


def _fault_marks(run: RunData) -> list[Mark]:
    """One mark for each stretch of a fault's firing."""
    marks: list[Mark] = []
    last: dict[str, tuple[int, int]] = {}
    for event in run.of("fault.injected"):
        name, step = str(event.get("name")), event["step"]
        x = _at(run, event)
        if name in last and step - last[name][1] <= 1 and step >= last[name][1]:
            index = last[name][0]
            old = marks[index]
            marks[index] = Mark(
                old.lane, old.kind, old.x, old.step, old.label, f"fault {name} until step {step}", end=x
            )
            last[name] = (index, step)
            continue
        last[name] = (len(marks), step)
        marks.append(Mark("fault", "fault", x, step, name.replace("_", " "), f"fault {name} at step {step}"))
    return marks


def _incident_marks(run: RunData, summary: Mapping[str, Any]) -> list[Mark]:
    marks = []
    for row in summary["incidents"]:
        attempt, since, closed = row["attempt"], row["since_step"], row["closed_step"]
        begin = run.steps.tokens_at(row["opened_step"] if since is None else since, attempt)
        end = (
            run.steps.tokens_at(closed)
            if closed is not None
            else float(run.steps.tokens[-1])
            if len(run.steps)
            else begin
        )
        culprits = ", ".join(row["culprits"]) or "nobody named"
        detail = (
            f"incident {row['number']}, steps {since} to {closed if closed is not None else 'now'}: {row['message']};"
            f" {row['verdict']}, {culprits}; {row['action']}; {row['status']}"
        )
        marks.append(
            Mark("incident", row["status"], begin, row["opened_step"], str(row["number"]), detail, end, row["number"])
        )
    return marks


def _action_marks(run: RunData) -> list[Mark]:
    marks: list[Mark] = []
    repeated: dict[tuple[str, Any], tuple[int, int, int]] = {}
    for event in run.of("action."):
        action = event["event"].removeprefix("action.")
        number = event.get("incident")
        if action == "rollback":
            to_step = int(event.get("to_step", event["step"]))
            left = np.flatnonzero(run.steps.attempt == event["attempt"] - 1)
            if not left.size:
                continue
            from_step, begin = int(run.steps.step[left[-1]]), float(run.steps.tokens[left[-1]])
            action = str(event.get("action", "rollback_replay"))
            label = ACTION_WORDS.get(action, action)
            kind = "rollback" if to_step < from_step else "retry_step"
            detail = f"{label} from step {from_step} to step {to_step}, incident {number}"
            marks.append(Mark("action", kind, begin, from_step, label, detail, run.steps.tokens_at(to_step), number))
        elif action in ACTION_WORDS and not action.startswith("rollback") and action != "retry_step":
            words, step, x = ACTION_WORDS[action], event["step"], _at(run, event)
            detail = f"{words} at step {step}, incident {number}: {event.get('reason', '')}"
            index, last, times = repeated.get((action, number), (len(marks), step, 0))
            if times and 0 <= step - last <= 1:  # one mark for what was done step after step
                times += 1
                first = marks[index]
                detail = f"{words} {times} times, steps {first.step} to {step}, incident {number}"
                marks[index] = replace(first, label=f"{times} x {words}", detail=detail, end=x)
            else:
                index, times = len(marks), 1
                marks.append(Mark("action", action, x, step, words, detail, number=number))
            repeated[action, number] = (index, step, times)
    return marks


def _checkpoint_marks(run: RunData, summary: Mapping[str, Any]) -> list[Mark]:
    return [
        Mark(
            "checkpoint",
            row["state"],
            run.steps.tokens_at(row["step"]),
            row["step"],
            "",
            f"checkpoint of step {row['step']}: {row['state'].replace('_', '-')}",
        )
        for row in summary["checkpoints"]
    ]


def _scaler_marks(run: RunData) -> list[Mark]:
    marks = []
    for event in run.of("scaler."):
        kind = event["event"].removeprefix("scaler.")
        change = f"{event.get('old_scale')} to {event.get('new_scale')}"
        marks.append(
            Mark("scaler", kind, _at(run, event), event["step"], "", f"{kind} at step {event['step']}: {change}")
        )
    return marks


def _run_marks(run: RunData, summary: Mapping[str, Any]) -> list[Mark]:
    marks = [
        Mark("run", "restart", run.steps.tokens_at(r["step"]), r["step"], "restart", f"restart at step {r['step']}")
        for r in summary["restarts"]
    ]
    for event in run.of("topology.changed"):
        sizes = f"{event.get('old_world_size')} to {event.get('world_size')} ranks"
        marks.append(Mark("run", "topology", _at(run, event), event["step"], sizes, f"{sizes} at step {event['step']}"))
    machines = [event for event in run.of("infra.") if not is_experiment(event)]
    for event in machines:
        text = next((str(event[k]) for k in ("text", "message", "reason") if event.get(k)), event["event"])
        kind = str(event.get("kind") or event["event"].removeprefix("infra.")) if len(machines) <= FEW else ""
        marks.append(Mark("run", "infra", _at(run, event), event["step"], kind, f"{text} at step {event['step']}"))
    return marks


def _schedule_marks(run: RunData) -> list[Mark]:
    marks = []
    for event in run.of("lr.changed"):
        change = f"rate {_short(event.get('old'))} → {_short(event.get('new'))}"
        detail = f"learning {change} at step {event['step']}"
        marks.append(Mark("schedule", "rate", _at(run, event), event["step"], change, detail))
    for event in run.of("mixture.changed"):
        if event.get("old") is None:
            continue  # the mixture at the start is no transition
        weights = ", ".join(f"{k} {_short(v)}" for k, v in (event.get("weights") or {}).items())
        marks.append(
            Mark(
                "schedule",
                "mixture",
                _at(run, event),
                event["step"],
                "mixture",
                f"mixture at step {event['step']}: {weights}",
            )
        )
    return marks


def _experiment_marks(run: RunData) -> list[Mark]:
    """From where on the run is no longer what was planned: an answer of the suite, or a person's note."""
    marks = []
    for event in run.of("experiment.started"):
        until = event.get("until")
        end = run.steps.tokens_at(until) if isinstance(until, int) else None
        words = _experiment_name(event)
        marks.append(
            Mark("experiment", "experiment", _at(run, event), event["step"], words, experiment_words(event), end)
        )
    for event in filter(is_experiment, run.of("infra.event")):
        words = experiment_words(event)
        marks.append(Mark("experiment", "experiment", _at(run, event), event["step"], "experiment", words))
    return marks


def _experiment_name(event: Mapping[str, Any]) -> str:
    return EXPERIMENT_WORDS.get(str(event.get("kind")), str(event.get("kind") or "experiment"))


def experiment_words(event: Mapping[str, Any]) -> str:
    """In a sentence from where on, and until when, the run is not what was planned.

    Example:
        >>> experiment_words({"event": "experiment.started", "step": 9, "kind": "reduce_lr", "until": None, "factor": 0.5})
        'reduced rate from step 9 for good, factor 0.5'
    """
    step, until = event["step"], event.get("until")
    if event["event"] == "infra.event":
        return f"experiment from step {step}: {event.get('text') or event.get('message') or ''}"
    if event["event"] == "experiment.ended":
        return f"{_experiment_name(event)} ended at step {step}"
    words = f"{_experiment_name(event)} from step {step}"
    words += f" until step {until}" if isinstance(until, int) else " for good"
    if event.get("factor") is not None:
        words += f", factor {_short(event['factor'])}"
    if event.get("experiment"):
        words += f"; this is experiment {event['experiment']}"
    return words


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(_short(v) for v in value)
    return f"{number(value):.2g}" if type(value) in (int, float) else str(value)


def place(boxes: Sequence[tuple[float, float]], rows: int, gap: float = 6.0) -> list[int | None]:
    """A row for each (left, right) in pixels such that nothing overlaps; None where all rows are taken there.

    Example:
        >>> place([(0, 50), (40, 90), (60, 80)], rows=2)
        [0, 1, 0]
    """
    ends = [-math.inf] * rows
    placed: list[int | None] = [None] * len(boxes)
    for i in sorted(range(len(boxes)), key=lambda i: boxes[i][0]):
        for row in range(rows):
            if boxes[i][0] >= ends[row] + gap:
                ends[row], placed[i] = boxes[i][1], row
                break
    return placed


@dataclass(frozen=True)
class LaneRow:
    """A mark with its row in the lane; without ``labelled`` there is no room for its words, ``flipped`` puts them left."""

    mark: Mark
    row: int
    labelled: bool
    flipped: bool = False


def lay_out(
    chart: Chart, lane: str, width: float, *, character: float = 6.2, rows: int = 3
) -> tuple[list[LaneRow], int]:
    """Marks of a lane in rows without overlap, and the rows used, for an axis ``width`` pixels wide.

    What finds no room for its words is drawn on the first row without them; points of one kind that would lie on each
    other are drawn once.
    """
    low, high = chart.x_range
    marks: list[Mark] = []
    boxes: list[tuple[float, float]] = []
    points: list[LaneRow] = []
    flips: list[bool] = []
    newest: dict[str, float] = {}
    for mark in chart.marks:
        if mark.lane != lane:
            continue
        left = (mark.x - low) / (high - low) * width
        if not mark.label and mark.end is None:
            if left - newest.get(mark.kind, -math.inf) >= 4:
                newest[mark.kind] = left
                points.append(LaneRow(mark, 0, False))
            continue
        begin = left if mark.end is None else min(left, (mark.end - low) / (high - low) * width)
        end = left if mark.end is None else max(left, (mark.end - low) / (high - low) * width)
        words = (
            8 + character * len(mark.label) if lane != "incident" else 0.0
        )  # an incident's number stands in its disc
        marks.append(mark)
        # At the right edge the words stand on the left of their mark.
        flips.append(end + 7 + words > width + 20)
        boxes.append((begin - 7 - words, end + 7) if flips[-1] else (begin - 7, end + 7 + words))
    placed = place(boxes, rows)
    laid = [
        LaneRow(mark, row or 0, row is not None, flip) for mark, row, flip in zip(marks, placed, flips, strict=True)
    ]
    return [*points, *laid], max((row or 0 for row in placed), default=0) + 1


def si(value: float) -> str:
    """A token count as people say it.

    Example:
        >>> si(983_040), si(1_500_000), si(2e12), si(0)
        ('983k', '1.5M', '2T', '0')
    """
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
