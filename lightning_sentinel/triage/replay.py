"""Computes a step again from its captured window, without a trace, and measures what comes out.

By default the replay is the step itself: same weights, same micro-batches, same random states, same precision, and what the
step ran compiled runs compiled. It must then give the same bits. With other weights, another window or another dtype it is an
experiment. What looks inside the modules (the trace, hooks on their calls) runs in their eager form.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..context import context_of
from ..state import lightning_private as _private
from ..state.tree import local
from .sandbox import StepReachedError, sandbox
from .tokens import NOT_HEARD, NOT_HEARD_COMPILED, CrossEntropies, TokenLosses, hook_of, told_by
from .window import StepWindow, tensors

if TYPE_CHECKING:
    from ..state.snapshot import Snapshot
    from .origin import Origin, OriginTrace


class ReplayUnavailableError(RuntimeError):
    """The step cannot be computed again here; the message says why."""


@dataclass
class ReplayResult:
    """What a replay measured on this rank.

    Attributes:
        losses: Loss of each micro-batch as ``training_step`` gave it, float32 on the CPU; NaN where there was none.
        loss: Mean of ``losses``.
        grad_norm: 2-norm of this rank's gradient, unscaled, before clipping; NaN if no backward was asked for.
        has_gradient: Whether a backward gave any parameter a gradient: then ``grad_norm`` says whether it is finite.
        grads: Unscaled local gradients by parameter path, if they were asked for.
        sample_losses: ``module.sample_loss_nats`` of each micro-batch, ``[batch]`` nats, where ``training_step`` sets it.
        bitwise_equal: Losses equal to the live ones, bit for bit; None where the live ones are not known.
        grads_equal: The same for the gradients; None on several ranks, where the live ones are already reduced.
        origin: First non-finite value, if armed and if there is one.
        tokens: Loss and entropy of the tokens of each micro-batch, where they were asked for and are known.
        no_tokens: Why they are not; empty where they are, or were not asked for.
        activation_rms: Root mean square of watched modules' outputs by path.
        gradient_rms: Root mean square of this rank's gradient of the watched modules' parameters by path, unscaled.
        sums: ``(micro-batch, path, sum)`` of the watched modules' outputs in forward order, as the live flags hold them.
        micro_batches: Indices of the micro-batches that were run.
        eager: Whether something that the step ran compiled ran in its eager form here.
        first_bad: Index of the first micro-batch whose loss, or the gradient after it, was not finite, if it was asked for.
        inexact: Why the replay may differ from the step although nothing is wrong; empty if it may not.
        seconds: Wall time.
    """

    losses: list[float]
    grad_norm: float = math.nan
    has_gradient: bool = False
    grads: dict[str, Tensor] | None = None
    sample_losses: list[Tensor | None] = field(default_factory=list)
    bitwise_equal: bool | None = None
    grads_equal: bool | None = None
    origin: Origin | None = None
    tokens: list[TokenLosses | None] = field(default_factory=list)
    no_tokens: str = ""
    activation_rms: dict[str, float] = field(default_factory=dict)
    gradient_rms: dict[str, float] = field(default_factory=dict)
    sums: list[tuple[int, str, float]] = field(default_factory=list)
    micro_batches: tuple[int, ...] = ()
    eager: bool = False
    first_bad: int | None = None
    inexact: str = ""
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def finite(self) -> bool:
        """Losses and, where a backward gave one, the gradient."""
        return all(map(math.isfinite, self.losses)) and (not self.has_gradient or math.isfinite(self.grad_norm))


def block_paths(module: nn.Module, patterns: Sequence[str] | str = "auto") -> list[str]:
    """Modules at whose outputs values are watched.

    ``"auto"``: the elements of every ``nn.ModuleList`` and their direct children; without a list, the direct children of
    the module. Patterns are shell-style and match ``named_modules()`` paths.
    """
    from fnmatch import fnmatchcase

    modules = dict(module.named_modules())
    if not isinstance(patterns, str):
        return [path for path in modules if path and any(fnmatchcase(path, p) for p in patterns)]
    lists = [(path, m) for path, m in modules.items() if isinstance(m, nn.ModuleList)]
    found = {f"{path}.{i}": None for path, m in lists for i, _ in m.named_children()}
    if not found:
        return [name for name, _ in module.named_children()]
    deeper = {f"{path}.{name}": None for path in found for name, _ in modules[path].named_children() if path in modules}
    return [path for path in modules if path in found or path in deeper]


def outer_blocks(module: nn.Module) -> list[str]:
    """The elements of the outermost ``nn.ModuleList`` s, in ``named_modules()`` order: a model's layers.

    Lists inside an element (a layer's experts) are not entered. Without a list, the direct children of the module.
    """
    found: list[str] = []
    waiting = [("", module)]
    while waiting:
        path, m = waiting.pop()
        children = [(f"{path}.{name}" if path else name, child) for name, child in m.named_children()]
        if isinstance(m, nn.ModuleList):
            found += [name for name, _ in children]
        else:
            waiting += reversed(children)
    return found or [name for name, _ in module.named_children()]


def replay(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    window: StepWindow | None = None,
    *,
    weights: Snapshot | None = None,
    dtype: torch.dtype | None = None,
    armed: bool = False,
    anomaly: bool = False,
    backward: bool = True,
    keep_grads: bool = False,
    micro_batches: Sequence[int] | None = None,
    watch: Sequence[str] = (),
    parameters: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    inside: Callable[[Mapping[str, Call]], None] | None = None,
    calls: Sequence[str] = (),
    instrument: Callable[[LightningModule], AbstractContextManager[Any]] | None = None,
    tokens: bool = False,
    eager: bool = False,
    by_micro_batch: bool = False,
) -> ReplayResult:
    """Compute a step again in a sandbox.

    On several ranks all must call it alike: a sharded module's forward takes part in collectives.

    What the run has compiled runs compiled, where nothing of the following asks for a look inside: ``armed``, ``dtype``,
    ``calls``, ``inside``, ``instrument``. Nothing is compiled anew; what would have to be runs eagerly, and the result says
    so. Where the run uses CUDA graphs every replay is eager: a graph that runs again overwrites what it gave the step.

    Args:
        trainer: The Trainer, between a window's last backward and the end of its last batch.
        module: The LightningModule, not wrapped by the strategy.
        optimizer: The optimizer whose step it is.
        window: What to compute; None for the current step.
        weights: Parameters and buffers of this snapshot in place of the current ones.
        dtype: Compute in this dtype, without autocast, in place of the run's precision.
        armed: Trace the first non-finite value (several times slower).
        anomaly: With ``armed``: autograd's anomaly mode, for the forward line of a non-finite backward.
        backward: Also run the backward.
        keep_grads: Return the gradients.
        micro_batches: Run only these, by index; None for all.
        watch: Paths of modules whose outputs' root mean square is measured.
        parameters: These parameters, by path, in place of the current (or the snapshot's) ones.
        buffers: These buffers, by path, in place of the window's (or the snapshot's).
        inside: Called within the sandbox when the step is done, with what ``calls`` has caught.
        calls: Paths of modules whose first call's arguments are caught.
        instrument: Called with the module inside the sandbox; what it returns is entered around the computation. Hooks that
            it registers are gone afterwards.
        tokens: Listen to the losses of single tokens; unless armed, also ask the module's ``token_losses``, if it has one.
        eager: Run the eager form of what is compiled in any case.
        by_micro_batch: Find the first micro-batch that is not finite.

    Raises:
        ReplayUnavailableError: Nothing was captured, or ``training_step`` takes an iterator.
    """
    current = context_of(trainer).window
    window = current if window is None else window
    if window is None or not window.micro_batches:
        raise ReplayUnavailableError(
            "no micro-batch was captured for this step; call lightning_sentinel.triage.window.ensure_capture(trainer)"
            " in on_fit_start."
        )
    if _private.uses_dataloader_iter(trainer) or any(m.batch is None for m in window.micro_batches):
        raise ReplayUnavailableError(
            "training_step takes a dataloader_iter and fetches its own batches, so the step's batch is not known here;"
            " take (batch, batch_idx) to have steps replayed."
        )
    indices = tuple(range(len(window.micro_batches)) if micro_batches is None else micro_batches)
    started = time.perf_counter()
    run = _Run(trainer, module, optimizer, window, dtype, armed, anomaly, backward, weights, watch, parameters, buffers)
    run.inside, run.caught_paths = inside, frozenset(calls)
    run.instrument, run.listens = instrument, tokens
    run.looks_by_micro_batch = by_micro_batch
    within = armed or dtype is not None or bool(calls) or inside is not None or instrument is not None
    if eager or within or _private.uses_cuda_graphs(trainer.strategy.root_device):
        run.eager = True
    result = run.execute(indices, keep_grads)
    result.micro_batches = indices
    if window is current and weights is None and dtype is None and parameters is None and buffers is None:
        _compare_with_live(trainer, module, window, run, result)
    result.seconds = time.perf_counter() - started
    return result


class _Run:
    """One replay. Holds what its parts share."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        window: StepWindow,
        dtype: torch.dtype | None,
        armed: bool,
        anomaly: bool,
        backward: bool,
        weights: Snapshot | None,
        watch: Sequence[str],
        parameters: Mapping[str, Tensor] | None = None,
        other_buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.trainer, self.module, self.optimizer, self.window = trainer, module, optimizer, window
        self.dtype, self.armed, self.anomaly, self.with_backward = dtype, armed, anomaly, backward
        self.watch = set(watch)
        self.substitute = self._weights(weights, parameters or {})
        buffers: Mapping[str, Tensor] = window.buffers if weights is None else weights.buffers
        buffers = {**buffers, **other_buffers} if other_buffers is not None else buffers
        self.buffers = buffers if dtype is None else {n: _cast(b, dtype) for n, b in _all_buffers(module, buffers)}
        self.scale = self._scale()
        self.instrument: Callable[[LightningModule], AbstractContextManager[Any]] | None = None
        self.ends: list[Tensor] = []
        self.raw_losses: list[Tensor] = []
        self.grads: dict[str, Tensor] = {}
        self.rms: dict[str, Tensor] = {}
        self.micro_batch_losses: list[Tensor] = []
        self.sample_losses: list[Tensor | None] = []
        self.tokens: list[TokenLosses | None] = []
        self.no_tokens = ""
        self.listens = False
        self.sums: list[tuple[int, str, Tensor]] = []
        self.caught: dict[str, Call] = {}
        self.inside: Callable[[Mapping[str, Call]], None] | None = None
        self.caught_paths: frozenset[str] = frozenset()
        self.index = 0
        self.own = any(map(_private.is_compiled, module.modules()))  # modules that are compiled on their own
        self.whole = _private.hold_compiled(module.modules())
        self.eager = False  # everything in its eager form
        self.fell_back = False  # something compiled ran in its eager form although it should not
        self.heard: CrossEntropies | None = None  # in a training_step
        self.ran_eagerly: list[str] = []  # functions for which there was no compiled code
        self.looks_by_micro_batch = False
        self.bad: list[Tensor] = []

    def _weights(self, snapshot: Snapshot | None, others: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        if snapshot is not None and snapshot.params is None:
            raise ReplayUnavailableError(f"the snapshot of step {snapshot.step} holds no parameters.")
        weights = None if snapshot is None else snapshot.params
        if others:
            weights = {**(weights or {}), **others}
        if self.dtype is None:
            return None if weights is None else dict(weights)
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
            raise ReplayUnavailableError("the parameters are sharded; their dtype cannot be changed for a replay.")
        named = dict(self.module.named_parameters(remove_duplicate=False)) | dict(weights or {})
        return {n: _cast(p.detach(), self.dtype) for n, p in named.items()}

    def _scale(self) -> Tensor | None:
        if _private.scaler_of(self.trainer) is None or self.dtype is not None:
            return None
        return self.window.scale if self.window.scale is not None else _private.scale_of(self.trainer)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of ``manual_backward`` and ``strategy.backward``: neither Lightning's hooks nor the reducer of DDP."""
        self.ends.append(loss.detach())
        self.micro_batch_losses.append(loss.detach())
        if self.with_backward and loss.requires_grad:
            self.module.backward(loss * self.scale.to(loss.device) if self.scale is not None else loss, *args, **kwargs)

    def execute(self, indices: Sequence[int], keep_grads: bool) -> ReplayResult:
        from .origin import OriginTrace

        scopes: list[str] | None = [] if self.armed else None
        trace = OriginTrace(self.module, scopes) if scopes is not None else None
        with ExitStack() as stack:
            self.ran_eagerly = stack.enter_context(
                sandbox(
                    self.trainer,
                    self.module,
                    self.optimizer,
                    buffers=self.buffers,
                    backward=self.backward,
                    weights=self.substitute,
                    scopes=scopes,
                    eager=self.eager,
                )
            )
            epoch = self.trainer.current_epoch if self.window.epoch is None else self.window.epoch
            # A loss with a schedule of its own (a coefficient that rises) is that of its step.
            stack.enter_context(_private.at_step(self.trainer, self.window.step, epoch))
            self._watch_modules()
            if self.instrument is not None:
                stack.enter_context(self.instrument(self.module))
            if self.anomaly and self.armed:
                stack.enter_context(_quiet_anomaly_mode())
            stack.enter_context(trace if trace is not None else nullcontext())
            if trace is not None:
                trace.enter_state()
            for index in indices:
                if not self._micro_batch(index, trace):
                    break
            parameters = dict(self.module.named_parameters())
            grads = {n: local(p.grad) for n, p in parameters.items() if p.grad is not None}
            if trace is not None:
                trace.stop()
                self.ends += grads.values()
            origin = trace.first(self.ends, list(grads.values())) if trace is not None else None
            self._unscale(list(grads.values()))
            norm = norm_of(list(grads.values())) if grads else math.nan
            losses = [float(x) for x in self.raw_losses]
            rms = {path: float(x) for path, x in self.rms.items()}
            gradient_rms = _rms_by_module(grads, rms)
            sums = [(i, path, float(x)) for i, path, x in self.sums]
            first_bad = next((i for i, bad in zip(indices, self.bad, strict=False) if bool(bad)), None)
            kept = dict(grads)
            if self.inside is not None:
                self.inside(self.caught)
        self.grads = kept
        reasons = [
            f"micro-batch {i} was changed in place after its capture"
            for i in indices
            if self.window.micro_batches[i].changed_in_place
        ]
        if reasons:
            warnings.warn(f"The replay of step {self.window.step} is not exact: {'; '.join(reasons)}.", stacklevel=4)
        return ReplayResult(
            losses=losses,
            grad_norm=norm,
            has_gradient=bool(grads),
            grads=kept if keep_grads else None,
            sample_losses=self.sample_losses,
            origin=origin,
            tokens=self.tokens,
            no_tokens="" if any(t is not None for t in self.tokens) else self.no_tokens,
            activation_rms=rms,
            gradient_rms=gradient_rms,
            sums=sums,
            eager=bool(self.own or self.whole) and (self.eager or self.fell_back),
            first_bad=first_bad,
            inexact="; ".join(reasons),
        )

    def _micro_batch(self, index: int, trace: OriginTrace | None) -> bool:
        """Run one micro-batch; False when a manual ``training_step`` has reached the step."""
        micro, go_on = self.window.micro_batches[index], True
        self.index = index
        batch = micro.batch if self.dtype is None else tree_map(lambda x: _cast(x, self.dtype), micro.batch)
        if trace is not None:
            trace.enter_batch(batch, index)
        _private.set_rng_states(micro.rng)
        for (path, key), state in micro.generators.items():
            self.module.get_submodule(path).__dict__[key].set_state(state)  # the sandbox's copy
        arguments = _private.training_step_arguments(self.trainer, batch, micro.batch_idx)
        before = len(self.micro_batch_losses)
        precision = self._precision()
        # What is compiled as a whole would have to be compiled anew to be listened to.
        heard = self.heard = CrossEntropies() if self.listens and (self.eager or not self.whole) else None
        known = len(self.ran_eagerly)
        try:
            with precision, heard or nullcontext():
                output = self.module.training_step(*arguments)
        except StepReachedError:
            output, go_on = None, False
        finally:
            self.heard = None
            self.fell_back = self.fell_back or len(self.ran_eagerly) > known
        loss = output.get("loss") if isinstance(output, dict) else output
        if self.module.automatic_optimization:
            if isinstance(loss, Tensor):
                # As the loop does it: the loss that reaches the backward is divided.
                self.backward(loss / self.trainer.accumulate_grad_batches)
            raw = loss.detach() if isinstance(loss, Tensor) else None
        else:
            manual = self.micro_batch_losses[before:]
            raw = sum(manual[1:], manual[0]) if manual else None
        self.raw_losses.append(torch.tensor(math.nan) if raw is None else raw)
        samples = getattr(self.module, "sample_loss_nats", None)
        self.sample_losses.append(samples.detach().float().cpu() if isinstance(samples, Tensor) else None)
        if self.listens:
            self.tokens.append(self._token_losses(heard, batch, micro.batch_idx))
        if self.looks_by_micro_batch:
            self.bad.append(self._is_bad_now())
        return go_on

    def _is_bad_now(self) -> Tensor:
        """Whether the last micro-batch's loss, or the gradient as it stands, is not finite."""
        sums = [local(p.grad).sum() for p in self.module.parameters() if p.grad is not None and not p.grad.is_sparse]
        last = self.raw_losses[-1]
        return ~torch.stack([s.float().to(last.device) for s in (last.reshape(()), *sums)]).isfinite().all()

    def _token_losses(self, heard: CrossEntropies | None, batch: Any, batch_idx: int) -> TokenLosses | None:
        """What was heard of single tokens, or what the module itself says of them."""
        hook = hook_of(self.module)
        if hook is None and heard is None:
            self.no_tokens = NOT_HEARD_COMPILED
            return None
        if heard is not None and (hook is None or self.armed):
            found = heard.result(batch)
            if found is None:
                self.no_tokens = (
                    NOT_HEARD if hook is None else "not available: an armed replay does not ask token_losses"
                )
            return found
        kept = [
            (b, b.clone()) for b in self.module.buffers()
        ]  # the sandbox's own, which the next micro-batch goes on from
        try:
            with torch.no_grad(), self._precision():
                return None if hook is None else told_by(hook(batch, batch_idx))
        except Exception as error:  # the user's hook
            if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
                raise  # its forward is an exchange: the ranks must not part
            self.no_tokens = f"not available: token_losses raised {type(error).__name__}: {error}"[:300]
            return None
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)

    def _precision(self) -> AbstractContextManager[Any]:
        return self.trainer.precision_plugin.train_step_context() if self.dtype is None else _default_dtype(self.dtype)

    def _watch_modules(self) -> None:
        """Hooks on the sandbox's copy of the modules' hooks; around what runs compiled, not in it."""
        for path, m in self.module.named_modules():
            if not self.eager and _private.is_compiled(m):
                self._around(m, self._measure(path) if path in self.watch else None)
            elif path in self.watch and (self.eager or not self._is_within_compiled(path)):
                m.register_forward_hook(self._measure(path))
            if path in self.caught_paths:
                m.register_forward_pre_hook(self._catch(path), with_kwargs=True)

    def _is_within_compiled(self, path: str) -> bool:
        """Whether compiled code may call this module: a hook on it would not be called, or make that code unfit."""
        parents = [path[:i] for i, c in enumerate(path) if c == "."]
        return self.whole or any(_private.is_compiled(self.module.get_submodule(p)) for p in parents)

    def _around(self, module: nn.Module, measure: Any) -> None:
        """Around the call of a module that was compiled on its own: nobody listens inside, and its output is measured."""
        inner: Any = module.__dict__["_compiled_call_impl"]

        def call(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self.heard is None else self.heard.aside():
                output = inner(*args, **kwargs)
            if measure is not None:
                measure(module, args, output)
            return output

        module.__dict__["_compiled_call_impl"] = call

    def _measure(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _private.in_backward():  # a checkpointed block runs a second time in the backward
                return
            total = total_of(output)
            if total is not None:
                self.sums.append((self.index, path, total))
            if path in self.rms:
                return
            for out in tensors(output):
                if out.is_floating_point() and out.numel():
                    out = out.detach()
                    norm = torch.linalg.vector_norm(out, dtype=torch.promote_types(out.dtype, torch.float32))
                    self.rms[path] = norm / math.sqrt(out.numel())
                    return

        return hook

    def _catch(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if path not in self.caught and not _private.in_backward():
                given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
                self.caught[path] = Call(module, given[0], given[1], _private.rng_states())

        return hook

    def _unscale(self, grads: list[Tensor]) -> None:
        """As the scaler does it: times the float32 of the float64 reciprocal."""
        if self.scale is None or not grads:
            return
        inverse = self.scale.double().reciprocal().float()
        for grad in grads:
            grad.mul_(inverse.to(grad.device))


@dataclass(frozen=True)
class Call:
    """One call of a module within a replay: its arguments, detached, and the random states before it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: dict[str, Any]


def total_of(output: Any) -> Tensor | None:
    """Sum over a module's floating-point outputs in float32 or wider: not finite where any of them is not."""
    if type(output) is Tensor and output.dtype is torch.float32 and output.numel():
        return output.detach().sum()  # the usual case, without a walk through containers
    total: Tensor | None = None
    for out in tensors(output):
        if out.is_floating_point() and out.numel():
            part = out.detach().sum(dtype=torch.promote_types(out.dtype, torch.float32))
            total = part if total is None else total + part
    return total


def norm_of(grads: list[Tensor]) -> float:
    """2-norm in float64, 0 of none: a finite gradient of 1e20 is not read as infinite."""
    if not grads:
        return 0.0
    squares = [
        torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g, dtype=torch.float64) for g in grads
    ]
    return float(torch.linalg.vector_norm(torch.stack([s.to(squares[0].device) for s in squares])))


def _rms_by_module(grads: Mapping[str, Tensor], paths: Iterable[str]) -> dict[str, float]:
    """Root mean square of the gradients of each module's parameters; a module without any is left out."""
    found = {}
    for path in paths:
        inside = [g for name, g in grads.items() if name.startswith(f"{path}.")]
        if elements := sum(g.numel() for g in inside):
            found[path] = norm_of(inside) / math.sqrt(elements)
    return found


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and dtype is not None else value


def _all_buffers(module: nn.Module, given: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(n, given.get(n, b)) for n, b in module.named_buffers()]


class _default_dtype:  # noqa: N801 - reads like the context manager it is
    """Tensors made inside get this dtype too, and autocast is off."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self.before)


class _quiet_anomaly_mode:  # noqa: N801
    """Autograd's anomaly mode for its forward traces, without its check that raises."""

    def __enter__(self) -> None:
        self.before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(True, check_nan=False)

    def __exit__(self, *exc: object) -> None:
        torch.autograd.set_detect_anomaly(*self.before)


def _live_equals(live: Tensor, replayed: Tensor, accumulate: int, scale: Tensor | None) -> bool:
    """Whether a live loss is the replayed one to the bit, also where it was divided and scaled and brought back."""
    x = replayed.float().cpu()
    forms = [x, x / accumulate, (x / accumulate) * accumulate]
    if scale is not None:
        s = scale.float().cpu()
        forms += [(x * s) / s, ((x / accumulate) * s) / s * accumulate]
    return any(same_bits(live.detach().float().cpu().reshape(()), f.reshape(())) for f in forms)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit; NaN equals NaN."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
        and bool(torch.equal(a.isnan(), b.isnan()))
    )


def _compare_with_live(
    trainer: Trainer, module: LightningModule, window: StepWindow, run: _Run, result: ReplayResult
) -> None:
    live = context_of(trainer).scratch.get("live_losses") or []
    if len(live) == len(window.micro_batches):
        accumulate = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        pairs = [(live[i], x) for i, x in zip(result.micro_batches, run.raw_losses, strict=False)]
        result.bitwise_equal = all(_live_equals(a, b, accumulate, run.scale) for a, b in pairs)
    whole = len(result.micro_batches) == len(window.micro_batches)
    if trainer.world_size == 1 and whole and run.with_backward and run.grads:
        live_grads = {n: local(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        if live_grads:
            result.grads_equal = live_grads.keys() == run.grads.keys() and all(
                same_bits(_dense(g), _dense(run.grads[n])) for n, g in live_grads.items()
            )


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad
