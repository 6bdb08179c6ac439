"""The example's text: what it holds, how it is packed, and its loaders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

from hybrid_lm.corpus import (  # noqa: E402
    IGNORED,
    SEPARATOR,
    VOCAB_SIZE,
    Document,
    TextSource,
    collect,
    docstrings,
    library_files,
    text_sources,
)
from hybrid_lm.datamodule import TextMixtureDataModule  # noqa: E402

SMALL = 60_000


def test_packing_never_predicts_across_documents() -> None:
    source = TextSource("prose", [Document.of(b"abc"), Document.of(b"de"), Document.of(b"fghijk")], 4)
    # a b c # d e # f g h i j k #: three whole sequences with their targets
    assert len(source) == 3
    samples = [{k: v.tolist() for k, v in source.sample(i).items()} for i in range(3)]
    a, separator = ord("a"), SEPARATOR
    assert samples[0] == {
        "input_ids": [a, a + 1, a + 2, separator],
        "targets": [a + 1, a + 2, separator, IGNORED],
        "document_ids": [0, 0, 0, 0],
    }
    assert samples[1] == {
        "input_ids": [a + 3, a + 4, separator, a + 5],
        "targets": [a + 4, separator, IGNORED, a + 6],
        "document_ids": [0, 0, 0, 1],
    }
    assert samples[2]["input_ids"] == [a + 6, a + 7, a + 8, a + 9]
    assert samples[2]["targets"] == [a + 7, a + 8, a + 9, a + 10]
    names = [Document.of(t).name for t in (b"abc", b"de", b"fghijk")]
    assert [source.sample_id(i) for i in range(3)] == [
        f"prose/{names[0]}/0",
        f"prose/{names[1]}/0",
        f"prose/{names[2]}/1",
    ]
    assert {k: v.dtype for k, v in source.sample(0).items()} == {
        "input_ids": np.int64,
        "targets": np.int64,
        "document_ids": np.int32,
    }


def test_too_little_text_is_refused() -> None:
    with pytest.raises(
        ValueError, match="source 'code' has 4 tokens, not enough for one sequence of 4 and its targets"
    ):
        TextSource("code", [Document.of(b"abc")], 4)
    with pytest.raises(ValueError, match="a sequence has 0 tokens, expected at least 1"):
        TextSource("code", [Document.of(b"abc")], 0)


def test_docstrings() -> None:
    long = "A sentence that says something. " * 8 + "Done."
    source = f'"""{long}"""\ndef f():\n    """short"""\nclass C:\n    def g(self):\n        """{long}g"""\n'
    assert list(docstrings(source.encode())) == [long, f"{long}g"]
    assert list(docstrings(b"def broken(:")) == []


def test_the_collection_is_real_text_of_bounded_size_and_apart() -> None:
    found = collect(SMALL)
    assert list(found) == ["prose", "code"]
    names: list[str] = []
    for train, held_out in found.values():
        assert sum(len(d.text) for d in train) == SMALL
        assert 0 < sum(len(d.text) for d in held_out) <= SMALL // 16
        names += [d.name for d in (*train, *held_out)]
    assert len(names) == len(set(names))
    assert b"def " in b"".join(d.text for d in found["code"][0])
    assert b" the " in b"".join(d.text for d in found["prose"][0])
    files = library_files()
    assert len(files) > 300
    assert not any({"test", "tests", "site-packages"} & set(f.parts) for f in files)


def test_every_sample_of_a_source_has_its_own_id_and_valid_tokens() -> None:
    for source in (*text_sources(SMALL, 64), *text_sources(SMALL, 64, held_out=True)):
        ids = [source.sample_id(i) for i in range(len(source))]
        assert len(set(ids)) == len(ids)
        for i in range(len(source)):
            sample = source.sample(i)
            tokens, targets, documents = sample["input_ids"], sample["targets"], sample["document_ids"]
            assert tokens.min() >= 0
            assert tokens.max() < VOCAB_SIZE
            assert (np.diff(documents) >= 0).all()
            assert documents[0] == 0
            # ignored exactly after separators
            assert ((targets == IGNORED) == (tokens == SEPARATOR)).all()


def test_set_up_with_the_defaults() -> None:
    data = TextMixtureDataModule()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["targets"].shape == (data.batch_size, data.sequence_length)


def test_the_datamodule() -> None:
    data = TextMixtureDataModule(batch_size=3, sequence_length=32, max_bytes=SMALL, validation_sequences=4, seed=1)
    data.setup("fit")
    loader = data.train_dataloader()
    assert loader.sources == ["prose", "code"]
    batch = next(iter(loader))
    assert {k: (v.dtype, tuple(v.shape)) for k, v in batch.items() if isinstance(v, torch.Tensor)} == {
        "input_ids": (torch.int64, (3, 32)),
        "targets": (torch.int64, (3, 32)),
        "document_ids": (torch.int32, (3, 32)),
        "source": (torch.int64, (3,)),
    }
    validation = list(data.val_dataloader())
    assert [len(b["sample_id"]) for b in validation] == [3, 3, 2]
    assert torch.cat([b["source"] for b in validation]).tolist() == [0] * 4 + [1] * 4
    again = list(data.val_dataloader())
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(validation, again, strict=True))
    assert data.vocab_size == 257
    assert TextMixtureDataModule(validation_sequences=0).val_dataloader() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "max_bytes is 0, expected at least 1"),
        ({"validation_sequences": -1}, "validation_sequences is -1, expected at least 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextMixtureDataModule(**options)


def test_validation_draws_nothing_from_the_global_random_state() -> None:
    data = TextMixtureDataModule(max_bytes=SMALL, sequence_length=32)
    before = torch.get_rng_state()
    list(data.val_dataloader())
    next(iter(data.train_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["text", "text_tiny"])
def test_the_configurations_fit_the_datamodule(name: str) -> None:
    path = EXAMPLES.parent / "configs" / "data" / f"{name}.yaml"
    options = yaml.safe_load(path.read_text())
    assert options.pop("_target_") == "hybrid_lm.datamodule.TextMixtureDataModule"
    assert options["seed"] == "${seed}"
    data = TextMixtureDataModule(**{**options, "seed": 0})
    assert set(options) == set(TextMixtureDataModule.__init__.__annotations__) - {"return"}
    assert len(next(iter(data.train_dataloader()))["sample_id"]) == options["batch_size"]
    keys = [line for line in path.read_text().splitlines() if line[:1].isalpha() and not line.startswith("_target_")]
    assert all("#" in line for line in keys)


def test_configurations_through_hydra() -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(EXAMPLES.parent / "configs" / "data" / "text.yaml")
    data = instantiate(OmegaConf.create({"seed": 5, "data": config}).data, max_bytes=SMALL, sequence_length=64)
    loader = data.train_dataloader()
    assert loader.seed == 5
    assert loader.weights_at(0) == {"prose": 0.7, "code": 0.3}
    assert loader.transitions == [600]


def test_in_a_trainer(tmp_path: Path) -> None:
    class Bigram(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
            nn.init.zeros_(self.table.weight)
            self.losses: list[float] = []
            self.validated: list[str] = []

        def loss(self, batch: dict[str, Any]) -> torch.Tensor:
            logits = self.table(batch["input_ids"]).flatten(0, 1)
            return nn.functional.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORED)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.validated += batch["sample_id"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    data = TextMixtureDataModule(8, 64, max_bytes=SMALL, validation_sequences=2)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=40,
        val_check_interval=20,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Bigram()
    trainer.fit(model, datamodule=data)
    assert model.losses[0] == pytest.approx(np.log(VOCAB_SIZE), abs=1e-4)
    # it is text: pairs of bytes tell a lot
    assert np.mean(model.losses[-5:]) < 4.0
    assert len(model.validated) == 8
    assert model.validated[:4] == model.validated[4:]
