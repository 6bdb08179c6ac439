"""Case scheduler-drift (Lightning#18828): the scaler skips an update, scheduler and ``global_step`` advance all the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from case_world import Net, events, fit, shuffled, suite
from lightning.pytorch.plugins import MixedPrecision

from lightning_sentinel import LossScaleMonitor

pytestmark = pytest.mark.filterwarnings(
    # the scaler skips the very first updates here; torch then guesses a wrong order of calls
    "ignore:Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`"
)


class Scheduled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.updates = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        optimizer.register_step_post_hook(lambda *args: setattr(self, "updates", self.updates + 1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_every_skip_is_journalled_and_both_counts_are_kept(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    callbacks = suite(tmp_path, 0)
    callbacks.insert(1, LossScaleMonitor())
    module, trainer = fit(
        callbacks, shuffled, seed=0, module=Scheduled, max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )
    skips = trainer.global_step - module.updates
    assert trainer.global_step == 12
    assert skips >= 3
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 12  # the report: as if every step had been one

    overflows = events(tmp_path, "scaler.overflow")
    scales = [2.0 ** (24 - i) for i in range(skips + 1)]
    assert [(e["old_scale"], e["new_scale"]) for e in overflows] == list(itertools.pairwise(scales))
    assert all(e["parameters"] for e in overflows)
    assert scaler.get_scale() == scales[-1]
    steps = events(tmp_path, "step")
    assert [e["step"] for e in steps if not e["applied"]] == [e["step"] for e in overflows]
    assert [e["applied_steps"] for e in steps] == list(itertools.accumulate(int(e["applied"]) for e in steps))
    ended = events(tmp_path, "run.ended")[0]
    assert (ended["nominal_steps"], ended["applied_steps"]) == (12, module.updates)
