"""Faults in the data: the loader delivers a batch that it should not.

The samples that were hit are remembered, and the fault strikes whenever one of them comes again: bad data stays bad.
Which tokens a sample gets depends on its id alone, so that it is hurt in the same way each time and no random number
is drawn from a generator that the training uses. Ids are remembered by rank.

A batch that is a mapping gets new tensors in place of the old ones; one that is a list or tuple is changed in place.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import Fault, Moment, nearest

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Key = str | int


def field(batch: Any, key: Key, fault: str) -> Tensor:
    """One tensor of the batch; a clear error where it is not there."""
    try:
        value = batch[key]
    except (KeyError, IndexError, TypeError):
        have = sorted(map(str, batch)) if isinstance(batch, MutableMapping) else f"a {type(batch).__name__}"
        raise KeyError(f"{fault}: the batch has no {key!r}; it has {have}. Set the fault's *_key arguments.") from None
    if not isinstance(value, Tensor):
        raise TypeError(f"{fault}: batch[{key!r}] is a {type(value).__name__}, expected a tensor.")
    return value


def put(batch: Any, key: Key, value: Tensor) -> None:
    """Deliver ``value`` in place of the batch's tensor.

    A mapping gets the new tensor, because the old one may share its memory with the data set.
    """
    if isinstance(batch, MutableMapping):
        batch[key] = value
    else:
        batch[key].copy_(value)


def sample_generator(seed: int, sample_id: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the sample's id alone."""
    digest = hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class DataFault(Fault, ABC):
    """A fault that lives in samples: those first hit are remembered and stay bad.

    ``duration`` counts the steps whose samples are taken, on whatever attempt; None takes all that follow.

    Args:
        samples: How many samples of each batch are hit, from the first on; None for all.
        input_key: Where the batch has its tokens, ``[batch, time]`` int64.
        target_key: Where the batch has its targets, ``[batch, time]`` int64, already shifted.
        ignore_index: Target that carries no loss.
        seed: Seed of the fault's own random numbers.
    """

    default_on_replay = True

    def __init__(
        self,
        step: int,
        duration: int | None = 1,
        samples: int | None = None,
        input_key: Key = "input_ids",
        target_key: Key = "targets",
        ignore_index: int = -100,
        seed: int = 0,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, rank, on_replay, name)
        if samples is not None and samples < 1:
            raise ValueError(f"{self.name}: samples is {samples}, expected 1 or more, or None for all of a batch.")
        self.samples, self.seed = samples, seed
        self.input_key, self.target_key, self.ignore_index = input_key, target_key, ignore_index
        self.sample_ids: set[str] = set()
        self.places: set[tuple[int, int]] = set()  # attempts and steps at which they were first hit

    def on_batch(self, moment: Moment) -> None:
        if self.attempt not in (None, moment.attempt) and not self.on_replay:
            return
        if self.due(moment):
            self.remember(moment)
        rows = [row for row, sample_id in enumerate(moment.sample_ids) if sample_id in self.sample_ids]
        if rows:
            details = self.hurt(moment, rows)
            self.struck(moment, sample_ids=[moment.sample_ids[row] for row in rows], **details)

    def in_window(self, step: int) -> bool:
        # Not the step's number but the data makes the end: after a rollback other batches come at the same steps.
        return step >= self.step

    def remember(self, moment: Moment) -> None:
        """Take the batch's samples among the bad ones, until those of ``duration`` steps are."""
        new = set(self.choose(moment)) - self.sample_ids
        place = (moment.attempt, moment.step)
        if new and (self.duration is None or place in self.places or len(self.places) < self.duration):
            self.places.add(place)
            self.sample_ids |= new

    def choose(self, moment: Moment) -> Sequence[str]:
        """Which of the batch's samples are bad from now on."""
        return moment.sample_ids[: self.samples]

    @abstractmethod
    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        """Change these rows of the batch; what was done, for the journal."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "sample_ids": sorted(self.sample_ids),
            "places": [list(place) for place in sorted(self.places)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sample_ids = set(state["sample_ids"])
        self.places = {(attempt, step) for attempt, step in state["places"]}


class CorruptBatch(DataFault):
    """Random tokens, all within the vocabulary, in every sample of one batch; the targets follow from them.

    Args:
        vocabulary: Tokens are drawn uniformly from ``0 .. vocabulary - 1``.
    """

    default_name = "corrupt_batch"

    def __init__(
        self,
        step: int,
        vocabulary: int = 256,
        duration: int | None = 1,
        samples: int | None = None,
        input_key: Key = "input_ids",
        target_key: Key = "targets",
        ignore_index: int = -100,
        seed: int = 0,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, samples, input_key, target_key, ignore_index, seed, rank, on_replay, name)
        if vocabulary < 2:
            raise ValueError(f"{self.name}: vocabulary is {vocabulary}, expected 2 tokens or more.")
        self.vocabulary = vocabulary

    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        tokens = field(moment.batch, self.input_key, self.name).clone()
        targets = field(moment.batch, self.target_key, self.name).clone()
        for row in rows:
            generator = sample_generator(self.seed, moment.sample_ids[row])
            noise = torch.randint(self.vocabulary, (tokens.shape[1] + 1,), generator=generator).to(tokens)
            tokens[row] = noise[:-1]
            targets[row] = torch.where(targets[row] == self.ignore_index, targets[row], noise[1:].to(targets))
        put(moment.batch, self.input_key, tokens)
        put(moment.batch, self.target_key, targets)
        return {"tokens_replaced": len(rows) * tokens.shape[1]}


class OutOfRangeToken(DataFault):
    """One id beyond the vocabulary in one sample. Unanswered, the embedding raises an index error.

    Args:
        token: The id that is put in, at or beyond the vocabulary's size.
        position: Where in the sample, counted from 0; negative from the end.
    """

    default_name = "out_of_range_token"

    def __init__(
        self,
        step: int,
        token: int = 1_000_000,
        position: int = 7,
        duration: int | None = 1,
        samples: int | None = 1,
        input_key: Key = "input_ids",
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, samples, input_key=input_key, rank=rank, on_replay=on_replay, name=name)
        self.token, self.position = token, position

    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        tokens = field(moment.batch, self.input_key, self.name).clone()
        if not -tokens.shape[1] <= self.position < tokens.shape[1]:
            raise ValueError(
                f"{self.name}: position is {self.position}, but the samples have {tokens.shape[1]} tokens."
            )
        tokens[list(rows), self.position] = self.token
        put(moment.batch, self.input_key, tokens)
        return {"token": self.token, "position": self.position % tokens.shape[1]}


class NoSupervisedTokens(DataFault):
    """Every target of the batch is ignored: the loss is a mean over nothing."""

    default_name = "no_supervised_tokens"

    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        targets = field(moment.batch, self.target_key, self.name).clone()
        ignored = int((targets[list(rows)] != self.ignore_index).sum())
        targets[list(rows)] = self.ignore_index
        put(moment.batch, self.target_key, targets)
        return {"targets_ignored": ignored}


class LevelShift(DataFault):
    """From a step on, every sample of one source has some of its token values exchanged for one another.

    The tokens stay within the vocabulary and the text keeps its shape, so nothing is invalid; the loss of that source
    steps up and stays there.

    Args:
        same_for_all: Exchange the same values in every sample: the model learns the new alphabet and the loss comes
            slowly down again. Otherwise each sample has its own, which cannot be learned.
        source: The source's name in the loader's ``sources``, or its index.
        share: Share of the values in ``low .. high - 1`` that change places.
        low: First value that may change.
        high: First value beyond.
        source_key: Where the batch has each sample's source, ``[batch]`` int64.
    """

    default_name = "level_shift"

    def __init__(
        self,
        step: int,
        source: str | int = 0,
        share: float = 0.5,
        low: int = 0,
        high: int = 256,
        same_for_all: bool = False,
        source_key: Key = "source",
        duration: int | None = None,
        input_key: Key = "input_ids",
        target_key: Key = "targets",
        seed: int = 0,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            step,
            duration,
            input_key=input_key,
            target_key=target_key,
            seed=seed,
            rank=rank,
            on_replay=on_replay,
            name=name,
        )
        if not 0.0 < share <= 1.0:
            raise ValueError(f"{self.name}: share is {share}, expected more than 0 and at most 1.")
        self.count = round(share * (high - low))
        if self.count < 2:
            raise ValueError(
                f"{self.name}: {share} of the values {low} .. {high - 1} is {self.count}, expected 2 or more."
            )
        self.source, self.source_key, self.share = source, source_key, share
        self.low, self.high, self.same_for_all = low, high, same_for_all
        self.index = source if isinstance(source, int) else -1

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        self._needs_name = isinstance(self.source, str)

    def choose(self, moment: Moment) -> Sequence[str]:
        if self._needs_name:
            self.index, self._needs_name = source_index(moment.trainer, str(self.source), self.name), False
        of_source = field(moment.batch, self.source_key, self.name).tolist()
        return [i for i, source in zip(moment.sample_ids, of_source, strict=True) if source == self.index]

    def table(self, sample_id: str) -> Tensor:
        """The new value of each value below ``high`` in this sample, ``[high]``."""
        generator = sample_generator(self.seed, "" if self.same_for_all else sample_id)
        chosen = self.low + torch.randperm(self.high - self.low, generator=generator)[: self.count]
        table = torch.arange(self.high)
        table[chosen] = chosen.roll(1)  # one cycle: every chosen value becomes another one
        return table

    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        for key in (self.input_key, self.target_key):
            values = field(moment.batch, key, self.name).clone()
            for row in rows:
                table = self.table(moment.sample_ids[row]).to(values.device)
                known = (values[row] >= 0) & (values[row] < self.high)
                values[row] = torch.where(known, table[values[row].clamp(0, self.high - 1)], values[row])
            put(moment.batch, key, values)
        return {"source": self.source, "values_exchanged": self.count}


def source_index(trainer: Trainer, name: str, fault: str) -> int:
    """Index of a source by its name in the train loader."""
    sources: list[str] = list(getattr(trainer.train_dataloader, "sources", ()))
    if name not in sources:
        raise ValueError(
            f"{fault}: the train loader has no source {name!r}; it has {nearest(name, sources, len(sources) or 1)}."
        )
    return sources.index(name)
