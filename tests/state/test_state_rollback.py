"""Rollback as a callback: retries, choice of snapshots, what is refused, what is written down, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from state_world import Cell, Hurt, Net, Samples, assert_same_run, make_trainer, map_loader, run, spoil
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel.callbacks.batch_validator import BatchValidator
from lightning_sentinel.callbacks.forensic_checkpoint import ForensicCheckpoint
from lightning_sentinel.callbacks.incident_response import IncidentResponse
from lightning_sentinel.callbacks.rank_telemetry import RankTelemetry
from lightning_sentinel.callbacks.rollback import Rollback, RollbackUnavailable
from lightning_sentinel.context import context_of
from lightning_sentinel.data.quarantine import QuarantineLedger
from lightning_sentinel.incidents import Action, Finding, FindingKind, Incident, Severity
from lightning_sentinel.record import StepRecord
from lightning_sentinel.state import lightning_private as private
from lightning_sentinel.state import rng
from lightning_sentinel.state.snapshot import take

# the first fp16 steps overflow on purpose, and torch takes the scaler's skip for a missing optimizer step
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Events:
    """Stands in for the journal."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.flushed_at: list[int] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def flush(self) -> None:
        self.flushed_at.append(len(self.lines))


class Gate(L.Callback):
    """Keeps the update of one step out of the weights, once, and asks for another try."""

    def __init__(self, rollback: Rollback, step: int, action: Action = Action.RETRY_STEP, hold: bool = True) -> None:
        self.rollback, self.step, self.action, self.hold = rollback, step, action, hold
        self.fired = 0
        self.light: list[bool] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step != self.step or self.fired:
            return
        self.fired += 1
        if self.hold:
            for parameter in module.parameters():
                parameter.grad = None
        snapshot = self.rollback.request(
            trainer, before_step=self.step, action=self.action, incident=3, reason="once more"
        )
        self.light.append(snapshot.light)


RETRIES = [
    (Cell("plain"), 7, 1),
    (Cell("first step"), 0, 1),
    (Cell("last batch of an epoch", validation=True), 11, 1),
    (Cell("first batch of an epoch", validation=True), 12, 1),
    (Cell("accumulate 2", trainer={"accumulate_grad_batches": 2}), 7, 2),
    (Cell("accumulate 5, incomplete window", trainer={"accumulate_grad_batches": 5}), 2, 2),
    (Cell("fp16", fp16=True), 9, 1),
    (Cell("manual", net={"manual": True}), 7, 1),
    (Cell("2 workers", loader=lambda: map_loader(2)), 7, 1),
    (Cell("validation before the step", validation=True, trainer={"val_check_interval": 4}), 8, 1),
]


@pytest.mark.parametrize(("cell", "step", "batches"), RETRIES, ids=[c.name.replace(" ", "-") for c, _, _ in RETRIES])
def test_retry_repeats_one_step_exactly(cell: Cell, step: int, batches: int) -> None:
    reference = run(cell)
    rollback = Rollback(every_n_steps=100)
    gate = Gate(rollback, step)
    outcome = run(cell, gate, rollback)
    assert gate.light == [True]
    assert outcome.calls == reference.calls + batches
    assert_same_run(outcome, reference)


def test_retry_of_a_step_that_reached_the_weights_goes_back_further() -> None:
    reference = run(Cell("applied"))
    rollback = Rollback(every_n_steps=5)
    gate = Gate(rollback, 7, hold=False)
    outcome = run(Cell("applied"), gate, rollback)
    assert gate.light == [
        True
    ]  # chosen at the gate, before the update; replaced when the weights turn out to be changed
    assert outcome.calls == reference.calls + 3  # steps 5, 6 and 7 again
    assert_same_run(outcome, reference)


def test_retry_without_light_snapshots_uses_a_full_one() -> None:
    for option, extra in ((False, []), (True, [WeightAveraging()])):
        rollback = Rollback(every_n_steps=5, retry=option)
        gate = Gate(rollback, 7)
        outcome = run(Cell("full"), *extra, gate, rollback)
        assert gate.light == [False]
        assert outcome.calls == 36 + 3


@pytest.mark.parametrize(
    "cell",
    [
        Cell("plain", validation=True),
        Cell("accumulate", trainer={"accumulate_grad_batches": 2}),
        Cell("fp16", fp16=True),
        Cell("manual", net={"manual": True, "two_optimizers": True}),
        Cell("2 workers", loader=lambda: map_loader(2)),
    ],
    ids=lambda c: c.name,
)
def test_taking_snapshots_changes_nothing(cell: Cell) -> None:
    outcome = run(cell, Rollback(every_n_steps=1))
    assert_same_run(outcome, run(cell))


def test_twice_to_the_same_snapshot_and_ten_times_in_a_row() -> None:
    reference = run(Cell("often"))
    rollback = Rollback(every_n_steps=8)
    hurt = Hurt(rollback, batch=11, before_step=10, times=10)
    outcome = run(Cell("often"), hurt, rollback)
    assert hurt.restored == [8] * 10
    assert_same_run(outcome, reference)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ten_rollbacks_leave_no_worker_and_no_file_behind() -> None:
    counts: list[tuple[int, int]] = []

    class Count(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            gc.collect()
            counts.append((len(multiprocessing.active_children()), open_files()))

    rollback = Rollback(every_n_steps=3)
    hurt = Hurt(rollback, batch=5, before_step=4, times=10)
    cell = Cell("leak", loader=lambda: map_loader(2, persistent_workers=True), trainer={"max_epochs": 1})
    run(cell, Count(), hurt, rollback)
    assert hurt.restored == [3] * 10
    assert {workers for workers, _ in counts} == {2}
    files = [f for _, f in counts]
    # batches on their way hold a few files for a moment, so the quiet moments at both ends are compared
    assert min(files[-8:]) <= min(files[:8])
    assert not multiprocessing.active_children()


def live_tensors() -> tuple[int, int]:
    """Number and bytes of the tensors that Python holds."""
    gc.collect()
    # a class may answer anything to isinstance; type() asks nobody
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(found), sum(t.nbytes for t in found)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "checkpoint"])
def test_ten_rollbacks_hold_no_more_memory_than_one(disk: bool, tmp_path: Path) -> None:
    """Counted right after each way back, when only the restore points and the live state are there."""
    counts: list[tuple[int, int]] = []

    class Count(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            private.advance_control(trainer).before.append(lambda: self.look(trainer))

        def look(self, trainer: L.Trainer) -> None:
            if trainer.global_step == (4 if disk else 8):
                counts.append(live_tensors())

    checkpoint = [ForensicCheckpoint(4, keep=99, probation_steps=0, resume=None, run_dir=tmp_path)] if disk else []
    rollback = Rollback(every_n_steps=9 if disk else 8)
    # the restore point on disk is older than the one in memory would be: step 0 is dropped for 9 and 18
    hurt = Hurt(rollback, batch=21 if disk else 11, before_step=5 if disk else 10, times=10)
    cell = Cell("leak", trainer={"max_epochs": 2})
    outcome = run(cell, Count(), hurt, rollback, *checkpoint)
    assert hurt.restored == [4 if disk else 8] * 10
    assert len(counts) == 11
    # the first way back still holds what its request chose; from then on not one tensor more
    assert counts[2:] == [counts[2]] * 9
    assert counts[2] <= counts[1]
    assert len(context_of(outcome.trainer).snapshots) <= rollback.keep


def records(trainer: L.Trainer, step: int) -> None:
    context = context_of(trainer)
    record = StepRecord.from_losses(step, [1.0])
    context.history.append(record)
    context.drawn.append((step, (f"id-{step}",)))
    context.rates.append((step, None, (0.1,)))
    context.tokens += 10


class Bookkeeping(L.Callback):
    """What the heartbeat does, in short: one record for each step."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        context_of(trainer).journal = self.events

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        records(trainer, trainer.global_step - 1)


def test_what_is_written_and_what_goes_back_in_the_context() -> None:
    events = Events()
    rollback = Rollback(every_n_steps=4)
    hurt = Hurt(rollback, batch=7, before_step=6)
    outcome = run(Cell("context", trainer={"max_steps": 12, "max_epochs": -1}), Bookkeeping(events), hurt, rollback)
    assert events.lines == [
        {
            "event": "action.rollback",
            "step": 7,
            "attempt": 1,
            "tokens": 70,
            "action": "rollback_replay",
            "from_step": 6,
            "to_step": 4,
            "incident": 1,
            "reason": "a test",
            "light": False,
            "replayed": ["id-4", "id-5", "id-6"],
            "excluded": [],
        }
    ]
    assert events.flushed_at == [1]
    context = context_of(outcome.trainer)
    assert context.attempt == 1
    assert context.tokens == 120
    assert [r.step for r in context.history] == list(range(12))
    assert [step for step, _, _ in context.rates] == list(range(12))
    assert rollback.state_dict() == {"executed": 1, "starts": {0: 0, 1: 4}}


class Suspicious(L.Callback):
    """Finds an incident in every third step, so that the step stays out of the history of accepted records."""

    def observe(self, record: StepRecord) -> list[Finding]:
        if record.step % 3:
            return []
        return [Finding(FindingKind.SPIKE, "test", record.step, 9.0, 1.0, "odd", Severity.INCIDENT)]


class Drawn(L.Callback):
    """Samples of all batches in order, abandoned paths included."""

    rewinds = False

    def __init__(self) -> None:
        self.ids: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ids += names_of(batch)


def names_of(batch: Any) -> list[str]:
    return [str(int(i)) for i in batch[2]]


@pytest.mark.parametrize(("accumulate", "batch"), [(1, 300), (2, 7)], ids=["long-path", "incomplete-window"])
def test_every_sample_that_is_drawn_again_is_written_down(accumulate: int, batch: int) -> None:
    events, drawn, rollback = Events(), Drawn(), Rollback(every_n_steps=1000)
    options = {"max_steps": batch, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    cell = Cell(
        "replayed",
        loader=lambda: StatefulDataLoader(Samples(1400), batch_size=4),
        trainer=options,
        net={"scheduler": "epoch"},
    )

    class Sink(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            context_of(trainer).journal = events

    telemetry = RankTelemetry(sample_id_fn=names_of)
    validator = BatchValidator(sample_id_fn=names_of)
    hurt = Hurt(rollback, batch=batch, before_step=0)
    run(cell, Sink(), validator, Suspicious(), telemetry, drawn, hurt, rollback)
    (line,) = [e for e in events.lines if e["event"] == "action.rollback"]
    assert line["to_step"] == 0
    assert line["replayed"] == drawn.ids[: 4 * batch]
    assert drawn.ids[4 * batch : 8 * batch] == line["replayed"]


def test_only_untrained_weights_are_known_good_without_a_probation() -> None:
    seen: list[tuple[int, bool]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append((trainer.global_step, context_of(trainer).snapshots[0].known_good))

    trainer = make_trainer(Cell("twice", trainer={"max_epochs": 1}), [Rollback(every_n_steps=4), Look()])
    validation = DataLoader(Samples(8), batch_size=4)
    trainer.fit(Net(), map_loader(), validation)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), map_loader(), validation)
    assert seen[0] == (1, True)
    assert (13, False) in seen


def test_a_rollback_that_excludes_is_in_the_ledger_on_disk(tmp_path: Path) -> None:
    class Folder(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            context_of(trainer).run_dir = tmp_path

    class Excluding(StatefulDataLoader):
        def exclude(self, names: Any) -> None:
            self.excluded = list(names)

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3 and not rollback.executed:
                rollback.request(
                    trainer,
                    before_step=2,
                    action=Action.ROLLBACK_SKIP,
                    incident=1,
                    reason="bad",
                    exclude=["sample:7"],
                )

    rollback = Rollback(every_n_steps=2)
    cell = Cell("ledger", loader=lambda: Excluding(Samples(), batch_size=4), trainer={"max_epochs": 1})
    run(cell, Folder(), Ask(), rollback)
    assert QuarantineLedger(tmp_path / "quarantine.jsonl").active == {"sample:7"}


def test_requests_that_cannot_be_met() -> None:
    messages: list[str] = []

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step != 30:
                return
            for options in ({"before_step": 3}, {"before_step": 29, "exclude": ["sample:7"]}):
                try:
                    rollback.request(
                        trainer,
                        action=Action.ROLLBACK_REPLAY,
                        incident=1,
                        reason="a test",
                        **options,  # type: ignore
                    )
                except RollbackUnavailable as error:
                    messages.append(str(error))
            with pytest.raises(ValueError, match="skip_step is not a rollback"):
                rollback.request(trainer, before_step=1, action=Action.SKIP_STEP, incident=1, reason="a test")

    rollback = Rollback(every_n_steps=5)
    run(Cell("refused"), Ask(), rollback)
    assert messages == [
        "No snapshot from before step 3 is left; the oldest is of step 20, and no known-good checkpoint is older. Raise"
        " `keep` (2) or `every_n_steps` (5), or add lightning_sentinel.ForensicCheckpoint.",
        "StatefulDataLoader has no `exclude(names)`, so 1 samples or sources cannot be left out. Use"
        " lightning_sentinel.data.MixtureLoader, or skip the step instead.",
    ]
    assert rollback.executed == 0


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_no_replay_from_the_first_state_after_a_restart(tmp_path: Path) -> None:
    found: list[tuple[int, Action, Any]] = []

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step != 8:
                return
            for before, action in (
                (5, Action.ROLLBACK_REPLAY),
                (5, Action.ROLLBACK_SKIP),
                (6, Action.ROLLBACK_REPLAY),
            ):
                try:
                    found.append(
                        (
                            before,
                            action,
                            rollback.request(
                                trainer, before_step=before, action=action, incident=1, reason="a test"
                            ).step,
                        )
                    )
                except RollbackUnavailable as error:
                    found.append((before, action, str(error)))
            rollback._request = None

    options: dict[str, Any] = {"max_steps": 5, "max_epochs": -1}
    first = make_trainer(Cell("first", trainer=options), [])
    validation = DataLoader(Samples(8), batch_size=4)
    first.fit(Net(), map_loader(), validation)
    first.save_checkpoint(tmp_path / "5.ckpt")
    rollback = Rollback(every_n_steps=100)
    second = make_trainer(Cell("second", trainer={**options, "max_steps": 9}), [Ask(), rollback])
    second.fit(Net(), map_loader(), validation, ckpt_path=tmp_path / "5.ckpt", weights_only=False)
    refusal = (
        "every restore point of this process was taken after the restart at step 5; resume from a checkpoint of"
        " ForensicCheckpoint instead."
    )
    assert found == [
        (5, Action.ROLLBACK_REPLAY, refusal),
        (5, Action.ROLLBACK_SKIP, 5),
        (6, Action.ROLLBACK_REPLAY, 5),
    ]
    assert context_of(second).restart_step == 5
    assert [s.known_good for s in context_of(second).snapshots] == [False]


def kept_snapshots(rollback: Rollback, act: Any, steps: int = 36) -> list[list[int]]:
    """Steps of the snapshots in memory before each step."""
    kept: list[list[int]] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            kept.append([s.step for s in context_of(trainer).snapshots])
            act(trainer)

    run(Cell("kept", trainer={"max_steps": steps, "max_epochs": -1}), rollback, Watch())
    return kept


def test_without_probation_the_newest_snapshots_are_kept() -> None:
    kept = kept_snapshots(Rollback(every_n_steps=5, keep=3), lambda trainer: None)
    assert kept[0] == [0]
    assert kept[5] == [0, 5]
    assert kept[24] == [10, 15, 20]
    assert kept[35] == [25, 30, 35]


def test_a_candidate_is_kept_through_its_probation() -> None:
    rollback = Rollback(every_n_steps=5, keep=2)
    kept = kept_snapshots(rollback, lambda trainer: rollback.mark_known_good(trainer, trainer.global_step - 12))
    # 5 becomes known good after step 17 and gives 0 free; at every moment one known-good snapshot is there
    assert kept[16] == [0, 5]
    assert kept[20] == [5, 20]
    assert kept[32] == [5, 20]
    assert kept[35] == [20, 35]


def test_after_a_resume_a_candidate_is_kept_until_its_probation_is_over() -> None:
    rollback = Rollback(every_n_steps=5, keep=2)

    def act(trainer: L.Trainer) -> None:
        if trainer.global_step == 0:
            context_of(trainer).snapshots[0].known_good = False  # as the first one of a resumed process
        elif trainer.global_step >= 12:
            rollback.mark_known_good(trainer, trainer.global_step - 12)
        else:
            rollback._probation = 12

    kept = kept_snapshots(rollback, act)
    assert kept[11] == [0, 10]
    assert kept[15] == [0, 10]  # 0 is good since step 12, 10 not yet


def test_what_predates_an_open_incident_is_kept() -> None:
    def act(trainer: L.Trainer) -> None:
        if trainer.global_step == 13:
            context_of(trainer).incidents.append(Incident(1, 13, 12, 0, 0))

    kept = kept_snapshots(Rollback(every_n_steps=5, keep=2), act)
    assert kept[12] == [5, 10]
    assert kept[35] == [10, 35]


def test_no_snapshot_of_a_held_step_without_an_answer() -> None:
    def act(trainer: L.Trainer) -> None:
        context = context_of(trainer)
        if trainer.global_step == 8:
            context.incidents.append(Incident(1, 8, 8, 0, 0))
        context.held = 9 <= trainer.global_step < 12

    assert kept_snapshots(Rollback(every_n_steps=5, keep=2), act, steps=14)[13] == [0, 5]


@pytest.mark.filterwarnings("ignore:Rollback is off")
def test_off_without_a_cursor_and_training_goes_on() -> None:
    def plain() -> Any:
        return DataLoader(Samples(), batch_size=4, shuffle=True)

    rollback = Rollback()
    cell = Cell("plain loader", loader=plain, trainer={"max_epochs": 1})
    seen: list[str | None] = []

    class Ask(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(rollback.unavailable(trainer))
            with pytest.raises(RollbackUnavailable, match="DataLoader has none"):
                rollback.request(trainer, before_step=0, action=Action.RETRY_STEP, incident=1, reason="a test")

    outcome = run(cell, Ask(), rollback)
    assert set(seen) == {
        "Rollback needs a data loader with `state_dict` and `load_state_dict`; DataLoader has none. Use"
        " torchdata.stateful_dataloader.StatefulDataLoader, or lightning_sentinel.data.MixtureLoader."
    }
    assert_same_run(outcome, run(cell))
    with pytest.raises(RollbackUnavailable, match="DataLoader has none"):
        run(cell, Rollback(cursor="require"))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            Cell("reload", trainer={"reload_dataloaders_every_n_epochs": 1}),
            "reload_dataloaders_every_n_epochs=1 replaces the loader while training",
        ),
        (
            Cell("lbfgs", net={"optimizer": torch.optim.LBFGS, "scheduler": "epoch"}),
            "LBFGS evaluates its closure several times in a step",
        ),
        (
            Cell("swa", net={"scheduler": "epoch"}, callbacks=lambda: [StochasticWeightAveraging(1e-3)]),
            "StochasticWeightAveraging replaces the schedulers while training",
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Cell) else "",
)
def test_what_cannot_be_put_back_is_said_at_the_start(cell: Cell, message: str) -> None:
    cell.trainer |= {"max_epochs": 1, "limit_train_batches": 2}
    with pytest.warns(UserWarning, match=f"Rollback is off, training goes on without it. {message}"):
        run(cell, Rollback())
    with pytest.raises(RollbackUnavailable, match=message):
        run(cell, Rollback(cursor="require"))


def test_two_fits_on_one_trainer() -> None:
    rollback = Rollback(every_n_steps=4)
    trainer = make_trainer(Cell("twice", trainer={"max_epochs": 1}), [rollback])
    validation = DataLoader(Samples(8), batch_size=4)
    trainer.fit(Net(), map_loader(), validation)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(Net(), map_loader(), validation)
    control = private.advance_control(trainer)
    assert control.before == control.after == []
    assert rollback.unavailable(trainer) == "training has ended"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1 or None, found 0"),
        ({"keep": 1}, r"keep must be at least 2 \(one known-good snapshot and one candidate\), found 1"),
        ({"cursor": "refuse"}, "cursor is 'refuse', expected one of auto, require"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Rollback: {message}"):
        Rollback(**options)


def test_every_private_lightning_name_is_still_there() -> None:
    trainer = make_trainer(Cell("names"), [])
    assert private.missing_names(trainer) == []


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "NAMES", (("lightning.pytorch.loops.loop", "_Loop.gone", "2.6.6"),))
    monkeypatch.setattr(private, "INSTANCE_NAMES", (("fit_loop._gone", "2.6.6"),))
    assert private.missing_names(make_trainer(Cell("names"), [])) == [
        "lightning.pytorch.loops.loop._Loop.gone (checked on 2.6.6)",
        "Trainer.fit_loop._gone (checked on 2.6.6)",
    ]


def test_only_one_module_touches_private_lightning_names() -> None:
    package = Path(private.__file__).parents[1]
    needles = ("._data_fetcher", "._combined_loader", "._logger_connector", "._batches_that_stepped", "._restarting")
    for path in [*sorted((package / "state").glob("*.py")), package / "callbacks" / "rollback.py"]:
        if path.name != "lightning_private.py":
            text = path.read_text()
            assert not [n for n in needles if n in text], path.name


def test_snapshot_memory_is_reused_and_counted() -> None:
    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Net, *args: Any) -> None:
            if trainer.global_step == 3:
                first = take(trainer)
                pointers = [t.data_ptr() for t in first.params.values()] if first.params else []
                second = take(trainer, into=first)
                assert second.params is not None
                assert [t.data_ptr() for t in second.params.values()] == pointers
                state = sum(p.nbytes for p in module.parameters()) * 3  # weights and two moments
                assert state < second.nbytes < state * 1.1 + 20_000
                spoil(trainer, module)
                assert all(bool(t.isfinite().all()) for t in second.params.values())

    run(Cell("memory", trainer={"max_steps": 3, "max_epochs": -1}), Look())


def test_random_state_round_trip() -> None:
    import random

    import numpy as np

    state = rng.capture()
    draws = (random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), torch.rand(3))
    rng.restore(state)
    again = (random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), torch.rand(3))
    assert draws[:4] == again[:4]
    assert torch.equal(draws[4], again[4])


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        (None, None, 25),
        ("recover", None, 25),
        ("guard", None, 50),
        ("observe", None, 50),
        ("observe", 30, 30),
        ("recover", 30, 30),
    ],
)
def test_snapshots_come_half_as_often_where_nobody_goes_back(
    mode: str | None, given: int | None, expected: int
) -> None:
    class Steps(L.Callback):
        """Steps of the full snapshots, as they come."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            for snapshot in context_of(trainer).snapshots:
                if snapshot.step not in self.seen:
                    self.seen.append(snapshot.step)

    rollback, steps = Rollback(every_n_steps=given), Steps()
    response = [] if mode is None else [RankTelemetry(update_norm_every_n_steps=0), IncidentResponse(mode=mode)]
    outcome = run(Cell("interval", trainer={"max_steps": 101, "max_epochs": -1}), *response, rollback, steps)
    assert rollback.interval(outcome.trainer) == expected
    assert steps.seen == list(range(0, 101, expected))


def test_random_states_are_read_anew_whenever_a_generator_has_moved() -> None:
    """Only a few of their words are looked at; what is kept is the whole state."""
    import random

    import numpy as np

    def plain(state: Any) -> list[Any]:
        return [x.tolist() if isinstance(x, np.ndarray) else x for x in state]

    before = rng.capture()
    try:
        random.seed(3), np.random.seed(3)
        for draws in (0, 1, 1, 623, 624, 1248, 5000):
            for _ in range(draws):
                random.getrandbits(32), np.random.bytes(4)
            assert rng.python_state() == random.getstate()
            assert plain(rng.numpy_state()) == plain(np.random.get_state())
            # A second look, without a draw between, gives the same object; the words of a state are not copied then.
            assert rng.python_state() is rng.python_state()
            assert rng.numpy_state() is rng.numpy_state()
        random.gauss(0, 1)  # keeps its pair: the words may stay while this goes away
        assert rng.python_state() == random.getstate()
        random.gauss(0, 1)
        assert rng.python_state() == random.getstate()
        for _ in range(3):  # of two normal numbers that are drawn together one is kept, at the same position
            np.random.standard_normal()
            with_one = rng.numpy_state()
            assert plain(with_one) == plain(np.random.get_state())
            np.random.standard_normal()
            assert plain(rng.numpy_state()) == plain(np.random.get_state())
            np.random.set_state(with_one)
            assert plain(rng.numpy_state()) == plain(np.random.get_state()) == plain(with_one)
        for seed in range(20):
            random.seed(seed), np.random.seed(seed)
            assert rng.python_state() == random.getstate()
            assert plain(rng.numpy_state()) == plain(np.random.get_state())
    finally:
        rng.restore(before)


def test_a_step_that_draws_one_normal_number_at_a_time_is_repeated_exactly() -> None:
    """NumPy draws normal numbers in pairs: every second step begins with one that is kept, at the position of the last."""
    import numpy as np

    class Draws(L.Callback):
        def __init__(self) -> None:
            self.drawn: list[tuple[int, float]] = []

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            self.drawn.append((trainer.global_step, float(np.random.standard_normal())))

    for step in (12, 13):
        found = []
        for hurt in (False, True):
            rollback, draws = Rollback(every_n_steps=5), Draws()
            np.random.seed(0)
            run(Cell("draws", trainer={"max_steps": 16}), draws, rollback, *([Gate(rollback, step)] if hurt else []))
            found.append(draws.drawn)
        clean, retried = found
        assert [s for s, _ in retried] == [*range(step + 1), *range(step, 16)]
        assert retried[: step + 1] + retried[step + 2 :] == clean
        assert retried[step + 1] == retried[step]
