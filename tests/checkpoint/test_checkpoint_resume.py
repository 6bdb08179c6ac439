"""Save, stop, resume in a fresh Trainer: bit for bit the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import Net, events, fit, fp16, loader, same_optimizer, same_weights, suite
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings(
    # the scaler skips the very first update here; torch then guesses a wrong order of calls
    "ignore:Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`"
)

CELLS: dict[str, dict[str, Any]] = {
    "mid-epoch": {"stop": 7},
    "last-batch-of-epoch": {"every": 12, "stop": 13},
    "second-epoch": {"every": 8, "stop": 20},
    "epoch-schedule": {"every": 12, "stop": 14, "interval": "epoch"},
    "stream-without-len": {"kind": "stream", "stop": 7},
    "stream-at-epoch-end": {"kind": "stream", "every": 12, "stop": 13},
    "two-workers": {"workers": 2, "stop": 7},
    "fp16-moving-scale": {"fp16": True, "stop": 8},
    "accumulation": {"accumulate": 2, "every": 4, "stop": 5},
    "validation": {"val": True, "every": 6, "stop": 7},
}


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.global_step)
        torch.rand(())  # validation draws, too


@pytest.mark.parametrize("cell", CELLS)
def test_resume_equals_the_uninterrupted_run(cell: str, tmp_path: Path) -> None:
    spec = CELLS[cell]
    every = spec.get("every", 5)

    def run(callbacks: list[Any], fail_at: int | None, seeds: int) -> tuple[Any, Any]:
        options: dict[str, Any] = {"accumulate_grad_batches": spec.get("accumulate", 1)}
        if spec.get("fp16"):
            options["plugins"] = [fp16()]
        if spec.get("val"):
            options["val_check_interval"] = 6
        val = DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 8))) if spec.get("val") else None
        return fit(
            callbacks,
            module=lambda: (Validated if spec.get("val") else Net)(fail_at, spec.get("interval", "step")),
            data=lambda: loader(spec.get("kind", "map"), spec.get("workers", 0)),
            seeds=seeds,
            val=val,
            **options,
        )

    clean, clean_trainer = run(suite(tmp_path / "clean", every_n_steps=every), None, seeds=0)
    with pytest.raises(RuntimeError, match="boom") as caught:
        run(suite(tmp_path / "run", every_n_steps=every, save_on_exception=False), spec["stop"], seeds=0)
    first, _ = caught.value.world  # type: ignore[attr-defined]
    # the newest, whatever its status: on a busy machine it may not have been written long enough to be known-good
    again, trainer = run(suite(tmp_path / "run", every_n_steps=every, resume="latest"), None, seeds=99)

    resumed = events(tmp_path / "run", "run.resumed")
    assert len(resumed) == 1
    assert resumed[0]["checkpoint_step"] == (spec["stop"] - 1) // every * every
    done = [row for row in first.steps if row[2] < resumed[0]["checkpoint_step"]]
    assert done + again.steps == clean.steps
    assert same_weights(clean, again)
    assert same_optimizer(clean_trainer, trainer)
    assert trainer.callback_metrics["loss"] == clean_trainer.callback_metrics["loss"]
    assert again.validated == [s for s in clean.validated if s > resumed[0]["checkpoint_step"]]
    if spec.get("fp16"):
        assert trainer.precision_plugin.scaler.get_scale() == clean_trainer.precision_plugin.scaler.get_scale()
        assert trainer.precision_plugin.scaler.get_scale() != 2.0**20
    compared = events(tmp_path / "run", "run.compared")[0]
    assert compared["largest_relative_difference"] == 0
    assert compared["equal_losses"] == compared["steps"] == spec["stop"] - resumed[0]["checkpoint_step"]
    assert not [f for f in events(tmp_path / "run", "finding") if f["finding"]["kind"] == "restart_jump"]
