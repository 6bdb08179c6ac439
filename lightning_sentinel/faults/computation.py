"""Faults in the computation: a module's output or its backward goes wrong.

They are ordinary hooks on a named module, so a replay of the step meets them exactly as the step itself did, unless the
fault is a transient one. Outside training steps, in validation for instance, they do nothing.

Compiled code does not call hooks on what is in it. A layer that was compiled on its own runs eagerly while a fault strikes
it or within it, the others as ever; where more than that is compiled, all of the step does. The line in the journal says so
(``ran_eagerly``). In every other step the compiled code runs, and the hooks are no part of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..state import lightning_private as _private
from .base import Fault, Moment, nearest
from .data import DataFault

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.hooks import RemovableHandle


def map_first_float(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The module's output with its first floating-point tensor changed; containers keep their type."""
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            raise TypeError(f"the output is a {output.dtype} tensor, expected a floating-point one")
        return change(output)
    if isinstance(output, dict):
        items = list(output.items())
    elif isinstance(output, list | tuple):
        items = list(enumerate(output))
    else:
        raise TypeError(f"the output is a {type(output).__name__}, expected a tensor, list, tuple or dict")
    for key, value in items:
        if isinstance(value, Tensor) and value.is_floating_point():
            changed = dict(items) | {key: change(value)}
            if isinstance(output, dict):
                return type(output)(changed)
            values = list(changed.values())
            return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise TypeError("the output holds no floating-point tensor")


def zero_by_zero(value: Tensor, row: int) -> Tensor:
    """``value`` with 0/0 in one row of its first dimension, a normaliser that is zero; the rest unchanged to the bit."""
    weight = torch.ones(value.shape[:1] + (1,) * (value.dim() - 1), dtype=value.dtype, device=value.device)
    weight[row] = 0.0
    return value * weight / weight


class _Backward(torch.autograd.Function):
    """Identity whose backward applies ``change`` to the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def with_backward(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """``value``, whose gradient goes through ``change`` on its way back."""
    return cast(Tensor, _Backward.apply(value, change))  # type: ignore[no-untyped-call]


AUTO = "auto"


class HookedFault(Fault, ABC):
    """A fault that strikes by a hook on one module's output.

    Attributes:
        target: Path of the module.
        whole: Whether more than single layers is compiled around it: then it strikes in a step that runs eagerly.
    """

    target: str
    whole = False
    _handle: RemovableHandle | None = None
    _layers: Sequence[tuple[str, _private.EagerWhile]] = ()  # compiled on their own: the target, what is around it

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        self._handle = register(self, self.target, module, self._look)
        hit = module.get_submodule(self.target)
        around = [(path, m) for path, m in module.named_modules() if any(inner is hit for inner in m.modules())]
        self.whole = _private.hold_compiled(m for _, m in around)
        self._layers = [
            (path, _private.EagerWhile(m, self.strikes_now)) for path, m in around if _private.is_compiled(m)
        ]

    def uninstall(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        for _, layer in reversed(self._layers):
            layer.remove()
        self._layers = ()

    @abstractmethod
    def strikes_now(self) -> bool:
        """Whether a forward that runs now is hurt."""

    @abstractmethod
    def _hook(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """A forward hook that is called only where the fault strikes."""

    def _look(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self.strikes_now():
            return None
        return self._hook(module, args, output)

    @property
    def ran_eagerly(self) -> dict[str, Any]:
        """For the journal: what did not run compiled for its sake."""
        paths = ["the step"] if self.whole else [path for path, _ in self._layers]
        return {"ran_eagerly": paths} if paths else {}

    def why_missed(self) -> str:
        return (
            f"its module {self.target!r} was not called in a training step, or by compiled code, which calls no hooks"
        )


class ModuleFault(HookedFault):
    """A fault in what one module computes.

    Args:
        target: Path of the module in ``named_modules()`` of the LightningModule; ``auto`` takes one in the middle.
    """

    def __init__(
        self,
        step: int,
        target: str,
        duration: int | None = 1,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, rank, on_replay, name)
        self.target = target
        self._counted: Moment | None = None

    def strikes_now(self) -> bool:
        return self.moment is not None and self.strikes(self.moment)

    def strikes(self, moment: Moment) -> bool:
        """Whether the forward that runs now is hurt."""
        return self.due(moment)

    @abstractmethod
    def hurt(self, value: Tensor) -> Tensor:
        """The module's output in place of ``value``."""

    def _hook(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        moment = cast(Moment, self.moment)
        try:
            changed = map_first_float(output, self.hurt)
        except TypeError as error:
            raise TypeError(f"{self.name}: module {self.target!r}: {error}.") from None
        if moment.live and self._counted is not moment:  # a module that is called twice is one strike
            self._counted = moment
            self.struck(moment, module=self.target, **self.ran_eagerly)
        return changed


def middle_of(module: LightningModule) -> str:
    """Path of a module in the middle of the model: of its blocks where it has a list of them, else of its leaves."""
    from ..triage.replay import block_paths

    paths = [p for p in block_paths(module) if list(module.get_submodule(p).parameters())]
    leaves = [p for p, m in module.named_modules() if p and not list(m.children()) and list(m.parameters())]
    found = paths if len(paths) > 1 else leaves
    if not found:
        raise ValueError(f"{type(module).__name__} has no module with parameters that target='{AUTO}' could take.")
    return found[len(found) // 2]


def register(fault: Fault, target: str, module: LightningModule, hook: Any) -> RemovableHandle:
    """Hook on a named module; a clear error where it does not exist. ``auto`` is one in the middle of the model."""
    modules = dict(module.named_modules())
    if target == AUTO and AUTO not in modules:
        target = middle_of(module)
        if hasattr(fault, "target"):
            fault.target = target
    if target not in modules or not target:
        raise ValueError(
            f"{fault.name}: {type(module).__name__} has no module {target!r}."
            f" Nearest names: {nearest(target, modules)}."
        )
    handle: RemovableHandle = modules[target].register_forward_hook(hook)
    return handle


class NanForward(ModuleFault):
    """0/0 in one sample of a module's output at one step, also when the step is replayed.

    Args:
        row: Index of the sample in the batch.
    """

    default_name = "nan_forward"
    default_on_replay = True

    def __init__(
        self,
        step: int,
        target: str,
        row: int = 0,
        duration: int | None = 1,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, target, duration, rank, on_replay, name)
        self.row = row

    def hurt(self, value: Tensor) -> Tensor:
        return zero_by_zero(value, self.row)


class NanBackward(NanForward):
    """Finite forward, 0/0 in one sample of the gradient at a module's output, also when the step is replayed."""

    default_name = "nan_backward"

    def hurt(self, value: Tensor) -> Tensor:
        row = self.row
        return with_backward(value, lambda grad: zero_by_zero(grad, row))


class TransientNan(NanForward):
    """0/0 in a module's output in one single forward: a replay of the same step finds nothing.

    Strikes on rank 0 unless told otherwise.
    """

    default_name = "transient_nan"
    default_on_replay = False

    def __init__(self, step: int, target: str, row: int = 0, rank: int | None = 0, name: str | None = None) -> None:
        super().__init__(step, target, row, rank=rank, name=name)

    def strikes(self, moment: Moment) -> bool:
        return moment.live and self.fired == 0 and self.due(moment)


class Fp16Overflow(ModuleFault):
    """One gradient beyond 65,504 in one step: the loss is finite, the scaler skips the step and halves its scale.

    Args:
        gain: Factor on the gradient at the module's output.
    """

    default_name = "fp16_overflow"

    def __init__(
        self,
        step: int,
        target: str,
        gain: float = 1e9,
        duration: int | None = 1,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, target, duration, rank, on_replay, name)
        if gain <= 1.0:
            raise ValueError(f"{self.name}: gain is {gain}, expected more than 1.")
        self.gain = gain

    def hurt(self, value: Tensor) -> Tensor:
        gain = self.gain
        return with_backward(value, lambda grad: grad * gain)


class Fp16Collapse(HookedFault, DataFault):
    """Some samples drive a module's activations beyond 65,504, for the batches of many steps and whenever they return.

    Args:
        target: Path of the module in ``named_modules()`` of the LightningModule.
        gain: Factor on the module's output for these samples.
        duration: Number of steps whose samples are bad.
    """

    default_name = "fp16_collapse"

    def __init__(
        self,
        step: int,
        target: str,
        gain: float = 1e9,
        duration: int | None = 30,
        samples: int | None = None,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, samples, rank=rank, on_replay=on_replay, name=name)
        if gain <= 1.0:
            raise ValueError(f"{self.name}: gain is {gain}, expected more than 1.")
        self.target, self.gain = target, gain
        self._rows: list[int] = []

    def strikes_now(self) -> bool:
        return self.moment is not None and bool(self._rows)

    def on_batch(self, moment: Moment) -> None:
        self._rows = []
        super().on_batch(moment)

    def hurt(self, moment: Moment, rows: Sequence[int]) -> dict[str, Any]:
        self._rows = list(rows)
        return {"module": self.target, "gain": self.gain, **self.ran_eagerly}

    def _hook(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        rows, gain = self._rows, self.gain

        def amplify(value: Tensor) -> Tensor:
            weight = torch.ones(value.shape[:1] + (1,) * (value.dim() - 1), dtype=torch.float32, device=value.device)
            weight[rows] = gain
            return (value * weight).to(value.dtype)

        try:
            return map_first_float(output, amplify)
        except TypeError as error:
            raise TypeError(f"{self.name}: module {self.target!r}: {error}.") from None
