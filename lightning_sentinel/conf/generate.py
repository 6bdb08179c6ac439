"""The callbacks' YAML files, made from the constructors: one place for names, defaults and meanings.

``python -m lightning_sentinel.conf.generate`` writes them again after a constructor has changed; a test says what differs.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

FOLDER = Path(__file__).parent / "callbacks" / "sentinel"

# File name, which is also the key under ``callbacks``, to class, in the order in which they stand in the Trainer.
CALLBACKS = {
    "run_journal": "RunJournal",
    "preflight": "Preflight",
    "batch_validator": "BatchValidator",
    "nonfinite_tracer": "NonFiniteTracer",
    "spike_detector": "SpikeDetector",
    "divergence_detector": "DivergenceDetector",
    "rank_outlier_detector": "RankOutlierDetector",
    "loss_scale_monitor": "LossScaleMonitor",
    "replica_consistency": "ReplicaConsistency",
    "rank_telemetry": "RankTelemetry",
    "incident_response": "IncidentResponse",
    "deep_probe": "DeepProbe",
    "rollback": "Rollback",
    "forensic_checkpoint": "ForensicCheckpoint",
}

# Values that come from elsewhere in the application's configuration. Each falls back to the constructor's default.
INTERPOLATED = {
    ("run_journal", "run_dir"): ("run_dir", "null"),
    ("preflight", "vocabulary_size"): ("model.vocab_size", "null"),
    ("batch_validator", "vocabulary_size"): ("model.vocab_size", "null"),
    ("rank_telemetry", "vocabulary_size"): ("model.vocab_size", "null"),
    ("incident_response", "mode"): ("policy.mode", "observe"),
    ("incident_response", "ladders"): ("policy.ladders", "null"),
    ("incident_response", "budgets"): ("policy.budgets", "null"),
}

WIDTH = 112


def callback_yaml(name: str) -> str:
    """The whole file of one callback.

    Example:
        >>> print(callback_yaml("loss_scale_monitor").split("max_consecutive")[0], end="")  # doctest: +ELLIPSIS
        # @package callbacks
        # Journals every event of the loss scaler with its cause and states a collapse as an incident.
        loss_scale_monitor:
          _target_: lightning_sentinel.LossScaleMonitor
          # Overflows in a row that make an incident, once a step has been applied.
    """
    cls = getattr(import_module(f"lightning_sentinel.callbacks.{name}"), CALLBACKS[name])
    meanings = argument_docs(cls)
    lines = ["# @package callbacks", *_comment(plain(inspect.cleandoc(cls.__doc__).split("\n\n")[0]), "")]
    lines += [f"{name}:", f"  _target_: lightning_sentinel.{CALLBACKS[name]}"]
    for parameter in inspect.signature(cls).parameters.values():
        meaning = meanings[parameter.name]
        if (name, parameter.name) in INTERPOLATED:
            source, otherwise = INTERPOLATED[name, parameter.name]
            meaning += f" Taken from {source} where the configuration has it."
            value = f"${{oc.select:{source},{otherwise}}}"
        else:
            value = _as_yaml(parameter.default)
        meaning = re.sub(r"\bNone\b", "null", meaning)  # as the reader of the file must write it
        lines += [*_comment(meaning, "  "), f"  {parameter.name}: {value}"]
    return "\n".join(lines) + "\n"


def default_yaml() -> str:
    """The file that brings all of them."""
    head = "# The whole suite. Leave one out with callbacks.<name>=null; change one with callbacks.<name>.<option>=<value>."
    return "\n".join([head, "defaults:", *(f"  - /callbacks/sentinel/{name}" for name in CALLBACKS)]) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    """Each file with what should be in it."""
    yield FOLDER / "default.yaml", default_yaml()
    for name in CALLBACKS:
        yield FOLDER / f"{name}.yaml", callback_yaml(name)


def argument_docs(cls: type) -> dict[str, str]:
    """The ``Args`` of a Google-style docstring, each as one line of plain prose."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    meanings: dict[str, str] = {}
    name = None
    for line in doc.partition("\nArgs:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if match := re.fullmatch(r" {4}(\w+): (.*)", line):
            name, meanings[match[1]] = match[1], match[2]
        elif name is not None:
            meanings[name] += " " + line.strip()
    return {key: plain(value.strip()) for key, value in meanings.items()}


def plain(text: str) -> str:
    """Prose without reStructuredText markup.

    Example:
        >>> plain("``x`` of :class:`~a.b.Thing`, see :meth:`decide`")
        'x of Thing, see decide'
    """
    text = re.sub(r":[\w:]+:`~[\w.]*?(\w+)`", r"\1", text)
    text = re.sub(r":[\w:]+:`([^`]+)`", r"\1", text)
    return " ".join(text.replace("`", "").split())


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)]


def _as_yaml(value: Any) -> str:
    plain_value = value.value if isinstance(value, Enum) else value
    return str(yaml.safe_dump(plain_value, default_flow_style=True)).removesuffix("...\n").strip()


def main() -> None:
    for path, text in files():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
