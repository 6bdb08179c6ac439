"""A run's journal as arrays and lists: what summary, picture and report are made from.

The journal tells every pass over a step. A step is *live* if it lies on the path that led to the newest weights: whenever
the steps go back (a rollback, a retry, a restart from an older checkpoint), what came from that step on is abandoned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..journal import JournalProblem, iter_file, journal_files, number

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Signals of a step line that become a column each, ``[n]`` float64.
COLUMNS = (
    "loss",
    "loss_min",
    "loss_median",
    "loss_max",
    "worst_rank",
    "grad_norm",
    "update_norm",
    "loss_scale",
    "step_seconds",
    "data_seconds",
    "wait_seconds",
    "own_seconds",
    "step_seconds_median",
    "data_seconds_median",
    "wait_seconds_median",
    "own_seconds_median",
    "slowest_rank",
    "applied_steps",
)
# Rows of the heat map.
MAX_RANKS = 64
# No run has more ranks than this many digits can name.
_RANK_DIGITS = 9
# What NumPy turns into the right number; None becomes NaN.
_PLAIN = frozenset((float, int, type(None)))
# Written by each rank for itself; everything else is alike on all ranks and read from the lowest one.
_PER_RANK = ("fault.", "infra.", "journal.", "checkpoint.failed")


@dataclass
class Steps:
    """The step lines of one rank in the order written, ``n`` of them.

    Attributes:
        columns: By name in :data:`COLUMNS`, ``[n]``; NaN where a line does not say.
        learning_rate: Largest rate of the parameter groups, ``[n]``.
        branch: Rises by one whenever the steps go back, ``[n]``.
        live: On the path that led to the newest weights, ``[n]``.
        rank_losses: Loss by rank, ``[n, len(ranks)]``, or None where no line holds it.
        rank_known: Where a line holds that loss, ``[n, len(ranks)]``: of many ranks it holds only those furthest out.
        ranks: Which rank each column is, ``[len(ranks)]``.
        world_size: The largest number of ranks, 0 where no line tells.
        worlds: Number of ranks at each step, ``[n]``; 0 where no line tells.
    """

    step: IntArray
    attempt: IntArray
    tokens: IntArray
    applied: BoolArray
    branch: IntArray
    live: BoolArray
    learning_rate: FloatArray
    columns: dict[str, FloatArray]
    rank_losses: FloatArray | None = None
    rank_known: BoolArray | None = None
    ranks: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    world_size: int = 0
    worlds: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> FloatArray:
        return self.columns[name]

    def tokens_at(self, step: int, attempt: int | None = None) -> float:
        """Tokens at a step: of the given attempt where journalled, else on the live path, interpolated; NaN if unknown."""
        if attempt is not None:
            hit = np.flatnonzero((self.step == step) & (self.attempt == attempt))
            if hit.size:
                return float(self.tokens[hit[-1]])
        steps, tokens = self.step[self.live], self.tokens[self.live]
        if not steps.size:
            return float("nan")
        return float(np.interp(step, steps, tokens))


@dataclass
class RunData:
    """Everything the journal of a run says.

    Attributes:
        steps: The signals.
        events: All other events in their order.
        ranks: Ranks that have a journal.
        problems: Lines that could not be read.
        last_time: Time of the newest line, seconds since the epoch; NaN for an empty journal.
        last_step_time: That of the newest step line; NaN where there is none.
    """

    steps: Steps
    events: list[dict[str, Any]]
    ranks: list[int] = field(default_factory=list)
    problems: list[JournalProblem] = field(default_factory=list)
    last_time: float = float("nan")
    last_step_time: float = float("nan")
    run_dir: Path | None = None

    def of(self, *prefixes: str) -> list[dict[str, Any]]:
        """Events whose name is one of the given, or begins with it where it ends in a dot."""
        return [
            e
            for e in self.events
            if any(e["event"] == p or (p[-1] == "." and e["event"].startswith(p)) for p in prefixes)
        ]

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> RunData:
        """From events of one or several ranks in their order."""
        builder = _Builder()
        for event in events:
            builder.add(event)
        return builder.build()


def load_run(run_dir: str | Path, read: Callable[[int], object] | None = None) -> RunData:
    """Read a run folder's journal; only one rank's step lines are parsed, the others' events are taken in.

    Args:
        run_dir: The run folder.
        read: Told of so many more bytes that have been read, about once a MiB.

    Raises:
        FileNotFoundError: Where there is no journal.
    """
    run_dir = Path(run_dir)
    files = journal_files(run_dir)
    if not files:
        raise FileNotFoundError(
            f"No journal in {run_dir}: expected {run_dir / 'journal' / 'rank-00000.jsonl'}. Give the run folder that"
            " RunJournal wrote."
        )
    by_rank: dict[int, list[Path]] = {}
    for path in files:
        by_rank.setdefault(int(path.name[len("rank-") :].split(".")[0]), []).append(path)
    problems: list[JournalProblem] = []
    builder = _Builder(lowest=min(by_rank))
    for rank, paths in sorted(by_rank.items()):
        for path in paths:
            for event in iter_file(path, problems=problems, skip_steps=rank != builder.lowest, read=read):
                builder.add(event)
    data = builder.build()
    data.problems, data.run_dir, data.ranks = problems, run_dir, sorted(by_rank)
    return data


class _Builder:
    def __init__(self, lowest: int | None = None) -> None:
        self.lowest = lowest
        self.ranks: set[int] = set()
        self.events: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []
        self.last_time = self.last_step_time = float("nan")
        self.rows: list[tuple[Any, ...]] = []
        self.heads: list[tuple[int, int, int, bool]] = []
        self.rank_losses: dict[int, list[Any]] = {}
        self.outliers: dict[int, dict[int, float]] = {}
        self.world_size = self.world = 0
        self.worlds: list[int] = []

    def add(self, event: Mapping[str, Any]) -> None:
        rank = int(event.get("rank", 0))
        self.ranks.add(rank)
        if self.lowest is None:
            self.lowest = rank
        time = event.get("time")
        time = time if type(time) is float else number(time)
        if not self.last_time >= time:
            self.last_time = time if time == time else self.last_time
        if event["event"] == "step":
            if rank == self.lowest:
                self._add_step(event)
                self.last_step_time = time
        elif rank == self.lowest:
            if event["event"] == "run.started" and isinstance(event.get("world_size"), int):
                self.world = event["world_size"]
                self.world_size = max(self.world_size, self.world)
            self.events.append(dict(event))
        elif event["event"].startswith(_PER_RANK):
            self.others.append(dict(event))

    def _add_step(self, event: Mapping[str, Any]) -> None:
        # Most of the time that a report takes is spent here: what can be done for all lines at once is done in build().
        rates = event.get("lr")
        if isinstance(rates, list):
            rates = rates[0] if len(rates) == 1 else max(map(number, rates), default=math.nan)
        losses, outliers = event.get("rank_losses"), event.get("outlier_losses")
        if isinstance(losses, list):
            self.rank_losses[len(self.rows)] = losses
        elif isinstance(outliers, Mapping):
            self.outliers[len(self.rows)] = {
                int(r): number(v) for r, v in outliers.items() if str(r).isdecimal() and len(str(r)) <= _RANK_DIGITS
            }
        self.worlds.append(len(losses) if isinstance(losses, list) else self.world)
        self.heads.append((event["step"], event["attempt"], event["tokens"], bool(event.get("applied", True))))
        self.rows.append((*map(event.get, COLUMNS), rates))

    def build(self) -> RunData:
        heads = np.array(self.heads, dtype=np.int64).reshape(-1, 4)
        columns = [numbers(column) for column in zip(*self.rows, strict=True)]
        columns = columns or [np.zeros(0)] * (len(COLUMNS) + 1)
        branch, live = branches(heads[:, 0])
        steps = Steps(
            step=heads[:, 0],
            attempt=heads[:, 1],
            tokens=heads[:, 2],
            applied=heads[:, 3].astype(np.bool_),
            branch=branch,
            live=live,
            learning_rate=columns[-1],
            columns=dict(zip(COLUMNS, columns, strict=False)),
            worlds=np.array(self.worlds, dtype=np.int64),
        )
        self._add_ranks(steps)
        events = self.events
        if self.others:
            seen = {_identity(e) for e in events}
            events = sorted(
                [*events, *(e for e in self.others if _identity(e) not in seen)], key=lambda e: number(e.get("time"))
            )
        return RunData(
            steps=steps,
            events=events,
            ranks=sorted(self.ranks),
            last_time=self.last_time,
            last_step_time=self.last_step_time,
        )

    def _add_ranks(self, steps: Steps) -> None:
        """The matrix of rank and loss: every rank where the lines hold them all, else those that were ever furthest out."""
        width = max((len(v) for v in self.rank_losses.values()), default=0)
        steps.world_size = max(width, self.world_size)
        ranks = np.arange(width, dtype=np.int64) if not self.outliers else self._furthest_out(steps["loss_median"])
        if len(ranks) < 2:
            return
        matrix = np.full((len(steps), len(ranks)), np.nan)
        known = np.zeros(matrix.shape, dtype=np.bool_)
        self._add_whole_rows(matrix, known, ranks)
        column = {int(r): i for i, r in enumerate(ranks)}
        for row, outliers in self.outliers.items():
            for rank, loss in outliers.items():
                if rank in column:
                    matrix[row, column[rank]], known[row, column[rank]] = loss, True
        steps.ranks, steps.rank_losses, steps.rank_known = ranks, matrix, known

    def _add_whole_rows(self, matrix: FloatArray, known: BoolArray, ranks: IntArray) -> None:
        """The lines that hold the loss of every rank; those of one number of ranks at once."""
        widths: dict[int, list[int]] = {}
        for row, losses in self.rank_losses.items():
            widths.setdefault(len(losses), []).append(row)
        for width, rows in widths.items():
            there = ranks[ranks < width]
            values = numbers([value for row in rows for value in self.rank_losses[row]]).reshape(-1, width)
            matrix[np.ix_(rows, range(len(there)))] = values[:, there]
            known[np.ix_(rows, range(len(there)))] = True

    def _furthest_out(self, median: FloatArray) -> IntArray:
        """Of all ranks that a line names those that were furthest above the median, at most :data:`MAX_RANKS`."""
        height: dict[int, float] = {}
        for row, outliers in self.outliers.items():
            for rank, loss in outliers.items():
                excess = loss - median[row] if math.isfinite(loss) else math.inf
                height[rank] = max(height.get(rank, -math.inf), excess)
        highest = sorted(height, key=lambda rank: -height[rank])[:MAX_RANKS]
        return np.array(sorted(highest), dtype=np.int64)


def numbers(values: Sequence[Any]) -> FloatArray:
    """Journalled numbers as :func:`lightning_sentinel.journal.number` reads each of them, ``[n]``.

    Example:
        >>> numbers([1, 2.5, "inf", None, True, "?"]).tolist()
        [1.0, 2.5, inf, nan, nan, nan]
    """
    # NumPy alone would take a truth value for 1 and "2" for 2.
    if _PLAIN.issuperset(map(type, values)):
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:  # a whole number of more than 308 digits
            pass
    return np.array([number(value) for value in values], dtype=np.float64)


def _identity(event: Mapping[str, Any]) -> str:
    """What makes two ranks' lines the same event."""
    return json.dumps({k: v for k, v in event.items() if k not in ("time", "rank", "fired")}, sort_keys=True)


def branches(step: IntArray) -> tuple[IntArray, BoolArray]:
    """Branch number and liveness of steps in the order written.

    Example:
        >>> branch, live = branches(np.array([0, 1, 2, 3, 2, 3, 4]))
        >>> branch.tolist(), live.astype(int).tolist()
        ([0, 0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1])
    """
    live = np.zeros(len(step), dtype=np.bool_)
    if not len(step):
        return np.zeros(0, dtype=np.int64), live
    branch = np.concatenate([[0], np.cumsum(np.diff(step) <= 0)]).astype(np.int64)
    # Seen from the end: a step lives if every later one is greater.
    later_minimum = np.minimum.accumulate(step[::-1])[::-1]
    live[:-1] = step[:-1] < later_minimum[1:]
    live[-1] = True
    return branch, live


def loss_from_bits(bits: str) -> float:
    """The float32 behind ``loss_bits``.

    Example:
        >>> loss_from_bits("40033333")
        2.049999952316284
    """
    return float(struct.unpack(">f", bytes.fromhex(bits))[0])
