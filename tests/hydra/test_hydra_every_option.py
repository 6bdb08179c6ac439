"""Every option that ``lightning-sentinel config`` lists: a misspelt name, a wrong type, a value out of bounds are named."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import lightning_sentinel
from lightning_sentinel.cli import main
from lightning_sentinel.cli.config import config_options
from lightning_sentinel.conf.generate import CALLBACKS
from lightning_sentinel.config import ConfigError, build_callbacks, describe, fits
from lightning_sentinel.limits import CHECKED_BY, CHOICES, Edge, Limit, limits_of
from lightning_sentinel.policy import DEFAULT_BUDGETS, DEFAULT_LADDERS, Policy

OPTIONS = [(row["callback"], row["path"].rpartition(".")[2]) for row in config_options() if row["callback"] != "policy"]
ODD: list[Any] = ["zzz", 3, 1.5, True, ["q"], {"a": 1}, None]


def refused(name: str, **values: Any) -> str:
    """The error of a configuration, without the callback's path, which must be in front."""
    target = f"lightning_sentinel.{CALLBACKS[name]}"
    with pytest.raises(ConfigError) as caught:
        build_callbacks(OmegaConf.create({name: {"_target_": target, **values}}))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"callbacks.{name}.")
    return text.removeprefix(f"callbacks.{name}.")


def defaults(name: str) -> dict[str, Any]:
    cls = getattr(lightning_sentinel, CALLBACKS[name])
    return {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}


def beyond(name: str, key: str, limit: Limit) -> Iterator[Any]:
    """One value behind each bound, of the right type."""

    def of(edge: Edge) -> float:
        return float(defaults(name)[edge]) if isinstance(edge, str) else edge

    found = []
    if limit.least is not None:
        found.append(of(limit.least) - 1)
    if limit.above is not None:
        found.append(of(limit.above))
    if limit.most is not None:
        found.append(of(limit.most) + 1)
    if limit.below is not None:
        found.append(of(limit.below))
    yield from (int(value) if limit.whole else float(value) for value in found)


def test_the_table_and_the_constructors_know_the_same_options() -> None:
    assert {name for name, _ in OPTIONS} == set(CALLBACKS)
    for name in CALLBACKS:
        listed = {key for callback, key in OPTIONS if callback == name}
        assert listed <= set(defaults(name))
        known = set(limits_of(CALLBACKS[name])) | set(CHOICES.get(CALLBACKS[name], {}))
        assert known <= set(defaults(name)), "a bound of an option that does not exist"
        numbers = {k for k, v in defaults(name).items() if isinstance(v, int | float) and not isinstance(v, bool)}
        assert numbers <= set(limits_of(CALLBACKS[name])), "a number without unit and bound"


@pytest.mark.parametrize(("name", "key"), OPTIONS, ids=[".".join(option) for option in OPTIONS])
def test_an_option_gone_wrong_is_named(name: str, key: str) -> None:
    typo = key + "x"
    target = f"lightning_sentinel.{CALLBACKS[name]}"
    assert refused(name, **{typo: defaults(name)[key]}) == (
        f"{typo} is no option of {target}. Nearest valid name: {key}."
    )
    hint = typing.get_type_hints(getattr(lightning_sentinel, CALLBACKS[name]).__init__)[key]
    wrong = [value for value in ODD if not fits(value, hint)]
    assert wrong
    for value in wrong:
        text = refused(name, **{key: value})
        assert text.startswith(f"{key} is {value!r} ({type(value).__name__}), expected {describe(hint)}.")
    limit = limits_of(CALLBACKS[name]).get(key)
    owner = CHECKED_BY.get(CALLBACKS[name], CALLBACKS[name])
    if limit is not None:
        for value in beyond(name, key, limit):
            none = " or None" if limit.optional else ""
            bound = f"{owner}: {key} must be {limit.words(defaults(name) | {key: value})}{none}, found {value!r}."
            assert refused(name, **{key: value}) == f"{key}: {bound}"
    words = CHOICES.get(CALLBACKS[name], {}).get(key)
    if words is not None:
        text = refused(name, **{key: words[0] + "x"})
        assert text.startswith(f"{key}")
        assert words[0] in text.partition("Nearest valid name")[2]


@pytest.mark.parametrize("case", DEFAULT_LADDERS)
def test_the_policy_names_case_and_action(case: str) -> None:
    with pytest.raises(ValueError, match=f"ladders has no case '{case}x'. Nearest valid name: '{case}'"):
        Policy(ladders={f"{case}x": ["stop"]})
    with pytest.raises(ValueError, match="Nearest valid name: 'skip_step'"):
        Policy(ladders={case: ["skip_stp"]})


@pytest.mark.parametrize("action", DEFAULT_BUDGETS)
def test_the_policy_names_a_budget(action: str) -> None:
    with pytest.raises(ValueError, match=f"Nearest valid name: '{action}'"):
        Policy(budgets={f"{action}x": 1})
    with pytest.raises(ValueError, match=f"budgets\\['{action}'\\] must be at least 0, found -1"):
        Policy(budgets={action: -1})


SCANNED = [
    (name, key)
    for name, key in OPTIONS
    if name in ("spike_detector", "divergence_detector", "rank_outlier_detector", "loss_scale_monitor")
    and key in limits_of(CALLBACKS[name])
]


def test_the_command_line_says_it_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("step,loss\n0,2.0\n1,1.9\n")
    assert len(SCANNED) > 40
    for name, key in SCANNED:
        limit = limits_of(CALLBACKS[name])[key]
        for value in beyond(name, key, limit):
            assert main(["scan", str(log), "--set", f"callbacks.{name}.{key}={value}"]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.count("\n") == 1, err
            assert f"{key} must be {limit.words(defaults(name) | {key: value})}" in err
            assert f"found {value!r}" in err
        assert main(["scan", str(log), "--set", f"callbacks.{name}.{key}x=3"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.endswith(f"; nearest: {key}.\n")
