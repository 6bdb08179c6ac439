"""The resolved Hydra configuration of the run that goes on, from wherever it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def config_of(trainer: Trainer) -> dict[str, Any] | None:
    """What ``RunJournal(config=...)`` was given, else the configuration of the running Hydra application; None without."""
    from ..callbacks.base import find_callback
    from ..callbacks.run_journal import RunJournal

    journal = find_callback(trainer, RunJournal)
    if journal is not None and journal.config is not None:
        return _resolved(journal.config)
    return hydra_config()


def hydra_config() -> dict[str, Any] | None:
    """The job's configuration as ``hydra.main`` has saved it in the output folder, resolved; None outside an application."""
    import sys

    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    if hydra.output_subdir is None:
        return None
    file = Path(hydra.runtime.output_dir) / hydra.output_subdir / "config.yaml"
    try:
        return _resolved(OmegaConf.load(file))
    except (OSError, OmegaConfBaseException):
        return None


def _resolved(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(config, DictConfig):
        return dict(config)
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {str(k): v for k, v in found.items()}
