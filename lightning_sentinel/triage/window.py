"""Captures what a step was computed from, so that it can be computed again: micro-batches, random states, buffers.

Batches are kept by reference, random states and buffers by value. A window is the micro-batches of one optimizer step.
Besides the current one, the newest healthy window is kept, and a few older healthy ones while they are small.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..context import RunContext, context_of
from ..state import comm_hook
from ..state import lightning_private as _private

KEPT_EVERY = 16  # steps between two older healthy windows
KEPT_WINDOWS = 4
UNBUFFERED_EVERY = 16  # steps
KEPT_BYTES = 16 * 2**20  # of batch tensors per window; larger windows are not kept beyond the newest healthy one


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in a nest of containers; the local part of a DTensor."""
    if type(tree) is dict:  # most batches: flat, and ten times faster without the general walk
        found = []
        for value in tree.values():
            kind = type(value)
            if kind is Tensor:
                found.append(value)
            elif not (value is None or (kind in _PLAIN_LISTS and _PLAIN_TYPES.issuperset(map(type, value)))):
                break
        else:
            return found
    return [getattr(t, "_local_tensor", t) for t in tree_leaves(tree) if isinstance(t, Tensor)]


_VALUES = methodcaller("values")
_PLAIN_LISTS, _PLAIN_TYPES = frozenset({list, tuple}), frozenset({str, int, float, bool})


class BufferTree:
    """Where the buffers of a module lie.

    Asked for in every step, so the walk of ``nn.Module.named_buffers`` is made again only where a submodule has been added,
    removed or replaced since; the buffers themselves are read anew each time. In a model that has none, new submodules
    are looked for every ``UNBUFFERED_EVERY`` steps.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._children: list[dict[str, nn.Module | None]] = []
        self._known: list[nn.Module | None] = []
        self._owners: list[tuple[str, dict[str, Tensor | None]]] = []
        self._places: list[dict[str, Tensor | None]] = []
        self._calls = 0

    def of(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Every buffer by its path, those that are not in the ``state_dict`` too, each once."""
        self._calls += 1
        known = self._module() is module and bool(self._owners)
        if known and self._calls % UNBUFFERED_EVERY and not any(self._places):
            return []
        if not known or self._changed():
            self._module = weakref.ref(module)
            modules = list(module.named_modules())
            self._owners = [(f"{path}." if path else "", m._buffers) for path, m in modules]
            self._places = [m._buffers for _, m in modules]
            self._children = [m._modules for _, m in modules if m._modules]
            self._known = [*chain.from_iterable(map(_VALUES, self._children))]
        found: list[tuple[str, Tensor]] = []
        seen: set[int] = set()
        for prefix, buffers in self._owners:
            if buffers:
                for name, b in buffers.items():
                    if b is not None and id(b) not in seen:
                        seen.add(id(b))
                        found.append((prefix + name, b))
        return found

    def _changed(self) -> bool:
        # Compared one by one by identity, which modules have no other equality to override.
        return self._known != [*chain.from_iterable(map(_VALUES, self._children))]


@dataclass
class MicroBatch:
    """One call of ``training_step``.

    Attributes:
        batch: The batch on its device, by reference.
        batch_idx: Index of the batch within its epoch.
        rng: Global random states right before ``training_step``.
        versions: Version counter of each tensor in the batch: a change in place shows as a difference.
        sample_ids: Ids of the batch's samples, where they were known at capture.
        generators: States of the ``torch.Generator`` attributes of modules, by module path and attribute.
    """

    batch: Any
    batch_idx: int
    rng: dict[str, Any]
    versions: list[int]
    sample_ids: tuple[str, ...] = ()
    generators: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    @property
    def changed_in_place(self) -> bool:
        return [t._version for t in tensors(self.batch)] != self.versions


@dataclass
class StepWindow:
    """All micro-batches of one optimizer step, and the buffers before the first one.

    Attributes:
        step: ``trainer.global_step`` at the first micro-batch.
        attempt: Which pass over the step this is.
        micro_batches: In order.
        buffers: Buffers by path, before the first forward.
        comm: What communication hooks of DDP remembered then.
        scale: Loss scale in force, 0-dim on its device; None without a scaler.
        boundary_flags: ``(micro-batch, module path, sum of the output)`` in forward order, the sum on its device (on the
            CPU as a number); a sum that is not finite marks an output that is not finite.
        losses: Live losses of the micro-batches, set when the window has passed the gate as healthy.
        sample_losses: Losses of the samples by micro-batch, ``[batch]`` nats each, where ``training_step`` left them.
        epoch: ``trainer.current_epoch`` there; None where it is not known.
    """

    step: int
    attempt: int = 0
    micro_batches: list[MicroBatch] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    comm: list[dict[str, Any]] = field(default_factory=list)
    scale: Tensor | None = None
    boundary_flags: list[tuple[int, str, Tensor | float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    sample_losses: list[Tensor] = field(default_factory=list)
    epoch: int | None = None

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(i for m in self.micro_batches for i in m.sample_ids)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for m in self.micro_batches for t in tensors(m.batch))


class StepCapture:
    """Keeps ``context.window`` and ``context.healthy_window`` up to date during one fit."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._module: weakref.ref[LightningModule] | None = None
        self._generators: dict[tuple[str, str], torch.Generator] = {}
        self._buffers = BufferTree(trainer.lightning_module)
        self._free: list[dict[str, Tensor]] = []  # buffer memory of retired windows
        self._comm: list[dict[str, Any]] = []  # only that of the current window is ever asked for
        self._attempt = context_of(trainer).attempt
        self._scaled = _private.scaler_of(trainer) is not None
        self._hooked = not isinstance(trainer.strategy, SingleDeviceStrategy)  # may have communication hooks
        self.keeps_previous = False  # a step may be judged while the next one is under way
        self._previous: StepWindow | None = None
        self._told = False  # somebody calls mark_healthy, so the default judgement is not needed
        self.kept: deque[StepWindow] = deque(maxlen=KEPT_WINDOWS)
        self.anchors: dict[int, StepWindow] = {}  # by step: healthy windows that start at a full snapshot
        self._undo: Callable[[], None] = _private.intercept_batch_start(trainer, self._on_batch)

    def release(self) -> None:
        self._undo()

    def mark_healthy(self, trainer: Trainer, window: StepWindow | None = None) -> None:
        self._told = True
        self._accept(context_of(trainer), window)

    def forget_after(self, context: RunContext, step: int) -> None:
        """Let go of the windows of ``step`` and later: they belong to an abandoned path."""
        if context.healthy_window is not None and context.healthy_window.step >= step:
            context.healthy_window = None
        if context.window is not None and context.window.step >= step:
            context.window = None
        self.anchors = {s: w for s, w in self.anchors.items() if s < step}
        kept = [w for w in self.kept if w.step < step]
        self.kept.clear()
        self.kept.extend(kept)

    def _accept(self, context: RunContext, window: StepWindow | None = None) -> None:
        window = context.window if window is None else window
        if window is None or window is context.healthy_window:
            return
        window.losses = list(context.scratch.get("live_losses", ()))
        if not self._is_anchor(context, window):
            window.boundary_flags = []
        older, context.healthy_window = context.healthy_window, window
        if older is None or (self.anchors and older is self.anchors.get(older.step)):
            return
        last = self.kept[-1] if self.kept else None
        due = last is None or abs(older.step - last.step) >= KEPT_EVERY or older.attempt != last.attempt
        if due and older.nbytes <= KEPT_BYTES:
            if len(self.kept) == self.kept.maxlen:
                self._retire(self.kept[0])
            self.kept.append(older)
        else:
            self._retire(older)

    def _retire(self, window: StepWindow) -> None:
        """Its buffers' memory may be used again."""
        if window.buffers:
            self._free.append(window.buffers)

    def _is_anchor(self, context: RunContext, window: StepWindow) -> bool:
        """Keep a window that starts at a full snapshot: from that state it must give its own loss again."""
        step = window.step
        for snapshot in context.snapshots:
            if snapshot.step == step and snapshot.params is not None and not snapshot.mid_accumulation:
                break
        else:
            return False
        kept = {s.step for s in context.snapshots}  # what belongs to a snapshot that has been given up goes now
        self.anchors = {s: w for s, w in self.anchors.items() if s in kept}
        if window.nbytes > KEPT_BYTES:
            return False
        self.anchors[step] = window
        return True

    def _looks_healthy(self, context: RunContext) -> bool:
        """Judgement where no incident response gives one: this step's record is finite, its update went in, all is calm."""
        # By now the telemetry has cleared the record of the step that is over; the history has it, if it was accepted.
        record, window = context.record or (context.history[-1] if context.history else None), context.window
        return (
            record is not None
            and window is not None
            and (record.step, record.attempt) == (window.step, window.attempt)
            and not record.has_nonfinite
            and not context.held
            and not any(i.is_open for i in context.incidents)
        )

    def _on_batch(self, batch: Any, batch_idx: int) -> None:
        trainer = self._trainer()
        if trainer is None:
            return
        context, module, step = context_of(trainer), trainer.lightning_module, trainer.global_step
        if context.attempt != self._attempt:  # a rollback: steps from here on are new, whatever was kept of them
            self._attempt = context.attempt
            self.forget_after(context, step)
        window = context.window
        same_module = self._module is not None and self._module() is module
        if (
            window is None
            or not same_module
            or window.step != step
            or window.attempt != context.attempt
            or not window.micro_batches
        ):
            if not same_module:
                self._generators = _generators(module)
                self._module = weakref.ref(module)
            window = self._open(trainer, module, context, step)
        known = context.scratch.get("sample_ids", ())
        taken = len(window.sample_ids) if window.micro_batches else 0
        ids = tuple(map(str, known[taken:] if taken else known)) or _own_ids(batch)
        versions = [t._version for t in tensors(batch)]
        private = {key: g.get_state() for key, g in self._generators.items()} if self._generators else {}
        window.micro_batches.append(MicroBatch(batch, batch_idx, _private.rng_states(), versions, ids, private))

    def _open(self, trainer: Trainer, module: LightningModule, context: RunContext, step: int) -> StepWindow:
        previous = context.window
        if not self._told and self._looks_healthy(context):
            self._accept(context)
        if self.keeps_previous:
            previous, self._previous = self._previous, previous
        if previous is not None and previous is not context.healthy_window:
            self._retire(previous)
        window = StepWindow(step, context.attempt, epoch=trainer.current_epoch)
        if self._scaled:
            window.scale = _private.scale_of(trainer)
        window.buffers = self._copy_buffers(module)
        if self._hooked:
            window.comm = self._comm = comm_hook.take(trainer, old=self._comm)
        context.window = window
        return window

    def _copy_buffers(self, module: LightningModule) -> dict[str, Tensor]:
        found = self._buffers.of(module)
        if not found:
            return {}
        now = {name: b.detach() for name, b in found}
        memory = self._free.pop() if self._free else {}
        del self._free[2:]
        fits = memory.keys() == now.keys() and all(
            memory[n].shape == b.shape and memory[n].dtype == b.dtype and memory[n].device == b.device
            for n, b in now.items()
        )
        if not fits:
            return {n: b.clone() for n, b in now.items()}
        torch._foreach_copy_(tensors(memory), tensors(now))
        return memory


def _generators(module: LightningModule) -> dict[tuple[str, str], torch.Generator]:
    """Random generators that modules keep as attributes, by module path and attribute."""
    return {
        (path, key): value
        for path, m in module.named_modules()
        for key, value in m.__dict__.items()
        if isinstance(value, torch.Generator)
    }


def _own_ids(batch: Any) -> tuple[str, ...]:
    """Ids that the batch itself carries; content hashes are left to whoever needs them."""
    if isinstance(batch, dict):
        for key in ("sample_id", "sample_ids"):
            value = batch.get(key)
            if isinstance(value, list | tuple):
                return tuple(str(v) for v in value)
    return ()


_CAPTURES: weakref.WeakKeyDictionary[Trainer, StepCapture] = weakref.WeakKeyDictionary()


def ensure_capture(trainer: Trainer) -> StepCapture:
    """Capture the steps of this Trainer from now on; calling it again changes nothing.

    Call it where training is about to start (``on_fit_start``, ``on_train_start``), not in ``setup``: the strategy may
    still be replaced there.
    """
    capture = _CAPTURES.get(trainer)
    if capture is None or "on_train_batch_start" not in trainer.strategy.__dict__:
        capture = _CAPTURES[trainer] = StepCapture(trainer)
    return capture


def release_capture(trainer: Trainer) -> None:
    """Stop capturing and let go of the batches that were kept."""
    capture = _CAPTURES.pop(trainer, None)
    if capture is not None:
        capture.release()
    context = context_of(trainer)
    context.window = context.healthy_window = None


def mark_healthy(trainer: Trainer, window: StepWindow | None = None) -> None:
    """The current window's step (or this one's) goes in and nothing was found in it: ``context.healthy_window``."""
    capture = _CAPTURES.get(trainer)
    if capture is not None:
        capture.mark_healthy(trainer, window)


def forget_after(trainer: Trainer, step: int) -> None:
    """Let go of what was captured of ``step`` and later, because a rollback has abandoned it.

    A rise of ``context.attempt`` has the same effect at the next batch, with the step that the run has gone back to.
    """
    capture = _CAPTURES.get(trainer)
    if capture is not None:
        capture.forget_after(context_of(trainer), step)


def healthy_windows(trainer: Trainer, before_step: int | None = None) -> list[StepWindow]:
    """Healthy windows that are still kept, newest first; with ``before_step`` only those of earlier steps."""
    capture, context = _CAPTURES.get(trainer), context_of(trainer)
    windows = [
        *([context.healthy_window] if context.healthy_window else []),
        *reversed(capture.kept if capture else ()),
    ]
    return [w for w in windows if before_step is None or w.step < before_step]


def anchor_windows(trainer: Trainer, before_step: int) -> list[StepWindow]:
    """Healthy windows of earlier steps that start at a full snapshot still at hand, newest first."""
    capture = _CAPTURES.get(trainer)
    steps = {s.step for s in context_of(trainer).snapshots if s.params is not None}
    found = [] if capture is None else [w for s, w in capture.anchors.items() if s < before_step and s in steps]
    return sorted(found, key=lambda w: -w.step)


@torch.no_grad()
def restore_buffers(trainer: Trainer, where: Tensor | None = None) -> None:
    """Put buffers, and what communication hooks remember, back to where they were before this window's first forward.

    ``where``: a 0-dim bool on the device; only if it is true, and without reading it.
    """
    window = context_of(trainer).window
    if window is None:
        return
    comm_hook.put_back(trainer, window.comm, where)
    if not window.buffers:
        return
    now = dict(trainer.lightning_module.named_buffers())
    names = [n for n in window.buffers if n in now and now[n].shape == window.buffers[n].shape]
    for name in names if where is not None else ():
        buffer, saved = _local(now[name]), _local(window.buffers[name])
        buffer.copy_(torch.where(where.to(buffer.device), saved, buffer))  # type: ignore[union-attr]
    if names and where is None:
        torch._foreach_copy_([_local(now[n]) for n in names], [_local(window.buffers[n]) for n in names])


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()
