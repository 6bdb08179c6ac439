"""Who is in a batch: sample ids, content hashes and token counts for any layout of batch.

A batch may be a tensor, a tuple or list, a dict (a Hugging Face ``BatchEncoding`` too), a dataclass, or any nesting of these,
such as the dict of batches that a ``CombinedLoader`` yields. Nothing here reads a value from the device except the content
hash, which copies each batch to the host once.

Example:
    >>> import torch
    >>> batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "sample_id": ["prose/3fa9/0", "code/77b1/512"]}
    >>> sample_ids(batch)
    ['prose/3fa9/0', 'code/77b1/512']
    >>> token_count(batch)
    8
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SampleIdFn = Callable[[Any], Sequence[str | int]]

ID_KEYS = ("sample_id", "sample_ids")
TOKEN_KEYS = ("input_ids", "tokens", "inputs")
TARGET_KEYS = ("targets", "labels", "target", "label")
ATTENTION_MASK_KEYS = ("attention_mask",)
LOSS_MASK_KEYS = ("loss_mask",)
WEIGHT_KEYS = ("sample_weight", "sample_weights", "loss_weights", "weights")
DOCUMENT_KEYS = ("document_ids",)
PASS_KEY = "sample_pass"  # which pass over its source each sample belongs to; the project's loader brings it
IGNORE_INDEX = -100


@dataclass(slots=True)
class Part:
    """One batch with its tensors under known names; a nested batch (``CombinedLoader``) has several parts.

    Attributes:
        where: Keys that lead to the part, e.g. ``("text",)``; empty for the batch itself.
        holder: The dict, tuple or tensor itself.
        tokens: Token ids ``[B, T]``, or None.
        targets: Targets ``[B, T]`` or ``[B]``, or None.
        named_tokens: True where a key such as ``input_ids`` says that these are tokens.
        target_key: Key of the targets in a dict, or None.
    """

    where: tuple[str, ...]
    holder: Any
    tokens: Tensor | None = None
    targets: Tensor | None = None
    attention_mask: Tensor | None = None
    loss_mask: Tensor | None = None
    weights: Tensor | None = None
    document_ids: Tensor | None = None
    ids: tuple[str, ...] | None = None
    passes: tuple[int, ...] | None = None
    named_tokens: bool = False
    target_key: str | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        for tensor in (self.tokens, self.targets):
            if tensor is not None and tensor.dim() > 0:
                return int(tensor.shape[0])
        return batch_size(self.holder)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Children of a container by name, in their own order."""
    if _is_mapping(value):
        for key in value:
            yield str(key), value[key]
    elif _is_record(value):
        for f in fields(value):
            yield f.name, getattr(value, f.name)
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield str(i), child


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is no container, with its path, less the sample ids: they name the content, they are not part of it."""
    if _is_mapping(value) or _is_record(value) or isinstance(value, (list, tuple)):
        for key, child in _items(value):
            if key not in ID_KEYS and key != PASS_KEY:
                yield from _leaves(child, f"{path}/{key}")
    else:
        yield path, value


def _as_ids(value: Any) -> tuple[str, ...]:
    if isinstance(value, Tensor):
        value = value.reshape(-1).tolist()
    if isinstance(value, (str, int)):
        return (str(value),)
    return tuple(map(str, value))


def _mapping_part(
    where: tuple[str, ...], holder: Any, named: Mapping[str, Any], targets_key: str | None
) -> Part | None:
    roles = _roles(tuple(named), tuple(map(type, named.values())), targets_key)
    if roles.tokens is None and roles.targets is None:
        return None
    passes = named.get(PASS_KEY)
    tokens, targets, attention, loss_mask, weights, documents = [None if k is None else named[k] for k in roles.tensors]
    return Part(
        where,
        holder,
        tokens=tokens,
        targets=targets,
        attention_mask=attention,
        loss_mask=loss_mask,
        weights=weights,
        document_ids=documents,
        ids=None if roles.ids is None else _as_ids(named[roles.ids]),
        passes=None if passes is None else tuple(map(int, passes)),
        # "inputs" is also what images are called
        named_tokens=roles.tokens is not None and roles.tokens != "inputs",
        target_key=roles.targets,
    )


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which key of a batch is what; None where it has no such key."""

    tensors: tuple[str | None, ...]  # tokens, targets, attention mask, loss mask, weights, document ids
    ids: str | None

    @property
    def tokens(self) -> str | None:
        return self.tensors[0]

    @property
    def targets(self) -> str | None:
        return self.tensors[1]


@lru_cache(maxsize=64)
def _roles(names: tuple[str, ...], kinds: tuple[type, ...], targets_key: str | None) -> _Roles:
    """One batch is made like the next: which key is what depends on names and types alone, and is found out once."""
    named = dict(zip(names, kinds, strict=True))
    target_keys = (targets_key,) if targets_key else TARGET_KEYS
    wanted = (TOKEN_KEYS, target_keys, ATTENTION_MASK_KEYS, LOSS_MASK_KEYS, WEIGHT_KEYS, DOCUMENT_KEYS)
    tensors = tuple(next((k for k in keys if issubclass(named.get(k, object), Tensor)), None) for keys in wanted)
    missing = type(None)
    return _Roles(tensors, next((key for key in ID_KEYS if named.get(key, missing) is not missing), None))


def parts(batch: Any, targets_key: str | None = None, where: tuple[str, ...] = ()) -> list[Part]:
    """The batch as one part, or the parts of a nested batch; empty where no layout is recognised."""
    if isinstance(batch, Tensor):
        tokens = batch if batch.dim() == 2 and is_integer(batch) else None
        return [Part(where, batch, tokens=tokens)]
    if _is_mapping(batch) or _is_record(batch):
        named = batch if type(batch) is dict else dict(_items(batch))
        part = _mapping_part(where, batch, named, targets_key)
        if part is not None:
            return [part]
        nested = [
            p
            for key, child in named.items()
            if is_container(child)
            for p in parts(child, targets_key, (*where, str(key)))
        ]
        return nested or ([Part(where, batch)] if batch_size(batch) else [])
    if isinstance(batch, (list, tuple)):
        tensors = [v for v in batch if isinstance(v, Tensor)]
        if tensors and len(tensors) == len(batch):
            first = tensors[0]
            return [
                Part(
                    where,
                    batch,
                    tokens=first if first.dim() == 2 and is_integer(first) else None,
                    targets=tensors[1] if len(tensors) > 1 else None,
                )
            ]
        nested = [
            p
            for i, child in enumerate(batch)
            if is_container(child)
            for p in parts(child, targets_key, (*where, str(i)))
        ]
        return nested or ([Part(where, batch)] if batch_size(batch) else [])
    return []


def is_container(value: Any) -> bool:
    return _is_mapping(value) or _is_record(value) or isinstance(value, (list, tuple))


def is_integer(tensor: Tensor) -> bool:
    """True for the integer types that can index an embedding; ``bool`` is a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def batch_size(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one; 1 for scalars alone, 0 without tensors."""
    scalar = False
    for _, leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0:
                return int(leaf.shape[0])
            scalar = True
    return int(scalar)


def sample_ids(batch: Any, sample_id_fn: SampleIdFn | None = None) -> list[str]:
    """Ids of the batch's samples, in order.

    The loader's own ids (key ``sample_id`` or ``sample_ids``, at any depth) come first, then ``sample_id_fn(batch)``, then a
    content hash per sample, written ``hash/<16 hex digits>``. A batch without any tensor has no ids.
    """
    own = _own_ids(batch)
    if own is not None:
        return own
    if sample_id_fn is not None:
        return [str(i) for i in sample_id_fn(batch)]
    return content_ids(batch)


def _own_ids(batch: Any) -> list[str] | None:
    """Ids that the loader brought, of a nested batch one part after the other; None where it brought none."""
    if type(batch) is dict or _is_mapping(batch):
        for key in ID_KEYS:
            if batch.get(key) is not None:
                return list(_as_ids(batch[key]))
    elif _is_record(batch):
        for key in ID_KEYS:
            if getattr(batch, key, None) is not None:
                return list(_as_ids(getattr(batch, key)))
    nested = [own for _, child in _items(batch) if is_container(child) and (own := _own_ids(child)) is not None]
    return [name for own in nested for name in own] if nested else None


def has_own_ids(batch: Any) -> bool:
    """True where the loader brought its ids."""
    return _own_ids(batch) is not None


def content_ids(batch: Any) -> list[str]:
    """A content hash for each sample, over every tensor and list that has one entry per sample."""
    size = batch_size(batch)
    if size == 0:
        return []
    headers: list[str] = []
    columns: list[Tensor] = []
    texts: list[list[str]] = []
    for path, leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size and leaf.numel() > 0:
            headers.append(f"{path}:{leaf.dtype}:{tuple(leaf.shape[1:])}")
            columns.append(_bytes_of(leaf, size))
        elif isinstance(leaf, Tensor) and leaf.dim() == 0 and size == 1:
            headers.append(f"{path}:{leaf.dtype}:()")
            columns.append(_bytes_of(leaf.reshape(1), 1))
    for path, values in _text_lists(batch, size):
        headers.append(path)
        texts.append(values)
    # one buffer, so that the device is read once
    rows = torch.cat(columns, dim=1).cpu().numpy() if columns else None
    prefix = "|".join(headers).encode()
    ids = []
    for i in range(size):
        digest = hashlib.blake2b(prefix, digest_size=8)
        if rows is not None:
            digest.update(rows[i].tobytes())
        for values in texts:
            digest.update(b"\0" + values[i].encode())
        ids.append(f"hash/{digest.hexdigest()}")
    return ids


def _text_lists(value: Any, size: int, path: str = "") -> Iterator[tuple[str, list[str]]]:
    for key, child in _items(value):
        if key in ID_KEYS:
            continue
        here = f"{path}/{key}"
        if isinstance(child, (list, tuple)) and len(child) == size and all(isinstance(c, str) for c in child):
            yield here, list(child)
        elif is_container(child):
            yield from _text_lists(child, size, here)


def _bytes_of(tensor: Tensor, size: int) -> Tensor:
    return tensor.detach().reshape(size, -1).contiguous().view(torch.uint8)


def batch_hash(batch: Any) -> str:
    """Content hash of the whole batch, 16 hex digits, the same on every device; ids are not part of the content."""
    digest = hashlib.blake2b(digest_size=8)
    headers: list[str] = []
    columns: list[Tensor] = []
    for path, leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            headers.append(f"{path}:{leaf.dtype}:{tuple(leaf.shape)}")
            if leaf.numel() > 0:
                columns.append(_bytes_of(leaf, 1).reshape(-1))
        elif isinstance(leaf, (str, bytes, int, float, bool, type(None))):
            headers.append(f"{path}:{leaf!r}")
    digest.update("|".join(headers).encode())
    if columns:
        digest.update(torch.cat(columns).cpu().numpy().tobytes())
    return digest.hexdigest()


def supervised_token_count(
    batch: Any,
    targets_key: str | None = None,
    ignore_index: int = IGNORE_INDEX,
    found: Sequence[Part] | None = None,
) -> Tensor:
    """Targets that carry loss, as a 0-dim int64 tensor on the batch's device; no host read.

    Integer targets count where they differ from ``ignore_index`` and, with a ``loss_mask`` of the same shape, where it is
    set. A batch without integer targets counts its samples. Hugging Face models shift ``labels`` inside, so their first
    position is counted although it carries no loss: one token in T for each sample.

    Args:
        batch: Any batch.
        targets_key: Key of the targets in a dict; None looks for ``targets``, ``labels``, ``target``, ``label``.
        ignore_index: Target value without loss.
        found: The batch's parts, where they are known already.
    """
    total: Tensor | None = None
    for part in parts(batch, targets_key) if found is None else found:
        targets = part.targets
        if targets is None or not is_integer(targets):
            device = next((v.device for _, v in _leaves(part.holder) if isinstance(v, Tensor)), torch.device("cpu"))
            count = torch.full((), part.size, dtype=torch.int64, device=device)
        elif targets.device.type == "cpu" and part.loss_mask is None:
            # NumPy: between two steps every further kernel of torch is called with cold caches
            count = torch.tensor(targets.numel() - int((targets.numpy() == ignore_index).sum()))
        else:
            supervised = targets != ignore_index
            if part.loss_mask is not None and part.loss_mask.shape == targets.shape:
                supervised = supervised & (part.loss_mask != 0)
            count = supervised.sum()
        total = count if total is None else total + count.to(total.device)
    return torch.zeros((), dtype=torch.int64) if total is None else total


def token_count(batch: Any, found: Sequence[Part] | None = None) -> int:
    """Tokens in the batch by its shapes alone (padding included); the number of samples where it has no tokens.

    ``found``: the batch's parts, where they are known already.
    """
    return sum(
        part.tokens.numel() if part.tokens is not None and is_integer(part.tokens) else part.size
        for part in (parts(batch) if found is None else found)
    )
