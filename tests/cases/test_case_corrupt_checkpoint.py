"""Lightning#21431, Megatron-LM#5281: a flipped bit or a zeroed page inside a tensor loads without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_sentinel.checkpoint import CheckpointError, CheckpointStore

DAMAGE = {"one flipped bit": slice(203, 204), "one zeroed 4 KiB page": slice(4096, 8192)}


@pytest.mark.parametrize("damage", DAMAGE)
def test_torch_loads_it_and_the_store_refuses_it_by_name(damage: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    weight = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    for step in (10, 20):
        pending = store.begin(step)
        pending.write_torch("model.pt", {"weight": weight + step})
        pending.write_torch("rank-00000.pt", {})
        store.promote(store.publish(pending, step=step).path)
    path = tmp_path / "step-00000020" / "model.pt"
    raw = bytearray(path.read_bytes())
    start = raw.find((weight + 20).numpy().tobytes()[:64])
    assert start > 0
    where = slice(start + DAMAGE[damage].start, start + DAMAGE[damage].stop)
    raw[where] = bytes([raw[where.start] ^ 0x40]) if damage == "one flipped bit" else bytes(4096)
    path.write_bytes(raw)

    loaded = torch.load(path, weights_only=True)["weight"]  # no error: this is the public report
    assert not torch.equal(loaded, weight + 20)

    assert store.verify(path.parent) == ["model.pt fails SHA-256"]
    with pytest.raises(CheckpointError, match=r"model\.pt fails SHA-256"):
        store.load_torch(store.read(path.parent), "model.pt")
    lines: list[str] = []
    chosen = store.newest_verified(say=lines.append)
    assert chosen is not None
    assert chosen.step == 10
    assert torch.equal(store.load_torch(chosen, "model.pt")["weight"], weight + 10)
    assert lines == ["checkpoint step-00000020 refused: model.pt fails SHA-256; trying the one before it"]
