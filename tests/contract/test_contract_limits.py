"""Units and bounds: every number has both, the constructors keep to them, and the command line prints them."""

from __future__ import annotations

import inspect
import json
import math
import typing
from typing import Any

import pytest
from omegaconf import OmegaConf

import lightning_sentinel
from lightning_sentinel.cli import main
from lightning_sentinel.conf.generate import CALLBACKS
from lightning_sentinel.config import ConfigError, build_callbacks
from lightning_sentinel.limits import CHECKED_BY, LIMITS, Limit, limits_of


def numbers(name: str) -> dict[str, Any]:
    """Options of a callback that take a number, with their defaults."""
    cls = getattr(lightning_sentinel, CALLBACKS[name])
    hints = typing.get_type_hints(cls.__init__)
    found = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        kinds = set(typing.get_args(hints[key])) or {hints[key]}
        if kinds & {int, float}:
            found[key] = parameter.default
    return found


OPTIONS = [(name, key, default) for name in CALLBACKS for key, default in numbers(name).items()]


def test_the_table_and_the_constructors_name_the_same_options() -> None:
    for name, kind in CALLBACKS.items():
        assert set(limits_of(kind)) == set(numbers(name)), kind
    assert set(LIMITS) == {CHECKED_BY.get(kind, kind) for name, kind in CALLBACKS.items() if numbers(name)}


@pytest.mark.parametrize(("name", "key", "default"), OPTIONS)
def test_every_number_has_a_unit_and_its_default_is_within_the_bounds(name: str, key: str, default: Any) -> None:
    limit = limits_of(CALLBACKS[name])[key]
    assert limit.unit
    assert limit.optional == (default is None)
    if default is not None:
        assert limit.allows(default, numbers(name))
        assert limit.whole == isinstance(default, int)


def beyond(limit: Limit, values: dict[str, Any]) -> list[float]:
    """For each bound the nearest number that is outside."""
    at = {n: values[e] if isinstance(e := getattr(limit, n), str) else e for n in ("least", "above", "most", "below")}
    steps = {"least": -math.inf, "above": None, "most": math.inf, "below": None}
    found = []
    for edge, toward in steps.items():
        if at[edge] is None:
            continue
        if limit.whole:
            found.append(at[edge] + {"least": -1, "above": 0, "most": 1, "below": 0}[edge])
        else:
            found.append(float(at[edge]) if toward is None else math.nextafter(at[edge], toward))
    return found


@pytest.mark.parametrize(("name", "key", "default"), OPTIONS)
def test_what_is_out_of_bounds_is_refused_by_key_and_bound(name: str, key: str, default: Any) -> None:
    owner = CHECKED_BY.get(CALLBACKS[name], CALLBACKS[name])
    limit = LIMITS[owner][key]
    assert beyond(limit, numbers(name)) or limit.unit == "token"
    for value in beyond(limit, numbers(name)):
        cfg = OmegaConf.create({name: {"_target_": f"lightning_sentinel.{CALLBACKS[name]}", key: value}})
        with pytest.raises(ConfigError) as caught:
            build_callbacks(cfg)
        assert str(caught.value).startswith(f"callbacks.{name}.{key}: {owner}: {key} must be ")
        assert str(caught.value).endswith(f", found {value!r}.")


def test_the_command_line_prints_default_unit_bound_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    for name, key, _ in OPTIONS:
        limit = limits_of(CALLBACKS[name])[key]
        row = rows[f"callbacks.{name}.{key}"]
        assert (row["unit"], row["bound"]) == (limit.unit, limit.words())
    assert rows["callbacks.spike_detector.gross_tail"]["bound"] == "greater than 0 and at most tail"
    assert (rows["callbacks.rollback.retry"]["unit"], rows["callbacks.rollback.retry"]["bound"]) == ("", "")
    assert main(["config", "rollback"]) == 0
    text = capsys.readouterr().out
    assert (
        "  callbacks.rollback.keep=2  (int; snapshots; at least 2 (one known-good snapshot and one candidate))\n"
        in text
    )
