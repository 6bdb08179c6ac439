"""Case epoch0-order (Lightning#21938): a distributed sampler with workers, resumed in epoch 1, shuffles as in epoch 0."""

from __future__ import annotations

from pathlib import Path

from case_world import (
    WITHOUT_ITS_CALLBACK,
    Samples,
    fit,
    lightning_checkpoint,
    restart_finding,
    suite,
    the_rest_is_exact,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

pytestmark = WITHOUT_ITS_CALLBACK


def distributed() -> StatefulDataLoader:
    data = Samples()
    sampler = StatefulDistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    return StatefulDataLoader(data, batch_size=4, num_workers=2, sampler=sampler)


def test_the_suites_own_checkpoint_resumes_in_the_order_of_its_epoch(tmp_path: Path) -> None:
    the_rest_is_exact(tmp_path, distributed, 17, 18)


def test_after_a_plain_resume_the_wrong_epoch_is_named(tmp_path: Path) -> None:
    clean, _ = fit([], distributed, seed=0)
    file = lightning_checkpoint(tmp_path, distributed, 17)
    module, _ = fit(suite(tmp_path, 0), distributed, seed=7, ckpt_path=file, max_steps=18)
    assert module.steps[0][:3] == (1, 17, clean.steps[5][2])  # the report: epoch 0's sixth batch in epoch 1
    finding = restart_finding(tmp_path)
    assert (finding["step"], finding["culprits"], finding["severity"]) == (17, ["cursor"], "incident")
    assert "resumed at epoch 1, data is epoch 0's order" in finding["message"]
    assert finding["evidence"]["expected"] == list(clean.steps[17][2])
    assert finding["evidence"]["live"] == list(clean.steps[5][2])
