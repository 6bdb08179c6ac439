"""Fingerprints of tensors by their bits, computed where the tensors lie, and what differs between ranks.

A tensor is read as 64-bit words and folded into two sums modulo 2^64, each word weighted by its place (of a large tensor: by
its column in the one sum, by its row in the other). All weights are odd, so one changed word, by however few bits, always
changes both sums; NaN payloads and the sign of zero count. Integer sums do not depend on their order: the same bits give the
same fingerprint on every device.

Example:
    >>> names, table = fingerprints([("w", torch.zeros(3)), ("b", torch.tensor([-0.0]))], torch.device("cpu"))
    >>> names, table.shape, bool(table[0].any()), bool(table[1].all())
    (['w', 'b'], torch.Size([2, 2]), False, True)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import local

ROW = 1024  # words in a row of a large tensor
SMALL = 2 * ROW  # tensors of fewer words are folded together, in a few operations for all of them
ODD = (
    0x9E3779B97F4A7C15 - 2**64
)  # the golden ratio in 64 bits, as a signed number: spreads neighbouring places far apart

_PLACES: dict[torch.device, Tensor] = {}


def _places(count: int, device: torch.device) -> Tensor:
    """Odd weights of the first places, ``[count]`` int64; made once per device and grown as needed."""
    known = _PLACES.get(device)
    if known is None or len(known) < count:
        size = max(count, SMALL)
        known = _PLACES[device] = (torch.arange(size, dtype=torch.int64, device=device) * 2 + 1) * ODD
    return known[:count]


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as int64 words, ``[ceil(bytes / 8)]``; a copy only where the memory does not allow a view."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype is torch.int64:
        return flat
    per_word = 8 // flat.element_size()
    missing = -flat.numel() % per_word
    if missing:
        padding = torch.zeros(missing * flat.element_size(), dtype=torch.uint8, device=flat.device)
        return torch.cat([flat.view(torch.uint8), padding]).view(torch.int64)
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    return flat.view(torch.int64)


def _large(words: Tensor) -> Tensor:
    """Both sums of a large tensor, ``[2]``: two reductions that read it once each and keep nothing of its size."""
    rows = words.numel() // ROW
    grid, rest = words[: rows * ROW].view(rows, ROW), words[rows * ROW :]
    place = _places(max(rows, ROW), words.device)
    tail = (rest * place[: rest.numel()]).sum()
    columns = (grid.sum(0) * place[:ROW]).sum()
    return torch.stack([columns + tail * 3, (grid.sum(1) * place[:rows]).sum() + tail])


def _small(words: Sequence[Tensor]) -> Tensor:
    """Both sums of many small tensors, ``[n, 2]``."""
    device = words[0].device
    ends = torch.tensor([w.numel() for w in words]).cumsum(0)
    place = torch.cat([_places(w.numel(), device) for w in words])
    flat = torch.cat(list(words))
    weighted = flat * place
    # Squares of odd weights are odd, too.
    last = (ends - 1).to(device)
    sums = torch.stack([weighted.cumsum(0)[last], (weighted * place).cumsum(0)[last]], dim=1)
    return sums - torch.cat([sums.new_zeros(1, 2), sums[:-1]])


@torch.no_grad()
def fingerprints(named: Iterable[tuple[str, Tensor]], device: torch.device) -> tuple[list[str], Tensor]:
    """Names, and an int64 fingerprint of each tensor's local part, ``[n, 2]`` on ``device``. Nothing is read by the host."""
    names: list[str] = []
    rows: dict[int, Tensor] = {}
    small: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, (name, tensor) in enumerate(named):
        names.append(name)
        words = _words(local(tensor))
        if words.numel() > SMALL:
            rows[i] = _large(words).to(device)
        elif words.numel():
            small.setdefault(words.device, []).append((i, words))
    table = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
    for group in small.values():
        table[torch.tensor([i for i, _ in group], device=device)] = _small([w for _, w in group]).to(device)
    if rows:
        table[torch.tensor(list(rows), device=device)] = torch.stack(list(rows.values()))
    return names, table


def digest(names: Sequence[str], table: Tensor) -> Tensor:
    """One fingerprint of a whole table and its names, ``[2]`` int64 on the table's device."""
    known = int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "little", signed=True)
    place = _places(max(len(names), 1), table.device)[: len(names)]
    return (table * place[:, None]).sum(0) + known


def parted(values: Sequence[object]) -> list[int]:
    """Places outside the largest group of equal values; all of them where no group is the largest.

    Example:
        >>> parted(["a", "a", "b"]), parted(["a", "b"]), parted(["a", "a"])
        ([2], [0, 1], [])
    """
    groups: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault(value, []).append(place)
    if len(groups) == 1:
        return []
    by_size = sorted(groups.values(), key=len, reverse=True)
    if len(by_size[0]) == len(by_size[1]):
        return list(range(len(values)))
    return sorted(set(range(len(values))) - set(by_size[0]))


def parted_ranks(tables: Tensor) -> tuple[list[int], list[int]]:
    """Ranks outside the largest group of equal replicas, and the rows on which the groups differ.

    Args:
        tables: Fingerprints, ``[world_size, n, 2]``.

    Returns:
        Ranks that differ from the majority (all ranks if there is none), and the indices of the tensors that differ.
    """
    ranks = parted([table.numpy().tobytes() for table in tables])
    rows = (tables != tables[:1]).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    return ranks, rows


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same on all of its replicas.

    Attributes:
        name: Its name.
        replicas: The ranks that hold a replica of it.
        parted: Those outside the largest group of equal replicas; all of them where there is no majority.
    """

    name: str
    replicas: tuple[int, ...]
    parted: tuple[int, ...]

    @property
    def majority(self) -> bool:
        return len(self.parted) < len(self.replicas)


def differences(
    tables: Sequence[Mapping[str, tuple[int, int]]], owners: Sequence[Mapping[str, int]]
) -> list[Difference]:
    """Tensors that differ between ranks that hold replicas of them, in the order of rank 0's names.

    Args:
        tables: Each rank's fingerprints by name. A name that a rank lacks counts as a value of its own.
        owners: Each rank's representative of the replicas of a tensor, by name: ranks with the same one hold the same part.
    """
    names = dict.fromkeys(name for table in tables for name in table)
    found = []
    for name in names:
        by_owner: dict[int, list[int]] = {}
        for rank, owner in enumerate(owners):
            by_owner.setdefault(owner.get(name, -1), []).append(rank)
        missing = by_owner.pop(-1, [])
        for group in by_owner.values():
            members = sorted([*group, *missing]) if len(by_owner) == 1 else group
            odd = parted([tables[rank].get(name) for rank in members])
            if odd:
                found.append(Difference(name, tuple(members), tuple(members[i] for i in odd)))
    return found
