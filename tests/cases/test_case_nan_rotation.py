"""kyutai-labs/pocket-tts#262: a rotation that keeps the newest files keeps only NaN weights and deletes the healthy ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import ForensicCheckpoint, RankTelemetry, RunJournal
from lightning_sentinel.checkpoint import CheckpointStore


class TurnsToNan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
        return loss * float("nan") if self.global_step == 20 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(callbacks: list[L.Callback], folder: Path) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=4)
    L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    ).fit(TurnsToNan(), data)


def finite(state: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(v).all()) for v in state.values())


def test_plain_rotation_keeps_only_nan_weights(tmp_path: Path) -> None:
    """The report itself, so that the case stays a case."""
    keeper = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=3, monitor="step", mode="max"
    )
    fit([keeper], tmp_path)
    kept = [torch.load(p, weights_only=False)["state_dict"] for p in sorted(tmp_path.glob("*.ckpt"))]
    assert [finite(state) for state in kept] == [False, False, False]


@pytest.mark.parametrize("with_telemetry", [True, False])
def test_the_newest_known_good_one_always_survives(with_telemetry: bool, tmp_path: Path) -> None:
    checkpoint = ForensicCheckpoint(every_n_steps=4, keep=3, probation_steps=4)
    suite = [RunJournal(tmp_path, report=False), *([RankTelemetry()] if with_telemetry else []), checkpoint]
    fit(suite, tmp_path)

    store = CheckpointStore(tmp_path / "checkpoints")
    good = store.newest_verified()
    assert good is not None
    assert good.step == 16  # 20 holds no NaN yet, but step 20 fell into its probation
    assert finite(store.load_torch(good, "model.pt"))
    kept = {c.step: (str(c.status.status), finite(store.load_torch(c, "model.pt"))) for c in store.checkpoints()}
    assert kept == {
        12: ("known_good", True),
        16: ("known_good", True),
        20: ("candidate", True),
        36: ("poisoned", False),
    }
    lines = [json.loads(line) for line in (tmp_path / "journal" / "rank-00000.jsonl").read_text().splitlines()]
    poisoned = [e for e in lines if e["event"] == "checkpoint.poisoned"]
    assert [e["checkpoint_step"] for e in poisoned] == [24, 28, 32, 36]
    assert poisoned[0]["reason"] == "non-finite at step 24: 8 of 8 values of parameter layer.weight are not finite"
