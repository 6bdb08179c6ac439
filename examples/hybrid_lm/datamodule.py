"""The example's data: a mixture of prose and code for training, fixed held-out sequences for validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from lightning_sentinel.data.mixture import MixtureLoader, collate

from .corpus import VOCAB_SIZE, TextSource, text_sources


class TextMixtureDataModule(L.LightningDataModule):
    """Byte-level text of the Python installation as a resumable mixture.

    Example:
        >>> data = TextMixtureDataModule(batch_size=2, sequence_length=64, max_bytes=50_000)
        >>> data.setup("fit")
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch["input_ids"].shape, batch["targets"].shape, len(batch["sample_id"])
        (torch.Size([2, 64]), torch.Size([2, 64]), 2)

    Args:
        batch_size: Sequences for each rank and micro-batch.
        sequence_length: Tokens in a sequence.
        weights: Weights of ``prose`` and ``code``, or knots ``{"draw": int, "weights": {...}}`` over the sequences drawn on
            all ranks together.
        interpolation: ``constant`` or ``linear`` weights between the knots.
        seed: Seed of the order of the data.
        max_bytes: Most bytes of each source.
        steps_per_epoch: Micro-batches in an epoch; None: the stream has no end and no length.
        validation_sequences: Held-out sequences of each source; 0 for no validation. They are repeated nowhere, so where the
            held-out text has fewer there are fewer.
    """

    def __init__(
        self,
        batch_size: int = 4,
        sequence_length: int = 256,
        weights: Mapping[str, float] | Sequence[Mapping[str, Any]] | None = None,
        interpolation: Literal["constant", "linear"] = "constant",
        seed: int = 0,
        max_bytes: int = 750_000,
        steps_per_epoch: int | None = None,
        validation_sequences: int = 16,
    ) -> None:
        super().__init__()
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, expected at least 1")
        if validation_sequences < 0:
            raise ValueError(f"validation_sequences is {validation_sequences}, expected at least 0")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.weights = weights
        self.interpolation: Literal["constant", "linear"] = interpolation
        self.seed = seed
        self.max_bytes = max_bytes
        self.steps_per_epoch = steps_per_epoch
        self.validation_sequences = validation_sequences
        self._sources: list[TextSource] | None = None

    @property
    def vocab_size(self) -> int:
        """Token ids are below this: 256 bytes and the separator."""
        return VOCAB_SIZE

    @property
    def train_sources(self) -> list[TextSource]:
        if self._sources is None:
            self._sources = text_sources(self.max_bytes, self.sequence_length)
        return self._sources

    def setup(self, stage: str) -> None:
        _ = self.train_sources

    def train_dataloader(self) -> MixtureLoader:
        return MixtureLoader(
            self.train_sources,
            self.weights,
            self.batch_size,
            self.seed,
            self.interpolation,
            self.steps_per_epoch,
        )

    def val_dataloader(self) -> Iterable[Any]:
        if self.validation_sequences == 0:
            return []
        sources = text_sources(self.max_bytes, self.sequence_length, held_out=True)
        samples = [
            {"sample_id": source.sample_id(i), "source": k, **source.sample(i)}
            for k, source in enumerate(sources)
            for i in range(min(self.validation_sequences, len(source)))
        ]
        # its own generator: an iterator of DataLoader draws a seed, and validation must not move the training's random state
        return DataLoader(
            samples,  # type: ignore[arg-type]  # a list is all that DataLoader asks of a data set
            batch_size=self.batch_size,
            collate_fn=_collate_validation,
            generator=torch.Generator(),
        )


def _collate_validation(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ids = [sample["sample_id"] for sample in samples]
    arrays = [{k: v for k, v in sample.items() if k not in ("sample_id", "source")} for sample in samples]
    source = torch.tensor([sample["source"] for sample in samples], dtype=torch.int64)
    return {**collate(arrays, ids), "source": source, "sample_id": ids}
