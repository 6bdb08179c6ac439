"""The Hydra group ``faults``: one file for each fault, every key a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_sentinel import FaultInjector
from lightning_sentinel.config import check_node
from lightning_sentinel.faults import CATALOGUE, Fault

GROUP = Path(__file__).parents[2] / "configs" / "faults"


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    (tmp_path / "main.yaml").write_text("defaults:\n  - faults: none\n  - _self_\n")
    (tmp_path / "faults").symlink_to(GROUP)
    return tmp_path


def faults_of(config_dir: Path, *overrides: str) -> list[Fault]:
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        config = compose("main", overrides=list(overrides))
    node = config.get("callbacks", {}).get("fault_injector")
    if node is None:
        return []
    injector = instantiate(node)
    assert isinstance(injector, FaultInjector)
    return injector.faults


def test_every_fault_has_a_file() -> None:
    assert {path.stem for path in GROUP.glob("*.yaml")} == {"none", *CATALOGUE}


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_file_makes_its_fault_with_the_keys_it_names(config_dir: Path, name: str) -> None:
    (fault,) = faults_of(config_dir, f"faults={name}")
    assert type(fault) is CATALOGUE[name]
    assert fault.name == name
    node = OmegaConf.load(GROUP / f"{name}.yaml").faults[name]
    check_node(node, f"faults.{name}")
    for key, value in node.items():
        if key != "_target_":
            assert getattr(fault, key) == value


def test_none_is_the_default_and_is_empty(config_dir: Path) -> None:
    assert faults_of(config_dir) == []


def test_several_faults_at_once_with_their_keys(config_dir: Path) -> None:
    faults = faults_of(config_dir, "faults=[corrupt_batch,lr_spike]", "faults.lr_spike.step=80")
    assert [(f.name, f.step) for f in faults] == [("corrupt_batch", 120), ("lr_spike", 80)]
