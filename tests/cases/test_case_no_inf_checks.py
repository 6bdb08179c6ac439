"""Case no-inf-checks (Lightning#4956): a loss that touches no parameter is a riddle in fp16 and a silent nothing in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case_world import Net, events, fit, shuffled, suite
from lightning.pytorch.plugins import MixedPrecision


class Detached(Net):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) if batch_idx == 3 else loss


def found(folder: Path) -> list[dict[str, Any]]:
    return [e["finding"] for e in events(folder, "finding") if e["finding"]["kind"] == "no_gradient"]


def test_in_fp32_it_is_said_and_the_step_changes_nothing(tmp_path: Path) -> None:
    _module, trainer = fit(suite(tmp_path, 0), shuffled, seed=0, module=Detached, max_epochs=1)
    assert trainer.global_step == 12
    [finding] = found(tmp_path)
    assert (finding["step"], finding["ranks"]) == (3, [0])
    assert finding["message"].startswith("No parameter received a gradient at step 3")
    assert [e["step"] for e in events(tmp_path, "step") if not e["applied"]] == [3]


def test_in_fp16_it_is_said_before_the_riddle(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):  # the report
        fit(suite(tmp_path, 0), shuffled, seed=0, module=Detached, max_epochs=1, plugins=[precision])
    [finding] = found(tmp_path)
    assert finding["step"] == 3
    assert finding["message"].startswith("No parameter received a gradient at step 3")
    names = [e["event"] for e in events(tmp_path, "finding") + events(tmp_path, "exception")]
    assert names == ["finding", "exception"]
    assert events(tmp_path, "exception")[0]["type"] == "AssertionError"
