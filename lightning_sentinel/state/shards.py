"""Parts of tensors that are divided among ranks, and other parts put together from them.

Example:
    >>> first, second = Part((5, 2), (0, 0), (3, 2)), Part((5, 2), (3, 0), (2, 2))
    >>> middle = Assembly(Part((5, 2), (2, 0), (2, 2)), torch.float32)
    >>> middle.add(torch.zeros(3, 2), first)
    >>> middle.missing
    2
    >>> middle.add(torch.ones(2, 2), second)
    >>> middle.missing, middle.tensor.tolist()
    (0, [[0.0, 0.0], [1.0, 1.0]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import lightning_private as private
from .tree import local


@dataclass(frozen=True)
class Part:
    """Where a part lies in its tensor: shape of the whole, offset and shape of the part; one number for each dimension."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """This rank's part of a ``DTensor``; all of any other tensor."""
        place = private.shard_place(tensor)
        return cls.all_of(tensor) if place is None else cls.at(place, local(tensor))

    @classmethod
    def at(cls, place: Sequence[Any], tensor: Tensor) -> Part:
        """``tensor`` at a place as :func:`~.lightning_private.shard_place` gives it."""
        return cls(tuple(place[0]), tuple(place[1]), tuple(tensor.shape))

    @classmethod
    def all_of(cls, tensor: Tensor) -> Part:
        return cls(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


class Assembly:
    """A part that is filled from other parts of the same tensor, whichever way these have cut it."""

    def __init__(self, part: Part, dtype: torch.dtype) -> None:
        self.part, self.tensor = part, torch.empty(part.shape, dtype=dtype)
        self._given = set[Part]()
        self.missing = self.tensor.numel()

    def add(self, tensor: Tensor, part: Part) -> None:
        """Take what the two parts have in common; a part that several ranks hold counts once.

        Raises:
            ValueError: The parts are of tensors of different shapes.
        """
        if part.whole != self.part.whole:
            raise ValueError(f"it has the shape {part.whole} there, {self.part.whole} here")
        if part in self._given:
            return
        self._given.add(part)
        pairs = list(zip(self.part.offset, self.part.shape, part.offset, part.shape, strict=True))
        spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in pairs]
        if any(start >= end for start, end in spans):
            return
        mine = tuple(slice(s - a, e - a) for (s, e), (a, _, _, _) in zip(spans, pairs, strict=True))
        theirs = tuple(slice(s - b, e - b) for (s, e), (_, _, b, _) in zip(spans, pairs, strict=True))
        self.tensor[mine] = tensor[theirs]
        self.missing -= tensor[theirs].numel()
