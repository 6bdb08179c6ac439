"""Case prefetch-lost (meta-pytorch/data#1520): a loader without ``__len__`` has fetched a batch ahead that nobody saves."""

from __future__ import annotations

from pathlib import Path

from case_world import (
    WITHOUT_ITS_CALLBACK,
    fit,
    lightning_checkpoint,
    restart_finding,
    stream,
    suite,
    the_rest_is_exact,
)

pytestmark = WITHOUT_ITS_CALLBACK


def test_36_of_36_steps_from_the_suites_own_checkpoint(tmp_path: Path) -> None:
    the_rest_is_exact(tmp_path, stream, 5, 6)


def test_a_plain_resume_that_loses_a_prefetched_batch_is_told_which_samples(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, stream, 5)
    module, _ = fit(suite(tmp_path, 0), stream, seed=7, ckpt_path=file)
    assert module.steps[0][2] == ("s24", "s25", "s26", "s27")  # the report: batch 6 is never trained
    finding = restart_finding(tmp_path)
    assert finding["culprits"] == ["cursor"]
    assert finding["step"] == 5
    assert finding["evidence"]["lost"] == ["s20", "s21", "s22", "s23"]
    assert "the checkpoint had fetched ahead" in finding["message"]
