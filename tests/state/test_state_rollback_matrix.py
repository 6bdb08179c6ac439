"""Rollback in place is exact: each cell is compared, step by step and at the end, with an uninterrupted run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from state_world import (
    Cell,
    Hurt,
    Samples,
    assert_same_run,
    distributed_loader,
    map_loader,
    run,
    stream_loader,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel.callbacks.rollback import Rollback


def both(mode: str, workers: int = 0, stream: bool = False) -> Any:
    """Twelve batches of one loader (with a length or without) and five of another."""

    def make() -> CombinedLoader:
        short = StatefulDataLoader(Samples(20), batch_size=4, shuffle=True, num_workers=workers)
        long = stream_loader(workers) if stream else map_loader(workers)
        return CombinedLoader({"long": long, "short": short}, mode)

    return make


CELLS = [
    Cell("plain", restored=8),
    Cell("first step of all", batch=3, before_step=2, every=100, restored=0),
    Cell("the very first batch", batch=1, before_step=0, restored=0),
    Cell("last batch of an epoch", batch=12, before_step=11, restored=8),
    Cell("snapshot at an epoch's first batch", batch=15, before_step=14, every=12, restored=12),
    Cell("from the next epoch into the last", batch=15, before_step=14, every=5, restored=10),
    Cell("across two epochs", batch=29, before_step=28, every=10, trainer={"max_epochs": 3}, restored=20),
    Cell("far back", batch=26, before_step=3, every=100, restored=0),
    Cell("last batch of all", batch=36, before_step=35, restored=32),
    Cell("accumulate 2", batch=10, before_step=4, every=2, trainer={"accumulate_grad_batches": 2}, restored=4),
    Cell("accumulate 4", batch=11, before_step=2, every=1, trainer={"accumulate_grad_batches": 4}, restored=2),
    Cell(
        "accumulate 5, incomplete window at the epoch's end",
        batch=14,
        before_step=3,
        every=1,
        trainer={"accumulate_grad_batches": 5},
        restored=3,
    ),
    Cell("hurt in the middle of a window", batch=9, before_step=4, every=2, trainer={"accumulate_grad_batches": 2}),
    Cell("manual", net={"manual": True}),
    Cell("manual, two optimizers", batch=9, before_step=16, every=2, net={"manual": True, "two_optimizers": True}),
    Cell(
        "manual, accumulating by itself",
        batch=9,
        before_step=3,
        every=2,
        net={"manual": True, "step_every": 3},
        restored=2,
    ),
    Cell(
        "manual, two optimizers, multiples passed over",
        batch=9,
        before_step=16,
        every=5,
        net={"manual": True, "two_optimizers": True},
        restored=16,
    ),
    Cell("momentum", net={"optimizer": torch.optim.SGD}),
    Cell("scheduler by epoch", batch=15, before_step=14, every=5, net={"scheduler": "epoch"}, restored=10),
    Cell(
        "plateau scheduler",
        batch=27,
        before_step=26,
        every=10,
        net={"scheduler": "plateau"},
        validation=True,
        restored=20,
    ),
    Cell("clipping by norm", trainer={"gradient_clip_val": 0.1}),
    Cell("clipping by value", trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    Cell("validation inside the epoch", validation=True, trainer={"val_check_interval": 3}),
    Cell("validation due after the snapshot", validation=True, trainer={"val_check_interval": 4}, every=4),
    Cell("validation due at the bad batch", batch=8, before_step=7, validation=True, trainer={"val_check_interval": 4}),
    Cell("validation at the epoch's end", batch=12, before_step=11, validation=True),
    Cell("bf16", trainer={"precision": "bf16-mixed"}),
    Cell("fp16 with a moving scale", batch=21, before_step=20, every=10, fp16=True),
    Cell("distributed sampler", batch=20, before_step=19, every=5, loader=distributed_loader),
    Cell(
        "distributed sampler, an epoch's first batch",
        batch=15,
        before_step=14,
        every=12,
        restored=12,
        loader=distributed_loader,
    ),
    Cell("iterable without length", batch=9, before_step=8, every=5, loader=stream_loader, restored=5),
    Cell("iterable, last batch", batch=12, before_step=11, every=11, loader=stream_loader, restored=11),
    Cell("iterable, next epoch", batch=14, before_step=13, every=11, loader=stream_loader, restored=11),
    Cell("combined, min_size", batch=9, before_step=8, every=3, loader=both("min_size")),
    Cell("combined, max_size_cycle", batch=11, before_step=10, every=7, loader=both("max_size_cycle")),
    Cell("combined, max_size", batch=11, before_step=10, every=7, loader=both("max_size")),
    Cell("combined, min_size, next epoch", batch=7, before_step=6, every=4, loader=both("min_size"), restored=4),
    Cell(
        "combined, max_size_cycle, short one runs out on the abandoned path",
        batch=8,
        before_step=7,
        every=3,
        loader=both("max_size_cycle"),
        restored=6,
    ),
    Cell("combined, max_size_cycle, next epoch", batch=14, before_step=13, every=11, loader=both("max_size_cycle")),
    Cell(
        "combined, max_size, short one just out", batch=8, before_step=7, every=5, loader=both("max_size"), restored=5
    ),
    Cell("combined, max_size, next epoch", batch=14, before_step=13, every=11, loader=both("max_size"), restored=11),
    Cell("combined, min_size, no length", batch=5, before_step=4, every=3, loader=both("min_size", stream=True)),
    Cell(
        "combined, max_size_cycle, no length",
        batch=9,
        before_step=8,
        every=4,
        loader=both("max_size_cycle", stream=True),
    ),
    Cell("combined, max_size, no length", batch=14, before_step=13, every=11, loader=both("max_size", stream=True)),
    Cell("limit_train_batches", batch=9, before_step=8, every=3, trainer={"limit_train_batches": 5}),
    Cell("limit_train_batches as a part", batch=9, before_step=8, every=5, trainer={"limit_train_batches": 0.5}),
    Cell("limit_train_batches, no length", batch=7, before_step=6, every=4, loader=stream_loader)
    | {"limit_train_batches": 5},
    Cell("one epoch", batch=12, before_step=11, every=5, trainer={"max_epochs": 1}),
    Cell("max_steps at the bad batch", batch=20, before_step=19, every=8, trainer={"max_steps": 20, "max_epochs": -1}),
    Cell("max_steps", batch=17, before_step=16, every=5, trainer={"max_steps": 20, "max_epochs": -1}),
    Cell("loader snapshot every 4", loader=lambda: map_loader(every=4)),
]
WORKER_CELLS = [
    Cell("2 workers", loader=lambda: map_loader(2)),
    Cell("2 workers, loader snapshot every 4", every=3, loader=lambda: map_loader(2, every=4)),
    Cell(
        "2 persistent workers", batch=15, before_step=14, every=5, loader=lambda: map_loader(2, persistent_workers=True)
    ),
    Cell(
        "2 persistent workers, loader snapshot every 4",
        batch=15,
        before_step=14,
        every=5,
        loader=lambda: map_loader(2, every=4, persistent_workers=True),
    ),
    Cell("2 workers, accumulate 4", batch=11, before_step=2, every=1, loader=lambda: map_loader(2))
    | {"accumulate_grad_batches": 4},
    Cell("2 workers, combined", batch=9, before_step=8, every=6, loader=both("max_size_cycle", 2)),
    Cell("2 workers, combined, max_size", batch=9, before_step=8, every=6, loader=both("max_size", 2)),
    Cell("2 workers, distributed sampler", batch=14, before_step=13, every=5, loader=lambda: distributed_loader(2)),
    Cell(
        "2 workers, distributed sampler, an epoch's first batch",
        batch=15,
        before_step=14,
        every=12,
        restored=12,
        loader=lambda: distributed_loader(2),
    ),
    Cell("2 workers, iterable, last batch", batch=14, before_step=13, every=11, loader=lambda: stream_loader(2)),
    Cell(
        "2 persistent workers, iterable, last batch",
        batch=14,
        before_step=13,
        every=11,
        loader=lambda: stream_loader(2, persistent_workers=True),
    ),
]


# the first fp16 steps overflow on purpose, and torch takes the scaler's skip for a missing optimizer step
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.mark.parametrize("cell", CELLS + WORKER_CELLS, ids=lambda c: c.name.replace(" ", "-"))
def test_rollback_equals_an_uninterrupted_run(cell: Cell) -> None:
    reference = run(cell)
    rollback = Rollback(every_n_steps=cell.every)
    hurt = Hurt(rollback, cell.batch, cell.before_step)
    outcome = run(cell, hurt, rollback)
    assert hurt.fired == rollback.executed == 1
    assert outcome.calls > reference.calls == len(reference.steps)
    if cell.restored is not None:
        assert hurt.restored == [cell.restored]
    assert_same_run(outcome, reference)
