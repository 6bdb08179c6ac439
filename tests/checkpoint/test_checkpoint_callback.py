"""ForensicCheckpoint in a real Trainer: probation, poison, failures, exceptions, signals, and what a resume notices."""

from __future__ import annotations

import json
import os
import signal
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import lightning as L
import pytest
import torch
from checkpoint_disk import FullDisk, QuickDisk, ReadOnlyDisk
from checkpoint_world import Net, events, fit, loader, same_weights, suite

from lightning_sentinel import ForensicCheckpoint
from lightning_sentinel.checkpoint import CheckpointError, CheckpointStore
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident, IncidentStatus, Severity


class At(L.Callback):
    """Runs something at the start of the batch of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act, self.done = step, act, False

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            self.act(trainer)


class Gate(L.Callback):
    """Takes the restart findings at the gate of the first step, as the telemetry does; put before ForensicCheckpoint."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        self.findings += context_of(trainer).scratch.pop("restart_findings", [])


def store_of(run_dir: Path) -> CheckpointStore:
    return CheckpointStore(run_dir / "checkpoints")


def statuses(run_dir: Path) -> dict[int, str]:
    return {c.step: str(c.status.status) for c in store_of(run_dir).checkpoints()}


def open_incident(trainer: L.Trainer, **changes: Any) -> Incident:
    finding = Finding(FindingKind.SPIKE, "test", trainer.global_step, 1.0, 0.5, "a spike", Severity.INCIDENT)
    incident = Incident(1, trainer.global_step, trainer.global_step, 0, 0, [finding])
    for name, value in changes.items():
        setattr(incident, name, value)
    context_of(trainer).incidents.append(incident)
    return incident


# ------------------------------------------------------------------------------------------- saving and probation


def test_a_checkpoint_becomes_known_good_after_its_probation(tmp_path: Path) -> None:
    fit(suite(tmp_path, every_n_steps=4, probation_steps=6, keep=2), max_steps=18)
    saved = events(tmp_path, "checkpoint.saved")
    assert [e["step"] for e in saved] == [4, 8, 12, 16]
    good = events(tmp_path, "checkpoint.known_good")
    assert [(e["checkpoint_step"], e["step"]) for e in good] == [(4, 10), (8, 14), (12, 18)]
    assert statuses(tmp_path) == {8: "known_good", 12: "known_good", 16: "candidate"}
    assert [e["checkpoint_step"] for e in events(tmp_path, "checkpoint.removed")] == [4]
    by_path = {e["path"]: e["sha256"] for e in saved}
    assert all(e["sha256"] == by_path[e["path"]] for e in good)
    assert not events(tmp_path, "checkpoint.failed")


def test_contents_say_where_they_come_from(tmp_path: Path) -> None:
    config = {"model": {"width": 16}, "api_key": "k-123", "url": "https://ann:hunter2@host/x", "pad_token": "<pad>"}
    fit(suite(tmp_path, config=config), max_steps=6)
    store = store_of(tmp_path)
    checkpoint = store.checkpoints()[0]
    assert store.verify(checkpoint.path) == []
    assert sorted(checkpoint.manifest.files) == ["model.pt", "optimizer.pt", "rank-00000.pt", "run.json"]
    assert (checkpoint.manifest.step, checkpoint.manifest.world_size) == (5, 1)
    assert checkpoint.manifest.tokens == 20  # samples stand in where a batch has no tokens
    assert checkpoint.manifest.versions["torch"] == version("torch")
    run = store.load_json(checkpoint, "run.json")
    assert run["config"] == {
        "model": {"width": 16},
        "api_key": "[redacted]",
        "url": "https://[redacted]@host/x",
        "pad_token": "<pad>",
    }
    assert run["topology"]["strategy"] == "SingleDeviceStrategy"
    own = store.load_torch(checkpoint, "rank-00000.pt")
    assert set(own["snapshot"]["rng"]) >= {"python", "numpy", "torch"}
    position = own["journal"]
    before = (tmp_path / "journal" / position["file"]).read_bytes()[: position["bytes"]]
    assert [e["step"] for e in map(json.loads, before.splitlines()) if e["event"] == "step"] == [0, 1, 2, 3, 4]
    assert (checkpoint.path / "rank-00000.pt").stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in "".join(p.read_text(errors="ignore") for p in tmp_path.rglob("*") if p.is_file())


def test_saving_changes_nothing_in_the_training(tmp_path: Path) -> None:
    plain, _ = fit([])
    watched, _ = fit(suite(tmp_path, every_n_steps=1, write_lightning_ckpt=True))
    assert plain.steps == watched.steps
    assert same_weights(plain, watched)


def test_an_incident_poisons_what_came_after_its_onset_and_delays_probation(tmp_path: Path) -> None:
    checkpoint = ForensicCheckpoint(every_n_steps=4, probation_steps=6, keep=9)

    def strike(trainer: L.Trainer) -> None:
        incident = open_incident(trainer, since_step=9)
        checkpoint.on_incident(trainer, incident.since_step)

    def recover(trainer: L.Trainer) -> None:
        context_of(trainer).incidents[0].status = IncidentStatus.RECOVERED
        checkpoint.on_recovered(trainer, 1)

    fit([*suite(tmp_path)[:2], At(13, strike), At(18, recover), checkpoint], max_steps=26)
    # 12 holds step 9's update (rotation keeps only the newest poisoned one); 16 was saved while nobody had answered
    assert statuses(tmp_path) == {
        4: "known_good",
        8: "known_good",
        16: "poisoned",
        20: "known_good",
        24: "candidate",
    }
    good = {e["checkpoint_step"]: e["step"] for e in events(tmp_path, "checkpoint.known_good")}
    assert good == {4: 10, 8: 24, 20: 26}  # 8: six healthy steps after the incident closed
    poisoned = [(e["checkpoint_step"], e["reason"]) for e in events(tmp_path, "checkpoint.poisoned")]
    assert poisoned == [
        (12, "since step 9: incident 1"),
        (16, "since step 9: incident 1 is open and unanswered"),
    ]


def test_an_answered_incident_leaves_candidates(tmp_path: Path) -> None:
    def strike(trainer: L.Trainer) -> None:
        open_incident(trainer, actions=[{"action": "skip_step", "step": 5, "attempt": 0, "reason": ""}])

    fit([At(5, strike), *suite(tmp_path, every_n_steps=4, probation_steps=2, keep=9)], max_steps=14)
    assert statuses(tmp_path) == {4: "candidate", 8: "candidate", 12: "candidate"}


def test_what_was_rotated_away_while_its_promotion_waited_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates 4, 8 and 12 pass while 16 is still being written, which then rotates 8 away: keep is 2."""

    class SlowDisk(QuickDisk):
        moves = threading.Event()

        def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
            assert self.moves.wait(60)
            super().write(file, data)

    disk = SlowDisk()
    disk.moves.set()
    monkeypatch.setattr("lightning_sentinel.checkpoint.store.Disk", lambda: disk)

    def strike(trainer: L.Trainer) -> None:
        open_incident(trainer, actions=[{"action": "skip_step", "step": 2, "attempt": 0, "reason": ""}])

    def recover(trainer: L.Trainer) -> None:
        callbacks[-1]._fit.keeper.settle(wait=True)  # type: ignore[attr-defined]  # 12 is on the disk
        disk.moves.clear()
        context_of(trainer).incidents[0].status = IncidentStatus.RECOVERED

    callbacks = suite(tmp_path, every_n_steps=4, probation_steps=2, keep=2)
    moments = [At(2, strike), At(15, recover), At(18, lambda _: disk.moves.set())]
    fit([*moments, *callbacks], max_steps=19)
    assert [e["checkpoint_step"] for e in events(tmp_path, "checkpoint.removed")] == [8]
    assert events(tmp_path, "checkpoint.failed") == []
    assert statuses(tmp_path) == {4: "known_good", 12: "known_good", 16: "known_good"}


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("disk", "reason"),
    [(FullDisk(3000), "No space left on device"), (FullDisk(0), "No space left"), (ReadOnlyDisk(), "Read-only file")],
)
def test_training_goes_on_where_nothing_can_be_saved(
    disk: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit(suite(tmp_path, every_n_steps=5), max_steps=8)
    assert statuses(tmp_path) == {5: "known_good"}
    monkeypatch.setattr("lightning_sentinel.checkpoint.store.Disk", lambda: disk)
    _, trainer = fit(suite(tmp_path, every_n_steps=2, write_lightning_ckpt=True), seeds=5, max_steps=20)
    assert trainer.global_step == 20
    failed = [e for e in events(tmp_path, "checkpoint.failed") if e["what"] == "saving"]
    assert [e["checkpoint_step"] for e in failed] == [6, 8, 10, 12, 14, 16, 18, 20]
    assert all(reason in e["reason"] for e in failed)
    assert statuses(tmp_path) == {5: "known_good"}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name] == []
    told = [r for r in caplog.records if "saving failed" in r.message]
    assert len(told) == 1
    assert "Training goes on." in told[0].message
    at_the_end = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert [m for m in at_the_end if reason in m] == at_the_end
    assert len([m for m in at_the_end if m.startswith("8 checkpoints failed, steps 6 to 20; the first: ")]) == 1
    assert len(at_the_end) == 1


def test_state_that_cannot_be_read_back_is_a_failure_now_not_at_the_resume(tmp_path: Path) -> None:
    class Odd(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    _, trainer = fit([Odd(), *suite(tmp_path)], max_steps=6)
    assert trainer.global_step == 6
    assert "object" in events(tmp_path, "checkpoint.failed")[0]["reason"]


# ------------------------------------------------------------------------------------------ exceptions and signals


def test_an_exception_is_journalled_and_leaves_a_dump(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom at step 7"):
        fit(suite(tmp_path), module=lambda: Net(fail_at=7))
    written = events(tmp_path, "exception")
    assert [(e["type"], e["message"]) for e in written] == [("RuntimeError", "boom at step 7, password=[redacted]")]
    assert written[0]["frames"][-1].startswith("checkpoint_world.py:")
    names = [json.loads(x)["event"] for x in (tmp_path / "journal" / "rank-00000.jsonl").read_text().splitlines()]
    assert names[-1] == "run.ended"
    store = store_of(tmp_path)
    dump = store.root / "exception-rank-00000"
    assert store.verify(dump) == []
    assert store.load_torch(store.read(dump), "rank-00000.pt")["snapshot"]["step"] == 7
    assert store.read(dump).status.reason == "RuntimeError on rank 0 at step 7"
    assert dump not in store.paths()  # never resumed from by itself


def test_after_an_exception_the_failing_batch_is_tried_again(tmp_path: Path) -> None:
    from lightning_sentinel import Rollback

    def callbacks() -> list[Any]:
        parts = suite(tmp_path, every_n_steps=5)
        return [*parts[:2], Rollback(every_n_steps=3), parts[2]]

    clean, _ = fit([])
    with pytest.raises(RuntimeError, match="boom") as caught:
        fit(callbacks(), module=lambda: Net(fail_at=7))
    first = caught.value.world[0]  # type: ignore[attr-defined]
    # the newest restart point in memory (step 6) was written down
    assert [e["checkpoint_step"] for e in events(tmp_path, "checkpoint.saved")] == [5, 7, 6]
    parts = callbacks()
    parts[-1].resume = "latest"
    again, _ = fit(parts, seeds=3)
    assert [s for s in first.steps if s[2] < 6] + again.steps == clean.steps
    assert same_weights(clean, again)


def test_sigterm_leaves_a_checkpoint_of_this_very_step(tmp_path: Path) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    clean, _ = fit([])
    strike = At(7, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SIGTERMException):
        fit([strike, *suite(tmp_path, every_n_steps=0)])
    assert statuses(tmp_path) == {8: "candidate"}
    again, _ = fit(suite(tmp_path, every_n_steps=0), seeds=3)
    assert again.steps == clean.steps[8:]
    assert same_weights(clean, again)


# ------------------------------------------------------------------------------------------- choosing a checkpoint


def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(tmp_path: Path) -> None:
    fit(suite(tmp_path, every_n_steps=4, probation_steps=1, keep=9), max_steps=14)
    model = tmp_path / "checkpoints" / "step-00000012" / "model.pt"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    module, _ = fit(suite(tmp_path), seeds=3, max_steps=14)
    assert module.steps[0][2] == 8
    assert [(e["path"][-13:], e["reason"]) for e in events(tmp_path, "checkpoint.refused")] == [
        ("step-00000012", "model.pt fails SHA-256")
    ]
    resumed = events(tmp_path, "run.resumed")[0]
    assert (resumed["checkpoint_step"], resumed["status"]) == (8, "known_good")
    assert resumed["sha256"] == store_of(tmp_path).read(Path(resumed["path"])).sha256
    assert resumed["attempt"] == 1  # steps 8 to 13 are in the journal already


def test_no_usable_checkpoint_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    fit(suite(tmp_path), max_steps=6)
    (tmp_path / "checkpoints" / "step-00000005" / "rank-00000.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"step-00000005: rank-00000.pt is missing.*set resume=None to start afresh"
    ):
        fit(suite(tmp_path), max_steps=6)
    module, _ = fit(suite(tmp_path, resume=None), max_steps=6)
    assert module.steps[0][2] == 0


@pytest.mark.parametrize("shared", [[], ["model.pt"]], ids=["weights divided", "weights whole"])
def test_a_data_position_for_each_rank_is_refused_by_another_number_of_ranks(shared: list[str], tmp_path: Path) -> None:
    reason = "StatefulDataLoader keeps a data position for each rank; start it with 2 ranks, or use a loader"
    store = store_of(tmp_path)
    pending = store.begin(5)
    for name in ["rank-00000.pt", "rank-00001.pt", *shared]:
        pending.write_bytes(name, b"")
    store.publish(pending, step=5, world_size=2)
    with pytest.raises(CheckpointError, match=f"holds the state of 2 ranks, this run has 1, and {reason}"):
        fit(suite(tmp_path), max_steps=6)


def test_a_resumed_state_is_known_good_in_memory_only_if_its_checkpoint_is(tmp_path: Path) -> None:
    from lightning_sentinel import Rollback

    fit(suite(tmp_path, every_n_steps=4, probation_steps=3, keep=9), max_steps=10)
    for resume, step, good in (("auto", 4, True), ("latest", 8, False)):
        parts = suite(tmp_path, resume=resume, every_n_steps=0)
        _, trainer = fit([*parts[:2], Rollback(), parts[2]], max_steps=10)
        assert [(s.step, s.known_good) for s in context_of(trainer).snapshots] == [(step, good)]


def test_a_permanent_change_of_the_run_is_named_in_its_checkpoints(tmp_path: Path) -> None:
    begin = At(6, lambda trainer: context_of(trainer).scratch.update(experiment="lr-1-6"))
    fit([begin, *suite(tmp_path, every_n_steps=4, probation_steps=1, keep=9)], max_steps=10)
    found = {c.step: c.manifest.extra["experiment"] for c in store_of(tmp_path).checkpoints()}
    assert found == {4: None, 8: "lr-1-6"}
    _, trainer = fit(suite(tmp_path), max_steps=10)
    assert context_of(trainer).restart_step == 8
    assert context_of(trainer).scratch["experiment"] == "lr-1-6"


def test_resume_from_a_path_and_from_the_latest(tmp_path: Path) -> None:
    fit(suite(tmp_path, every_n_steps=4, probation_steps=3, keep=9), max_steps=10)
    assert statuses(tmp_path) == {4: "known_good", 8: "candidate"}
    options: dict[str, Any] = {"every_n_steps": 0}
    for resume, first in (("auto", 4), ("latest", 8), (tmp_path / "checkpoints" / "step-00000008", 8), (None, 0)):
        module, _ = fit(suite(tmp_path, resume=resume, **options), max_steps=10)
        assert module.steps[0][2] == first


def test_a_second_fit_and_fast_dev_run_are_left_alone(tmp_path: Path) -> None:
    fit(suite(tmp_path / "dev"), fast_dev_run=2)
    assert not (tmp_path / "dev").exists()
    module, trainer = fit(suite(tmp_path), max_steps=6)
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(module, loader())
    assert [s[2] for s in module.steps] == [*range(6), 6, 7, 8]


def test_a_trainer_on_an_empty_run_folder_starts_from_scratch(tmp_path: Path) -> None:
    module, _ = fit([*suite(tmp_path)[:2], ForensicCheckpoint(5, run_dir=tmp_path / "own")], max_steps=6)
    assert module.steps[0][2] == 0
    assert (tmp_path / "own" / "checkpoints" / "step-00000005").is_dir()
    assert not events(tmp_path, "run.resumed")


# --------------------------------------------------------------------------------------------- after the restart


def restarted(
    tmp_path: Path, strike: Any, *, data: Any = loader
) -> tuple[list[Finding], ForensicCheckpoint, list[Any]]:
    with pytest.raises(RuntimeError, match="boom"):
        fit(suite(tmp_path, save_on_exception=False), module=lambda: Net(fail_at=8))
    gate, parts, plans = Gate(), suite(tmp_path), []
    keep = At(5, lambda trainer: plans.append(parts[2].saved_schedule(trainer)))
    late = At(7, lambda trainer: plans.append(parts[2].saved_schedule(trainer)))
    fit([At(5, strike), keep, late, gate, *parts], seeds=3, data=data, max_steps=8)
    return gate.findings, parts[2], plans


def reset_scheduler(trainer: L.Trainer) -> None:
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    trainer.optimizers[0].param_groups[0]["lr"] = 1e-2
    scheduler.last_epoch, scheduler._step_count = -1, 0
    scheduler.step()


def do_nothing(trainer: L.Trainer) -> None:
    return None


def test_a_scheduler_reset_after_the_resume_is_named(tmp_path: Path) -> None:
    findings, _, plans = restarted(tmp_path, reset_scheduler)
    assert [(f.kind, f.culprits, f.restart_aligned, f.step) for f in findings] == [
        (FindingKind.RESTART_JUMP, ("scheduler",), True, 5)
    ]
    assert findings[0].severity is Severity.INCIDENT
    assert findings[0].evidence["saved_rates"] == [pytest.approx(9e-3)]
    assert findings[0].evidence["live_rates"] == [1e-2]
    assert plans[0]["schedulers"][0]["last_epoch"] == 5
    assert plans[0]["rates"] == [[pytest.approx(9e-3)]]
    assert plans[1] is None  # after the first update the saved plan is history


@pytest.mark.parametrize(
    ("culprit", "strike"),
    [
        ("optimizer:lr", lambda t: t.optimizers[0].param_groups[0].update(lr=0.5)),
        ("optimizer:step", lambda t: [s["step"].zero_() for s in t.optimizers[0].state.values()]),
    ],
)
def test_an_optimizer_that_jumped_is_named(culprit: str, strike: Any, tmp_path: Path) -> None:
    findings, _, _ = restarted(tmp_path, strike)
    assert findings[0].culprits == (culprit,)
    # what follows may only be an alarm about the losses that come of it
    assert {f.severity for f in findings[1:]} <= {Severity.ALARM}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("known_by", ["checkpoint", "journal"])
def test_a_schedule_that_jumped_is_named_after_a_resume_by_lightning(known_by: str, tmp_path: Path) -> None:
    fit(suite(tmp_path, every_n_steps=8, write_lightning_ckpt=True), max_steps=10)
    file = (tmp_path / "checkpoints" / "step-00000008" / "lightning.ckpt").rename(tmp_path / "eight.ckpt")
    wrong, strike = file, reset_scheduler
    if known_by == "journal":
        # no checkpoint of the suite, and the file itself is what is wrong
        store_of(tmp_path).checkpoints()[0].path.rename(tmp_path / "away")
        content, wrong, strike = torch.load(file, weights_only=False), tmp_path / "wrong.ckpt", do_nothing
        content["lr_schedulers"][0] |= {"last_epoch": 0, "_step_count": 1, "_last_lr": [1e-2]}
        content["optimizer_states"][0]["param_groups"][0]["lr"] = 1e-2
        torch.save(content, wrong)
    for path, change, jumped in ((file, do_nothing, False), (wrong, strike, True)):
        gate = Gate()
        fit([At(8, change), gate, *suite(tmp_path, every_n_steps=0)], seeds=3, ckpt_path=path, max_steps=9)
        found = [f for f in gate.findings if f.culprits == ("scheduler",)]
        assert len(found) == jumped
    severity = Severity.INCIDENT if known_by == "checkpoint" else Severity.ALARM
    assert (found[0].kind, found[0].severity, found[0].step) == (FindingKind.RESTART_JUMP, severity, 8)
    assert found[0].evidence["saved_rates"] == [pytest.approx(9e-3)]
    assert found[0].evidence["live_rates"] == [1e-2]


def test_nothing_is_found_after_a_healthy_restart(tmp_path: Path) -> None:
    findings, _, _ = restarted(tmp_path, lambda trainer: None)
    assert findings == []
    assert events(tmp_path, "run.compared")[0]["equal_losses"] == 3


def test_other_samples_than_recorded_are_named(tmp_path: Path) -> None:
    class Renamed(torch.utils.data.Dataset):
        def __init__(self) -> None:
            from checkpoint_world import Samples

            self.base = Samples()

        def __len__(self) -> int:
            return len(self.base)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return self.base[i] | {"sample_id": f"other-{i}"}

    from torchdata.stateful_dataloader import StatefulDataLoader

    data = lambda: StatefulDataLoader(Renamed(), batch_size=4, num_workers=0, shuffle=True)  # noqa: E731
    findings, _, _ = restarted(tmp_path, lambda trainer: None, data=data)
    assert [f.culprits for f in findings] == [("cursor",)]
    assert findings[0].evidence["live"][0].startswith("other-")
    assert findings[0].evidence["lost"] == findings[0].evidence["expected"]


def test_incidents_and_quarantine_survive_and_lost_ones_are_closed(tmp_path: Path) -> None:
    from lightning_sentinel.data.quarantine import QuarantineLedger

    def early(trainer: L.Trainer) -> None:
        open_incident(trainer, status=IncidentStatus.RECOVERED)
        context_of(trainer).ledger = QuarantineLedger()
        context_of(trainer).ledger.add(["sample:s3"], step=2, incident=1, policy="recover", reason="test")
        context_of(trainer).infra_events.append({"node": "a", "event": "ecc"})

    def late(trainer: L.Trainer) -> None:
        incident = open_incident(trainer, number=2)
        context_of(trainer).write(trainer, "incident.opened", incident=incident.to_dict())

    with pytest.raises(RuntimeError, match="boom"):
        fit([At(2, early), At(7, late), *suite(tmp_path)], module=lambda: Net(fail_at=8))
    seen: list[Any] = []
    _, trainer = fit([At(5, lambda t: seen.append(list(context_of(t).incidents))), *suite(tmp_path)], max_steps=8)
    context = context_of(trainer)
    assert [(i.number, i.status) for i in context.incidents] == [(1, "recovered"), (2, "resolved")]
    assert context.incidents[1].closing.startswith("the process ended; resumed at step 5")
    assert context.ledger is not None
    assert context.ledger.active == {"sample:s3"}
    assert list(context.infra_events) == [{"node": "a", "event": "ecc"}]
    assert context.restart_step == 5
    assert context.attempt == 1


# ------------------------------------------------------------------------------------------------ Lightning's file


@pytest.mark.filterwarnings("ignore:.*weights_only.*")
def test_an_ordinary_lightning_checkpoint_is_written_and_works(tmp_path: Path) -> None:
    fit(suite(tmp_path, every_n_steps=12, write_lightning_ckpt=True, keep=9), max_epochs=2)
    file = tmp_path / "checkpoints" / "step-00000012" / "lightning.ckpt"
    assert "lightning.ckpt" in store_of(tmp_path).read(file.parent).manifest.files
    again, trainer = fit(suite(tmp_path / "plain"), ckpt_path=file, max_epochs=2)
    assert trainer.global_step == 24
    assert again.steps[0][2] == 12
    assert events(tmp_path / "plain", "run.resumed")[0]["checkpoint"] == str(file)


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": -1}, "every_n_steps must be at least 0, found -1"),
        ({"keep": 0}, "keep must be at least 1, found 0"),
        ({"keep_every_tokens": 0}, "keep_every_tokens must be at least 1 or None, found 0"),
        ({"probation_steps": -2}, "probation_steps must be at least 0, found -2"),
        ({"compare_steps": -1}, "compare_steps must be at least 0, found -1"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"ForensicCheckpoint: {message}"):
        ForensicCheckpoint(**options)  # type: ignore[arg-type]
