"""The whole suite in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from .batch_validator import BatchValidator
from .deep_probe import DeepProbe
from .divergence_detector import DivergenceDetector
from .forensic_checkpoint import ForensicCheckpoint
from .incident_response import IncidentResponse
from .loss_scale_monitor import LossScaleMonitor
from .nonfinite_tracer import NonFiniteTracer
from .preflight import Preflight
from .rank_outlier_detector import RankOutlierDetector
from .rank_telemetry import RankTelemetry
from .replica_consistency import ReplicaConsistency
from .rollback import Rollback
from .run_journal import RunJournal
from .spike_detector import SpikeDetector

# Order in the Trainer: who looks at the batch, who judges, who decides, who acts. User callbacks come before all of these.
ORDER: tuple[type[Callback], ...] = (
    RunJournal,
    Preflight,
    BatchValidator,
    NonFiniteTracer,
    SpikeDetector,
    DivergenceDetector,
    RankOutlierDetector,
    LossScaleMonitor,
    ReplicaConsistency,
    RankTelemetry,
    IncidentResponse,
    DeepProbe,
    Rollback,
    ForensicCheckpoint,
)


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """User callbacks first in their own order, then the suite's in theirs."""
    rank = {kind: i for i, kind in enumerate(ORDER)}
    return sorted(callbacks, key=lambda c: rank.get(type(c), -1))


def default_callbacks(
    run_dir: str | Path | None = None,
    policy: str = "observe",
    vocabulary_size: int | None = None,
    sample_id_fn: Callable[[Any], Sequence[str | int]] | None = None,
    checkpoint_every_n_steps: int | None = None,
) -> list[Callback]:
    """All callbacks of the suite with their defaults.

    Example:
        >>> import lightning_sentinel
        >>> [type(c).__name__ for c in lightning_sentinel.default_callbacks()][:3]
        ['RunJournal', 'Preflight', 'BatchValidator']

    Args:
        run_dir: Where journal, checkpoints, incidents and the report go; None: a folder under the Trainer's
            ``default_root_dir``.
        policy: ``observe`` (watch and record), ``guard`` (also keep non-finite updates out) or ``recover``.
        vocabulary_size: Size of the vocabulary, for token range checks and the uniform baseline.
        sample_id_fn: ``batch -> ids``; by default the batch's own ids, else a content hash per sample.
        checkpoint_every_n_steps: How often ``ForensicCheckpoint`` saves; None leaves that callback out.

    Returns:
        The callbacks, in the order in which they must stand in the Trainer, after your own.
    """
    callbacks: list[Callback] = [
        RunJournal(run_dir=run_dir),
        Preflight(vocabulary_size=vocabulary_size),
        BatchValidator(vocabulary_size=vocabulary_size, sample_id_fn=sample_id_fn),
        NonFiniteTracer(),
        SpikeDetector(),
        DivergenceDetector(),
        RankOutlierDetector(),
        LossScaleMonitor(),
        ReplicaConsistency(),
        RankTelemetry(vocabulary_size=vocabulary_size, sample_id_fn=sample_id_fn),
        IncidentResponse(mode=policy),
        DeepProbe(),
        Rollback(),
    ]
    if checkpoint_every_n_steps is not None:
        callbacks.append(ForensicCheckpoint(every_n_steps=checkpoint_every_n_steps))
    return callbacks
