"""Case cursor-dropped (Lightning#20550): ``estimated_stepping_batches`` in ``configure_optimizers`` drops the cursor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from case_world import (
    WITHOUT_ITS_CALLBACK,
    Net,
    all_events,
    events,
    fit,
    lightning_checkpoint,
    shuffled,
    suite,
    the_rest_is_exact,
)

pytestmark = WITHOUT_ITS_CALLBACK


class Estimates(Net):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def test_the_suites_own_checkpoint_keeps_the_position(tmp_path: Path) -> None:
    the_rest_is_exact(tmp_path, shuffled, 5, 6, module=Estimates)


def test_after_a_plain_resume_it_is_an_error_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 5, module=Estimates)
    module, _ = fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file, module=Estimates, max_steps=7)
    clean, _ = fit([], shuffled, seed=0)
    assert module.steps[0][2] != clean.steps[5][2]  # the report: the loader starts over
    found = [e["finding"] for e in events(tmp_path, "finding") if e["finding"]["kind"] == "restart_jump"]
    assert [f["culprits"] for f in found] == [["cursor"]] * len(found)
    assert "the checkpoint carries a data cursor that was never applied" in found[0]["message"]
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len([m for m in errors if "a data cursor that was never applied" in m]) == 1
    written = [e["event"] for e in all_events(tmp_path) if e["attempt"] == 1]
    assert written.index("finding") < written.index("step")


def test_a_plain_resume_that_applies_its_position_is_left_alone(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 5)
    fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file, max_steps=7)
    assert not [e for e in events(tmp_path, "finding") if e["finding"]["kind"] == "restart_jump"]
