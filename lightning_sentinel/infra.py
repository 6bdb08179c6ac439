"""What happens to the machines of a run, told by whoever knows: a launcher, a health check, a person.

Losses and gradients do not show a lost node, a throttled device or a flapping link; the journal and the checkpoints keep
what is told here, and the curve shows it beside the incidents.

Example:
    >>> from lightning.pytorch import Trainer
    >>> from lightning_sentinel import infra_event
    >>> from lightning_sentinel.context import context_of
    >>> trainer = Trainer(logger=False, enable_checkpointing=False, barebones=True, accelerator="cpu")
    >>> infra_event(trainer, "ecc", "node 3: 2 uncorrectable errors on device 1")
    >>> [(event["kind"], event["text"]) for event in context_of(trainer).infra_events]
    [('ecc', 'node 3: 2 uncorrectable errors on device 1')]
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .context import context_of
from .journal import redact

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def infra_event(trainer: Trainer, kind: str, text: str) -> None:
    """Note an event of the infrastructure: in the journal as ``infra.event``, and in every checkpoint from now on.

    Args:
        trainer: The Trainer whose run it concerns, on the rank that knows of it.
        kind: A short word, e.g. ``restart``, ``ecc``, ``preemption``, ``link``.
        text: A sentence for people. What looks like a secret is redacted.
    """
    note_infra(trainer, kind, text, trainer.global_step)


def note_infra(trainer: Trainer, kind: str, text: str, step: int) -> None:
    """:func:`infra_event` where the Trainer does not stand at ``step`` yet: it is about to resume there."""
    if not kind or not text:
        raise ValueError(f"infra_event needs a kind and a text, found kind {kind!r} and text {text!r}.")
    context = context_of(trainer)
    text = redact(text)
    context.infra_events.append({"time": time.time(), "step": step, "kind": kind, "text": text})
    context.journal.write(
        "infra.event", step=step, attempt=context.attempt, tokens=context.tokens, kind=kind, text=text
    )
