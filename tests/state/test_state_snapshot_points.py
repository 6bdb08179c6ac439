"""A snapshot may lie between any two batches or at a batch's end: inside an accumulation, with validation pending."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
from state_world import Cell, assert_same_run, map_loader, run, spoil, stream_loader

from lightning_sentinel.state import lightning_private as private
from lightning_sentinel.state.snapshot import Snapshot, restore, restore_between_batches, take

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

BEFORE, AFTER, INSIDE = "before the batch", "at the batch's end", "back inside the hook"


class Jump(L.Callback):
    """Takes a snapshot at one batch; some batches later spoils everything and goes back to it, once."""

    def __init__(self, take_at: int, back_at: int, point: str) -> None:
        self.take_at, self.back_at, self.point = take_at, back_at, point
        self.batches = self.fired = 0
        self.snapshot: Snapshot | None = None

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        control = private.advance_control(trainer)
        control.before.append(partial(self.before, trainer))
        control.after.append(partial(self.after, trainer, module))

    def before(self, trainer: L.Trainer) -> None:
        if self.point == BEFORE and self.batches == self.take_at - 1 and not self.fired:
            self.snapshot = take(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.batches += 1
        if self.point != BEFORE and self.batches == self.take_at and not self.fired:
            self.snapshot = take(trainer)
        if self.point == INSIDE and self.batches == self.back_at and not self.fired:
            self.go_back(trainer, module, restore)

    def after(self, trainer: L.Trainer, module: Any) -> None:
        if self.point != INSIDE and self.batches == self.back_at and not self.fired:
            self.go_back(trainer, module, restore_between_batches)

    def go_back(self, trainer: L.Trainer, module: Any, how: Any) -> None:
        self.fired += 1
        assert self.snapshot is not None
        spoil(trainer, module)
        how(trainer, self.snapshot)


def accumulating(count: int, **options: Any) -> Cell:
    return Cell(f"accumulate {count}", trainer={"accumulate_grad_batches": count}, **options)


POINTS: list[tuple[Cell, int, int, bool]] = [
    # cell, batch of the snapshot, batch of the way back, is it inside an accumulation before / after that batch
    (accumulating(2), 6, 9, True),
    (accumulating(4), 7, 10, True),
    (accumulating(4, fp16=True), 10, 14, True),
    (accumulating(5), 12, 15, True),
    (Cell("workers", loader=lambda: map_loader(2), trainer={"accumulate_grad_batches": 4}), 7, 9, True),
    (Cell("iterable", loader=stream_loader, trainer={"accumulate_grad_batches": 4}), 11, 14, True),
    (Cell("by hand", net={"manual": True, "step_every": 3}), 8, 10, False),
    (Cell("validation", validation=True, trainer={"val_check_interval": 4}), 8, 10, False),
    (Cell("plateau", validation=True, net={"scheduler": "plateau"}), 12, 14, False),
    (Cell("last batch"), 12, 13, False),
    (Cell("iterable, last batch", loader=stream_loader), 12, 15, False),
]


@pytest.mark.parametrize("point", [BEFORE, AFTER, INSIDE])
@pytest.mark.parametrize(("cell", "take_at", "back_at", "accumulates"), POINTS, ids=lambda x: getattr(x, "name", None))
def test_back_to_any_point_equals_an_uninterrupted_run(
    cell: Cell, take_at: int, back_at: int, accumulates: bool, point: str
) -> None:
    reference = run(cell)
    jump = Jump(take_at, back_at, point)
    outcome = run(cell, jump)
    assert jump.fired == 1
    assert jump.snapshot is not None
    assert jump.snapshot.after_batch == (point != BEFORE)
    ended = take_at % cell.trainer.get("accumulate_grad_batches", 1) == 0 or take_at % 12 == 0
    assert jump.snapshot.mid_accumulation == (accumulates and (point == BEFORE or not ended))
    assert outcome.calls == reference.calls + back_at - take_at + (point == BEFORE)
    assert_same_run(outcome, reference)
