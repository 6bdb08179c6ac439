"""Past a window of samples: who is left out, what is left, and that it stays so after a resume and on a revert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from state_world import Cell, Outcome, run
from test_state_incidents import Alarm, Fail, FailedError, events
from test_state_mixture import Numbered

from lightning_sentinel import BatchValidator, ForensicCheckpoint, IncidentResponse, RankTelemetry, Rollback, RunJournal
from lightning_sentinel.data.mixture import MixtureLoader
from lightning_sentinel.data.quarantine import FILE_NAME, QuarantineLedger
from lightning_sentinel.incidents import Action, FindingKind


def one_source(**options: Any) -> MixtureLoader:
    """An epoch is one pass over 96 samples, or what ``options`` say."""
    return MixtureLoader([Numbered("a", 0, 96)], batch_size=4, **options)


EPOCHS = Cell("epochs", loader=lambda: one_source(steps_per_epoch=6), trainer={"max_epochs": 3})
ENDLESS = Cell("endless", loader=one_source, trainer={"max_steps": 18, "max_epochs": -1})


class Skip(L.Callback):
    """Asks for a rollback past the samples of a window of steps."""

    def __init__(self, rollback: Rollback, names: list[str], first: int, at: int) -> None:
        self.rollback, self.names, self.first, self.at = rollback, names, first, at

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at and not self.rollback.executed:
            self.rollback.request(
                trainer,
                before_step=self.first,
                action=Action.ROLLBACK_SKIP,
                incident=1,
                reason="a bad window",
                exclude=self.names,
            )


def drawn(outcome: Outcome) -> list[int]:
    return [i for step in outcome.steps for i in step[3]]


def counters(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [step[:3] for step in outcome.steps]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cell", [EPOCHS, ENDLESS], ids=lambda c: c.name)
@pytest.mark.parametrize("what", ["samples", "batches"])
def test_skip_past_a_window(what: str, cell: Cell, accumulate: int, tmp_path: Path) -> None:
    cell |= {"accumulate_grad_batches": accumulate}
    if accumulate == 2 and cell.name == "endless":
        cell |= {"max_steps": 9}
    reference = run(cell)
    batches = [step[3] for step in reference.steps]
    # three single samples of the steps 3 and 4, or the whole batches of these steps
    window = [i for b in batches[3 * accumulate : 5 * accumulate] for i in b]
    bad = window[1::3] if what == "samples" else window
    names = [f"sample:a/{i}" for i in bad]
    rollback = Rollback(every_n_steps=2)
    parts = [RunJournal(tmp_path, report=False), RankTelemetry(), Skip(rollback, names, 3, 5), rollback]
    outcome = run(cell, *parts)

    (back,) = events(tmp_path, "action.rollback")
    assert (back["from_step"], back["to_step"], back["excluded"]) == (3, 2, names)
    redone = [i for b in batches[2 * accumulate : 5 * accumulate] for i in b]
    assert back["replayed"] == [f"a/{i}" for i in redone]
    # the same epochs, batches and steps; the same order less the excluded, and what then comes next at the end
    assert counters(outcome) == counters(reference)
    left = [i for i in drawn(reference) if i not in bad]
    assert drawn(outcome)[: len(left)] == left
    assert len(drawn(outcome)) == len(drawn(reference))
    assert not set(drawn(outcome)) & set(bad)
    assert outcome.state["step"] == reference.state["step"]
    assert outcome.state["epoch"] == reference.state["epoch"]
    ledger = QuarantineLedger(tmp_path / FILE_NAME)
    assert [e.name for e in ledger.entries] == names
    assert {(e.event, e.step, e.incident, e.policy, e.reason) for e in ledger.entries} == {
        ("added", 3, 1, "rollback_skip", "a bad window")
    }


def suite(folder: Path, *extra: L.Callback, validator: bool = False) -> list[L.Callback]:
    return [
        RunJournal(folder, report=False),
        *([BatchValidator(repeats="allow")] if validator else []),
        *extra,
        RankTelemetry(),
        IncidentResponse(
            "recover", ladders={"undetermined/loss": ["rollback_skip", "stop"]}, triage=False, probation_steps=3
        ),
        Rollback(every_n_steps=2),
        ForensicCheckpoint(4, resume="latest", save_on_exception=False),
    ]


@pytest.mark.parametrize("cell", [EPOCHS, ENDLESS], ids=lambda c: c.name)
def test_who_is_quarantined_stays_out_after_a_resume_until_it_is_reverted(cell: Cell, tmp_path: Path) -> None:
    reference = run(cell)
    bad = list(reference.steps[5][3])
    left = [i for i in drawn(reference) if i not in bad]

    def run_to(stop: int, *extra: L.Callback) -> None:
        with pytest.raises(FailedError):
            run(cell, Fail(stop), *suite(tmp_path, *extra), seed=stop)

    run_to(10, Alarm({5: 5}, FindingKind.SPIKE))
    (back,) = events(tmp_path, "action.rollback")
    assert back["excluded"] == [f"sample:a/{i}" for i in bad]
    (added,) = events(tmp_path, "quarantine.added")
    assert (added["names"], added["incident"]) == (back["excluded"], 1)
    # a person quarantines two more samples between two processes, and takes one of the first back
    ledger = QuarantineLedger(tmp_path / FILE_NAME)
    (entry,) = {(e.step, e.incident, e.policy) for e in ledger.entries}
    assert entry == (5, 1, "rollback_skip")
    later = left[11 * 4 + 1], left[13 * 4]
    ledger.add([f"sample:a/{i}" for i in later], step=None, incident=None, policy="by hand", reason="read by a person")
    ledger.revert(f"sample:a/{bad[0]}", "read by a person: harmless")
    outcome = run(cell, *suite(tmp_path), seed=9)
    assert events(tmp_path, "run.resumed")[0]["checkpoint_step"] == 10
    again = drawn(outcome)
    expected = [i for i in left if i not in later]
    # the restored log begins with the steps of the first process
    assert again[: len(expected)] == expected
    assert not (set(later) | set(bad[1:])) & set(again[40:])
    assert counters(outcome) == counters(reference)
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["added"] * 6 + ["reverted"]
    assert lines[-1]["reason"] == "read by a person: harmless"
    assert not [e for e in events(tmp_path, "finding") if e["finding"]["kind"] == "restart_jump"]


def test_a_reverted_sample_is_drawn_again_in_the_same_run(tmp_path: Path) -> None:
    """Thirty-two samples, so that a second pass comes by; what is excluded in the first is back in the second."""
    cell = Cell(
        "passes",
        loader=lambda: MixtureLoader([Numbered("a", 0, 32)], batch_size=4),
        trainer={"max_steps": 20, "max_epochs": -1},
    )

    class Revert(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            from lightning_sentinel.callbacks.base import ledger_of
            from lightning_sentinel.state.lightning_private import train_loaders

            if trainer.global_step == 9 and rollback.executed:
                ledger_of(trainer).revert("sample:a/" + str(bad[0]), "harmless")
                ledger_of(trainer).apply(train_loaders(trainer))

    reference = run(cell)
    bad = list(reference.steps[2][3])
    rollback = Rollback(every_n_steps=2)
    names = [f"sample:a/{i}" for i in bad]
    outcome = run(cell, Revert(), RunJournal(tmp_path, report=False), Skip(rollback, names, 2, 4), rollback)
    seen = drawn(outcome)
    assert not set(seen[:32]) & set(bad)
    assert bad[0] in seen[32:]
    assert not set(seen) & set(bad[1:])


@pytest.mark.parametrize("validator", [False, True])
def test_the_failing_batch_of_an_exception_is_quarantined_not_lost(validator: bool, tmp_path: Path) -> None:
    """A sample makes the forward raise; quarantined by hand, the next process passes it and loses no other."""

    class Poison(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if f"a/{bad}" in batch["sample_id"]:
                raise FailedError(batch["sample_id"])

    reference = run(ENDLESS)
    bad = reference.steps[10][3][2]
    for attempt in range(2):  # as long as it is drawn, it fails again: the batch is tried again, not left out
        with pytest.raises(FailedError):
            run(ENDLESS, Poison(), *suite(tmp_path, validator=validator), seed=attempt)
    QuarantineLedger(tmp_path / FILE_NAME).add(
        [f"sample:a/{bad}"], step=10, incident=None, policy="by hand", reason="the forward raises on it"
    )
    outcome = run(ENDLESS, Poison(), *suite(tmp_path, validator=validator), seed=7)
    expected = [i for i in drawn(reference) if i != bad]
    assert drawn(outcome)[: len(expected)] == expected
    assert len(outcome.steps) == 18
