"""The callbacks by class path in LightningCLI's configuration."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from docs_pages import Block
from sentinel_kit import Loader, Net

import lightning_sentinel
from lightning_sentinel.callbacks.defaults import ORDER
from lightning_sentinel.journal import read_journal

pytest.importorskip("jsonargparse", reason='pip install "jsonargparse[signatures]"')

from lightning.pytorch.cli import LightningCLI

TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 3,
}


@pytest.fixture(autouse=True)
def as_in_a_script_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    # LightningCLI 2.6 adds its instantiators in a way that jsonargparse deprecates since 4.49.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def command_line(callbacks: list[dict[str, Any]]) -> LightningCLI:
    args = {"trainer": {**TRAINER, "callbacks": callbacks}}
    return LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False, args=args)  # type: ignore[arg-type]


def test_every_callback_by_class_path(tmp_path: Any) -> None:
    nodes: list[dict[str, Any]] = [{"class_path": f"lightning_sentinel.{kind.__name__}"} for kind in ORDER]
    place = {kind.__name__: i for i, kind in enumerate(ORDER)}
    nodes[place["RunJournal"]]["init_args"] = {"run_dir": str(tmp_path / "run"), "report": False}
    nodes[place["SpikeDetector"]]["init_args"] = {"threshold": 9.5}
    nodes[place["IncidentResponse"]]["init_args"] = {"mode": "guard", "budgets": {"stop": 2}}
    cli = command_line(nodes)
    ours = [c for c in cli.trainer.callbacks if type(c) in ORDER]  # type: ignore[attr-defined]
    assert [type(c) for c in ours] == list(ORDER)
    spikes, response = ours[place["SpikeDetector"]], ours[place["IncidentResponse"]]
    assert isinstance(spikes, lightning_sentinel.SpikeDetector)
    assert spikes.detector.threshold == 9.5
    assert isinstance(response, lightning_sentinel.IncidentResponse)
    assert response.policy.mode == "guard"
    cli.trainer.fit(cli.model, Loader(64))
    assert (tmp_path / "run" / "journal" / "rank-00000.jsonl").exists()


def test_the_configuration_of_the_quick_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documented: list[Block]
) -> None:
    """As a file, with ``fit``, as a user's ``train.py`` reads it; what a test sets is the quiet Trainer."""
    monkeypatch.chdir(tmp_path)
    (block,) = documented
    Path("config.yaml").write_text(block.take())
    quiet = [f"--trainer.{name}={str(value).lower()}" for name, value in TRAINER.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", "config.yaml", *quiet])
    cli = LightningCLI(Net, ThreeSteps, save_config_callback=None, seed_everything_default=False)
    ours = [c for c in cli.trainer.callbacks if type(c) in ORDER]  # type: ignore[attr-defined]
    assert [type(c).__name__ for c in ours] == re.findall(r"lightning_sentinel\.(\w+)", block.content)
    assert [c.detector.threshold for c in ours if isinstance(c, lightning_sentinel.SpikeDetector)] == [10.0]
    assert [c.policy.mode for c in ours if isinstance(c, lightning_sentinel.IncidentResponse)] == ["guard"]
    assert [e["step"] for e in read_journal("runs/my-run") if e["event"] == "step"] == [0, 1, 2]


class ThreeSteps(L.LightningDataModule):
    def train_dataloader(self) -> Loader:
        return Loader(64)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"treshold": 9.0}, "treshold"), ({"threshold": "high"}, "high"), ({"threshold": -1.0}, "greater than 0")],
)
def test_what_is_wrong_ends_before_training(
    values: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"class_path": "lightning_sentinel.SpikeDetector", "init_args": values}
    with pytest.raises((SystemExit, ValueError)) as caught:
        command_line([node, {"class_path": "lightning_sentinel.RankTelemetry"}])
    assert said in capsys.readouterr().err + str(caught.value)
