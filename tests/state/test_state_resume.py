"""A run that is continued in a new Trainer from a saved snapshot equals one that was never interrupted."""

from __future__ import annotations

import io
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from state_world import Cell, Recorder, assert_same_run, distributed_loader, map_loader, run, same, stream_loader

from lightning_sentinel.context import context_of
from lightning_sentinel.state import lightning_private as private
from lightning_sentinel.state.snapshot import Snapshot, from_payload, restore, resume, take, to_payload

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class StoppedError(Exception):
    """Stands for the end of the process."""


class Save(L.Callback):
    """Saves a snapshot at the end of one batch, or before it, and ends the run a little later."""

    def __init__(self, batch: int, before_batch: bool = False) -> None:
        self.batch, self.before_batch, self.batches = batch, before_batch, 0
        self.data = b""

    def save(self, trainer: L.Trainer) -> None:
        file = io.BytesIO()
        torch.save(to_payload(take(trainer)), file)
        self.data = file.getvalue()

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.before_batch:
            private.advance_control(trainer).before.append(
                lambda: self.save(trainer) if self.batches == self.batch - 1 else None
            )

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == self.batch and not self.before_batch:
            self.save(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.batches >= self.batch + 2:
            raise StoppedError


class Resume(L.Callback):
    def __init__(self, data: bytes) -> None:
        self.snapshot: Snapshot = from_payload(torch.load(io.BytesIO(data), weights_only=True))

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        resume(trainer, self.snapshot)


CELLS = [
    Cell("mid-epoch", batch=5),
    Cell("first batch of an epoch", batch=13),
    Cell("last batch of an epoch", batch=12),
    Cell("last batch of the second epoch", batch=24),
    Cell("in the second epoch", batch=17),
    Cell("mid-accumulation", batch=9, trainer={"accumulate_grad_batches": 4}),
    Cell("window end", batch=8, trainer={"accumulate_grad_batches": 4}),
    Cell("2 workers", batch=7, loader=lambda: map_loader(2)),
    Cell("2 workers, last batch", batch=12, loader=lambda: map_loader(2)),
    Cell("distributed sampler", batch=17, loader=distributed_loader),
    Cell("distributed sampler, first batch of an epoch", batch=13, loader=distributed_loader),
    Cell("distributed sampler, last batch of an epoch", batch=12, loader=distributed_loader),
    Cell("distributed sampler, epochs cut short", batch=8, loader=distributed_loader) | {"limit_train_batches": 8},
    Cell("2 workers, distributed sampler, first batch of an epoch", batch=13, loader=lambda: distributed_loader(2)),
    Cell("2 workers, distributed sampler, last batch of an epoch", batch=12, loader=lambda: distributed_loader(2)),
    Cell("iterable without length", batch=5, loader=stream_loader),
    Cell("iterable, last but one batch", batch=11, loader=stream_loader),
    Cell("iterable, last batch", batch=12, loader=stream_loader),
    Cell("fp16", batch=8, fp16=True),
    Cell("manual, two optimizers", batch=8, net={"manual": True, "two_optimizers": True}),
    Cell("scheduler by epoch", batch=13, net={"scheduler": "epoch"}),
    Cell("plateau, validation pending", batch=12, net={"scheduler": "plateau"}, validation=True),
    Cell("validation inside the epoch", batch=8, validation=True, trainer={"val_check_interval": 4}),
    Cell("averaged weights", batch=8, callbacks=lambda: [WeightAveraging()]),
    Cell("max_steps", batch=8, trainer={"max_steps": 20, "max_epochs": -1}),
]


BEFORE_BATCH = (
    "mid-epoch",
    "first batch of an epoch",
    "mid-accumulation",
    "fp16",
    "2 workers",
    "distributed sampler, first batch of an epoch",
    "2 workers, distributed sampler, first batch of an epoch",
)
POINTS = [(c, False) for c in CELLS] + [(c, True) for c in CELLS if c.name in BEFORE_BATCH]


@pytest.mark.parametrize(
    ("cell", "before_batch"), POINTS, ids=[f"{c.name}{', before the batch' * b}".replace(" ", "-") for c, b in POINTS]
)
def test_resumed_run_equals_an_uninterrupted_one(cell: Cell, before_batch: bool) -> None:
    reference = run(cell)
    save = Save(cell.batch, before_batch)
    with pytest.raises(StoppedError):
        run(cell, save)
    # another seed: nothing may depend on what the new process happens to start with
    outcome = run(cell, Resume(save.data), seed=5)
    assert outcome.calls == len(reference.steps) - (cell.batch - before_batch)
    assert_same_run(outcome, reference)
    assert context_of(outcome.trainer).restart_step == outcome.steps[cell.batch - 1 - before_batch][2]


class AtOnce(L.Callback):
    """Takes a snapshot as soon as it is resumed from another, before any batch, and goes on from that one."""

    def __init__(self, data: bytes) -> None:
        self.first = Resume(data)

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        resume(trainer, self.first.snapshot)
        control = private.advance_control(trainer)
        put_back = control.first
        assert put_back is not None

        def twice() -> bool:
            result = put_back()
            restore(trainer, take(trainer))
            return result

        control.first = twice


@pytest.mark.parametrize("batch", [5, 12])
def test_a_snapshot_taken_right_after_a_resume_is_the_same_place(batch: int) -> None:
    cell = Cell("at once", batch=batch, loader=distributed_loader)
    save = Save(batch)
    with pytest.raises(StoppedError):
        run(cell, save)
    assert_same_run(run(cell, AtOnce(save.data), seed=5), run(cell))


def test_payload_round_trip() -> None:
    save = Save(5)
    with pytest.raises(StoppedError):
        run(Cell("payload"), save)
    payload = torch.load(io.BytesIO(save.data), weights_only=True)
    same(to_payload(from_payload(payload)), payload)
    assert payload["step"] == 5
    assert payload["format"] == 1
    with pytest.raises(ValueError, match="The snapshot has format 9, this version reads format 1"):
        from_payload(payload | {"format": 9})


def test_payload_refuses_what_is_not_plain_data() -> None:
    class Odd(Recorder):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class Collect(L.Callback):
        snapshot: Snapshot

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.snapshot = take(trainer)

    collect = Collect()
    run(Cell("odd", trainer={"max_steps": 1, "max_epochs": -1}), Odd(), collect)
    with pytest.raises(ValueError, match=r"holds a object at `callbacks.*Odd.*state_dict.odd`, which cannot be saved"):
        to_payload(collect.snapshot)


def test_a_snapshot_of_another_model_is_refused() -> None:
    save = Save(2)
    with pytest.raises(StoppedError):
        run(Cell("small"), save)
    payload = torch.load(io.BytesIO(save.data), weights_only=True)
    payload["params"]["net.0.weight"] = torch.zeros(3, 3)
    file = io.BytesIO()
    torch.save(payload, file)
    with pytest.raises(
        RuntimeError, match=r"Parameter net.0.weight has shape \(16, 8\) here and \(3, 3\) in the snapsh"
    ):
        run(Cell("small"), Resume(file.getvalue()))
