"""Runs a training step again without leaving a trace.

Whatever the step changes, it changes on copies that are thrown away: the objects that hold state are swapped out, and the
original objects go back afterwards. Nothing is copied back value by value, so nothing can come back slightly different.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from ..context import context_of
from ..state import lightning_private as _private

REPLAYING = "replaying"  # in context.scratch while a replay runs: hooks of the suite look away
EAGER = "eager"  # in context.scratch while a step that would run compiled runs eagerly by torch.compiler.set_stance

_SHALLOW = ("_modules", "_parameters")  # the entries are shared, the dict itself is the sandbox's own


class StepReachedError(Exception):
    """Ends a replayed manual ``training_step`` where its optimizer step would have been."""


def is_replaying(trainer: Trainer) -> bool:
    """True while triage runs a step again."""
    return bool(context_of(trainer).scratch.get(REPLAYING))


def _copy_of(value: Any, depth: int = 3) -> Any:
    """Plain tensors, generators and built-in containers of them as copies; anything else as it is."""
    if type(value) is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is torch.Generator:
        return value.clone_state()
    if depth and type(value) in (list, deque):
        copied = type(value)(_copy_of(v, depth - 1) for v in value)
        return deque(copied, value.maxlen) if isinstance(value, deque) else copied
    if depth and type(value) in (dict, OrderedDict):
        return type(value)((k, _copy_of(v, depth - 1)) for k, v in value.items())
    return set(value) if type(value) is set else value


def _swap_module(
    module: nn.Module,
    prefix: str,
    buffers: Mapping[str, Tensor],
    copies: dict[int, Tensor],
    eager: bool,
) -> None:
    """Replace what a forward may change in one submodule. ``copies`` keeps tensors shared between modules shared."""
    state = module.__dict__
    for key, value in list(state.items()):
        if key in _SHALLOW:
            state[key] = copy.copy(value)
        elif key != "_buffers":
            state[key] = _copy_of(value)
    state["_buffers"] = {
        name: None if b is None else copies.setdefault(id(b), buffers.get(prefix + name, b).detach().clone())
        for name, b in state["_buffers"].items()
    }
    if eager and state.get("_compiled_call_impl") is not None:
        state["_compiled_call_impl"] = None  # module.compile()


def _substitute(module: nn.Module, prefix: str, weights: Mapping[str, Tensor], copies: dict[int, nn.Parameter]) -> None:
    """Put other parameters into one submodule; tied parameters stay tied."""
    swapped: dict[str, nn.Parameter | None] = {}
    for name, p in module.__dict__["_parameters"].items():
        if p is None:
            swapped[name] = None
            continue
        if id(p) not in copies and prefix + name in weights:
            value = weights[prefix + name].to(device=p.device)
            copies[id(p)] = nn.Parameter(value.detach().clone(), requires_grad=p.requires_grad)
        swapped[name] = copies.get(id(p), p)
    module.__dict__["_parameters"] = swapped


@contextmanager
def _quiet_optimizers(trainer: Trainer, optimizer: Optimizer) -> Iterator[None]:
    """Nothing steps: neither optimizers nor schedulers. The step of ``optimizer`` ends the replayed ``training_step``."""

    def step_of(raw: Any) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, **_: Any) -> None:
            if closure is not None:
                closure()
            if raw is optimizer:
                raise StepReachedError

        return step

    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    wrappers = _private.lightning_optimizers(trainer)
    targets = [*trainer.optimizers, *wrappers, *schedulers]
    saved = [(t, "step" in t.__dict__, t.__dict__.get("step")) for t in targets]
    try:
        for target in [*trainer.optimizers, *wrappers]:
            target.__dict__["step"] = step_of(getattr(target, "optimizer", target))
        for scheduler in schedulers:
            scheduler.__dict__["step"] = lambda *_, **__: None
        yield
    finally:
        for target, had, step in saved:
            if had:
                target.__dict__["step"] = step
            else:
                target.__dict__.pop("step", None)


def _scoped_call(path: str, call: Callable[..., Any], scopes: list[str]) -> Callable[..., Any]:
    def scoped(*args: Any, **kwargs: Any) -> Any:
        scopes.append(path)
        try:
            return call(*args, **kwargs)
        finally:
            scopes.pop()

    return scoped


@contextmanager
def sandbox(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    *,
    buffers: Mapping[str, Tensor],
    backward: Callable[..., None],
    weights: Mapping[str, Tensor] | None = None,
    scopes: list[str] | None = None,
    eager: bool = True,
) -> Iterator[list[str]]:
    """Inside, ``module.training_step`` can be called without any effect outside.

    Yields:
        Names of functions that ran eagerly because there was no compiled code for them, as they come.

    Args:
        trainer: The Trainer, in its fit loop.
        module: The LightningModule, not wrapped by the strategy.
        optimizer: The optimizer at whose step a manual ``training_step`` ends with :class:`StepReachedError`.
        buffers: Buffers by path to start from; others start from their current values.
        backward: Called in place of ``module.manual_backward``.
        weights: Parameters by path to use in place of the current ones.
        scopes: Filled with the paths of the modules whose call is running, innermost last. A module's hooks count as part
            of its call.
        eager: Run what is compiled in its eager form. Without it, compiled code runs where there is some for these inputs,
            and nothing is compiled anew.
    """
    context = context_of(trainer)
    paths = {m: path for path, m in module.named_modules()}
    saved = [(m, dict(m.__dict__)) for m in paths]
    grads = [(p, p.grad, p.requires_grad) for p in module.parameters()]
    rng, loggers, hook = _private.rng_states(), _private.loggers(trainer), _private.current_hook(module)
    buffer_copies: dict[int, Tensor] = {}
    parameter_copies: dict[int, nn.Parameter] = {}
    restored = ExitStack()
    divided = _private.sharded_groups(module) if any(hasattr(p, "_local_tensor") for p, _, _ in grads) else []
    try:
        context.scratch[REPLAYING] = True
        if weights is not None and any(hasattr(p, "_local_tensor") for p, _, _ in grads):
            restored.enter_context(_sharded_weights(module, weights))
            weights = None
        for p, _, _ in grads:
            p.grad = None
        for m, path in paths.items():
            prefix = path + "." if path else ""
            _swap_module(m, prefix, buffers, buffer_copies, eager)
            if weights is not None:
                _substitute(m, prefix, weights, parameter_copies)
            if scopes is not None:
                m.__dict__["_call_impl"] = _scoped_call(path, m._call_impl, scopes)
        module.__dict__.update(log=_nothing, log_dict=_nothing, manual_backward=backward)
        _private.set_loggers(trainer, [DummyLogger() for _ in loggers])
        _private.set_current_hook(module, "training_step")
        compiled: Any = nullcontext([])
        if eager:
            compiled = torch.compiler.set_stance("force_eager")
        elif not context.scratch.get(EAGER):
            compiled = _private.compiling_nothing()
        with _quiet_optimizers(trainer, optimizer), torch.enable_grad(), compiled as told:
            yield [] if told is None else told
    finally:
        _private.divide_again(divided)
        for m, state in saved:
            m.__dict__.clear()
            m.__dict__.update(state)
        restored.close()
        for p, grad, requires_grad in grads:
            p.grad = grad
            p.requires_grad_(requires_grad)
        _private.set_loggers(trainer, loggers)
        _private.set_current_hook(module, hook)
        context.scratch.pop(REPLAYING, None)
        _private.set_rng_states(rng)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def _sharded_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in the local shards of sharded parameters, whose objects their wrapper holds on to."""
    with torch.no_grad():
        pairs = [
            # .data has a version counter of its own: the live parameters do not look changed afterwards
            (getattr(p, "_local_tensor", p).data, getattr(weights[n], "_local_tensor", weights[n]).data)
            for n, p in module.named_parameters()
            if n in weights
        ]
        before = [own.clone() for own, _ in pairs]
        for own, other in pairs:
            own.copy_(other)
        try:
            yield
        finally:
            for (own, _), old in zip(pairs, before, strict=True):
                own.copy_(old)
