"""Case empty-epoch (meta-pytorch/data#1437): a loader's state from after an epoch's last batch makes the next epoch empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from case_world import (
    WITHOUT_ITS_CALLBACK,
    events,
    fit,
    lightning_checkpoint,
    shuffled,
    stream,
    suite,
    the_rest_is_exact,
)

pytestmark = WITHOUT_ITS_CALLBACK


@pytest.mark.parametrize(("data", "save_at"), [(shuffled, 12), (stream, 12), (shuffled, 24)])
def test_36_of_36_steps_from_the_suites_own_checkpoint(data: Any, save_at: int, tmp_path: Path) -> None:
    the_rest_is_exact(tmp_path, data, save_at, save_at + 1)


def test_a_plain_resume_into_an_empty_epoch_is_named(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 12, with_suite=False)
    module, trainer = fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file)
    assert trainer.global_step == 24  # the report: 24 of 36
    assert len(module.steps) == 12
    finding = events(tmp_path, "finding")[0]["finding"]
    assert (finding["kind"], finding["culprits"]) == ("restart_jump", ["cursor"])
    assert finding["message"].startswith("restart-aligned, cursor: epoch 1 trained no batch")
    assert finding["evidence"]["epoch"] == 1
