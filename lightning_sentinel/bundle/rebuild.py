"""Model and data from the recorded configuration.

The convention: a key ``rebuild`` with the dotted path of a function ``cfg -> (module, datamodule)``; without it ``model``
must be a node that instantiates to a LightningModule, and ``data`` or ``datamodule``, where there is one, a
LightningDataModule.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from ..config import build
from ..journal import REDACTED

KEY = "rebuild"
DATA_KEYS = ("data", "datamodule")
_BY_HAND = "lightning_sentinel.replay_incident(run_dir, incident, model=..., datamodule=...)"


class RebuildError(ValueError):
    """The configuration does not lead to a model; the message says what was found and what to do."""


def rebuild(
    config: Mapping[str, Any] | None, function: str | None = None
) -> tuple[LightningModule, LightningDataModule | None]:
    """The untrained model and its data, as the run had them.

    Args:
        config: The recorded configuration, resolved.
        function: Dotted path of ``cfg -> (module, datamodule)``; None takes the configuration's ``rebuild``.
    """
    if not config:
        raise RebuildError(
            "The bundle holds no configuration: the run was no Hydra application and RunJournal was given none"
            f" (RunJournal(config=...)). Build model and data yourself and call {_BY_HAND}."
        )
    from omegaconf import OmegaConf

    cfg = OmegaConf.create(dict(config))
    function = function or config.get(KEY)
    if function is not None:
        return _by_function(str(function), cfg)
    node = config.get("model")
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise RebuildError(
            f"The recorded configuration has neither {KEY!r} nor a node 'model' with _target_; it has"
            f" {sorted(map(str, config))}. Add `{KEY}: package.function` (cfg -> (module, datamodule)) to the"
            f" application's configuration, give --rebuild package.function, or call {_BY_HAND}."
        )
    model = _built(cfg.model, "model")
    if not isinstance(model, LightningModule):
        raise RebuildError(
            f"model._target_ ({node['_target_']}) is a {type(model).__name__}, expected a LightningModule. Add"
            f" `{KEY}: package.function` (cfg -> (module, datamodule)) to the application's configuration, or give"
            " --rebuild package.function."
        )
    key = next((k for k in DATA_KEYS if isinstance(config.get(k), Mapping)), None)
    data = None if key is None else _built(cfg[key], key)
    if data is not None and not isinstance(data, LightningDataModule):
        raise RebuildError(
            f"{key}._target_ ({config[str(key)]['_target_']}) is a {type(data).__name__}, expected a LightningDataModule. Add"
            f" `{KEY}: package.function` (cfg -> (module, datamodule)) to the application's configuration."
        )
    return model, data


def _built(node: Any, where: str) -> Any:
    try:
        return build(node, where)
    except Exception as error:
        hidden = f" It holds {REDACTED} where a secret was." if REDACTED in str(node) else ""
        raise RebuildError(
            f"{where} of the recorded configuration cannot be built: {error}.{hidden} Give --app-dir the folder that the"
            f" application's modules are imported from, or call {_BY_HAND}."
        ) from error


def _by_function(path: str, cfg: Any) -> tuple[LightningModule, LightningDataModule | None]:
    from hydra.utils import get_method

    hydra_log = logging.getLogger("hydra.utils")  # logs what is raised, too, on lines of its own
    was_disabled, hydra_log.disabled = hydra_log.disabled, True
    try:
        function = get_method(path)
    except Exception as error:
        why = str(error).rstrip(".?")
        raise RebuildError(
            f"{KEY} is {path!r}, which cannot be imported: {why}. Give --app-dir the folder that it is imported from."
        ) from error
    finally:
        hydra_log.disabled = was_disabled
    found = function(cfg)
    if isinstance(found, LightningModule):
        found = (found, None)
    if (
        not isinstance(found, tuple)
        or len(found) != 2
        or not isinstance(found[0], LightningModule)
        or not isinstance(found[1], LightningDataModule | None)
    ):
        raise RebuildError(
            f"{path} returned {type(found).__name__}, expected (LightningModule, LightningDataModule or None)."
        )
    return found


@contextlib.contextmanager
def code_from(folders: Sequence[str | Path]) -> Iterator[list[str]]:
    """Inside, modules are also found in these folders, those that exist; gives the ones that were added."""
    added = [str(f) for f in folders if Path(f).is_dir() and str(f) not in sys.path]
    sys.path[:0] = added
    try:
        yield added
    finally:
        for folder in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
