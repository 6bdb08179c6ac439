"""One module alone, from its inputs in the step: its backward against finite differences, its range in wider numbers.

The directional derivative of a module along a direction ``u`` of its inputs and parameters, seen through a cotangent ``c``,
is ``<c, J u>``. Its backward says ``<J^T c, u>``. In float64 the central difference ``<c, f(x + h u) - f(x - h u)> / 2h`` is
right to about ``h^2`` and the rounding over ``h``; a right backward agrees with it to many digits, a wrong one does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..state import lightning_private as _private
from .replay import Call
from .window import tensors

STEP = 1e-5  # of the finite difference, relative to the size of what is moved
WRONG = 0.05  # relative disagreement of backward and finite difference from which the backward is wrong


@dataclass(frozen=True)
class Slope:
    """Directional derivative of one module.

    Attributes:
        backward: What its backward says.
        measured: What the finite difference says.
    """

    backward: float
    measured: float

    @property
    def disagreement(self) -> float:
        """Relative difference; 0 where both are negligible."""
        size = max(abs(self.backward), abs(self.measured))
        if not math.isfinite(size):
            return math.inf
        return abs(self.backward - self.measured) / size if size > 1e-12 else 0.0

    @property
    def is_wrong(self) -> bool:
        return self.disagreement > WRONG


class Alone:
    """A module's caught call, to be computed again on copies of its inputs and parameters in another dtype."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self.call, self.dtype = call, dtype
        leaves, self.spec = tree_flatten((call.args, call.kwargs))
        self.leaves = [x.to(dtype) if _floats(x) else x for x in leaves]
        self.state = {
            n: p.detach().to(dtype) if p.is_floating_point() else p.detach() for n, p in _state(call.module).items()
        }
        trained = {n for n, p in call.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.names = [n for n in self.state if n in trained and self.state[n].is_floating_point()]
        self.inputs = [i for i, x in enumerate(self.leaves) if _floats(x)]

    def run(self, leaves: list[Any] | None = None, state: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Floating-point outputs, from these inputs and parameters, with the call's own random states."""
        args, kwargs = tree_unflatten(self.leaves if leaves is None else leaves, self.spec)
        given = {n: t.clone() for n, t in {**self.state, **(state or {})}.items()}  # buffers may be written to
        before = _private.rng_states()
        _private.set_rng_states(self.call.rng)
        try:
            out = functional_call(self.call.module, given, args, kwargs, tie_weights=False)
        finally:
            _private.set_rng_states(before)
        return [t for t in tensors(out) if t.is_floating_point()]

    def slope(self, seed: int = 0) -> Slope:
        """Backward and finite difference along one random direction of inputs and parameters together."""
        generator = torch.Generator().manual_seed(seed)

        def like(x: Tensor) -> Tensor:
            return torch.randn(x.shape, generator=generator, dtype=self.dtype).to(x.device)

        moved = [self.leaves[i].detach().clone().requires_grad_() for i in self.inputs]
        weights = [self.state[n].detach().clone().requires_grad_() for n in self.names]
        # Each tensor moves in proportion to its own size, so that none drowns the others.
        directions = [like(x) * _size(x) for x in (*moved, *weights)]
        with torch.enable_grad():
            outputs = self.run(self._with(moved), dict(zip(self.names, weights, strict=True)))
            cotangents = [like(y) for y in outputs]
            total = sum((y * c).sum() for y, c in zip(outputs, cotangents, strict=True))
            if not isinstance(total, Tensor) or not total.requires_grad:
                return Slope(0.0, 0.0)
            grads = torch.autograd.grad(total, [*moved, *weights], allow_unused=True)
        backward = sum(float((g * u).sum()) for g, u in zip(grads, directions, strict=True) if g is not None)
        ends = []
        with torch.no_grad():
            for sign in (1.0, -1.0):
                shifted = [x + sign * STEP * u for x, u in zip((*moved, *weights), directions, strict=True)]
                there = self.run(
                    self._with(shifted[: len(moved)]), dict(zip(self.names, shifted[len(moved) :], strict=True))
                )
                ends.append(sum(float((y * c).sum()) for y, c in zip(there, cotangents, strict=True)))
        return Slope(backward, (ends[0] - ends[1]) / (2.0 * STEP))

    def _with(self, inputs: list[Tensor]) -> list[Any]:
        leaves = list(self.leaves)
        for i, x in zip(self.inputs, inputs, strict=True):
            leaves[i] = x
        return leaves


def _state(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _size(x: Tensor) -> float:
    return max(float(x.detach().abs().mean()), 1e-6) if x.numel() else 1.0


def wrong_backwards(calls: Mapping[str, Call]) -> dict[str, Slope]:
    """Modules whose backward is finite and wrong, the innermost of those within each other only.

    A module that cannot be computed alone (it needs a state that the call does not hold) is left out.
    """
    wrong: dict[str, Slope] = {}
    for path, call in calls.items():
        try:
            alone = Alone(call, torch.float64)
            slopes = [alone.slope(seed) for seed in (0, 1)]
        except Exception:  # the user's module, called in another dtype: it may refuse in any way
            continue
        if all(s.is_wrong for s in slopes):  # a kink in the way of one direction proves nothing
            wrong[path] = slopes[0]
    return {
        path: slope
        for path, slope in wrong.items()
        if not any(other != path and other.startswith(path + ".") for other in wrong)
    }


@dataclass(frozen=True)
class Widened:
    """What a module gives alone in one dtype.

    Attributes:
        finite: Whether all of its outputs are finite.
        largest_input: Largest finite magnitude that went in.
        largest: Largest finite magnitude that came out.
    """

    dtype: str
    finite: bool
    largest_input: float
    largest: float


def widened(call: Call, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> list[Widened]:
    """The module alone from its caught inputs in wider numbers, without autocast."""
    found = []
    for dtype in dtypes:
        alone = Alone(call, dtype)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            outputs = alone.run()
        found.append(
            Widened(
                str(dtype).removeprefix("torch."),
                all(bool(y.isfinite().all()) for y in outputs),
                max((_largest(alone.leaves[i]) for i in alone.inputs), default=0.0),
                max((_largest(y) for y in outputs), default=0.0),
            )
        )
    return found


def _largest(x: Tensor) -> float:
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
