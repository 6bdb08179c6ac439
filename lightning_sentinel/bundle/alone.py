"""One module alone, from the inputs and the output gradient that it had in the replayed step, in several dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..state import lightning_private as private
from ..triage.origin import Range, is_bad
from ..triage.replay import _cast, _default_dtype, replay
from ..triage.sandbox import sandbox
from ..triage.window import StepWindow, tensors

KEPT_CALLS = 16  # a module that is called more often in a step is looked at in its first calls only
# Relative distance from float64 beyond which more than rounding has happened: a thousand units in the last place, which a
# long sum may lose, and which a wrong formula exceeds by far.
ULPS = 1000.0
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # narrower than inputs that are float32


@dataclass(frozen=True)
class InDtype:
    """What the module gave in one dtype.

    Attributes:
        dtype: ``as in the run`` or the dtype.
        output_finite: Whether every floating-point output is.
        gradient_finite: Whether the gradients of inputs and parameters are; None where there was nothing to go back from.
        largest: Largest absolute value among the finite outputs.
        output_error: Relative distance of the output from that in float64, in the 2-norm; NaN where it is not finite.
        gradient_error: The same for the gradients.
        raised: The error that it ended with, or empty.
    """

    dtype: str
    output_finite: bool = False
    gradient_finite: bool | None = None
    largest: float = math.nan
    output_error: float = math.nan
    gradient_error: float = math.nan
    raised: str = ""


@dataclass
class ModuleCheck:
    """One module's outcome: its inputs and what it made of them by dtype."""

    path: str
    kind: str
    micro_batch: int
    calls: int
    inputs: list[dict[str, Any]]
    by_dtype: list[InDtype] = field(default_factory=list)
    sentence: str = ""
    precision: str = ""

    @property
    def rounding(self) -> float:
        """Relative distance from float64 that rounding explains."""
        dtypes = [*_dtypes(self), *([_AUTOCAST[self.precision]] if self.precision in _AUTOCAST else [])]
        return ULPS * max((torch.finfo(t).eps for t in dtypes), default=torch.finfo(torch.float32).eps)

    @property
    def wrong(self) -> bool:
        """Whether output or gradient, finite and from finite inputs, is farther from float64 than rounding explains."""
        if not self.by_dtype or any(r["nonfinite"] for r in self.inputs):
            return False
        return any(error > self.rounding for error in (self.by_dtype[0].output_error, self.by_dtype[0].gradient_error))


@dataclass
class _Call:
    micro_batch: int
    args: Any
    kwargs: Any
    rng: dict[str, Any]
    bad: bool = False
    grads: list[Tensor | None] = field(default_factory=list)


def module_alone(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    window: StepWindow,
    path: str,
    dtype: str | None = None,
) -> ModuleCheck:
    """Replay the step to capture the module's inputs, then compute the module alone.

    Looked at is its first call whose output or output gradient is not finite, else its first call.
    """
    target = module.get_submodule(path)
    calls = _captured(trainer, module, optimizer, window, target)
    kind = type(target).__name__
    if not calls:
        return ModuleCheck(path, kind, 0, 0, [], sentence=f"{kind} {path} is not called in this step.")
    call = next((c for c in calls if c.bad or any(g is not None and is_bad(g) for g in c.grads)), calls[0])
    inputs = [vars(Range.of(t)) for t in tensors((call.args, call.kwargs)) if t.is_floating_point()]
    precision = str(getattr(trainer.precision_plugin, "precision", ""))
    check = ModuleCheck(path, kind, call.micro_batch, len(calls), inputs, precision=precision)
    names: list[str | None] = [None, "float32", "float64", *([dtype] if dtype else [])]
    outcomes = {n: _compute(trainer, module, optimizer, window, target, call, n) for n in dict.fromkeys(names)}
    reference = outcomes["float64"]
    for name, outcome in outcomes.items():
        check.by_dtype.append(_described(name, outcome, reference))
    check.sentence = _sentence(check, outcomes[None])
    return check


def _captured(
    trainer: Trainer, module: LightningModule, optimizer: Optimizer, window: StepWindow, target: nn.Module
) -> list[_Call]:
    calls: list[_Call] = []
    begun: list[_Call] = []
    seen = {"step": -1}
    inner = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        seen["step"] += 1
        return inner(*args, **kwargs)

    def before(m: nn.Module, args: Any, kwargs: Any) -> None:
        if private.in_backward() or len(calls) >= KEPT_CALLS:  # a checkpoint's recomputation is the same call
            return
        arguments, named = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        begun.append(_Call(seen["step"], arguments, named, private.rng_states()))

    def after(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if private.in_backward() or not begun:
            return
        call = begun.pop()
        outputs = [t for t in tensors(output) if t.is_floating_point()]
        call.bad = any(is_bad(t) for t in outputs)
        call.grads = [None] * len(outputs)
        for i, out in enumerate(outputs):
            if out.requires_grad:
                out.register_hook(partial(_keep, call.grads, i))  # type: ignore[no-untyped-call]
        calls.append(call)

    handles = [
        target.register_forward_pre_hook(before, with_kwargs=True),
        target.register_forward_hook(after, with_kwargs=True),
    ]
    module.__dict__["training_step"] = wraps(inner)(training_step)
    try:
        replay(trainer, module, optimizer, window)
    finally:
        module.__dict__.pop("training_step", None)
        for handle in handles:
            handle.remove()
    return calls


def _keep(grads: list[Tensor | None], index: int, grad: Tensor) -> None:
    grads[index] = grad.detach().clone()


@dataclass
class _Outcome:
    outputs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    raised: str = ""


def _compute(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    window: StepWindow,
    target: nn.Module,
    call: _Call,
    name: str | None,
) -> _Outcome:
    dtype = None if name is None else getattr(torch, name)
    weights = None
    buffers: Mapping[str, Tensor] = window.buffers
    if dtype is not None:
        weights = {n: _cast(p.detach(), dtype) for n, p in module.named_parameters(remove_duplicate=False)}
        buffers = {n: _cast(window.buffers.get(n, b), dtype) for n, b in module.named_buffers()}
    with ExitStack() as stack:
        stack.enter_context(
            sandbox(trainer, module, optimizer, buffers=buffers, backward=lambda *a, **k: None, weights=weights)
        )
        stack.enter_context(trainer.precision_plugin.train_step_context() if dtype is None else _default_dtype(dtype))
        leaves: list[Tensor] = []

        def given(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = _cast(value, dtype).detach().clone()
            if value.is_floating_point():
                leaves.append(value.requires_grad_())
                # What comes from an operator may be changed in place; a leaf may not.
                return value.view_as(value)
            return value

        args, kwargs = tree_map(given, (call.args, call.kwargs))
        private.set_rng_states(call.rng)
        try:
            output = target(*args, **kwargs)
            outputs = [t for t in tensors(output) if t.is_floating_point()]
            pairs = [
                (out, _cast(g, out.dtype))
                for out, g in zip(outputs, call.grads, strict=False)
                if g is not None and out.requires_grad
            ]
            wanted = [*leaves, *(p for p in target.parameters() if p.requires_grad)]
            grads: Sequence[Tensor | None] = ()
            if pairs and wanted and not any(is_bad(g) for _, g in pairs):
                grads = torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        except Exception as error:
            return _Outcome(raised=f"{type(error).__name__}: {error}"[:300])
        return _Outcome([t.detach().double() for t in outputs], [g.detach().double() for g in grads if g is not None])


def _described(name: str | None, outcome: _Outcome, reference: _Outcome) -> InDtype:
    if outcome.raised:
        return InDtype(name or "as in the run", raised=outcome.raised)
    finite = [t[torch.isfinite(t)] for t in outcome.outputs]
    return InDtype(
        name or "as in the run",
        output_finite=not any(is_bad(t) for t in outcome.outputs),
        gradient_finite=None if not outcome.grads else not any(is_bad(g) for g in outcome.grads),
        largest=max((float(t.abs().max()) for t in finite if t.numel()), default=math.nan),
        output_error=_distance(outcome.outputs, reference.outputs),
        gradient_error=_distance(outcome.grads, reference.grads),
    )


def _distance(mine: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Relative distance in the 2-norm over all tensors together; NaN where it cannot be told."""
    if not mine or len(mine) != len(reference) or any(a.shape != b.shape for a, b in zip(mine, reference, strict=True)):
        return math.nan
    if any(is_bad(t) for t in (*mine, *reference)):
        return math.nan
    size = math.sqrt(sum(float(b.square().sum()) for b in reference))
    apart = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(mine, reference, strict=True)))
    return apart / size if size > 0 else (0.0 if apart == 0 else math.inf)


def _sentence(check: ModuleCheck, own: _Outcome) -> str:
    run = check.by_dtype[0]
    wide = next(d for d in check.by_dtype if d.dtype == "float64")
    where = f"{check.kind} {check.path} alone"
    ranges = [r for r in check.inputs if r["nonfinite"]]
    if ranges:
        return f"{where}: its inputs are not finite already; the cause lies before it."
    if run.raised:
        return f"{where} raises {run.raised}."
    for what, mine, exact in (
        ("output", run.output_finite, wide.output_finite),
        ("gradient", run.gradient_finite, wide.gradient_finite),
    ):
        if mine is False:
            rest = (
                "finite in float64: a value left the range of its dtype"
                if exact
                else "not finite in float64 either: the formula has no value there"
            )
            return f"{where}, from finite inputs: its {what} is not finite, and {rest}."
    for what, error in (("output", run.output_error), ("gradient", run.gradient_error)):
        if error > check.rounding:
            return (
                f"{where}: finite, but its {what} is {error:.2g} of its size away from float64, where rounding explains"
                f" {check.rounding:.2g}: the computation is wrong or ill-conditioned."
            )
    return f"{where}: finite, and within {run.output_error:.2g} of float64."


def _dtypes(check: ModuleCheck) -> list[torch.dtype]:
    return [getattr(torch, r["dtype"]) for r in check.inputs]
