"""What the suite's callbacks share during one fit: the journal, the attempt, the token count, the current step.

One :class:`RunContext` hangs on each Trainer. A callback asks for it with :func:`context_of` and never keeps another
callback's state itself.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from .data.quarantine import QuarantineLedger
    from .incidents import Incident
    from .record import StepRecord
    from .state.snapshot import Snapshot
    from .triage.window import StepWindow

log = logging.getLogger("lightning_sentinel")


class EventSink(Protocol):
    """Where events go. :class:`lightning_sentinel.journal.Journal` is the real one."""

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None: ...

    def flush(self) -> None: ...


class LogSink:
    """Stands in for the journal when there is no ``RunJournal``: events go to the ``lightning_sentinel`` logger."""

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None:
        if event != "step":
            log.info("%s at step %d (attempt %d): %s", event, step, attempt, fields)

    def flush(self) -> None:
        return None


# The history holds 256 records, but not more than this many bytes of them (65 MB: 2,700 ranks) while there are enough for
# a forecast.
HISTORY_BYTES, HISTORY_LEAST = 1 << 26, 48


class RunContext:
    """Shared facts of one fit.

    Attributes:
        journal: Where events go.
        run_dir: The run folder, or None where nothing is written.
        attempt: Which pass over the steps this is; rises by one with each rollback and never goes back.
        tokens: Tokens processed on the current path over all ranks; goes back with a rollback.
        nominal_steps: Optimizer steps attempted on the current path; goes back with a rollback.
        applied_steps: Of these, the ones that changed the weights; goes back with a rollback.
        held: True from the gate on while the current step's update is kept out of the weights.
        record: Record of the current step, from the gate on.
        window: Micro-batches of the current step with their RNG, if a callback captures them.
        healthy_window: The newest window whose step was accepted.
        snapshots: Restore points in host memory, oldest first.
        history: The newest records on the current path that passed the gate, oldest first; goes back with a rollback.
        rates: Learning rates of the newest steps, ``(step, planned, actual)``, one rate per parameter group; ``planned``
            is what the scheduler last set, or None without a scheduler. Goes back with a rollback.
        drawn: This rank's sample ids at every gate of the current path, ``(step, ids)``, newest last.
        unapplied: Steps on the current path, newest last, whose update was kept out of the weights.
        incidents: All incidents of this run, oldest first.
        stopped_by: Number of the incident whose ladder ended in ``stop`` in this fit, or None. It is closed as escalated,
            but the state is no better for it: nothing that is saved from then on is a clean restart point.
        ledger: Who is quarantined, since when and why; None until a callback needs it.
        infra_events: Recent infrastructure events, as the user's launcher reported them.
        restart_step: Step at which this process resumed, or None.
        terminating: True once this process has received SIGTERM, where several ranks must agree on what follows.
        terminated_ranks: Ranks that had received SIGTERM at the newest gate, the same on every rank.
        scratch: Extra values by callback name, for what only two of them share.
    """

    def __init__(self) -> None:
        self.journal: EventSink = LogSink()
        self.run_dir: Path | None = None
        self.attempt = 0
        self.tokens = 0
        self.nominal_steps = 0
        self.applied_steps = 0
        self.held = False
        self.record: StepRecord | None = None
        self.window: StepWindow | None = None
        self.healthy_window: StepWindow | None = None
        self.snapshots: deque[Snapshot] = deque()
        self.history: deque[StepRecord] = deque(maxlen=256)
        self.rates: deque[tuple[int, tuple[float, ...] | None, tuple[float, ...]]] = deque(maxlen=1024)
        self.drawn: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=4096)
        self.unapplied: deque[int] = deque(maxlen=256)
        self.incidents: list[Incident] = []
        self.stopped_by: int | None = None
        self.ledger: QuarantineLedger | None = None
        self.infra_events: deque[dict[str, Any]] = deque(maxlen=64)
        self.restart_step: int | None = None
        self.terminating = False
        self.terminated_ranks: tuple[int, ...] = ()
        self.scratch: dict[str, Any] = {}

    def path_state(self) -> dict[str, int]:
        """Counters that go back with a rollback."""
        return {
            "tokens": self.tokens,
            "nominal_steps": self.nominal_steps,
            "applied_steps": self.applied_steps,
        }

    def load_path_state(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]
        self.nominal_steps = state["nominal_steps"]
        self.applied_steps = state["applied_steps"]

    def remember(self, record: StepRecord) -> None:
        """Take a record into the history; of very many ranks fewer are kept, so that the history stays small."""
        self.history.append(record)
        if record.world_size > 1 and len(self.history) > HISTORY_LEAST:
            most = max(HISTORY_LEAST, HISTORY_BYTES // max(record.nbytes, 1))
            while len(self.history) > most:
                self.history.popleft()

    def forget_after(self, step: int) -> None:
        """Drop records and rates of ``step`` and later: they belong to an abandoned path."""
        while self.history and self.history[-1].step >= step:
            self.history.pop()
        while self.rates and self.rates[-1][0] >= step:
            self.rates.pop()
        while self.drawn and self.drawn[-1][0] >= step:
            self.drawn.pop()
        while self.unapplied and self.unapplied[-1] >= step:
            self.unapplied.pop()

    def weights_untouched_since(self, since: int, step: int) -> bool:
        """True if no update of the steps ``since .. step - 1`` has reached the weights."""
        return step - since <= len(self.unapplied) and set(range(since, step)) <= set(self.unapplied)

    def unsolved(self) -> list[Incident]:
        """Incidents that are open, and the one that stops the run."""
        return [i for i in self.incidents if i.is_open or i.number == self.stopped_by]

    def write(self, trainer: Trainer, event: str, **fields: Any) -> None:
        """Write one event at the trainer's current step."""
        self.journal.write(event, step=trainer.global_step, attempt=self.attempt, tokens=self.tokens, **fields)


_CONTEXTS: weakref.WeakKeyDictionary[Trainer, RunContext] = weakref.WeakKeyDictionary()
# Whose context was asked for last: some forty times a step it is the same one again.
_newest: tuple[Callable[[], Trainer | None], RunContext] | None = None


def context_of(trainer: Trainer) -> RunContext:
    """The context of this Trainer, made on first use."""
    global _newest
    newest = _newest
    if newest is not None and newest[0]() is trainer:
        return newest[1]
    context = _CONTEXTS.get(trainer)
    if context is None:
        context = _CONTEXTS[trainer] = RunContext()
    _newest = (weakref.ref(trainer, _let_go), context)
    return context


def _let_go(gone: Any) -> None:
    global _newest
    if _newest is not None and _newest[0] is gone:
        _newest = None
