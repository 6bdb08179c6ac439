"""What every injectable fault is: it knows when to strike, strikes in the real training, and counts each time it did.

A fault never touches a detector, a verdict or a record. It changes a batch, a module's computation, weights, optimizer
state, a schedule or a loader, and the suite has to find out from what it measures.

Example:
    >>> from lightning_sentinel.faults import LearningRateSpike
    >>> fault = LearningRateSpike(step=40, duration=3, factor=50)
    >>> fault.name, fault.fired
    ('lr_spike', 0)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass
class Moment:
    """The micro-batch at hand, as a fault may know it.

    Attributes:
        trainer: The Trainer.
        module: The LightningModule, not wrapped by the strategy.
        step: ``trainer.global_step`` at the start of this step's first micro-batch.
        attempt: Which pass over the steps this is.
        batch: The batch, on the device.
        sample_ids: Ids of its samples, taken before any fault has touched the batch.
        live: True until the optimizer step is due; later forwards of this step are replays by somebody else, which see
            the same computation but do not count as fired.
    """

    trainer: Trainer
    module: LightningModule
    step: int
    attempt: int
    batch: Any
    sample_ids: tuple[str, ...] = ()
    live: bool = True


class Fault:
    """Base of all faults.

    Args:
        step: First step on which it strikes (``trainer.global_step`` at the start of that step's first micro-batch).
        duration: Number of consecutive steps on which it strikes; None for all that follow.
        rank: The rank on which it strikes; None for all.
        on_replay: Whether it strikes again when a later attempt comes past its steps (or past its samples). A real
            transient cause is gone after a rollback, one that lies in the data or in the computation is not. None
            takes what is true of this fault.
        name: Name in the journal; None for the fault's own.

    Attributes:
        fired: How often it struck in a real training step, on this rank.
    """

    default_name: ClassVar[str]
    default_on_replay: ClassVar[bool] = False
    first_step: ClassVar[int] = 0  # smallest step at which there is something to hurt

    def __init__(
        self,
        step: int,
        duration: int | None = 1,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or self.default_name
        if step < self.first_step:
            raise ValueError(f"{self.name}: step is {step}, expected {self.first_step} or more.")
        if duration is not None and duration < 1:
            raise ValueError(f"{self.name}: duration is {duration} steps, expected 1 or more, or None for no end.")
        if rank is not None and rank < 0:
            raise ValueError(f"{self.name}: rank is {rank}, expected 0 or more, or None for all ranks.")
        self.step, self.duration, self.rank = step, duration, rank
        self.on_replay = self.default_on_replay if on_replay is None else on_replay
        self.fired = 0
        self.attempt: int | None = None  # the attempt on which it first struck
        self.moment: Moment | None = None
        self.report: Callable[[Fault, dict[str, Any]], None] = lambda fault, details: None

    # ------------------------------------------------------------------ what the injector calls

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        """At the start of ``fit``, before the first forward: check the target, register hooks."""

    def uninstall(self) -> None:
        """At the end of ``fit`` or after an exception: remove what :meth:`install` registered."""

    def on_batch(self, moment: Moment) -> None:
        """Before the batch is used, for each micro-batch."""

    def on_batch_end(self, moment: Moment) -> None:
        """After the batch and, on the last micro-batch of a step, after the optimizer and scheduler steps."""

    def why_missed(self) -> str:
        """Why it may never have struck although its steps came; empty where that is nothing to speak of."""
        return ""

    # ------------------------------------------------------------------ when

    def in_window(self, step: int) -> bool:
        """Whether the step is one of the fault's steps."""
        return self.step <= step < self.step + (math.inf if self.duration is None else self.duration)

    def due(self, moment: Moment, step: int | None = None) -> bool:
        """Whether it strikes now: right rank, right step, and not gone with an earlier attempt."""
        return (
            (self.rank is None or self.rank == moment.trainer.global_rank)
            and self.in_window(moment.step if step is None else step)
            and (self.on_replay or self.attempt is None or self.attempt == moment.attempt)
        )

    def struck(self, moment: Moment, **details: Any) -> None:
        """Count one strike in a real step and report what exactly was done."""
        self.fired += 1
        if self.attempt is None:
            self.attempt = moment.attempt
        self.report(self, details)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {"fired": self.fired, "attempt": self.attempt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fired, self.attempt = state["fired"], state["attempt"]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name={self.name!r}, step={self.step}, duration={self.duration}, rank={self.rank})"
        )


def nearest(wanted: str, names: Iterable[str], count: int = 3) -> str:
    """The most similar names, for an error message."""
    names = [n for n in names if n]
    found = difflib.get_close_matches(wanted, names, n=count, cutoff=0.0)
    return ", ".join(repr(n) for n in found) if found else "none"
