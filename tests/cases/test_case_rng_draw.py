"""Case rng-draw (Megatron-Bridge#5257): the random state restored before ``iter(loader)``, which draws from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from case_world import WITHOUT_ITS_CALLBACK, Stop, fit, shuffled, suite

pytestmark = WITHOUT_ITS_CALLBACK


def test_the_random_state_goes_last(tmp_path: Path) -> None:
    """``iter(loader)`` draws from the global generator; a restore before it is off by that draw."""
    seen: dict[str, list[torch.Tensor]] = {"clean": [], "again": []}

    class Watch(L.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step >= 5:
                seen[self.name].append(torch.get_rng_state())

    fit([Watch("clean")], shuffled, seed=0)
    fit([Stop(6), *suite(tmp_path, 5)], shuffled, seed=0)
    fit([Watch("again"), *suite(tmp_path, 5)], shuffled, seed=7)
    assert len(seen["again"]) == len(seen["clean"]) == 31
    for mine, theirs in zip(seen["clean"], seen["again"], strict=True):
        assert torch.equal(mine, theirs)
