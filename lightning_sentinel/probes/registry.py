"""Which statistics belong to which kind of module.

A *probe* is a function that is called right after a module's forward, in a replay of the step that leaves no trace:

    probe(module, args, kwargs, output) -> {name: tensor}

- ``args`` and ``kwargs`` are what the module was called with, ``output`` is what it returned. Nothing of them may be changed.
- Values are real tensors on the module's device, of no dimension or one (one number per head, say). **The host must not read
  them**: no ``.item()``, ``float()``, ``bool()``, ``.cpu()``, ``.tolist()``; ``DeepProbe`` copies all values at once.
- It runs without autograd and without autocast, and may call parts of its module: probes of these stay silent meanwhile.
- It may draw no random numbers.
- How near outputs come to the limit of their dtype is watched for every probed module anyway.

Example:
    >>> import torch
    >>> class Gate(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * x.sigmoid()
    >>> @register_probe(Gate)
    ... def gate(module, args, kwargs, output):
    ...     share = args[0].sigmoid()
    ...     return {"open": (share > 0.5).double().mean(), "mean": share.mean()}
    >>> probe_of(Gate()) is gate, probe_of(torch.nn.Flatten()) is None
    (True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn


class Probe(Protocol):
    """What :func:`register_probe` takes; see the module's docstring."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, /
    ) -> Mapping[str, Tensor]: ...


P = TypeVar("P", bound=Probe)

_PROBES: dict[type[nn.Module], Probe] = {}


def register_probe(*kinds: type[nn.Module]) -> Callable[[P], P]:
    """Measure modules of these classes, and of their subclasses, with the decorated function.

    The nearest class of a module counts. Registering a class again replaces its probe, also the built-in ones.

    Args:
        kinds: Module classes, at least one.
    """
    if not kinds or not all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds):
        raise TypeError(
            f"register_probe expects subclasses of torch.nn.Module, found {', '.join(map(repr, kinds)) or 'none'}."
        )

    def register(probe: P) -> P:
        for kind in kinds:
            _PROBES[kind] = probe
        return probe

    return register


def probe_of(module: nn.Module) -> Probe | None:
    """The probe of the module's nearest registered class, or None."""
    from . import generic  # noqa: F401 - registers the built-in ones

    return next((_PROBES[kind] for kind in type(module).__mro__ if kind in _PROBES), None)
