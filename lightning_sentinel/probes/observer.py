"""Watches a replayed forward: the modules' registered probes, the residual stream, calls of attention and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..state import lightning_private as private
from . import generic
from .collect import Stats, in_turns, limit_of
from .registry import Probe, probe_of


def block_lists(module: nn.Module) -> list[str]:
    """Paths of the blocks by depth: elements of every ``nn.ModuleList`` that lies in no other one."""
    lists = [path for path, m in module.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [p for p in lists if not any(p != other and p.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{name}" for path in outer for name, _ in module.get_submodule(path).named_children()]


class Observer:
    """Put around one replayed forward, it fills :class:`~lightning_sentinel.probes.collect.Stats`.

    Args:
        max_modules: Probed modules of one class at most, spread evenly over the depth.
    """

    def __init__(self, max_modules: int) -> None:
        self.max_modules = max_modules
        self.stats = Stats()
        self.left_out = 0
        self.failed: dict[str, str] = {}
        self._busy = False
        self._scopes: list[str] = []
        self._calls: dict[str, int] = {}

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Hooks on the sandbox's copy of the modules' hooks: they are gone with the sandbox."""
        blocks = block_lists(module)
        for path, m in module.named_modules():
            m.register_forward_pre_hook(self._enter(path), with_kwargs=True)
        chosen = self._chosen(module)
        for path, m in module.named_modules():
            if path in chosen or path in blocks:
                m.register_forward_hook(self._after(path, chosen.get(path), path in blocks), with_kwargs=True)
        for _, m in module.named_modules():
            m.register_forward_hook(self._leave, always_call=True)
        with _Calls(self):
            yield

    def _chosen(self, module: nn.Module) -> dict[str, Probe]:
        by_kind: dict[type[nn.Module], list[tuple[str, Probe]]] = {}
        for path, m in module.named_modules():
            probe = probe_of(m)
            if probe is not None:
                by_kind.setdefault(type(m), []).append((path, probe))
        kept = [x for found in by_kind.values() for x in in_turns(found, self.max_modules)]
        self.left_out += sum(map(len, by_kind.values())) - len(kept)
        return dict(kept)

    # ------------------------------------------------------------------------------------------------------- hooks

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._scopes.append(path)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._scopes:
            self._scopes.pop()

    def _after(self, path: str, probe: Probe | None, is_block: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._looks_away() or path in self.stats.kinds:
                return  # a module that is called several times counts with its first call
            self.measure(
                path, type(module).__name__, lambda: self._values(probe, is_block, module, args, kwargs, output)
            )
            for out in _floats(output):
                self.range(path, out, out.dtype)
            if isinstance(module, nn.Linear):
                for given in _floats(args):  # autocast casts it on the way in
                    self.range(path, given, _cast_dtype(given))

        return hook

    @staticmethod
    def _values(
        probe: Probe | None, is_block: bool, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Mapping[str, Tensor]:
        values: dict[str, Tensor] = {}
        if is_block and (outputs := _floats(output)):
            values = {"stream_rms": generic.rms(outputs[0]), "stream_max": generic.largest(outputs[0])}
        return {**values, **probe(module, args, kwargs, output)} if probe is not None else values

    def _looks_away(self) -> bool:
        return self._busy or private.in_backward()

    def measure(self, path: str, kind: str, values: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take up what a probe gives. One that fails is named and left out: it must not end the replay."""
        self._busy = True
        try:
            with torch.no_grad(), _no_autocast():
                self.stats.add(path, values(), kind)
        except Exception as error:  # probes are the user's code
            self.failed.setdefault(path, f"{type(error).__name__}: {error}"[:200])
        finally:
            self._busy = False

    def range(self, path: str, tensor: Tensor, dtype: torch.dtype) -> None:
        with torch.no_grad():
            self.stats.ranges.append((path, generic.largest(tensor).detach().double(), limit_of(dtype)))

    # --------------------------------------------------------------------------------------- calls of functions

    def call(self, kind: str, values: Callable[[], Mapping[str, Tensor] | None]) -> None:
        """Values of a function that the running module calls, under the module's path and the function's name."""
        if self._looks_away():
            return
        path = f"{self._scopes[-1] if self._scopes else ''}:{kind}"
        count = self._calls[path] = self._calls.get(path, 0) + 1
        same = sum(p.endswith(f":{kind}") for p in self._calls)
        if count > 1 or same > self.max_modules:
            self.left_out += count == 1
            return
        self.measure(path, kind, lambda: values() or {})


class _Calls(TorchFunctionMode):
    """Sees the calls of attention and cross-entropy on their way."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            name, values = handler
            self.observer.call(name, lambda: values(*args, **kwargs))
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Mapping[str, Tensor] | None:
    scores = generic.attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa)
    return None if scores is None else generic.attention_values(scores)


def _softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Tensor] | None:
    """A softmax over the last of four dimensions is taken for attention, ``[B, H, Q, K]``."""
    if input.dim() != 4 or dim not in (-1, 3):
        return None
    places = generic.spread_evenly(input.shape[2], generic.QUERIES, input.device)
    return generic.attention_values(input[: generic.SAMPLES, :, places].float())


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    *args: Any,
    **kwargs: Any,
) -> Mapping[str, Tensor] | None:
    if target.is_floating_point() or input.dim() < 2:
        return None
    return generic.token_losses(input, target, ignore_index)


_HANDLERS: dict[Any, tuple[str, Callable[..., Mapping[str, Tensor] | None]]] = {
    F.scaled_dot_product_attention: ("attention", _attention),
    torch.softmax: ("attention", _softmax),
    F.softmax: ("attention", _softmax),
    Tensor.softmax: ("attention", _softmax),
    F.cross_entropy: ("tokens", _cross_entropy),
}


def _floats(value: Any) -> list[Tensor]:
    found = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    return [getattr(t, "_local_tensor", t) for t in found]


def _cast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which autocast would multiply this tensor; its own one without autocast."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and tensor.dtype is torch.float32:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


@contextmanager
def _no_autocast() -> Iterator[None]:
    kinds = [
        k for k in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(k) and torch.is_autocast_enabled(k)
    ]
    before = [(k, torch.get_autocast_dtype(k)) for k in kinds]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind, _ in before:
            torch.set_autocast_enabled(kind, True)
