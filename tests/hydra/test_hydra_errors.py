"""A configuration that is wrong: the key, what was found, what was expected and the nearest valid name, before training."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
from omegaconf import OmegaConf

import lightning_sentinel
from lightning_sentinel.conf.generate import CALLBACKS
from lightning_sentinel.config import ConfigError, build_callbacks, check_node, fits

SENTINEL = "lightning_sentinel."


def error_of(name: str, target: str, **values: Any) -> str:
    cfg = OmegaConf.create({name: {"_target_": target, **values}})
    with pytest.raises(ConfigError) as caught:
        build_callbacks(cfg)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "spike_detector",
            {"treshold": 8.0},
            ".treshold is no option of lightning_sentinel.SpikeDetector. Nearest valid name: threshold.",
        ),
        (
            "rollback",
            {"every_n_step": 8},
            ".every_n_step is no option of lightning_sentinel.Rollback. Nearest valid name: every_n_steps.",
        ),
        (
            "rollback",
            {"zzz": 1},
            ".zzz is no option of lightning_sentinel.Rollback. Valid names: cursor, every_n_steps, keep, retry.",
        ),
    ],
)
def test_misspelt_key(name: str, values: dict[str, Any], message: str) -> None:
    assert error_of(name, SENTINEL + CALLBACKS[name], **values) == f"callbacks.{name}{message}"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("spike_detector", {"threshold": "high"}, ".threshold is 'high' (str), expected float."),
        ("spike_detector", {"warmup": 1.5}, ".warmup is 1.5 (float), expected int."),
        ("spike_detector", {"warmup": True}, ".warmup is True (bool), expected int."),
        ("spike_detector", {"threshold": None}, ".threshold is None (NoneType), expected float."),
        ("rollback", {"retry": "yes"}, ".retry is 'yes' (str), expected bool."),
        ("rollback", {"every_n_steps": "???"}, ".every_n_steps is '???' (str), expected int or null."),
        ("run_journal", {"run_dir": 3}, ".run_dir is 3 (int), expected str or Path or null."),
        ("rank_telemetry", {"sources": "prose"}, ".sources is 'prose' (str), expected a list or null."),
        (
            "rank_telemetry",
            {"sample_id_fn": "ids"},
            ".sample_id_fn is 'ids' (str), expected a node with _target_ or null.",
        ),
        ("incident_response", {"budgets": ["stop"]}, ".budgets is ['stop'] (list), expected a mapping or null."),
        (
            "batch_validator",
            {"repeats": "alow"},
            ".repeats is 'alow' (str), expected one of 'report', 'allow'. Nearest valid name: allow.",
        ),
    ],
)
def test_wrong_type(name: str, values: dict[str, Any], message: str) -> None:
    assert error_of(name, SENTINEL + CALLBACKS[name], **values) == f"callbacks.{name}{message}"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "rollback",
            {"keep": 1},
            ".keep: Rollback: keep must be at least 2 (one known-good snapshot and one candidate), found 1.",
        ),
        (
            "incident_response",
            {"lr_factor": 1.5},
            ".lr_factor: IncidentResponse: lr_factor must be greater than 0 and less than 1, found 1.5.",
        ),
        (
            "incident_response",
            {"mode": "recver"},
            ".mode: policy: mode is 'recver', expected one of observe, guard, recover. Nearest valid name: 'recover'.",
        ),
        (
            "incident_response",
            {"ladders": {"numerics/stp": ["stop"]}},
            ".ladders: policy: ladders has no case 'numerics/stp'. Nearest valid name: 'numerics/step'.",
        ),
        (
            "nonfinite_tracer",
            {"boundaries": "layers.*"},
            ".boundaries: NonFiniteTracer: boundaries is 'layers.*', expected 'auto' or a list of module path patterns,"
            " e.g. ['layers.*'].",
        ),
    ],
)
def test_value_out_of_bounds(name: str, values: dict[str, Any], message: str) -> None:
    assert error_of(name, SENTINEL + CALLBACKS[name], **values) == f"callbacks.{name}{message}"


def test_node_that_is_no_callback() -> None:
    cfg = OmegaConf.create({"rollback": {"every_n_steps": 3}})
    with pytest.raises(ConfigError) as caught:
        build_callbacks(cfg)
    assert str(caught.value) == (
        "callbacks.rollback has no _target_; expected the class of a callback, or null to leave it out."
    )
    assert error_of("rollback", "lightning_sentinel.Rolback") == (
        "callbacks.rollback._target_ is 'lightning_sentinel.Rolback', which can't be imported."
        " Nearest valid name: lightning_sentinel.Rollback."
    )
    assert error_of("mine", "no_such_package.Thing") == (
        "callbacks.mine._target_ is 'no_such_package.Thing', which can't be imported."
        " ModuleNotFoundError: No module named 'no_such_package'"
    )


def test_other_people_s_callbacks() -> None:
    assert error_of("early", "lightning.pytorch.callbacks.EarlyStopping", moniter="loss") == (
        "callbacks.early.moniter is no option of lightning.pytorch.callbacks.EarlyStopping. Nearest valid name: monitor."
    )
    assert error_of("early", "lightning.pytorch.callbacks.EarlyStopping", min_delta=0.1) == (
        "callbacks.early: EarlyStopping.__init__() missing 1 required positional argument: 'monitor'"
    )


def test_null_and_nothing() -> None:
    assert build_callbacks(None) == []
    cfg = OmegaConf.create({"rollback": None, "run_journal": {"_target_": "lightning_sentinel.RunJournal"}})
    assert [type(c).__name__ for c in build_callbacks(cfg)] == ["RunJournal"]


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_option_s_type_is_known_and_its_default_fits(name: str) -> None:
    """Otherwise the check of types would pass over it in silence."""
    cls = getattr(lightning_sentinel, CALLBACKS[name])
    hints = typing.get_type_hints(cls.__init__)
    for key, parameter in inspect.signature(cls).parameters.items():
        assert fits(parameter.default, hints[key]), key
        assert not fits(object(), hints[key]), f"{key}: anything would do"


def test_defaults_pass_the_check() -> None:
    for name, kind in CALLBACKS.items():
        check_node({"_target_": SENTINEL + kind}, name)
