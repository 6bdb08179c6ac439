"""A long run costs in its last step what it costs in an early one, in calls and in memory."""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from sentinel_kit import Loader
from torch import Tensor, nn

from lightning_sentinel import BatchValidator, Preflight, RunJournal, default_callbacks
from lightning_sentinel.context import context_of
from lightning_sentinel.journal import read_journal

STEPS, TRACED, EARLY, LATE, SPAN = 1_300, 300, 600, 1_200, 50  # traced early enough that all kept records are new
KEPT = 800  # bytes a step: windows of 2,048 losses are still filling; a kept record would be three times that


class Curve(L.LightningModule):
    """Its loss is a slow descent with a ripple, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.global_step
        level = 2.0 + 3.0 / math.sqrt(1.0 + step / 500.0) + 0.05 * math.sin(1.7 * step)
        return self.layer(batch["x"]).square().mean() * 0.0 + level

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Meter(L.Callback):
    """Calls of Python functions in a span of steps, and bytes that are alive, early and late."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self._count = 0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == TRACED:
            tracemalloc.start()
        if step in (EARLY, LATE):
            gc.collect()
            self.bytes[step] = tracemalloc.get_traced_memory()[0]
            self._count = 0
            sys.setprofile(self._profile)
        elif step in (EARLY + SPAN, LATE + SPAN):
            sys.setprofile(None)
            self.calls[step - SPAN] = self._count

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        self._count += event == "call"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        sys.setprofile(None)
        tracemalloc.stop()


def test_cost_and_memory_of_a_step_stay_where_they_are(tmp_path: Path) -> None:
    meter = Meter()
    suite = [c for c in default_callbacks() if not isinstance(c, (RunJournal, BatchValidator, Preflight))]
    # 12 bytes and a dictionary entry for each sample are meant to grow, up to max_remembered: left out here.
    own = [RunJournal(tmp_path, max_bytes=2**18, report=False), BatchValidator(repeats="allow")]
    trainer = L.Trainer(
        max_steps=STEPS + 1,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[meter, *own, *suite],
    )
    # Ids and rates of the newest thousands of steps are meant to be remembered: here of the newest hundred.
    context = context_of(trainer)
    context.drawn, context.rates = deque(maxlen=100), deque(maxlen=100)
    trainer.fit(Curve(), Loader())
    assert meter.calls[LATE] < 1.03 * meter.calls[EARLY]
    assert meter.bytes[LATE] - meter.bytes[EARLY] < KEPT * (LATE - EARLY)
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) > 2
    steps = [e["step"] for e in read_journal(tmp_path) if e["event"] == "step"]
    assert steps == list(range(STEPS + 1))
