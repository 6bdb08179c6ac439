"""The curve as a picture in the loggers that take one."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from test_run_journal import Incidents, Model, trainer

from lightning_sentinel import RankTelemetry, RunJournal
from lightning_sentinel.images import log_curve


def size_of(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


def run(tmp_path: Path, *loggers: Any) -> Path:
    journal = RunJournal(tmp_path / "run")
    callbacks = [journal, Incidents(2, 4), RankTelemetry()]
    trainer(tmp_path, *callbacks, logger=list(loggers), log_every_n_steps=1).fit(Model())
    return tmp_path / "run" / "loss.png"


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "tb")
    picture = run(tmp_path, logger, CSVLogger(tmp_path / "csv"))
    found = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    found.Reload()
    *_, shown = found.Images("sentinel/curve")  # one may have been made when the incident opened
    assert shown.step == 6
    assert (shown.width, shown.height) == size_of(picture.read_bytes())
    assert "sentinel/loss_mean" in found.Tags()["scalars"]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path / "wb", offline=True)
    picture = run(tmp_path, logger)
    logger.experiment.finish()
    made = (tmp_path / "wb").glob("wandb/offline-run-*/files/media/images/sentinel/curve_*.png")
    kept = max(made, key=lambda path: path.stat().st_mtime_ns)  # one may have been made when the incident opened
    assert size_of(kept.read_bytes()) == size_of(picture.read_bytes())


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
    picture = run(tmp_path, logger)
    [kept] = (tmp_path / "mlruns").glob("**/artifacts/sentinel/loss.png")
    assert kept.read_bytes() == picture.read_bytes()


class WandbLogger:
    """What Lightning's offers here: the protocol, where wandb is not installed."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None, **_: Any) -> None:
        self.seen.append({"key": key, "images": images, "step": step})


class MLFlowLogger:
    run_id = "r1"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    @property
    def experiment(self) -> Any:
        return self

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        self.seen.append((run_id, local_path, str(artifact_path)))


def test_each_logger_in_its_own_words(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    wandb, mlflow = WandbLogger(), MLFlowLogger()
    assert log_curve([wandb, mlflow, CSVLogger(tmp_path)], picture, 7) == []
    assert wandb.seen == [{"key": "sentinel/curve", "images": [str(picture)], "step": None}]
    assert mlflow.seen == [("r1", str(picture), "sentinel")]


def test_a_logger_that_fails_is_a_sentence_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TensorBoardLogger):
        @property
        def experiment(self) -> Any:
            def add_image(*_: Any, **__: Any) -> None:
                raise OSError("no space left")

            writer = super().experiment
            writer.add_image = add_image
            return writer

    with caplog.at_level(logging.WARNING, logger="lightning_sentinel"):
        run(tmp_path, Broken(tmp_path / "tb"))
    assert [r.getMessage() for r in caplog.records if "picture" in r.getMessage()] == [
        "Broken took no picture of the loss: OSError: no space left"
    ]
    assert (tmp_path / "run" / "report.html").exists()
