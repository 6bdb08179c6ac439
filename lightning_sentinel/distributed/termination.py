"""SIGTERM on many ranks: each hears it at another moment, all act upon it at the end of the same step.

Lightning's own handler broadcasts from inside the signal handler, wherever the rank happens to be. Where the others are in
another collective, the two are taken for each other: the job hangs, or sums what does not belong together. So the handler
only notes the signal here; the note travels with the step's gather (column ``terminated``), after which every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..context import context_of
from ..infra import infra_event
from ..state import lightning_private as private


def listen(trainer: Trainer) -> Callable[[], None]:
    """Note SIGTERM from now on instead of broadcasting it; returns what undoes it. Call it in ``setup`` of a fit."""
    context = context_of(trainer)
    context.terminating, context.terminated_ranks = False, ()

    def note() -> None:
        context.terminating = True

    return private.note_sigterm(trainer, note)


def agreed(trainer: Trainer, gathered: bool) -> bool:
    """Whether any rank has received SIGTERM, the same answer on every rank. Call it at the end of a batch on all of them.

    Args:
        trainer: The Trainer.
        gathered: Whether ``RankTelemetry`` gathers the note; otherwise it costs a small reduction here.
    """
    context = context_of(trainer)
    if gathered:
        return bool(context.terminated_ranks)
    return bool(trainer.strategy.reduce_boolean_decision(context.terminating, all=False))


def leave(trainer: Trainer) -> None:
    """End the fit on every rank, after the checkpoint."""
    context = context_of(trainer)
    if trainer.is_global_zero:
        ranks = ", ".join(map(str, context.terminated_ranks))
        who = f"rank {ranks}" if ranks else "a rank"
        infra_event(trainer, "sigterm", f"{who} received SIGTERM; all ranks end at step {trainer.global_step}")
    private.set_received_sigterm(trainer)
    raise SIGTERMException
