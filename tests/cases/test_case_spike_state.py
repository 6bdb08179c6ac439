"""Case spike-state (Lightning#21752): the built-in spike detection crashes on resume and in manual optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from case_world import WITHOUT_ITS_CALLBACK, Net, Stop, all_events, events, fit, shuffled, suite
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.spike import SpikeDetection

from lightning_sentinel import SpikeDetector

pytestmark = WITHOUT_ITS_CALLBACK


class Manual(Net):
    """Returns nothing from ``training_step``; a calm loss with one gross spike at step 30."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = 2.0 + 0.01 * super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss * (5.0 if self.trainer.global_step == 30 else 1.0))
        optimizer.step()


def test_the_built_in_one_crashes(tmp_path: Path) -> None:
    """The report itself, so that the case stays a case."""
    keeper = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    fit([Stop(6), SpikeDetection(rtol=1e9), keeper], shuffled, seed=0)
    with pytest.raises(AttributeError, match="running"):
        fit([SpikeDetection(rtol=1e9)], shuffled, seed=0, ckpt_path=tmp_path / "step=5.ckpt")
    with pytest.raises((KeyError, TypeError)):
        fit([SpikeDetection()], shuffled, seed=0, module=Manual, max_steps=3)


def watched(folder: Path, every: int) -> tuple[SpikeDetector, list[L.Callback]]:
    journal, telemetry, checkpoint = suite(folder, every)
    detector = SpikeDetector()
    return detector, [journal, detector, telemetry, checkpoint]


@pytest.mark.parametrize("by", ["suite", "lightning"])
def test_the_state_goes_through_a_resume_of_a_trainer(by: str, tmp_path: Path) -> None:
    at_ten, callbacks = watched(tmp_path / "ten", 0)
    fit(callbacks, shuffled, seed=0, max_steps=10)
    whole, callbacks = watched(tmp_path / "whole", 0)
    fit(callbacks, shuffled, seed=0)
    assert whole.state_dict() != at_ten.state_dict()

    resumed, seen = SpikeDetector(), []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 10:
                seen.append(resumed.state_dict())

    _first, callbacks = watched(tmp_path / "run", 10)
    keeper = ModelCheckpoint(tmp_path / "plain", filename="{step}", every_n_train_steps=10, save_top_k=-1)
    fit([Stop(11), *callbacks, keeper], shuffled, seed=0)
    journal, telemetry, checkpoint = suite(tmp_path / "run", 10)
    file = tmp_path / "plain" / "step=10.ckpt" if by == "lightning" else None
    fit([Look(), journal, resumed, telemetry, checkpoint], shuffled, seed=7, ckpt_path=file)
    assert flat(seen[0]) == flat(at_ten.state_dict())
    if by == "suite":  # the plain resume has no random state: its losses differ
        assert flat(resumed.state_dict()) == flat(whole.state_dict())


def flat(state: Any) -> Any:
    """Arrays as lists, so that states compare."""
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def test_it_works_in_manual_optimization(tmp_path: Path) -> None:
    _, callbacks = watched(tmp_path, 0)
    _module, trainer = fit(callbacks, shuffled, seed=0, module=Manual)
    assert trainer.global_step == 36
    spikes = [e["finding"] for e in events(tmp_path, "finding") if e["finding"]["kind"] == "spike"]
    assert (spikes[0]["step"], spikes[0]["severity"]) == (30, "incident")
    assert len([e for e in all_events(tmp_path) if e["event"] == "step"]) == 36
