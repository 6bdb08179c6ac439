"""The example as a Hydra application: every group, the command line, determinism, precision, two processes."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.plugins import MixedPrecision
from omegaconf import DictConfig

SCRIPT = Path(pretrain.__file__)
BARE = ["~callbacks", "~policy"]
TINY = ["model=tiny", "data=text_tiny", "trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def config(run_dir: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
        return compose("config", [f"run_dir={run_dir}", *overrides])


def run(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``python examples/pretrain.py`` in a process of its own, started from some directory."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *BARE, *TINY, *overrides]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)


def logged(run_dir: Path, name: str) -> list[float]:
    with open(run_dir / "metrics" / "metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (pretrain.CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group in ("model", "optimizer", "trainer", "logger", "data") for option in options(group)],
)
def test_every_option_composes_and_names_what_exists(tmp_path: Path, group: str, option: str) -> None:
    from hydra.utils import get_object

    cfg = config(tmp_path, *BARE, f"{group}={option}")
    node = cfg[group]
    assert "_target_" in node or group == "logger"
    for part in (node, *(v for v in node.values() if isinstance(v, DictConfig)), *(node.get("plugins") or [])):
        if "_target_" in part:
            assert callable(get_object(part["_target_"]))


def test_runs_are_equal_to_the_bit_with_and_without_the_suite_and_another_seed_is_not(tmp_path: Path) -> None:
    def run(*overrides: str) -> tuple[int, dict[str, torch.Tensor]]:
        trainer = pretrain.pretrain(config(tmp_path, *TINY, "logger=none", "trainer.max_steps=5", *overrides))
        return len(trainer.callbacks), trainer.lightning_module.state_dict()

    callbacks, first = run("callbacks=none")
    more, watched = run("policy=recover")
    _, other = run("callbacks=none", "seed=1")
    assert more > callbacks + 8
    assert all(torch.equal(value, first[name]) for name, value in watched.items())
    assert not torch.equal(first["model.head.weight"], other["model.head.weight"])


def test_loss_on_real_text_falls_from_uniform_to_words(tmp_path: Path) -> None:
    overrides = [*TINY, "data=text", "data.sequence_length=64", "data.max_bytes=200000", "trainer.max_steps=150"]
    overrides += ["logger=tensorboard"] if find_spec("tensorboard") else []
    trainer = pretrain.pretrain(config(tmp_path, *BARE, *overrides))
    losses = logged(tmp_path, "train/loss_nats")
    assert len(losses) == trainer.global_step == 150
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert sum(losses[-20:]) / 20 < 2.9
    assert len(logged(tmp_path, "val/token_probability")) == 3
    validation = trainer.callback_metrics
    assert validation["val/token_probability"].item() == pytest.approx(math.exp(-validation["val/loss_nats"].item()))
    if find_spec("tensorboard"):
        assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))  # beside the CSV


def test_fp16_on_the_cpu_scales_for_real_and_does_not_overflow_when_healthy(tmp_path: Path) -> None:
    overrides = ["trainer=fp16", "model=micro", "logger=none", "data.sequence_length=64", "trainer.max_steps=40"]
    trainer = pretrain.pretrain(config(tmp_path, *BARE, *overrides, "trainer.enable_progress_bar=false"))
    precision = trainer.precision_plugin
    assert isinstance(precision, MixedPrecision)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 65536.0
    assert precision.scaler.state_dict()["_growth_tracker"] == 40  # every step since the start was applied
    assert trainer.callback_metrics["train/loss_nats"] < 4.5


def test_model_too_small_for_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size is 256, expected at least the 257 token ids of the data"):
        pretrain.pretrain(config(tmp_path, *BARE, *TINY, "model.vocab_size=256"))


def test_value_out_of_bounds_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model.width: width must be a whole number of at least 1, got 0$"):
        pretrain.pretrain(config(tmp_path, *BARE, *TINY, "model.width=0"))
    with pytest.raises(ValueError, match=r"^optimizer.learning_rate: learning_rate must be above 0, got -1$"):
        pretrain.pretrain(config(tmp_path, *BARE, *TINY, "optimizer.learning_rate=-1"))


def test_misspelt_key_fails_before_training_with_the_nearest_name(tmp_path: Path) -> None:
    done = run(tmp_path, "trainer.max_step=4")
    assert done.returncode == 1
    assert "trainer.max_step: no such key. Nearest valid name: trainer.max_steps" in done.stderr
    assert not list(tmp_path.glob("runs/*/metrics"))


@pytest.mark.distributed
def test_command_line_from_another_directory_in_two_processes_that_train_as_one(tmp_path: Path) -> None:
    limit = "+callbacks.limit._target_=collective_limit.CollectiveLimit"
    done = run(tmp_path, "trainer=ddp", "trainer.max_steps=3", "optimizer.learning_rate=1e-3", limit)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count("3 steps in ") == 1
    assert f"Run folder: {run_dir}" in done.stdout
    assert len(logged(run_dir, "train/loss_nats")) == 3


def test_faults_reach_the_trainer(tmp_path: Path) -> None:
    from lightning_sentinel import FaultInjector

    overrides = ["faults=lr_spike", "faults.lr_spike.step=3", "logger=none"]
    trainer: Any = pretrain.build_trainer(config(tmp_path, *BARE, *TINY, *overrides))
    (injector,) = (c for c in trainer.callbacks if isinstance(c, FaultInjector))
    assert injector.fired == {"lr_spike": 0}
    assert injector.faults[0].step == 3
