"""RunJournal in real Trainers: what a run leaves behind, however it ends."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from sentinel_kit import Loader, Net, run_ranks
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import RankTelemetry, default_callbacks, infra_event
from lightning_sentinel.callbacks.base import log_of
from lightning_sentinel.callbacks.run_journal import RunJournal, Status, lr_jump, mixture_moved
from lightning_sentinel.context import LogSink, context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident, IncidentStatus
from lightning_sentinel.journal import read_journal


class Model(L.LightningModule):
    def __init__(
        self, milestones: tuple[int, ...] = (), fail_at: int | None = None, error: BaseException | None = None
    ):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.milestones, self.fail_at, self.error = milestones, fail_at, error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fail_at is not None and self.global_step == self.fail_at:
            raise self.error or RuntimeError("cannot log in with password=hunter2 to the store")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(self.milestones))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)


class Incidents(L.Callback):
    """Stands in for the response: opens an incident at one step and closes it at another."""

    def __init__(self, opened: int, closed: int | None = None, status: IncidentStatus = IncidentStatus.RECOVERED):
        self.opened, self.closed, self.status = opened, closed, status

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        incident = Incident(1, self.opened, self.opened, attempt=0, tokens=0)
        incident.findings = [Finding(FindingKind.SPIKE, "Spike", self.opened, 9.0, 6.0, "the loss jumped")]
        if step == self.opened:
            context_of(trainer).write(trainer, "incident.opened", incident=incident.to_dict())
        if step == self.closed:
            incident.status, incident.closing = self.status, "budget spent"
            context_of(trainer).write(trainer, "incident.closed", incident=incident.to_dict())


def trainer(tmp_path: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 6, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "default_root_dir": tmp_path,
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **(defaults | settings))


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(run_dir) if e["event"] == name]


# ---------------------------------------------------------------------------------------------------- beginning and end


def test_a_run_says_how_it_began_and_ended(tmp_path: Path) -> None:
    L.seed_everything(11)
    callback = RunJournal(tmp_path / "run", step_interval=5, config={"lr": 0.1, "api_key": "k-1"})
    fit = trainer(tmp_path, callback)
    fit.fit(Model())
    (started,) = events(tmp_path / "run", "run.started")
    assert {k: started[k] for k in ("segment", "world_size", "strategy", "precision", "max_steps", "step", "parameters")} == {
        "segment": 0, "world_size": 1, "strategy": "SingleDeviceStrategy", "precision": "32-true", "max_steps": 6,
        "step": 0, "parameters": 5,
    }  # fmt: skip
    assert started["config"] == {"lr": 0.1, "api_key": "[redacted]"}
    assert started["seeds"] == {"PL_GLOBAL_SEED": "11", "torch": torch.initial_seed()}
    assert started["versions"]["torch"] == torch.__version__
    (ended,) = events(tmp_path / "run", "run.ended")
    assert (ended["status"], ended["exception"], ended["step"]) == ("finished", None, 6)
    assert context_of(fit).run_dir == tmp_path / "run"
    assert context_of(fit).scratch["step_interval"] == 5
    assert callback.summary is not None
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == callback.summary
    assert callback.summary["status"] == "finished"
    assert (tmp_path / "run" / "report.html").exists()


def test_a_second_fit_is_a_new_segment_of_the_same_run(tmp_path: Path) -> None:
    callback = RunJournal(tmp_path / "run", report=False)
    fit, model = trainer(tmp_path, callback), Model()
    fit.fit(model)
    fit.fit_loop.epoch_loop.max_steps = 9
    fit.fit(model)
    names = [(e["event"], e["step"]) for e in read_journal(tmp_path / "run")]
    assert names == [
        ("run.started", 0), ("run.ended", 6), ("run.started", 6), ("run.resumed", 6), ("run.ended", 9),
    ]  # fmt: skip
    assert [e["segment"] for e in events(tmp_path / "run", "run.started")] == [0, 1]
    assert not (tmp_path / "run" / "summary.json").exists()  # report=False writes no files
    assert callback.summary is not None
    assert callback.summary["status"] == "finished"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_names_its_checkpoint(tmp_path: Path) -> None:
    first = trainer(tmp_path, RunJournal(tmp_path / "run", report=False))
    first.fit(Model())
    first.save_checkpoint(tmp_path / "last.ckpt")
    second = trainer(tmp_path, RunJournal(tmp_path / "run"), max_steps=8)
    second.fit(Model(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    (resumed,) = events(tmp_path / "run", "run.resumed")
    assert (resumed["step"], resumed["checkpoint"]) == (6, str(tmp_path / "last.ckpt"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(r["step"], r["checkpoint"]) for r in summary["restarts"]] == [(6, str(tmp_path / "last.ckpt"))]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_counts_go_on_after_a_resume_by_lightning(tmp_path: Path) -> None:
    def go_on(at: int, max_steps: int, opened: int) -> L.Trainer:
        fit = trainer(
            tmp_path,
            RunJournal(tmp_path / "run", report=False),
            RankTelemetry(),
            Incidents(opened, opened + 1),
            max_steps=max_steps,
        )
        fit.fit(Model(), ckpt_path=tmp_path / f"{at}.ckpt" if at else None, weights_only=False)
        fit.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return fit

    first = go_on(0, 4, 2)
    assert (context_of(first).attempt, context_of(first).scratch["first_incident"]) == (0, 0)
    whole = go_on(4, 6, 5)  # the checkpoint of the last step: nothing is repeated
    assert (context_of(whole).attempt, context_of(whole).scratch["first_incident"]) == (0, 1)
    assert context_of(whole).restart_step == 4
    again = go_on(4, 8, 5)  # steps 4 and 5 once more
    assert (context_of(again).attempt, context_of(again).restart_step) == (1, 4)
    steps = [(e["attempt"], e["step"]) for e in events(tmp_path / "run", "step")]
    assert steps == [*((0, n) for n in range(6)), *((1, n) for n in range(4, 8))]
    resumed = [(e["attempt"], e["step"]) for e in events(tmp_path / "run", "run.resumed")]
    assert resumed == [(0, 4), (1, 4)]


def test_a_failed_run_names_its_exception_without_secrets(tmp_path: Path) -> None:
    callback = RunJournal(tmp_path / "run")
    with pytest.raises(RuntimeError, match="hunter2"):
        trainer(tmp_path, callback).fit(Model(fail_at=3))
    (ended,) = events(tmp_path / "run", "run.ended")
    assert (ended["status"], ended["exception"], ended["step"]) == ("failed", "RuntimeError", 3)
    assert ended["message"] == "cannot log in with password=[redacted] to the store"
    for path in (tmp_path / "run").rglob("*.*"):
        assert b"hunter2" not in path.read_bytes()
    assert callback.summary is not None
    assert callback.summary["status"] == "failed"


def test_the_journal_ends_after_the_other_callbacks_have_heard_of_the_exception(tmp_path: Path) -> None:
    class Late(L.Callback):
        def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
            context_of(trainer).write(trainer, "checkpoint.saved", path="last", checkpoint_step=3, status="exception")

    callback = RunJournal(tmp_path / "run", report=False)
    fit = trainer(tmp_path, callback, Late())
    with pytest.raises(RuntimeError, match="hunter2"):
        fit.fit(Model(fail_at=3))
    names = [e["event"] for e in read_journal(tmp_path / "run")]
    assert names == ["run.started", "checkpoint.saved", "run.ended"]
    assert callback.summary is not None
    assert [c["path"] for c in callback.summary["checkpoints"]] == ["last"]
    assert "on_exception" not in vars(fit.strategy)


def test_a_restart_by_the_launcher_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    fit = trainer(tmp_path, RunJournal(tmp_path / "run", report=False))
    fit.fit(Model())
    infra_event(fit, "link", "node 3 lost its link, token=hunter2hunter2")
    found = [(e["step"], e["kind"], e["text"]) for e in events(tmp_path / "run", "infra.event")]
    assert found == [
        (0, "restart", "torchelastic has started the workers anew, restart number 2"),
        (6, "link", "node 3 lost its link, token=[redacted]"),
    ]
    assert [(e["step"], e["kind"], e["text"]) for e in context_of(fit).infra_events] == found
    with pytest.raises(ValueError, match="needs a kind and a text, found kind '' and text 'x'"):
        infra_event(fit, "", "x")


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(tmp_path, RunJournal(tmp_path / "run", report=False)).fit(Model(fail_at=2, error=KeyboardInterrupt()))
    assert events(tmp_path / "run", "run.ended")[0]["status"] == "interrupted"


def test_without_a_run_dir_a_time_stamp_under_the_root_is_taken(tmp_path: Path) -> None:
    callback = RunJournal(report=False)
    trainer(tmp_path, callback).fit(Model())
    assert callback.run_dir is not None
    assert callback.run_dir.parent == tmp_path / "sentinel"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", callback.run_dir.name)
    assert [e["event"] for e in read_journal(callback.run_dir)] == ["run.started", "run.ended"]


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit = trainer(tmp_path, RunJournal(tmp_path / "run"), fast_dev_run=2)
    fit.fit(Model())
    assert list(tmp_path.iterdir()) == []
    assert isinstance(context_of(fit).journal, LogSink)


def test_validation_alone_opens_no_journal(tmp_path: Path) -> None:
    class Validated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    trainer(tmp_path, RunJournal(tmp_path / "run")).validate(Validated(), verbose=False)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_made_never_stops_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("in the way")
    callback = RunJournal(tmp_path / "run")
    fit = trainer(tmp_path, callback)
    with caplog.at_level(logging.WARNING, logger="lightning_sentinel"):
        fit.fit(Model())
    assert fit.global_step == 6
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory.")
    assert callback.summary is not None
    assert callback.summary["failures"] == [
        f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory. 2 events could not be written.",
        f"The report cannot be written to {tmp_path}/run: File exists.",
    ]


def test_the_journal_changes_no_weight(tmp_path: Path) -> None:
    def weights(*callbacks: L.Callback) -> torch.Tensor:
        L.seed_everything(5)
        model = Model(milestones=(3,))
        trainer(tmp_path, *callbacks).fit(model)
        return model.layer.weight.detach()

    assert torch.equal(weights(), weights(RunJournal(tmp_path / "run"), Incidents(2, 4)))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"step_interval": -1}, "RunJournal: step_interval must be at least 0 (0: no step lines), found -1."),
        ({"report_every_seconds": -2.0}, "RunJournal: report_every_seconds must be at least 0, found -2.0."),
        ({"max_bytes": 0}, "RunJournal: max_bytes must be at least 1, found 0."),
    ],
)
def test_wrong_arguments_are_refused(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RunJournal(**argument)


# ------------------------------------------------------------------------------------------------------ rate and mixture


def test_a_milestone_is_an_event_and_a_smooth_schedule_is_none(tmp_path: Path) -> None:
    trainer(tmp_path, RunJournal(tmp_path / "run", report=False), max_steps=8).fit(Model(milestones=(4,)))
    (change,) = events(tmp_path / "run", "lr.changed")
    assert (change["step"], change["old"], round(change["new"], 9), change["group"]) == (4, 0.1, 0.01, 0)


def test_smooth_schedules_have_no_jumps() -> None:
    shapes = {
        "warm-up": [1e-3 * (n + 1) / 10 for n in range(10)] + [1e-3] * 5,
        "cosine": [0.5e-3 * (1 + torch.cos(torch.tensor(torch.pi * n / 60)).item()) for n in range(55)],
        "exponential": [0.9**n for n in range(30)],
        "from zero": [0.0, 1e-4, 2e-4, 3e-4],
    }
    for name, rates in shapes.items():
        for i in range(1, len(rates)):
            assert lr_jump([[r] for r in rates[max(0, i - 2) : i]], [rates[i]]) is None, (name, i)
    assert lr_jump([[1e-3, 1e-3], [1e-3, 1e-3]], [1e-3, 0.0]) == 1


def test_a_mixture_is_journalled_when_it_moves(tmp_path: Path) -> None:
    class Loader:
        sources = ("prose", "code")

        def __init__(self) -> None:
            self.inner = Model().train_dataloader()
            self.drawn = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in self.inner:
                self.drawn += 1
                yield batch

        def __len__(self) -> int:
            return len(self.inner)

        def mixture_weights(self) -> dict[str, float]:
            return {"prose": 0.7, "code": 0.3} if self.drawn < 5 else {"prose": 0.5, "code": 0.5}

    trainer(tmp_path, RunJournal(tmp_path / "run", report=False)).fit(Model(), Loader())
    first, second = events(tmp_path / "run", "mixture.changed")
    assert (first["weights"], first["old"], first["step"]) == ({"prose": 0.7, "code": 0.3}, None, 0)
    assert (second["weights"], second["old"]) == ({"prose": 0.5, "code": 0.5}, {"prose": 0.7, "code": 0.3})
    assert 3 <= second["step"] <= 5  # the fetcher is one batch ahead
    assert not mixture_moved({"a": 0.5, "b": 0.5}, {"a": 0.51, "b": 0.49})
    assert mixture_moved({"a": 1.0}, {"b": 1.0})


# ------------------------------------------------------------------------------------------------ status, log, reporter


def test_the_status_line_says_health_and_last_action() -> None:
    status = Status()
    assert status.line == "ok"
    status.see("incident.opened", 7, {"incident": {"number": 3}})
    status.see("action.skip_step", 7, {})
    assert status.line == "1 open (#3), skip_step@7"
    status.see("incident.closed", 9, {"incident": {"number": 3, "status": "recovered"}})
    status.see("checkpoint.known_good", 20, {"checkpoint_step": 10})
    assert status.line == "ok, skip_step@7, good@10"
    assert status.changes == 2  # opened, closed
    status.see("action.stop", 30, {})
    assert status.stopped
    assert status.line == "stopped, stop@30, good@10"


def test_the_status_line_keeps_an_escalated_incident_and_names_what_a_rollback_was_for() -> None:
    status = Status()
    status.see("incident.opened", 5, {"incident": {"number": 1, "status": "open"}})
    status.see("action.rollback", 5, {"action": "retry_step", "from_step": 5, "to_step": 5})
    assert status.line == "1 open (#1), retry_step@5"
    status.see("incident.closed", 30, {"incident": {"number": 1, "status": "escalated"}})
    assert status.line == "1 escalated (#1), retry_step@5"
    status.see("incident.opened", 40, {"incident": {"number": 2, "status": "open"}})
    assert status.line == "1 open (#2), 1 escalated (#1), retry_step@5"
    status.see("incident.closed", 50, {"incident": {"number": 2, "status": "recovered"}})
    status.see("action.stop", 60, {})
    assert status.line == "stopped, 1 escalated (#1), stop@60"


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_the_progress_bar_shows_the_status(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    bar = {"tqdm": L.pytorch.callbacks.TQDMProgressBar, "rich": L.pytorch.callbacks.RichProgressBar}[kind]()
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            seen.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module)["sentinel"])

    fit = trainer(
        tmp_path, bar, RunJournal(tmp_path / "run", report=False), Incidents(2, 4), Look(), enable_progress_bar=True
    )
    fit.fit(Model())
    assert seen == ["ok", "1 open (#1)", "1 open (#1)", "ok", "ok", "ok"]
    assert "sentinel" in capsys.readouterr().out
    assert "get_metrics" not in vars(bar)


def test_an_incident_is_said_once_with_the_command_to_look_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == 1:
                with torch.no_grad():
                    next(pl_module.parameters()).fill_(float("nan"))

    callbacks = default_callbacks(tmp_path / "run", policy="observe")
    with caplog.at_level(logging.INFO, logger="lightning_sentinel"):
        trainer(tmp_path, Bad(), *callbacks, max_steps=6).fit(Net(), Loader(64))
    opened = [r for r in caplog.records if r.getMessage().startswith("incident 1 at step 1: ")]
    assert [r.levelname for r in opened] == ["WARNING"]  # once, however many findings there are
    assert opened[0].getMessage().endswith(f". Look: lightning-sentinel report {tmp_path}/run")
    verdicts = [r for r in caplog.records if r.getMessage().startswith("incident 1: ")]
    assert [r.levelname for r in verdicts] == ["WARNING"]


def test_only_rank_0_says_what_all_ranks_decide() -> None:
    first, second = (log_of(SimpleNamespace(is_global_zero=zero)) for zero in (True, False))  # type: ignore[arg-type]
    assert (first.name, first.isEnabledFor(logging.ERROR)) == ("lightning_sentinel", True)
    assert (second.name, second.isEnabledFor(logging.ERROR)) == ("lightning_sentinel.other_ranks", False)


def test_a_closed_incident_brings_a_report_while_training_goes_on(tmp_path: Path) -> None:
    found: list[bool] = []

    class Wait(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                deadline = time.monotonic() + 60
                while not (tmp_path / "run" / "summary.json").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                found.append((tmp_path / "run" / "summary.json").exists())

    callback = RunJournal(tmp_path / "run", report_every_seconds=0)
    # The journal stands before the one who closes the incident, so it sees it at the next step.
    trainer(tmp_path, callback, Incidents(2, 3), Wait()).fit(Model())
    assert found == [True]
    assert callback.summary is not None
    assert callback.summary["failures"] == []
    assert [i["status"] for i in callback.summary["incidents"]] == ["recovered"]


def test_a_report_that_is_still_being_made_at_the_end_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(run_dir: Path) -> subprocess.Popen[bytes]:
        (run_dir / ".report.html.abc").write_text("half a page")
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], stderr=subprocess.PIPE)

    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal._start_reporter", start)
    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal.REPORTER_WAIT_SECONDS", 0.1)
    callback = RunJournal(tmp_path / "run", report_every_seconds=0)
    trainer(tmp_path, callback, Incidents(2, 3)).fit(Model())
    assert callback.summary is not None
    assert (callback.summary["failures"], callback.summary["next_action"]) == ([], "Nothing.")
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


# ------------------------------------------------------------------------------------------------------------- two ranks

TWO_RANKS = """
import sys, warnings
from pathlib import Path
import lightning as L
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[2:]
from collective_limit import CollectiveLimit
from test_run_journal import Model
from lightning_sentinel.callbacks.run_journal import RunJournal
from lightning.pytorch.strategies import DDPStrategy
import os
rank = int(os.environ["LOCAL_RANK"])
root = Path(sys.argv[1])
# Started separately, each rank has made up a folder of its own.
callback = RunJournal(root / f"run-{rank}")
L.Trainer(max_steps=4, callbacks=[CollectiveLimit(), callback], logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=2,
          strategy=DDPStrategy(process_group_backend="gloo"), default_root_dir=root).fit(Model())
"""


@pytest.mark.distributed
def test_both_ranks_write_into_the_folder_of_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    run_ranks(script, tmp_path, Path(__file__).parent, Path(__file__).parents[1])
    assert not (tmp_path / "run-1").exists()
    journals = sorted(p.name for p in (tmp_path / "run-0" / "journal").iterdir())
    assert journals == ["rank-00000.jsonl", "rank-00001.jsonl"]
    for rank in (0, 1):
        read = read_journal(tmp_path / "run-0", rank=rank)
        assert [e["event"] for e in read] == ["run.started", "run.ended"]
        assert read[0]["world_size"] == 2
    assert json.loads((tmp_path / "run-0" / "summary.json").read_text())["status"] == "finished"


def test_an_incident_is_told_when_it_opens_and_its_closing_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 50 s, a report no time, the interval is 120 s: what is pending at the end is told by the fit's own."""
    now = [1000.0]
    started: list[tuple[float, list[str]]] = []

    class Child:
        returncode, stderr = 0, None

        def poll(self) -> int:
            return 0

    def start(run_dir: Path) -> Child:
        told = [str(e["event"]) for e in read_journal(run_dir) if e["event"].startswith("incident.")]
        started.append((now[0], told))
        return Child()

    class Passing(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            now[0] += 50

    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal._start_reporter", start)
    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal.REPORT_SHARE", 0.0)
    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal.time.monotonic", lambda: now[0])
    for steps, opened, expected in (
        # Opened at step 4 (1200 s as the journal's hook next runs), closed a step later: 120 s from there at the soonest.
        (12, 4, [(1200.0, ["incident.opened"]), (1350.0, ["incident.opened", "incident.closed"])]),
        (7, 4, [(1200.0, ["incident.opened"])]),
        # The first is told at once, however young the fit is: it may die before the interval has passed.
        (6, 1, [(1050.0, ["incident.opened"]), (1200.0, ["incident.opened", "incident.closed"])]),
    ):
        now[0] = 1000.0
        started.clear()
        run_dir = tmp_path / f"run-{steps}"
        callback = RunJournal(run_dir, report_every_seconds=120)
        trainer(tmp_path, callback, Incidents(opened, opened + 1), Passing(), max_steps=steps).fit(Model())
        assert started == expected
        assert callback.summary is not None
        assert [i["status"] for i in callback.summary["incidents"]] == ["recovered"]
        assert (run_dir / "report.html").exists()


def test_a_report_that_took_long_is_followed_by_a_long_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in children that take "half a minute": the second one waits for twenty times that, not for the interval."""
    now = [1000.0]
    started: list[float] = []

    class Child:
        returncode, stderr = 0, None

        def __init__(self) -> None:
            started.append(now[0])
            self.done_at = now[0] + 30

        def poll(self) -> int | None:
            return 0 if now[0] >= self.done_at else None

        def wait(self, timeout: float | None = None) -> int:
            self.done_at = now[0]
            return 0

    class Passing(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            now[0] += 50
            incident = Incident(trainer.global_step, trainer.global_step, trainer.global_step, attempt=0, tokens=0)
            context_of(trainer).write(trainer, "incident.opened", incident=incident.to_dict())
            incident.status = IncidentStatus.RECOVERED
            context_of(trainer).write(trainer, "incident.closed", incident=incident.to_dict())

    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal._start_reporter", lambda run_dir: Child())
    monkeypatch.setattr("lightning_sentinel.callbacks.run_journal.time.monotonic", lambda: now[0])
    callback = RunJournal(tmp_path / "run", report_every_seconds=60)
    trainer(tmp_path, callback, Passing(), max_steps=30).fit(Model())
    # Seen as done a step later, 50 s after it began: the next one comes 20 times 50 s later.
    assert started == [1050.0, 2050.0]
