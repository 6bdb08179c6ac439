"""Nested containers with tensors in them: fast copies, copies into buffers that exist, and plain-data checks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})  # copied without autograd as they are
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: the local shard of a ``DTensor``, else the tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return shard if shard is not None else tensor


def clone(value: Any) -> Any:
    """A copy that shares nothing mutable with ``value``. Plain containers are walked; the rest is left to deepcopy."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        if _ATOMS.issuperset(map(type, value.values())):
            return dict(value)
        return {k: clone(v) for k, v in value.items()}
    if kind is list:
        return list(value) if _ATOMS.issuperset(map(type, value)) else [clone(v) for v in value]
    if kind is tuple:
        return value if _ATOMS.issuperset(map(type, value)) else tuple(clone(v) for v in value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if kind is np.ndarray:
        return value.copy()
    return copy.deepcopy(value)


class HostCopies:
    """Collects tensors to be copied to host memory and copies them all at once.

    Args:
        pin: Use page-locked memory for what comes from an accelerator.
    """

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def tensor(self, source: Tensor, old: Any = None) -> Tensor:
        """Register one tensor; the returned host tensor has its value after :meth:`run`. ``old`` is reused if it fits."""
        if type(source) not in _PLAIN_TENSORS:
            source = local(source.detach())
        fits = (
            isinstance(old, Tensor)
            and old.shape == source.shape
            and old.dtype == source.dtype
            and old.stride() == source.stride()
        )
        if fits:
            target: Tensor = old
        else:
            target = torch.empty_like(
                source, device="cpu", pin_memory=self._pin and source.is_cuda, requires_grad=False
            )
        self._targets.append(target)
        self._sources.append(source)
        return target

    def tree(self, value: Any, old: Any = None) -> Any:
        """Like :meth:`tensor` for every tensor in a nested container; the rest is cloned."""
        if isinstance(value, Tensor):
            return self.tensor(value, old)
        kind = type(value)
        if kind is dict:
            if _ATOMS.issuperset(map(type, value.values())):
                return dict(value)
            by_key = old if isinstance(old, dict) else {}
            return {k: self.tree(v, by_key.get(k)) for k, v in value.items()}
        if kind is OrderedDict:  # a module's state_dict carries its versions as an attribute
            copied, by_key = copy.copy(value), old if isinstance(old, dict) else {}
            copied.update((k, self.tree(v, by_key.get(k))) for k, v in value.items())
            return copied
        if kind in (list, tuple):
            if _ATOMS.issuperset(map(type, value)):  # a detector's window of numbers: hundreds in every light snapshot
                return kind(value)
            before = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
            return kind(self.tree(v, o) for v, o in zip(value, before, strict=True))
        return clone(value)

    def run(self) -> None:
        """Copy everything registered so far and wait until it has arrived."""
        if not self._targets:
            return
        pairs: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(self._targets, self._sources, strict=True):
            targets, sources = pairs.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        with torch.no_grad():
            for device, (targets, sources) in pairs.items():
                _copy_to_host(device, targets, sources)
        self._targets, self._sources = [], []


_SIDE_STREAMS: dict[torch.device, Any] = {}


def _copy_to_host(device: torch.device, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy, and wait for these copies alone: on a stream of their own where the device has streams."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is None or not hasattr(module, "Stream"):
        torch._foreach_copy_(targets, sources, non_blocking=True)
        if module is not None:
            module.synchronize(device)
        return
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = module.Stream(device)
    stream = _SIDE_STREAMS[device]
    stream.wait_stream(module.current_stream(device))  # what computes the values comes first
    with module.stream(stream):
        torch._foreach_copy_(targets, sources, non_blocking=True)
    stream.synchronize()


def copy_into(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy values into live tensors, on whatever device these are, without touching autograd."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([local(t.detach()) for t in targets], sources)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """A copy of a plain container with ``fn`` applied to each tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, fn) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, fn) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a container, counted as often as they appear."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += local(tensor).nbytes
        return tensor

    map_tensors(value, add)
    return total
