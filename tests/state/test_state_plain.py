"""Training state as plain data and back, through a file that is read with ``weights_only=True``."""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_sentinel.state.plain import from_plain, to_plain


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    names: list[str]
    made: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.made + 1)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(to_plain(value, "state"), file)
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True))


def test_batches_of_every_kind_come_back_as_what_they_were() -> None:
    pair = through_a_file(Pair(torch.arange(3), torch.ones(2)))
    assert type(pair) is Pair
    assert pair.x.tolist() == [0, 1, 2]
    batch = through_a_file(Batch(torch.arange(2), ["a", "b"]))
    assert type(batch) is Batch
    assert (batch.tokens.tolist(), batch.names, batch.made) == ([0, 1], ["a", "b"], 1)
    encoding = through_a_file(BatchEncoding({"input_ids": torch.arange(4), "labels": torch.zeros(4)}))
    assert type(encoding) is BatchEncoding
    assert encoding.input_ids.tolist() == [0, 1, 2, 3]
    assert list(encoding.to("cpu")) == ["input_ids", "labels"]


def test_the_rest_comes_back_too() -> None:
    state = {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "set": {3, 1},
        "dtype": torch.bfloat16,
        "nested": [(1, "two", None, [3.5, b"x"])],
        "ordered": OrderedDict(a=1),
        5: np.int64(7),
    }
    back = through_a_file(state)
    assert back["array"].dtype == np.float32
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (back["set"], back["dtype"], back["nested"]) == ({1, 3}, torch.bfloat16, [(1, "two", None, [3.5, b"x"])])
    assert back["ordered"] == {"a": 1}
    assert back[5] == 7


def test_what_cannot_be_read_back_safely_is_refused_by_name_and_place() -> None:
    with pytest.raises(ValueError, match=r"holds a object at `cursor.batches\[1\]`"):
        to_plain({"batches": [1, object()]}, "cursor")


@pytest.mark.parametrize("name", ["no_such_module:Batch", f"{__name__}:NoSuchBatch"])
def test_a_class_that_the_program_has_not_loaded_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="which this program has not loaded"):
        from_plain({"__class__": name, "fields": []})


@pytest.mark.parametrize("name", ["subprocess:Popen", "builtins:dict", f"{UserDict.__module__}:namedtuple"])
def test_no_other_class_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=r"no dataclass, named tuple or UserDict|has not loaded"):
        from_plain({"__class__": name, "fields": [["args", ["true"]]]})
