"""Whatever takes long says so: on standard error or in the log, never among the results, and never under --json."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from report_journals import MadeRun
from sentinel_kit import Loader, Net

import lightning_sentinel
from lightning_sentinel import progress
from lightning_sentinel.callbacks.forensic_checkpoint import ForensicCheckpoint
from lightning_sentinel.checkpoint.restore_point import load_newest
from lightning_sentinel.checkpoint.store import CheckpointStore
from lightning_sentinel.cli import main


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as long."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an incident's bundle, checkpoints and a journal of more than a MiB."""
    folder = tmp_path_factory.mktemp("aloud") / "run"
    suite = lightning_sentinel.default_callbacks(folder, "recover", checkpoint_every_n_steps=10)
    torch.manual_seed(0)
    trainer = quiet(suite)
    trainer.fit(Net({23: float("nan")}, once=True), Loader())
    store = CheckpointStore(folder / "checkpoints")
    store.promote(store.paths()[0])
    return folder


def quiet(callbacks: list[L.Callback], steps: int = 40) -> L.Trainer:
    return L.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[str]]:
    """Standard output of a command and the lines on standard error."""
    capsys.readouterr()
    assert main([*arguments]) in (0, 1)
    out, err = capsys.readouterr()
    return out, err.splitlines()


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "report": lambda run: ["report", str(run), "--out", str(run.parent / "out")],
    "scan": lambda run: ["scan", str(run)],
    "verify": lambda run: ["verify", str(run)],
}
LINES = {"report": "report of {run}: ", "scan": "scanning run: ", "verify": "hashing: "}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_how_far_it_is(command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, *COMMANDS[command](run_dir))
    begin = LINES[command].format(run=run_dir)
    assert len(err) >= 2
    assert all(line.startswith(begin) for line in err), err
    assert err[-1].startswith(f"{begin}done after ")
    assert begin not in out
    out, err = said(capsys, *COMMANDS[command](run_dir), "--json")
    assert err == []
    json.loads(out)


def test_a_report_says_what_it_is_making(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(tmp_path / "run")
    run.begin()
    run.run(2200)
    run.end()
    _, err = said(capsys, "report", str(tmp_path / "run"))
    shares = [line for line in err if "reading the journal" in line]
    assert len(shares) >= 1  # a line for each MiB that was read
    assert ": 1.0 of 1.1 MiB (" in shares[0]
    assert [line.rpartition(", ")[2] for line in err if "making" in line] == ["making loss.png", "making report.html"]
    assert "(100 %)" in err[-2]
    assert said(capsys, "report", str(tmp_path / "run"), "--quiet") == ("", [])


def test_nothing_is_said_of_what_is_done_at_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1e9)
    for command in COMMANDS.values():
        assert said(capsys, *command(run_dir))[1] == []


def test_the_end_of_a_run_says_that_it_is_making_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lightning.pytorch.lightning_sentinel")
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger.name), caplog.at_level(logging.INFO, "lightning.pytorch"):
        logger.addHandler(caplog.handler)
        try:
            quiet([lightning_sentinel.RunJournal(tmp_path / "run"), lightning_sentinel.RankTelemetry()], 5).fit(
                Net(), Loader()
            )
        finally:
            logger.removeHandler(caplog.handler)
    told = [r.getMessage() for r in caplog.records if "report of" in r.getMessage()]
    assert told[0].startswith(f"report of {tmp_path / 'run'}: ")
    assert "making loss.png" in " ".join(told)
    assert "done after" in told[-1]


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture
def words() -> Any:
    """What progress says while a Trainer runs, with Lightning's loggers as loud as they are for a user."""
    handler, logger = Words(), progress.TRAINING_LOG
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.told
    logger.removeHandler(handler)


def test_a_resume_says_that_it_verifies_and_loads(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = CheckpointStore(run_dir / "checkpoints").newest_verified()
    assert newest is not None
    callbacks: list[L.Callback] = [
        lightning_sentinel.RunJournal(run_dir, report=False),
        ForensicCheckpoint(every_n_steps=0, resume="auto"),
    ]
    trainer = quiet(callbacks, newest.step + 2)
    capsys.readouterr()
    trainer.fit(Net(), Loader())
    assert trainer.global_step == newest.step + 2
    for what in ("verifying", "loading"):
        mine = [line for line in words if line.startswith(f"{what} {newest.path.name}: ")]
        assert "(100 %)" in " ".join(mine)
        assert mine[-1].startswith(f"{what} {newest.path.name}: done after ")
    assert capsys.readouterr().out == ""


def test_a_rollback_from_the_disk_says_so(run_dir: Path, words: list[str]) -> None:
    trainer = quiet([])
    found = load_newest(trainer, CheckpointStore(run_dir / "checkpoints"), 1000, lambda *_: True, lambda *_: None)
    assert found is not None
    name = found[1].name
    assert [line.partition(":")[0] for line in words if line.endswith(" s") and "done after" in line] == [
        f"verifying {name}",
        f"loading {name}",
    ]
