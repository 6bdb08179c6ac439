"""Addresses with a protocol: Lightning's own files go there, the run folder is a folder, and is never one by that name."""

from __future__ import annotations

from pathlib import Path

import fsspec
import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from sentinel_kit import Loader, Net, make_trainer, same_bits, weights

from lightning_sentinel import ForensicCheckpoint, RunJournal, default_callbacks
from lightning_sentinel.folders import as_folder
from lightning_sentinel.journal import read_journal


@pytest.mark.parametrize(
    ("address", "protocol"),
    [
        ("s3://bucket/runs", "s3"),
        ("memory://runs", "memory"),
        ("abfs+ssl://a@b/c", r"abfs\+ssl"),
        (Path("gs://b/c"), "gs"),
    ],
)
def test_an_object_store_is_no_run_folder(address: str | Path, protocol: str, tmp_path: Path) -> None:
    for make in (RunJournal, ForensicCheckpoint):
        with pytest.raises(
            ValueError, match=rf"{make.__name__}: run_dir is .* all ranks reach: {protocol} has no rename"
        ):
            make(run_dir=address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "folder"),
    [
        ("runs/a", "runs/a"),
        ("file:///data/runs", "/data/runs"),
        ("local:///data/runs", "/data/runs"),
        (Path("file:///data/runs"), "/data/runs"),
        ("C:/runs", "C:/runs"),
        ("runs/a:b", "runs/a:b"),
    ],
)
def test_what_is_a_folder(address: str | Path, folder: str) -> None:
    assert as_folder(address, "run_dir") == Path(folder)


def fit(callbacks: list[L.Callback], steps: int, gains: dict[int, float] | None = None, **options: str) -> Net:
    L.seed_everything(1, verbose=False)
    module = Net(gains)
    trainer, _ = make_trainer(callbacks, max_steps=steps, default_root_dir="memory://root", enable_checkpointing=True)
    trainer.fit(module, Loader(), **options)
    return module


def test_lightning_writes_to_an_address_beside_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ModelCheckpoint`` and the root folder on fsspec's memory, the suite's by ``file://``; both are resumed from."""
    monkeypatch.chdir(tmp_path)
    run = f"file://{tmp_path}/run"

    def callbacks() -> list[L.Callback]:
        own = ModelCheckpoint("memory://lightning", "{step}", every_n_train_steps=4, save_top_k=-1)
        return [own, *default_callbacks(run, policy="recover", checkpoint_every_n_steps=4)]

    whole = fit(default_callbacks(tmp_path / "whole"), 16)
    fit(callbacks(), 9)
    disk = fsspec.filesystem("memory")
    names = sorted(Path(name).name for name in disk.ls("memory://lightning", detail=False))
    assert names == ["step=4.ckpt", "step=8.ckpt"]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    resumed = fit(callbacks(), 16)
    assert same_bits(weights(whole), weights(resumed))
    events = read_journal(tmp_path / "run")
    assert [e["checkpoint_step"] for e in events if e["event"] == "run.resumed"] == [8]
    # no folder "memory:" or "file:" has come into being
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "whole"]

    # Said of each callback whose state the checkpoint holds, in no order.
    said = (
        "^Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided during `Trainer`"
        r" instantiation\. Please add the following callbacks: \["
    )
    with pytest.warns(UserWarning, match=said):
        fit([RunJournal(report=False)], 12, ckpt_path="memory://lightning/step=8.ckpt")
    (there,) = (tmp_path / "sentinel").iterdir()  # the root folder is no folder, so the working directory is it
    assert [e["checkpoint"] for e in read_journal(there) if e["event"] == "run.resumed"] == [
        "memory://lightning/step=8.ckpt"
    ]
