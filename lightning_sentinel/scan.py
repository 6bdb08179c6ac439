"""The default detectors on a finished or growing log: no callback, no Trainer.

``watch()`` gives the shipped detectors with the shipped thresholds, one loss at a time; ``lightning-sentinel scan
FILE...`` reads logs that others wrote. Formats: CSV (Lightning's ``metrics.csv`` too), JSON lines, Hugging Face's
``trainer_state.json``, TensorBoard event files (where tensorboard is installed), and the suite's own journal or run folder.

Example:
    >>> suite = watch(1000)
    >>> any(suite.update(step, 2.0 + 0.01 * (step % 3), None) for step in range(100)), suite.update(100, 9.0, None)
    (False, True)
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .detectors import Detector, Divergence, LossScale, NonFinite, RankOutlier, Spike
from .incidents import Finding, FindingKind, Severity
from .record import SIGNAL_INDEX, SIGNALS, StepRecord

# Names under which thresholds are set, here and in Hydra.
DETECTORS: Mapping[str, type[Any]] = {
    "spike_detector": Spike,
    "divergence_detector": Divergence,
    "rank_outlier_detector": RankOutlier,
    "loss_scale_monitor": LossScale,
}
# Rows without a finding after which an episode is over (an open spike keeps it open).
QUIET_ROWS = 25
MAX_PROBLEMS_SHOWN = 10


# ------------------------------------------------------------------------------------------------------- the suite


def default_detectors(overrides: Mapping[str, Mapping[str, Any]] | None = None) -> list[Detector]:
    """The shipped detectors in the order in which a Trainer runs them, with the shipped thresholds unless overridden.

    Args:
        overrides: Arguments by detector, e.g. ``{"spike_detector": {"threshold": 10.0}}``.
    """
    changed = overrides or {}
    return [NonFinite(), *(kind(**changed.get(name, {})) for name, kind in DETECTORS.items())]


@dataclass
class Episode:
    """Findings that belong together: from the first until the log has been quiet again."""

    number: int
    opened_row: int
    opened_step: int
    since_step: int
    severity: Severity
    findings: list[Finding] = field(default_factory=list)
    last_step: int = 0
    closed_step: int | None = None

    @property
    def kind(self) -> FindingKind:
        """Kind of the gravest finding, the first of them."""
        return next(f for f in self.findings if f.severity is self.severity).kind

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "severity": str(self.severity),
            "kind": str(self.kind),
            "kinds": sorted({str(f.kind) for f in self.findings}),
            "opened_step": self.opened_step,
            "since_step": self.since_step,
            "last_step": self.last_step,
            "closed_step": self.closed_step,
            "findings": [f.to_dict() for f in self.findings],
        }


class Watch:
    """A suite of detectors on one log, with its findings gathered into episodes.

    Args:
        overrides: Arguments by detector; see :func:`default_detectors`.
    """

    def __init__(self, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.detectors = default_detectors(overrides)
        self.episodes: list[Episode] = []
        self.restart_step: int | None = None
        self._spike = next(d for d in self.detectors if isinstance(d, Spike))
        self._quiet = 0
        self._row = 0
        self._template = np.zeros((1, len(SIGNALS)))
        self._template[0, SIGNAL_INDEX["supervised_tokens"]] = 1.0
        self._template[0, SIGNAL_INDEX["update_norm"]] = math.nan
        self._template[0, SIGNAL_INDEX["loss_scale"]] = 1.0

    def update(self, step: float, loss: float, grad_norm: float | None) -> bool:
        """Look at one row; True if an alarm or an incident begins or grows here."""
        return any(f.severity is not Severity.EVENT for f in self.look(int(step), loss, grad_norm))

    def look(
        self, step: int, loss: float, grad_norm: float | None = None, loss_scale: float | None = None
    ) -> list[Finding]:
        """Findings on one row of a log."""
        values = self._template.copy()
        values[0, 0] = loss
        if not math.isfinite(loss):
            values[0, SIGNAL_INDEX["nonfinite_loss"]] = 1.0
        if grad_norm is not None:
            values[0, SIGNAL_INDEX["grad_norm"]] = grad_norm
            if not math.isfinite(grad_norm):
                values[0, SIGNAL_INDEX["nonfinite_grads"]] = 1.0
        if loss_scale is not None:
            values[0, SIGNAL_INDEX["loss_scale"]] = loss_scale
        return self.observe(StepRecord(step=step, values=values, restart_step=self.restart_step))

    def observe(self, record: StepRecord) -> list[Finding]:
        """Findings on one record; they also go into :attr:`episodes`."""
        found = [finding for detector in self.detectors for finding in detector.observe(record)]
        self._row += 1
        if found or self.episodes:
            self._gather(record.step, found)
        return found

    @property
    def incidents(self) -> list[Episode]:
        """Episodes that hold at least one incident."""
        return [e for e in self.episodes if e.severity is Severity.INCIDENT]

    def _gather(self, step: int, found: list[Finding]) -> None:
        grave = [f for f in found if f.severity is not Severity.EVENT]
        episode = self.episodes[-1] if self.episodes and self.episodes[-1].closed_step is None else None
        # An outlier that has come back is over; what follows it is something else.
        alone = episode is not None and episode.severity is Severity.ALARM
        if episode is not None and alone and grave and all(f.since_step > episode.last_step for f in grave):
            episode.closed_step = episode.last_step
            episode = None
        if episode is None:
            if not grave:
                return
            episode = Episode(len(self.episodes) + 1, self._row, step, grave[0].since_step, Severity.ALARM)
            self.episodes.append(episode)
        episode.findings.extend(found)
        if found:
            episode.last_step = step
        if grave:
            self._quiet = 0
            episode.since_step = min(episode.since_step, *(f.since_step for f in grave))
            if any(f.severity is Severity.INCIDENT for f in grave):
                episode.severity = Severity.INCIDENT
        elif not self._spike.is_open:
            self._quiet += 1
            if self._quiet >= QUIET_ROWS:
                episode.closed_step = step


def watch(n_rows: int) -> Watch:
    """A fresh default suite. ``n_rows``, the length of the log, is not used: a detector sees nothing ahead."""
    return Watch()


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Row:
    """One row of a log that carries a loss."""

    line: int
    step: int
    loss: float
    grad_norm: float | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class Problem:
    """A line that could not be read; it was skipped."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass
class Columns:
    """Which column is which; None: not in this log (a missing step is the row number)."""

    step: str | None = None
    loss: str | None = None
    grad_norm: str | None = None
    loss_scale: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name) or '-'}" for f in fields(self))


STEP_NAMES = (
    "step",
    "global_step",
    "trainer/global_step",
    "_step",
    "iteration",
    "iter",
    "it",
    "steps",
    "update",
    "batch",
)
LOSS_NAMES = (
    "loss",
    "train_loss",
    "train/loss",
    "train_loss_step",
    "train/loss_step",
    "loss_step",
    "training_loss",
    "train/cross_entropy_loss",
    "train/crossentropyloss",
    "lm loss",
    "lm_loss",
    "train_ce",
    "loss_mean",
    "sentinel/loss_mean",
    "nll",
    "train_loss_epoch",
)
NORM_NAMES = ("grad_norm", "gradient_norm", "train/grad_norm", "optim/total_grad_norm", "grad norm", "gnorm", "norm")
SCALE_NAMES = ("loss_scale", "loss scale", "scale", "sentinel/loss_scale", "scaler")
NOT_TRAINING = {"val", "eval", "evaluation", "test", "scale", "valid", "validation"}


def guess_columns(names: Sequence[str], wanted: Columns | None = None) -> Columns:
    """Find the columns of a log by their names; what ``wanted`` sets must exist.

    Raises:
        ValueError: If a wanted column or any loss is missing; the message lists what there is.
    """
    wanted = wanted or Columns()
    guess = Columns(
        step=_pick(names, wanted.step, STEP_NAMES, ()),
        loss=_pick(names, wanted.loss, LOSS_NAMES, ("loss", "nll", "cross_entropy", "perplexity")),
        grad_norm=_pick(names, wanted.grad_norm, NORM_NAMES, ("grad_norm", "gradnorm", "grad norm")),
        loss_scale=_pick(names, wanted.loss_scale, SCALE_NAMES, ("loss_scale", "loss scale")),
    )
    if guess.loss is None:
        raise ValueError(f"found no loss among the columns {_listed(names)}; name it with --loss COLUMN.")
    return guess


def _pick(names: Sequence[str], wanted: str | None, known: Sequence[str], parts: Sequence[str]) -> str | None:
    if wanted is not None:
        if wanted in names:
            return wanted
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ValueError(f"found no column {wanted!r} among {_listed(names)}{hint}.")
    lower = {n.strip().lower(): n for n in reversed(names)}
    for name in known:
        if name in lower:
            return lower[name]
    allowed_words = [word for part in parts for word in re.split(r"[^a-z0-9]+", part)]
    about = {name: set(re.split(r"[^a-z0-9]+", name.lower())) for name in names}
    allowed = [
        name
        for name in names
        if any(part in name.lower() for part in parts) and not (about[name] & NOT_TRAINING) - set(allowed_words)
    ]
    return allowed[0] if allowed else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(n) for n in names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")


def parse_number(value: Any) -> float | None:
    """A number from a cell; None where it is empty. ``nan``, ``inf`` and ``-inf`` as text are numbers.

    Raises:
        ValueError: If it is no number.
    """
    if value is None or value == "" or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        text = str(value).strip().lower()
        if text in ("", "none", "null", "n/a", "-"):
            return None
        raise ValueError(f"found {value!r}, expected a number") from None


class LogReader:
    """Rows of one log, oldest first; what can't be read goes to :attr:`problems`.

    Args:
        path: A file, or a run folder with a journal.
        wanted: Columns set by hand.
        follow: Go on reading as the file grows.
        idle_seconds: With ``follow``, stop when nothing new has come for so long; None: never.
    """

    def __init__(
        self, path: Path, wanted: Columns | None = None, *, follow: bool = False, idle_seconds: float | None = None
    ) -> None:
        self.path = path
        self.wanted = wanted or Columns()
        self.follow = follow
        self.idle_seconds = idle_seconds
        self.problems: list[Problem] = []
        self.columns: Columns | None = None
        self.format = self._format()

    def _format(self) -> str:
        path = self.path
        if path.is_dir():
            if (path / "journal").is_dir():
                return "journal"
            if any("tfevents" in p.name for p in path.iterdir()):
                return "tensorboard"
            raise ValueError(f"{path} is a folder with neither a journal nor TensorBoard event files; give a log file.")
        if not path.exists():
            raise FileNotFoundError(
                f"There is no {path}. Give a log file (CSV, JSON lines, TensorBoard events) or a run folder."
            )
        if "tfevents" in path.name:
            return "tensorboard"
        with path.open("rb") as file:
            start = file.read(65536).lstrip()
        if b"\0" in start:
            raise ValueError(f"{path} is not a text file. Give CSV, JSON lines, TensorBoard events or a run folder.")
        if not start:
            return "empty"
        if start[:1] not in (b"{", b"["):
            return "csv"
        if start[:1] == b"{" and b'"schema"' in start.split(b"\n", 1)[0] and b'"event"' in start.split(b"\n", 1)[0]:
            return "journal"
        first = start.split(b"\n", 1)[0].strip()
        try:
            whole = json.loads(first)
        except ValueError:
            return "json"
        return "json" if isinstance(whole, list) or "log_history" in whole else "jsonl"

    def rows(self) -> Iterator[Row]:
        """Read the log once.

        Raises:
            ValueError: For an empty file or a missing column.
        """
        if self.format == "empty" and not self.follow:
            raise ValueError(f"{self.path} is empty: found no line, expected a header and rows.")
        source = {
            "csv": self._csv,
            "empty": self._csv,
            "jsonl": self._json_lines,
            "json": self._json,
            "journal": self._journal,
            "tensorboard": self._tensorboard,
        }[self.format]
        yield from source()

    # -- one reader per format

    def _lines(self) -> Iterator[tuple[int, str]]:
        number = 0
        with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
            if not self.follow:
                for number, line in enumerate(file, start=1):
                    yield number, line.rstrip("\r\n")
                return
            for line in _tail(file, self.idle_seconds):
                number += 1
                yield number, line.rstrip("\r\n")

    def _csv(self) -> Iterator[Row]:
        lines = self._lines()
        header_line = next(((n, line) for n, line in lines if line.strip() and not line.startswith("#")), None)
        if header_line is None:
            raise ValueError(f"{self.path} is empty: found no line, expected a header and rows.")
        delimiter = max((",", "\t", ";", "|"), key=header_line[1].count)
        header = [name.strip() for name in next(csv.reader([header_line[1]], delimiter=delimiter))]
        columns = self._set_columns(header)
        where = [None if name is None else header.index(name) for name in _names(columns)]
        width = len(header)
        for number, line in lines:
            if not line.strip():
                continue
            cells = line.split(delimiter) if '"' not in line else next(csv.reader([line], delimiter=delimiter))
            if len(cells) != width:
                self.problems.append(Problem(number, f"found {len(cells)} cells, expected {width}; skipped"))
                continue
            row = self._row(number, [None if i is None else cells[i] for i in where])
            if row is not None:
                yield row

    def _json_lines(self) -> Iterator[Row]:
        return self._from_objects(self._objects())

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                self.problems.append(Problem(number, "is not JSON; skipped"))
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                self.problems.append(Problem(number, f"is a {type(value).__name__}, expected an object; skipped"))

    def _json(self) -> Iterator[Row]:
        try:
            whole = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON: {error}.") from error
        history = whole.get("log_history") if isinstance(whole, dict) else whole
        if not isinstance(history, list):
            raise ValueError(f'{self.path} has no "log_history", which Hugging Face\'s trainer_state.json holds.')
        return self._from_objects((i, v) for i, v in enumerate(history, start=1) if isinstance(v, dict))

    def _from_objects(self, objects: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Row]:
        columns: Columns | None = None
        waiting: list[tuple[int, dict[str, Any]]] = []
        seen: dict[str, None] = {}
        for number, value in objects:
            if columns is None:
                # The first objects of a log often hold no loss (configuration, validation): wait for one that does.
                seen |= dict.fromkeys(value)
                waiting.append((number, value))
                try:
                    columns = self._set_columns(list(seen))
                except ValueError:
                    continue
                ready, waiting = waiting, []
            else:
                ready = [(number, value)]
            for line, entry in ready:
                if columns.grad_norm is None or columns.loss_scale is None:
                    columns = self._more_columns(columns, entry)
                row = self._row(line, [None if n is None else entry.get(n) for n in _names(columns)])
                if row is not None:
                    yield row
        if columns is None:
            self._set_columns(list(seen))

    def _more_columns(self, columns: Columns, entry: Mapping[str, Any]) -> Columns:
        names = list(entry)
        return Columns(
            columns.step,
            columns.loss,
            columns.grad_norm or _pick(names, None, NORM_NAMES, ("grad_norm",)),
            columns.loss_scale or _pick(names, None, SCALE_NAMES, ("loss_scale",)),
        )

    def _journal(self) -> Iterator[Row]:
        from .journal import JournalProblem, iter_events, number

        self.columns = Columns("step", "loss", "grad_norm", "loss_scale")
        problems: list[JournalProblem] = []
        for i, event in enumerate(iter_events(self.path, rank=0, problems=problems), start=1):
            if event["event"] == "step":
                yield Row(
                    i,
                    int(event["step"]),
                    number(event.get("loss")),
                    number(event.get("grad_norm")),
                    number(event.get("loss_scale")),
                )
        self.problems += [Problem(p.line, p.reason) for p in problems]

    def _tensorboard(self) -> Iterator[Row]:
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError as error:
            raise ValueError(f"Reading {self.path} needs TensorBoard: pip install tensorboard") from error
        events = EventAccumulator(str(self.path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        series = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        for tag in events.Tags()["tensors"]:
            points = [(e.step, e.tensor_proto) for e in events.Tensors(tag)]
            series[tag] = [(s, p.float_val[0]) for s, p in points if len(p.float_val) == 1]
        columns = self._set_columns(list(series))
        assert columns.loss is not None
        norms = dict(series[columns.grad_norm]) if columns.grad_norm else {}
        scales = dict(series[columns.loss_scale]) if columns.loss_scale else {}
        for i, (step, loss) in enumerate(series[columns.loss], start=1):
            yield Row(i, int(step), float(loss), norms.get(step), scales.get(step))

    # -- shared

    def _set_columns(self, names: Sequence[str]) -> Columns:
        try:
            self.columns = guess_columns(names, self.wanted)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        return self.columns

    def _row(self, line: int, cells: Sequence[Any]) -> Row | None:
        step_cell, loss_cell, norm_cell, scale_cell = cells
        try:
            loss = parse_number(loss_cell)
            if loss is None:
                return None  # a row of something else, such as validation
            step = parse_number(step_cell)
            norm = parse_number(norm_cell)
            scale = parse_number(scale_cell)
        except ValueError as error:
            self.problems.append(Problem(line, f"{error}; skipped"))
            return None
        if step is not None and not math.isfinite(step):
            self.problems.append(Problem(line, f"the step is {step}; skipped"))
            return None
        return Row(line, line if step is None else int(step), loss, norm, scale)


def _names(columns: Columns) -> tuple[str | None, ...]:
    return columns.step, columns.loss, columns.grad_norm, columns.loss_scale


def _tail(file: TextIO, idle_seconds: float | None, poll_seconds: float = 0.2) -> Iterator[str]:
    """Complete lines of a growing file, until nothing has come for ``idle_seconds``."""
    part = ""
    last = time.monotonic()
    while True:
        chunk = file.readline()
        if chunk:
            part += chunk
            last = time.monotonic()
            if part.endswith("\n"):
                yield part
                part = ""
        elif idle_seconds is not None and time.monotonic() - last >= idle_seconds:
            if part:
                yield part
            return
        else:
            time.sleep(poll_seconds)


# ------------------------------------------------------------------------------------------------------- scanning


@dataclass
class Scan:
    """What one log showed."""

    path: Path
    format: str = ""
    columns: Columns | None = None
    rows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    restarts: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "format": self.format,
            "columns": None if self.columns is None else dict(vars(self.columns)),
            "rows": self.rows,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "restarts": self.restarts,
            "problems": [{"line": p.line, "reason": p.reason} for p in self.problems],
            "incidents": [e.to_dict() for e in self.episodes],
        }


class Scanner:
    """Runs a suite over one log; iterate over it for the findings as they come.

    Args:
        reader: The log.
        suite: The detectors.
        keep: Keep steps and losses for a picture.
        each_row: Called after each row.
    """

    def __init__(
        self, reader: LogReader, suite: Watch, *, keep: bool = True, each_row: Callable[[], object] | None = None
    ) -> None:
        self.reader, self.suite, self.keep, self.each_row = reader, suite, keep, each_row
        self.result = Scan(reader.path, reader.format)

    def __iter__(self) -> Iterator[Finding]:
        result, suite = self.result, self.suite
        for row in self.reader.rows():
            if result.last_step is None:
                result.first_step = row.step
                result.columns = self.reader.columns
            elif row.step < result.last_step:
                result.restarts.append(row.step)
                suite.restart_step = row.step
            result.last_step = row.step
            result.rows += 1
            if self.keep:
                result.steps.append(row.step)
                result.losses.append(row.loss)
            yield from suite.look(row.step, row.loss, row.grad_norm, row.loss_scale)
            if self.each_row is not None:
                self.each_row()
        self.finish()

    def finish(self) -> Scan:
        """The result so far."""
        result = self.result
        result.columns = self.reader.columns
        result.problems = self.reader.problems
        result.episodes = self.suite.episodes
        return result


def scan(
    path: str | Path, columns: Columns | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Scan:
    """Scan one finished log with the default detectors."""
    scanner = Scanner(LogReader(Path(path), columns), Watch(overrides))
    for _ in scanner:
        pass
    return scanner.finish()


def draw(result: Scan, path: Path) -> None:
    """Write an annotated PNG of the loss.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "--png needs matplotlib, which is not installed: pip install 'lightning-sentinel[report]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = np.array(result.steps, dtype=np.float64), np.array(result.losses)
    for part in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps) < 0) + 1):
        axes.plot(steps[part], losses[part], linewidth=0.8, color="#33638d")
    finite = losses[np.isfinite(losses)]
    if finite.size:
        low, high = float(finite.min()), float(np.quantile(finite, 0.98))
        margin = 0.08 * max(high - low, 1e-3 * abs(high), 1e-9)
        axes.set_ylim(low - margin, high + 4 * margin)
    colours = {Severity.INCIDENT: "#c0392b", Severity.ALARM: "#e0a100"}
    bottom, top = axes.get_ylim()
    for episode in result.episodes:
        colour = colours[episode.severity]
        axes.axvspan(episode.since_step, max(episode.last_step, episode.since_step), color=colour, alpha=0.18)
        axes.axvline(episode.opened_step, color=colour, linewidth=0.9)
        if len(result.episodes) <= 40:
            axes.text(
                episode.opened_step,
                top - 0.02 * (top - bottom),
                f"{episode.number} {str(episode.kind).replace('_', ' ')}",
                rotation=90,
                va="top",
                ha="right",
                fontsize=7,
                color=colour,
            )
    for step in result.restarts:
        axes.axvline(step, color="#7f8c8d", linewidth=0.9, linestyle=":")
    missing = ~np.isfinite(losses)
    if missing.any():
        axes.plot(
            steps[missing], np.full(int(missing.sum()), bottom), "x", color="#c0392b", markersize=5, clip_on=False
        )
    axes.set_xlabel("step")
    axes.set_ylabel(result.columns.loss if result.columns and result.columns.loss else "loss")
    axes.set_title(
        f"{result.path.name}: {len(result.episodes)} finding(s) in {result.rows:,} rows"
        " (red incident, amber alarm, dotted restart, x not finite)",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------------- command


def parse_overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Thresholds by the names they have in Hydra: ``callbacks.spike_detector.threshold=10``; ``callbacks.`` may be left out.

    Raises:
        ValueError: For an unknown name (with the nearest one), or a value that is no number.
    """
    overrides: dict[str, dict[str, Any]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.removeprefix("callbacks.").split(".")
        if not equals or len(parts) != 2:
            raise ValueError(f"found {setting!r}, expected DETECTOR.NAME=VALUE, e.g. spike_detector.threshold=10.")
        detector, name = parts
        kinds = {f.name: f.type for f in fields(DETECTORS[_known(detector, list(DETECTORS), "detector")])}
        number = kinds[_known(name, list(kinds), f"argument of {detector}")]
        try:
            value: float = int(text) if number == "int" else float(text)
        except ValueError:
            raise ValueError(
                f"{key} is {text!r}, expected {'a whole number' if number == 'int' else 'a number'}."
            ) from None
        overrides.setdefault(detector, {})[name] = value
    return overrides


def _known(name: str, names: Sequence[str], what: str) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    raise ValueError(f"there is no {what} {name!r}; {'nearest: ' + near[0] if near else 'known: ' + ', '.join(names)}.")


def finding_line(finding: Finding) -> str:
    """A finding on one line."""
    return f"  {finding.severity!s:8} {str(finding.kind).replace('_', ' '):18} {finding.message}"


def summary(result: Scan) -> str:
    """What one log showed, for people."""
    lines = [
        f"{result.path}: {result.format}, {result.rows:,} rows, steps {result.first_step} to {result.last_step}"
        f" ({result.columns})"
    ]
    for problem in result.problems[:MAX_PROBLEMS_SHOWN]:
        lines.append(f"  skipped  {problem}")
    if len(result.problems) > MAX_PROBLEMS_SHOWN:
        lines.append(f"  skipped  {len(result.problems) - MAX_PROBLEMS_SHOWN} more lines")
    for step in result.restarts:
        lines.append(f"  restart  the steps go back to {step}")
    for episode in result.episodes:
        until = f", quiet since step {episode.closed_step}" if episode.closed_step is not None else ", not quiet since"
        lines.append(
            f"{episode.severity!s:8} {episode.number}: {str(episode.kind).replace('_', ' ')} at step {episode.opened_step}"
            f" (since step {episode.since_step}{until})"
        )
        lines.extend(finding_line(f) for f in episode.findings)
    if not result.episodes:
        lines.append("  nothing found")
    return "\n".join(lines)
