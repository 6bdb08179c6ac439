"""Which samples have been seen before, and when: a compact, append-only memory of 64-bit hashes.

Per sample 12 bytes in the order of first sight, and 16 for lookup, which goes through a dict of the newest and one sorted
array of all others. Beyond ``max_samples`` the memory keeps only the hashes whose low bits are zero (half of them, then a
quarter ...), so it stays bounded and still covers the whole run evenly: a cursor that starts over is seen as surely, a
single repeat only where its hash is among the kept.

Example:
    >>> seen = SeenSamples()
    >>> first = seen.keys(["a", "b"], [0, 0])
    >>> seen.add(first, step=3)
    >>> seen.find(seen.keys(["b", "c", "a"], [0, 0, 1])).tolist()
    [1, -1, -1]
    >>> seen.step_of(1)
    3
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

KeyArray = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]
RECENT = 65_536


class SeenSamples:
    """Samples in the order of their first sight. Sample ``n`` of the memory is the ``n``-th kept one.

    Args:
        max_samples: Bound on the memory, 28 bytes for each, and some 100 for each of the newest ``RECENT``.
    """

    def __init__(self, max_samples: int = 1_048_576) -> None:
        if max_samples < 2:
            raise ValueError(f"max_samples is {max_samples}, expected at least 2")
        self.max_samples = max_samples
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._keys: KeyArray = np.empty(0, dtype=np.uint64)
        self._steps: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._mask = 0
        self._recent: dict[int, int] = {}
        self._sorted: KeyArray = np.empty(0, dtype=np.uint64)
        self._sorted_at: IntArray = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    clear = _clear

    @staticmethod
    def numbers(ids: Sequence[str], passes: Sequence[int]) -> list[int]:
        """:meth:`keys` as plain numbers."""
        return [
            int.from_bytes(hashlib.blake2b(f"{number}\0{name}".encode(), digest_size=8).digest(), sys.byteorder)
            for name, number in zip(ids, passes, strict=True)
        ]

    @staticmethod
    def keys(ids: Sequence[str], passes: Sequence[int]) -> KeyArray:
        """64-bit keys of samples; the same id in another pass over the data is another key."""
        return np.array(SeenSamples.numbers(ids, passes), dtype=np.uint64)

    def kept(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which of the keys this memory keeps at all."""
        return np.asarray(keys & np.uint64(self._mask) == 0)

    def find(self, keys: KeyArray) -> IntArray:
        """Place of each key in the memory, or -1."""
        found = np.array([self._recent.get(key, -1) for key in keys.tolist()], dtype=np.int64)
        if len(self._sorted):
            at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
            found = np.where(self._sorted[at] == keys, self._sorted_at[at], found)
        return found

    def step_of(self, place: int) -> int:
        """Step at which the sample at this place was first seen."""
        return int(self._steps[place])

    def all_new(self, numbers: Sequence[int]) -> bool:
        """True if none of these keys is known and none comes twice: the usual batch, told without making arrays."""
        if not self._recent.keys().isdisjoint(numbers) or len(set(numbers)) < len(numbers):
            return False
        return not len(self._sorted) or bool((self.find(np.array(numbers, dtype=np.uint64)) < 0).all())

    def add(self, keys: KeyArray, step: int) -> None:
        """Remember keys; those that are known keep their first step."""
        known = self.find(keys).tolist()
        self.add_new([key for key, place in zip(keys.tolist(), known, strict=True) if place < 0], step)

    def add_new(self, numbers: Sequence[int], step: int) -> None:
        """Remember keys of which none is known; one that comes twice is remembered once."""
        for key in numbers:
            if not key & self._mask and key not in self._recent:
                if self._count == len(self._keys):
                    more = max(self._count, 1024)
                    self._keys = np.concatenate([self._keys, np.empty(more, dtype=np.uint64)])
                    self._steps = np.concatenate([self._steps, np.empty(more, dtype=np.int32)])
                self._keys[self._count], self._steps[self._count] = key, step
                self._recent[key] = self._count
                self._count += 1
        if self._count > self.max_samples:
            self._thin()
        if len(self._recent) > RECENT:
            self._sort()

    def _thin(self) -> None:
        while self._count > self.max_samples:
            self._mask = self._mask << 1 | 1
            keep = self.kept(self._keys[: self._count])
            self._keys, self._steps = self._keys[: self._count][keep], self._steps[: self._count][keep]
            self._count = len(self._keys)
        self._sort()

    def _sort(self) -> None:
        self._sorted_at = np.argsort(self._keys[: self._count], kind="stable").astype(np.int64)
        self._sorted = self._keys[self._sorted_at]
        self._recent = {}

    def state_dict(self) -> dict[str, Any]:
        """Two tensors and a mask. The tensors share the memory's storage, whose filled part never changes."""
        return {
            "keys": torch.from_numpy(self._keys[: self._count].view(np.int64)),
            "steps": torch.from_numpy(self._steps[: self._count]),
            "mask": self._mask,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clear()
        self._keys = torch.as_tensor(state["keys"], dtype=torch.int64).cpu().numpy().view(np.uint64).copy()
        self._steps = torch.as_tensor(state["steps"], dtype=torch.int32).cpu().numpy().copy()
        self._mask = int(state["mask"])
        self._count = len(self._keys)
        self._sort()
