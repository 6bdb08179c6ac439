"""Sample ids, hashes and token counts of every layout of batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_sentinel.data.identity import (
    batch_hash,
    batch_size,
    content_ids,
    has_own_ids,
    parts,
    sample_ids,
    supervised_token_count,
    token_count,
)

TOKENS = torch.arange(12).reshape(3, 4)
TARGETS = torch.tensor([[1, 2, 3, -100], [5, -100, -100, -100], [-100, -100, -100, -100]])


@dataclass
class Record:
    input_ids: Tensor
    targets: Tensor
    sample_id: list[str]


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("key", ["sample_id", "sample_ids"])
@pytest.mark.parametrize("ids", [["a", "b", "c"], ("a", "b", "c")])
def test_ids_of_the_loader(key: str, ids: object) -> None:
    batch = {"input_ids": TOKENS, key: ids}
    assert sample_ids(batch, lambda batch: ["never", "asked", "for"]) == ["a", "b", "c"]
    assert has_own_ids(batch)


def test_integer_ids_become_strings() -> None:
    assert sample_ids({"x": TOKENS, "sample_id": torch.tensor([7, 8, 9])}) == ["7", "8", "9"]
    assert sample_ids((TOKENS, TARGETS), lambda batch: [int(batch[0][i, 0]) for i in range(3)]) == ["0", "4", "8"]


def test_ids_of_nested_batches_stand_one_part_after_the_other() -> None:
    one = {"input_ids": TOKENS[:1], "sample_id": ["a"]}
    two = {"input_ids": TOKENS[1:], "sample_id": ["b", "c"]}
    assert sample_ids({"text": one, "code": two}) == ["a", "b", "c"]
    assert sample_ids([one, two]) == ["a", "b", "c"]
    assert sample_ids((one, 0, 0)) == ["a"]
    assert sample_ids(UserDict(one)) == ["a"]
    assert sample_ids(Record(TOKENS, TARGETS, ["a", "b", "c"])) == ["a", "b", "c"]


def test_content_ids_name_each_sample() -> None:
    ids = sample_ids((TOKENS, TARGETS))
    assert len(set(ids)) == 3
    assert all(name.startswith("hash/") and len(name) == 21 for name in ids)
    # a sample keeps its id wherever it stands, and alone
    assert sample_ids((TOKENS.flip(0), TARGETS.flip(0))) == ids[::-1]
    assert sample_ids((TOKENS[1:2], TARGETS[1:2])) == [ids[1]]
    # and has another one as soon as one bit differs
    other = TARGETS.clone()
    other[1, 0] = 6
    changed = sample_ids((TOKENS, other))
    assert [a == b for a, b in zip(ids, changed, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.complex64]
)
def test_content_ids_of_every_type(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(3, 2).remainder(5).to(dtype)
    ids = sample_ids(x)
    assert len(ids) == 3
    assert ids == sample_ids(x.clone())
    assert sample_ids(x.t().contiguous().t()) == ids
    assert len(set(sample_ids([x, TOKENS]))) == 3


def test_content_ids_hold_the_texts_of_a_batch() -> None:
    same = torch.zeros(2, 3)
    assert len(set(sample_ids({"x": same, "prompt": ["a", "a"]}))) == 1
    assert len(set(sample_ids({"x": same, "prompt": ["a", "b"]}))) == 2


def test_layouts_are_told_apart() -> None:
    assert content_ids({"a": TOKENS}) != content_ids({"b": TOKENS})
    assert content_ids(TOKENS) != content_ids(TOKENS.float())


def test_batches_without_samples() -> None:
    assert sample_ids({}) == []
    assert sample_ids(None) == []
    assert sample_ids("text") == []
    assert sample_ids(torch.tensor(3.0)) == sample_ids(torch.tensor(3.0))
    assert len(sample_ids(torch.tensor(3.0))) == 1
    assert sample_ids(torch.zeros(2, 0)) == sample_ids(torch.zeros(2, 0))


def test_batch_hash() -> None:
    batch = {"input_ids": TOKENS, "targets": TARGETS, "sample_id": ["a", "b", "c"]}
    assert len(batch_hash(batch)) == 16
    assert batch_hash(batch) == batch_hash({**batch, "sample_id": ["d", "e", "f"]})
    assert batch_hash(batch) != batch_hash({**batch, "targets": TARGETS + 1})
    assert batch_hash(batch) != batch_hash({"input_ids": TOKENS})
    assert batch_hash(TOKENS) != batch_hash(TOKENS.reshape(4, 3))
    assert batch_hash(None) == batch_hash(None)


@pytest.mark.parametrize(
    ("batch", "supervised", "tokens"),
    [
        ({"input_ids": TOKENS, "targets": TARGETS}, 4, 12),
        ({"input_ids": TOKENS, "labels": TARGETS, "attention_mask": torch.ones(3, 4)}, 4, 12),
        ((TOKENS, TARGETS), 4, 12),
        ([TOKENS, TARGETS], 4, 12),
        (Record(TOKENS, TARGETS, ["a", "b", "c"]), 4, 12),
        (Pair(TOKENS, TARGETS), 4, 12),
        (TOKENS, 3, 12),
        (torch.zeros(5, 8), 5, 5),
        ((torch.zeros(5, 8), torch.zeros(5, dtype=torch.int64)), 5, 5),
        ((torch.zeros(5, 8), torch.zeros(5)), 5, 5),
        ({"a": {"input_ids": TOKENS, "targets": TARGETS}, "b": (torch.zeros(2, 2), torch.zeros(2))}, 6, 14),
        ({"input_ids": TOKENS, "targets": TARGETS, "loss_mask": TARGETS != 5}, 3, 12),
        ({"x": torch.zeros(5, 8)}, 5, 5),
        ({}, 0, 0),
        (None, 0, 0),
    ],
)
def test_counts(batch: object, supervised: int, tokens: int) -> None:
    count = supervised_token_count(batch)
    assert count.shape == ()
    assert count.dtype == torch.int64
    assert int(count) == supervised
    assert token_count(batch) == tokens


def test_counts_follow_the_targets_key_and_the_ignored_value() -> None:
    batch = {"input_ids": TOKENS, "targets": TARGETS, "next": torch.full((3, 4), 9)}
    assert int(supervised_token_count(batch, "next")) == 12
    assert int(supervised_token_count(batch, ignore_index=5)) == 11


def test_counting_reads_nothing_from_the_device() -> None:
    batch = {"input_ids": TOKENS.to("meta"), "targets": TARGETS.to("meta"), "loss_mask": TARGETS.to("meta")}
    assert supervised_token_count(batch).is_meta
    assert supervised_token_count((torch.zeros(4, 2, device="meta"),)).is_meta
    assert token_count(batch) == 12


def test_parts_know_what_is_named() -> None:
    (part,) = parts({"input_ids": TOKENS, "labels": TARGETS, "document_ids": TOKENS, "sample_weight": torch.ones(3)})
    assert part.tokens is TOKENS
    assert part.targets is TARGETS
    assert part.target_key == "labels"
    assert part.named_tokens
    assert part.weights is not None
    assert part.size == batch_size((TOKENS,)) == 3
    assert [p.where for p in parts({"a": {"input_ids": TOKENS}, "b": [{"input_ids": TOKENS}]})] == [("a",), ("b", "0")]


def test_hugging_face_batches() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": TOKENS, "labels": TARGETS})
    assert int(supervised_token_count(batch)) == 4
    assert token_count(batch) == 12
    assert len(set(sample_ids(batch))) == 3
