"""The shipped YAML: exactly the constructors' options with their defaults, and a comment for each."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import lightning_sentinel
from lightning_sentinel.callbacks.defaults import ORDER
from lightning_sentinel.conf import generate
from lightning_sentinel.policy import MODES, Policy

POLICIES = generate.FOLDER.parent.parent / "policy"
NAMES = list(generate.CALLBACKS)


def written(name: str) -> str:
    return (generate.FOLDER / f"{name}.yaml").read_text()


def node(name: str, around: str = "") -> DictConfig:
    """The callback's node, resolved in a configuration that holds ``around`` beside it."""
    cfg = OmegaConf.create({"callbacks": OmegaConf.create(written(name)), **OmegaConf.create(around or "{}")})
    OmegaConf.resolve(cfg)
    found = cfg.callbacks[name]
    assert isinstance(found, DictConfig)
    return found


@pytest.mark.parametrize("path", [path for path, _ in generate.files()], ids=lambda path: path.stem)
def test_file_is_what_the_constructor_says(path: Path) -> None:
    expected = dict(generate.files())[path]
    difference = "\n".join(difflib.unified_diff(path.read_text().splitlines(), expected.splitlines(), "file", "class"))
    assert not difference, f"run `python -m lightning_sentinel.conf.generate`:\n{difference}"


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_are_the_constructor_s(name: str) -> None:
    values = dict(node(name))
    cls = getattr(lightning_sentinel, str(values.pop("_target_")).removeprefix("lightning_sentinel."))
    parameters = inspect.signature(cls).parameters
    assert list(values) == list(parameters)
    for key, parameter in parameters.items():
        assert values[key] == parameter.default, key
        assert type(values[key]) is type(parameter.default), key


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_a_comment_of_plain_prose(name: str) -> None:
    lines = written(name).splitlines()
    assert lines[0] == "# @package callbacks"
    assert lines[1].startswith("# ")
    for number, line in enumerate(lines):
        if re.match(r"  \w+:", line) and "_target_" not in line:
            assert lines[number - 1].startswith("  # "), f"{name}.yaml:{number + 1} has no comment above it"
    comments = [line for line in lines if line.lstrip().startswith("#")]
    assert not [line for line in comments if "`" in line or "None" in line or re.search(r":\w+:", line)]
    assert max(map(len, lines)) <= 120


def test_a_file_for_every_callback_of_the_suite_and_no_other() -> None:
    assert [generate.CALLBACKS[name] for name in NAMES] == [kind.__name__ for kind in ORDER]
    assert sorted(path.stem for path in generate.FOLDER.iterdir()) == sorted([*NAMES, "default"])


def test_interpolations_take_what_the_application_has() -> None:
    around = "{run_dir: out, model: {vocab_size: 257}, policy: {mode: recover, budgets: {stop: 2}, ladders: {}}}"
    assert node("run_journal", around).run_dir == "out"
    assert node("batch_validator", around).vocabulary_size == 257
    assert node("rank_telemetry", around).vocabulary_size == 257
    response = node("incident_response", around)
    assert (response.mode, response.budgets) == ("recover", {"stop": 2})


@pytest.mark.parametrize("mode", MODES)
def test_policy_files_are_the_modes(mode: str) -> None:
    cfg = OmegaConf.to_container(OmegaConf.load(POLICIES / f"{mode}.yaml"))
    assert isinstance(cfg, dict)
    assert set(cfg) == {"mode", "ladders", "budgets"}
    assert Policy(**{str(key): value for key, value in cfg.items()}) == Policy(mode)
    assert sorted(path.stem for path in POLICIES.glob("*.yaml")) == sorted(MODES)


def test_generator_writes_only_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    generate.main()
    assert capsys.readouterr().out.split() == ["default.yaml", *(f"{name}.yaml" for name in NAMES)]
    (tmp_path / "rollback.yaml").write_text("rollback: null\n")
    generate.main()
    assert capsys.readouterr().out.split() == ["rollback.yaml"]
    assert (tmp_path / "rollback.yaml").read_text() == written("rollback")
