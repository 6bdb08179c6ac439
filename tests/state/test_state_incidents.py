"""Whole incidents in real runs: answered by going back, during another's probation, after a resume, found late."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from state_world import Cell, Net, Recorder, Samples, assert_same_run, make_trainer, map_loader, run, same, seed_all
from torch.utils.data import DataLoader

from lightning_sentinel import ForensicCheckpoint, IncidentResponse, RankTelemetry, Rollback, RunJournal
from lightning_sentinel.checkpoint import CheckpointStore
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Action, Finding, FindingKind, Severity
from lightning_sentinel.record import StepRecord
from lightning_sentinel.state import lightning_private as private

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Alarm(L.Callback):
    """States a finding at chosen steps, each once: ``{step: since_step}``."""

    def __init__(self, at: dict[int, int], kind: FindingKind = FindingKind.SPIKE) -> None:
        self.at, self.kind = dict(at), kind

    def observe(self, record: StepRecord) -> list[Finding]:
        since = self.at.pop(record.step, None)
        if since is None:
            return []
        return [Finding(self.kind, "alarm", record.step, 9.0, 1.0, "a test", Severity.INCIDENT, since)]


class FailedError(Exception):
    """Ends the process's training."""


class Fail(L.Callback):
    """Raises before a step's batch, once per process."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise FailedError


def names_of(batch: Any) -> list[str]:
    return [str(int(i)) for i in batch[2]]


def suite(
    folder: Path,
    *extra: L.Callback,
    ladder: tuple[str, ...] = ("rollback_replay", "rollback_replay", "rollback_replay", "stop"),
    response: dict[str, Any] | None = None,
    rollback: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> list[L.Callback]:
    ladders = {"undetermined/loss": ladder}
    return [
        RunJournal(folder, report=False),
        *extra,
        RankTelemetry(sample_id_fn=names_of),
        IncidentResponse(
            **{"mode": "recover", "ladders": ladders, "triage": False, "probation_steps": 8} | (response or {})
        ),
        Rollback(**{"every_n_steps": 5, "keep": 3} | (rollback or {})),
        ForensicCheckpoint(
            **{"every_n_steps": 4, "probation_steps": 2, "keep": 9, "save_on_exception": False} | (checkpoint or {})
        ),
    ]


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    lines = (folder / "journal" / "rank-00000.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] in names]


# ------------------------------------------------------------------------------------------------ found late


@pytest.mark.parametrize(
    "cell",
    [
        Cell("plain"),
        Cell("accumulate", trainer={"accumulate_grad_batches": 2, "max_epochs": 6}, fp16=True),
        Cell("workers", loader=lambda: map_loader(2)),
        Cell("validation", validation=True, trainer={"val_check_interval": 4}, net={"scheduler": "plateau"}),
    ],
    ids=lambda c: c.name,
)
def test_what_is_found_late_goes_back_to_a_known_good_checkpoint_in_place(cell: Cell, tmp_path: Path) -> None:
    reference = run(cell)
    alarm = Alarm({26: 9}, FindingKind.LEVEL_SHIFT)
    outcome = run(cell, *suite(tmp_path, alarm, rollback={"keep": 2}, response={"probation_steps": 4}))
    (back,) = events(tmp_path, "action.rollback")
    assert (back["from_step"], back["to_step"], back["checkpoint"]) == (9, 8, "step-00000008")
    assert_same_run(outcome, reference)
    store = CheckpointStore(tmp_path / "checkpoints")
    # those of the abandoned path stay poisoned, those of the new one have earned their place
    found = {c.path.name: str(c.status.status) for c in store.checkpoints()}
    assert {s for n, s in found.items() if "attempt" not in n and n > "step-00000008"} == {"poisoned"}
    assert found["step-00000008"] == "known_good"
    assert {s for n, s in found.items() if "attempt" in n and n < "step-00000032"} == {"known_good"}
    (incident,) = context_of(outcome.trainer).incidents
    assert incident.status == "recovered"


def test_a_checkpoint_of_an_abandoned_path_or_a_damaged_one_is_not_gone_back_to(tmp_path: Path) -> None:
    class Damage(L.Callback):
        """Turns one bit of the known-good checkpoint of step 8."""

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 29:
                path = tmp_path / "checkpoints" / "step-00000008" / "model.pt"
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(bytes(data))

    reference = run(Cell("damaged"))
    alarm = Alarm({30: 9}, FindingKind.LEVEL_SHIFT)
    outcome = run(Cell("damaged"), Damage(), *suite(tmp_path, alarm, rollback={"keep": 2}))
    assert_same_run(outcome, reference)
    (back,) = events(tmp_path, "action.rollback")
    assert (back["to_step"], back["checkpoint"]) == (4, "step-00000004")
    (refused,) = events(tmp_path, "checkpoint.refused")
    assert refused["path"].endswith("step-00000008")
    assert "model.pt" in refused["reason"]
    rollback = Rollback()
    rollback.load_state_dict({"executed": 2, "starts": {0: 0, 1: 10, 2: 4}})
    assert [rollback._on_path(*c) for c in ((0, 4), (0, 8), (1, 10), (1, 3), (2, 30))] == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_newer_checkpoint_is_better_than_an_old_snapshot(tmp_path: Path) -> None:
    """Memory holds 5 and 20 or so; what began at 13 need not go back to 5 where 12 is known-good on disk."""
    reference = run(Cell("newer"))
    outcome = run(Cell("newer"), *suite(tmp_path, Alarm({18: 13}, FindingKind.LEVEL_SHIFT), rollback={"keep": 2}))
    (back,) = events(tmp_path, "action.rollback")
    assert (back["to_step"], back["checkpoint"]) == (12, "step-00000012")
    assert_same_run(outcome, reference)


def test_without_any_old_restore_point_the_reason_says_so(tmp_path: Path) -> None:
    alarm = Alarm({30: 3}, FindingKind.LEVEL_SHIFT)
    outcome = run(Cell("none"), *suite(tmp_path, alarm, rollback={"keep": 2}, checkpoint={"every_n_steps": 10}))
    (incident,) = context_of(outcome.trainer).incidents
    passed = incident.actions[0]["passed_over"]
    assert "rollback_replay: no snapshot and no known-good checkpoint is older than step 3" in passed


# ---------------------------------------------------------------------------------------- one during another


@pytest.mark.parametrize(("since", "restored"), [(21, 20), (19, 15)], ids=["after-it", "to-before-it"])
def test_a_rollback_during_the_probation_of_another(since: int, restored: int, tmp_path: Path) -> None:
    reference = run(Cell("two"))
    callbacks = suite(tmp_path, Alarm({16: 16, 21: since}), checkpoint={"every_n_steps": 0})
    outcome = run(Cell("two"), *callbacks)
    assert [b["to_step"] for b in events(tmp_path, "action.rollback")] == [15, restored]
    first, second = context_of(outcome.trainer).incidents
    # 8 healthy steps after 16 and after 21, each counted once although some are trained twice
    assert [(i.status, i.closed_step) for i in (first, second)] == [("recovered", 24), ("recovered", 29)]
    assert context_of(outcome.trainer).attempt == 2
    assert_same_run(outcome, reference)


def test_trouble_that_comes_back_late_does_not_go_back_past_newer_restore_points(tmp_path: Path) -> None:
    """15 led to 18; what comes back at 20 blames 15, what comes back at 26 has passed that way and goes to 25."""
    for later, restored, kind in ((20, 10, FindingKind.DIVERGENCE), (26, 25, FindingKind.DIVERGENCE)):
        folder = tmp_path / str(later)
        response = {"recovered_z": 1e-9}  # a loss off its forecast by anything keeps the incident open
        callbacks = suite(folder, Alarm({18: 18, later: later}, kind), response=response, rollback={"keep": 4})
        outcome = run(Cell("again"), *callbacks)
        assert len(context_of(outcome.trainer).incidents) == 1
        assert [b["to_step"] for b in events(folder, "action.rollback")] == [15, restored]


# -------------------------------------------------------------------------------------------- around a resume


def interrupted(
    folder: Path, cell: Cell, make: Callable[[], list[L.Callback]], stop: int, again: tuple[L.Callback, ...] = ()
) -> Any:
    """One process that ends before ``stop``, and the outcome of a second one that continues it, on another seed."""
    with pytest.raises(FailedError):
        run(cell, Fail(stop), *make())
    callbacks = make()
    callbacks[-1].resume = "latest"  # type: ignore[attr-defined]
    return run(cell, *again, *callbacks, seed=5)


@pytest.mark.parametrize(("step", "checkpoint"), [(20, "step-00000020"), (21, None), (23, None)])
def test_a_rollback_right_after_a_resume(step: int, checkpoint: str | None, tmp_path: Path) -> None:
    """At the very first step the state of this process proves nothing: the checkpoint itself is put back."""
    reference = run(Cell("resumed"))
    outcome = interrupted(tmp_path, Cell("resumed"), lambda: suite(tmp_path), 23, (Alarm({step: step}),))
    assert events(tmp_path, "run.resumed")[0]["checkpoint_step"] == 20
    (back,) = events(tmp_path, "action.rollback")
    assert (back["to_step"], back.get("checkpoint")) == (20, checkpoint)
    assert_same_run(outcome, reference)


def test_a_retry_of_the_first_step_after_a_resume_whose_update_got_through(tmp_path: Path) -> None:
    """The light snapshot turns out to be of no use at the batch's end; what is chosen then must not end the run."""

    class Careless(L.Callback):
        """Asks for another try without keeping the update out."""

        def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 20 and not rollback.executed:
                rollback.request(trainer, before_step=20, action=Action.RETRY_STEP, incident=1, reason="a test")

    reference = run(Cell("resumed"))
    with pytest.raises(FailedError):
        run(Cell("resumed"), Fail(23), *suite(tmp_path))
    callbacks = suite(tmp_path)
    rollback, callbacks[-1].resume = callbacks[-2], "latest"  # type: ignore[attr-defined]
    outcome = run(Cell("resumed"), Careless(), *callbacks, seed=5)
    (back,) = events(tmp_path, "action.rollback")
    assert (back["to_step"], back["light"]) == (20, False)
    assert_same_run(outcome, reference)


def test_resume_in_the_middle_of_an_incident(tmp_path: Path) -> None:
    reference = run(Cell("middle"))
    outcome = interrupted(tmp_path, Cell("middle"), lambda: suite(tmp_path, Alarm({18: 18})), 22)
    (incident,) = context_of(outcome.trainer).incidents
    assert (incident.opened_step, incident.status, incident.closed_step) == (18, "recovered", 26)
    assert [a["action"] for a in incident.actions] == ["rollback_replay"]
    assert [e["incident"]["number"] for e in events(tmp_path, "incident.opened")] == [1]
    assert len(events(tmp_path, "incident.closed")) == 1
    assert_same_run(outcome, reference)


@pytest.mark.parametrize("permanent", [False, True])
def test_resume_during_a_reduction_of_the_learning_rate(permanent: bool, tmp_path: Path) -> None:
    def make(folder: Path) -> list[L.Callback]:
        response = {"lr_factor": 0.25, "lr_steps": 8, "lr_permanent": permanent}
        return suite(folder, Alarm({18: 18}), ladder=("reduce_lr", "stop"), response=response)

    reference = run(Cell("reduced"), *make(tmp_path / "whole"))
    outcome = interrupted(tmp_path / "cut", Cell("reduced"), lambda: make(tmp_path / "cut"), 22)
    assert_same_run(outcome, reference)
    plain = run(Cell("reduced"))
    assert plain.steps[:19] == reference.steps[:19]  # step 18 itself is held
    assert plain.steps[19:] != reference.steps[19:]
    for folder in (tmp_path / "whole", tmp_path / "cut"):
        (started,) = events(folder, "experiment.started")
        ended = events(folder, "experiment.ended")
        assert (started["step"], [e["step"] for e in ended]) == (18, [] if permanent else [27])
        assert not [e for e in events(folder, "finding") if e["finding"]["kind"] == "restart_jump"]


# ------------------------------------------------------------------------------------------------------ misuse


def test_without_journal_logger_or_checkpoint_it_recovers_all_the_same() -> None:
    reference = run(Cell("bare"))
    parts = [Alarm({18: 18}), *suite(Path("unused"))[1:4]]
    outcome = run(Cell("bare"), *parts)
    assert outcome.calls == reference.calls + 4
    assert_same_run(outcome, reference)


def test_fast_dev_run_writes_nothing_and_still_goes_back(tmp_path: Path) -> None:
    cell = Cell("dev", trainer={"fast_dev_run": 6})
    reference = run(cell)
    folder = tmp_path / "run"
    outcome = run(cell, *suite(folder, Alarm({3: 3}), rollback={"every_n_steps": 2}))
    assert outcome.calls == reference.calls + 2
    assert_same_run(outcome, reference)
    assert not (folder / "checkpoints").exists()


def test_a_second_fit_on_one_trainer_goes_back_as_the_first_did(tmp_path: Path) -> None:
    def twice(*callbacks: L.Callback) -> tuple[L.Trainer, Net, Recorder]:
        recorder = Recorder()
        trainer = make_trainer(Cell("twice", trainer={"max_epochs": 1}, validation=True), [recorder, *callbacks])
        seed_all(0)
        module, loader, validation = Net(), map_loader(), DataLoader(Samples(8), batch_size=4)
        seed_all(1)
        trainer.fit(module, loader, validation)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader, validation)
        return trainer, module, recorder

    _, clean, reference = twice()
    trainer, module, recorder = twice(*suite(tmp_path, Alarm({8: 8, 17: 17})))
    assert [b["to_step"] for b in events(tmp_path, "action.rollback")] == [5, 15]
    assert recorder.steps == reference.steps
    assert len(recorder.steps) == 24
    same(module.state_dict(), clean.state_dict())
    assert private.advance_control(trainer).before == []
    assert private.advance_control(trainer).after == []
