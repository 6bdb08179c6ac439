"""lightning-sentinel: callbacks that see training failures where they start, answer them, and prove the recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .bundle.replay import replay_incident
    from .callbacks.batch_validator import BatchValidator
    from .callbacks.deep_probe import DeepProbe
    from .callbacks.defaults import default_callbacks
    from .callbacks.divergence_detector import DivergenceDetector
    from .callbacks.fault_injector import FaultInjector
    from .callbacks.forensic_checkpoint import ForensicCheckpoint
    from .callbacks.incident_response import IncidentResponse
    from .callbacks.loss_scale_monitor import LossScaleMonitor
    from .callbacks.nonfinite_tracer import NonFiniteTracer
    from .callbacks.preflight import Preflight
    from .callbacks.rank_outlier_detector import RankOutlierDetector
    from .callbacks.rank_telemetry import RankTelemetry
    from .callbacks.replica_consistency import ReplicaConsistency
    from .callbacks.rollback import Rollback
    from .callbacks.run_journal import RunJournal
    from .callbacks.spike_detector import SpikeDetector
    from .canary.pilot import run_canary
    from .infra import infra_event

# Where each public name lives. Loaded on first use, so that importing the package costs next to nothing.
_PUBLIC = {
    "BatchValidator": "callbacks.batch_validator",
    "DeepProbe": "callbacks.deep_probe",
    "DivergenceDetector": "callbacks.divergence_detector",
    "FaultInjector": "callbacks.fault_injector",
    "ForensicCheckpoint": "callbacks.forensic_checkpoint",
    "IncidentResponse": "callbacks.incident_response",
    "LossScaleMonitor": "callbacks.loss_scale_monitor",
    "NonFiniteTracer": "callbacks.nonfinite_tracer",
    "Preflight": "callbacks.preflight",
    "RankOutlierDetector": "callbacks.rank_outlier_detector",
    "RankTelemetry": "callbacks.rank_telemetry",
    "ReplicaConsistency": "callbacks.replica_consistency",
    "Rollback": "callbacks.rollback",
    "RunJournal": "callbacks.run_journal",
    "SpikeDetector": "callbacks.spike_detector",
    "default_callbacks": "callbacks.defaults",
    "infra_event": "infra",
    "replay_incident": "bundle.replay",
    "run_canary": "canary.pilot",
}

__all__ = [
    "BatchValidator",
    "DeepProbe",
    "DivergenceDetector",
    "FaultInjector",
    "ForensicCheckpoint",
    "IncidentResponse",
    "LossScaleMonitor",
    "NonFiniteTracer",
    "Preflight",
    "RankOutlierDetector",
    "RankTelemetry",
    "ReplicaConsistency",
    "Rollback",
    "RunJournal",
    "SpikeDetector",
    "__version__",
    "default_callbacks",
    "infra_event",
    "replay_incident",
    "run_canary",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
