"""The project's own loader: rollback and resume to the sample, and past samples that are quarantined."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
from state_world import Cell, Hurt, Samples, assert_same_run, run
from test_state_resume import Resume, Save, StoppedError

from lightning_sentinel.callbacks.rollback import Rollback
from lightning_sentinel.context import context_of
from lightning_sentinel.data.mixture import MixtureLoader
from lightning_sentinel.incidents import Action


class Numbered:
    """A part of the samples as one source of a mixture."""

    def __init__(self, name: str, first: int, count: int) -> None:
        self.name, self.first, self.count, self.samples = name, first, count, Samples(96)

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int) -> dict[str, Any]:
        x, y, _ = self.samples[self.first + index]
        return {"x": np.asarray(x), "y": np.asarray(y)}

    def sample_id(self, index: int) -> str:
        return f"{self.name}/{self.first + index}"


def mixture(**options: Any) -> MixtureLoader:
    return MixtureLoader([Numbered("a", 0, 60), Numbered("b", 60, 36)], {"a": 2.0, "b": 1.0}, 4, **options)


CELLS = [
    Cell("epochs", batch=8, before_step=7, every=4, loader=lambda: mixture(steps_per_epoch=6)),
    Cell("last batch of an epoch", batch=6, before_step=5, every=4, loader=lambda: mixture(steps_per_epoch=6)),
    Cell("next epoch", batch=8, before_step=7, every=5, loader=lambda: mixture(steps_per_epoch=6)),
    Cell("endless", batch=9, before_step=8, every=5, loader=mixture, trainer={"max_steps": 20, "max_epochs": -1}),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name.replace(" ", "-"))
def test_rollback_and_resume_are_exact(cell: Cell) -> None:
    reference = run(cell)
    rollback = Rollback(every_n_steps=cell.every)
    outcome = run(cell, Hurt(rollback, cell.batch, cell.before_step), rollback)
    assert rollback.executed == 1
    assert_same_run(outcome, reference)
    save = Save(cell.batch)
    with pytest.raises(StoppedError):
        run(cell, save)
    assert_same_run(run(cell, Resume(save.data), seed=5), reference)


def test_skip_leaves_out_the_named_samples_and_nothing_else() -> None:
    options: dict[str, Any] = {"max_steps": 14, "max_epochs": -1}

    def one_source() -> MixtureLoader:
        return MixtureLoader([Numbered("a", 0, 96)], batch_size=4)

    reference = run(Cell("clean", loader=one_source, trainer=options))
    bad = reference.steps[7][3]  # the four samples of step 7

    class Skip(L.Callback):
        fired = False

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 8 and not self.fired:
                self.fired = True
                names = [f"sample:a/{i}" for i in bad]
                rollback.request(
                    trainer, before_step=7, action=Action.ROLLBACK_SKIP, incident=1, reason="bad", exclude=names
                )

    rollback = Rollback(every_n_steps=3)
    outcome = run(Cell("skip", loader=one_source, trainer=options), Skip(), rollback)
    drawn = [i for step in outcome.steps for i in step[3]]
    expected = [i for step in reference.steps for i in step[3] if i not in bad]
    assert len(outcome.steps) == 14
    assert drawn[: len(expected)] == expected
    assert not set(bad) & set(drawn)
    assert outcome.steps[:7] == reference.steps[:7]
    ledger = context_of(outcome.trainer).ledger
    assert ledger is not None
    assert ledger.active == {f"sample:a/{i}" for i in bad}
    assert {(e.step, e.incident, e.policy, e.reason) for e in ledger.entries} == {(7, 1, "rollback_skip", "bad")}
