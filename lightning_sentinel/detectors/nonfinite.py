"""Non-finite losses and gradients, and steps without any gradient, as the record shows them.

Under a loss scale other than 1 a non-finite *gradient* with a finite loss is how fp16 says that the scale is too high:
the scaler skips that step and halves the scale. That is :class:`~lightning_sentinel.detectors.loss_scale.LossScale`'s
to count, not an incident here. A non-finite *loss* is one always.

Example:
    >>> from lightning_sentinel.record import StepRecord
    >>> [finding] = NonFinite().observe(StepRecord.from_losses(step=3, losses=[2.0, float("nan")]))
    >>> str(finding.kind), finding.ranks
    ('nonfinite_loss', (1,))
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..incidents import Finding, FindingKind, Severity
from ..record import SIGNAL_INDEX, FloatArray, StepRecord

MISSING = SIGNAL_INDEX["missing_grads"]


def _ranks(flags: FloatArray) -> tuple[int, ...]:
    return tuple(int(r) for r in np.flatnonzero(flags))


def _named(ranks: tuple[int, ...], world_size: int) -> str:
    if len(ranks) == world_size:
        return "all ranks" if world_size > 1 else "this rank"
    shown = ", ".join(str(r) for r in ranks[:8])
    more = "" if len(ranks) <= 8 else f" and {len(ranks) - 8} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more} of {world_size}"


def is_scaler_overflow(record: StepRecord) -> bool:
    """True where non-finite gradients are a loss scaler's ordinary overflow: a scale in force and a finite loss."""
    return bool(
        record.column("nonfinite_grads").any()
        and not record.column("nonfinite_loss").any()
        and (record.column("loss_scale") != 1.0).any()
    )


class NonFinite:
    """States NaN and infinity the step they appear; keeps no history and has no threshold."""

    name: ClassVar[str] = "non_finite"

    def observe(self, record: StepRecord) -> list[Finding]:
        if record.world_size == 1 and not (record.has_nonfinite or record.numbers[MISSING]):
            return []
        findings = []
        if record.column("nonfinite_loss").any():
            findings.append(self._finding(record, FindingKind.NONFINITE_LOSS, "nonfinite_loss", "loss"))
        if record.column("nonfinite_grads").any() and not is_scaler_overflow(record):
            findings.append(self._finding(record, FindingKind.NONFINITE_GRADS, "nonfinite_grads", "gradient"))
        missing = _ranks(record.column("missing_grads"))
        if missing:
            findings.append(
                Finding(
                    kind=FindingKind.NO_GRADIENT,
                    detector=self.name,
                    step=record.step,
                    score=float(len(missing)),
                    threshold=0.0,
                    unit="ranks",
                    ranks=missing,
                    window=1,
                    message=f"No parameter received a gradient at step {record.step} on {_named(missing, record.world_size)}"
                    " (more than 0 such ranks; expected 0).",
                )
            )
        return findings

    def _finding(self, record: StepRecord, kind: FindingKind, column: str, what: str) -> Finding:
        counts = record.column(column)
        ranks = _ranks(counts)
        local_loss = kind is FindingKind.NONFINITE_LOSS
        return Finding(
            kind=kind,
            detector=self.name,
            step=record.step,
            score=float(counts.sum()),
            threshold=0.0,
            unit="micro-batches" if local_loss else "ranks",
            severity=Severity.INCIDENT,
            ranks=ranks,
            # A reduced gradient carries one rank's NaN to all of them, so only the loss convicts a rank.
            culprits=tuple(f"rank:{r}" for r in ranks) if local_loss and 0 < len(ranks) < record.world_size else (),
            window=1,
            message=f"The {what} is NaN or infinite at step {record.step} on {_named(ranks, record.world_size)}"
            f" ({counts.sum():g} {'micro-batches' if local_loss else 'ranks'}; expected 0).",
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None
