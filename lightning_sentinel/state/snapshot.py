"""A restore point of the whole training state in host memory, and going back to it.

A snapshot is taken either *before a batch* (the previous batch is over, with its validation and its logging; the usual
point) or *inside* ``on_train_batch_end`` (``after_batch``), where a checkpoint is written. Restoring goes back to the same
point of Lightning's loop, so that what Lightning does next applies to both runs alike. The random state goes last:
``iter(loader)`` draws from it.

What cannot be put back, because nothing describes it: plain Python attributes of modules and callbacks that appear in no
``state_dict`` and no ``on_save_checkpoint``, generators that hang elsewhere than on a loader, files, and side effects of
a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn

from ..callbacks.base import SentinelCallback, declares
from ..context import context_of
from . import comm_hook, rng
from . import lightning_private as private
from .cursor import cursor_problems, restore_cursor, settle_samplers, take_cursor
from .plain import from_plain, to_plain
from .tree import HostCopies, clone, copy_into, local, tensor_bytes

FORMAT = 1

__all__ = [
    "Snapshot",
    "cursor_problems",
    "from_payload",
    "light_problems",
    "parameter_versions",
    "restore",
    "restore_between_batches",
    "resume",
    "state_problems",
    "take",
    "to_payload",
]


@dataclass
class Snapshot:
    """Training state of this rank at one point of the loop.

    Attributes:
        step: ``trainer.global_step`` at capture: the first step that runs again after a restore.
        attempt: Which pass over the steps it was taken in.
        tokens: Tokens processed before it, over all ranks.
        mid_accumulation: True if micro-batches of ``step`` are already in the gradients; they count as done.
        known_good: True once a probation of healthy steps has passed after it.
        after_batch: True if it was taken inside ``on_train_batch_end``, False if before a batch.
        params: Parameters by name (this rank's shard under FSDP2), or None in a light snapshot.
        buffers: Buffers by name, persistent or not.
        grads: Gradients by name where they count (mid-accumulation, manual optimization), else None.
        optimizers: ``optimizer.state_dict()`` of each optimizer; without ``state`` in a light snapshot.
        schedulers: ``scheduler.state_dict()`` of each scheduler.
        precision: State of the precision plugin (the gradient scaler).
        loops: Lightning's loop progress.
        cursor: Loader states, prefetched batches, iterators and loader generators.
        metrics: torchmetrics inside the module, by name.
        results: Values accumulated by ``self.log``.
        logged: Metrics that callbacks, loggers and progress bars see.
        callbacks: State of callbacks, by position and ``state_key``.
        module: Extra state of modules, module hooks and the datamodule.
        trainer: Plain settings of the Trainer that callbacks change.
        rng: Random state of this rank.
        path: Counters of the run context that go back.
        comm: What communication hooks of DDP remember, in a full snapshot.
        versions: Sum of the parameters' version counters (light snapshots): tells whether a step has changed them.
    """

    step: int
    attempt: int
    tokens: int
    mid_accumulation: bool
    known_good: bool = False
    after_batch: bool = False
    params: dict[str, Tensor] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] | None = None
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    loops: dict[str, Any] = field(default_factory=dict)
    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    path: dict[str, int] = field(default_factory=dict)
    comm: list[dict[str, Any]] = field(default_factory=list)
    versions: int = 0

    @property
    def light(self) -> bool:
        """True if it holds neither weights nor optimizer state."""
        return self.params is None

    @property
    def position(self) -> float:
        """Where it lies on the axis of steps; half a step later where micro-batches of ``step`` are already done."""
        return self.step + 0.5 * self.mid_accumulation

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return sum(tensor_bytes(getattr(self, f.name)) for f in fields(self))


# --- Taking -------------------------------------------------------------------------------------------------------


def take(trainer: Trainer, *, tensors: bool = True, into: Snapshot | None = None) -> Snapshot:
    """Capture the training state; call it before a batch or inside ``on_train_batch_end``.

    Args:
        trainer: A Trainer that is fitting.
        tensors: Also copy weights and optimizer state. Without them (a *light* snapshot) the result takes back a step
            whose update never reached the weights.
        into: A snapshot of the same run that is no longer needed; its tensors are overwritten and reused.
    """
    module = trainer.lightning_module
    context = context_of(trainer)
    copies = HostCopies()
    layout = _layout(trainer, fresh=tensors)
    parameters = layout.parameters
    mid_accumulation = private.window_open(trainer)

    params = None
    grads = None
    if tensors:
        old = into.params or {} if into is not None else {}
        params = {n: copies.tensor(p, old.get(n)) for n, p in parameters.items()}
    if mid_accumulation or not module.automatic_optimization:
        old = into.grads or {} if into is not None else {}
        grads = {n: copies.tensor(p.grad, old.get(n)) for n, p in parameters.items() if p.grad is not None}
    old = into.buffers if into is not None else {}
    buffers = {n: copies.tensor(b, old.get(n)) for n, b in layout.buffers()}
    optimizers = [
        _optimizer_state(
            o, copies, into.optimizers[i] if into is not None and i < len(into.optimizers) else None, tensors
        )
        for i, o in enumerate(trainer.strategy.optimizers)
    ]
    callbacks = _callback_states(trainer, copies, into.callbacks if into is not None else {})
    # a light snapshot takes back a held step, which has put it back already
    comm = comm_hook.take(trainer, copies, into.comm if into is not None else None) if tensors else []
    copies.run()

    settle_samplers(trainer)
    loops = private.loop_state(trainer)
    return Snapshot(
        step=trainer.global_step,
        attempt=context.attempt,
        tokens=context.tokens,
        mid_accumulation=mid_accumulation,
        after_batch=private.in_batch(trainer),
        params=params,
        buffers=buffers,
        grads=grads,
        optimizers=optimizers,
        schedulers=[clone(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        precision=clone(trainer.precision_plugin.state_dict()),
        cursor=take_cursor(trainer, loops),
        loops=loops,
        metrics=_metric_states(trainer),
        results=private.result_state(trainer),
        logged=private.logger_state(trainer),
        callbacks=callbacks,
        module=_module_state(trainer),
        trainer={"accumulate_grad_batches": trainer.accumulate_grad_batches, "should_stop": trainer.should_stop},
        rng=rng.capture(trainer.strategy.root_device),
        path=dict(context.path_state()),
        comm=comm,
        versions=parameter_versions(trainer),
    )


_VERSION = attrgetter("_version")


@dataclass
class _Layout:
    """Where the module's state lies. Walking a deep module costs more than a light snapshot may."""

    parameters: dict[str, nn.Parameter]
    plain: bool  # none of them is sharded
    owners: list[tuple[str, nn.Module]]
    metrics: dict[str, torchmetrics.Metric]
    extra: dict[str, nn.Module]
    inside: frozenset[int]  # ids of all submodules

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers by name, as ``named_buffers`` gives them, read anew from their owners."""
        seen = set()
        for prefix, owner in self.owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield prefix + name, buffer


def _layout(trainer: Trainer, fresh: bool) -> _Layout:
    control = private.advance_control(trainer)
    if fresh or control.layout is None:
        module = trainer.lightning_module
        modules = dict(module.named_modules())
        parameters = dict(module.named_parameters())
        control.layout = _Layout(
            parameters=parameters,
            plain={nn.Parameter}.issuperset(map(type, parameters.values())),
            owners=[(f"{name}." if name else "", m) for name, m in modules.items() if m._buffers],
            metrics={name: m for name, m in modules.items() if isinstance(m, torchmetrics.Metric)},
            extra={name: m for name, m in modules.items() if type(m).get_extra_state is not nn.Module.get_extra_state},
            inside=frozenset(map(id, modules.values())),
        )
    layout: _Layout = control.layout
    return layout


def parameter_versions(trainer: Trainer) -> int:
    """Grows with every change of a parameter that went through torch; equal sums mean untouched weights."""
    layout = _layout(trainer, fresh=False)
    return sum(map(_VERSION, layout.parameters.values() if layout.plain else map(local, layout.parameters.values())))


def _optimizer_state(
    optimizer: torch.optim.Optimizer, copies: HostCopies, old: dict[str, Any] | None, tensors: bool
) -> dict[str, Any]:
    if not tensors:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return {"param_groups": clone(groups)}
    state: dict[str, Any] = copies.tree(optimizer.state_dict(), old)
    return state


_METRIC_COUNTERS = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced")


def _metrics(trainer: Trainer) -> dict[str, torchmetrics.Metric]:
    found = dict(_layout(trainer, fresh=False).metrics)
    known = {id(m) for m in found.values()}
    for i, metric in enumerate(private.active_results(trainer)):
        if id(metric) not in known and isinstance(metric, torchmetrics.Metric):
            found[f"logged.{i}"] = metric
    return found


def _metric_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    states = {}
    for name, metric in _metrics(trainer).items():
        state: dict[str, Any] = {}
        for attribute in metric._defaults:
            value = getattr(metric, attribute)
            # tensors are updated in place; lists of batches only grow, their entries never change
            state[attribute] = list(value) if isinstance(value, list) else value.detach().clone()
        for attribute in _METRIC_COUNTERS:
            state[attribute] = getattr(metric, attribute)
        states[name] = state
    return states


def _module_state(trainer: Trainer) -> dict[str, Any]:
    module, datamodule = trainer.lightning_module, private.datamodule_of(trainer)
    state: dict[str, Any] = {
        "extra": {name: clone(child.get_extra_state()) for name, child in _layout(trainer, fresh=False).extra.items()}
    }
    if private.overrides(module, "on_save_checkpoint"):
        state["hook"] = _hook_state(trainer, module.on_save_checkpoint)
    if datamodule is not None:
        state["datamodule"] = clone(datamodule.state_dict())
        if private.overrides(datamodule, "on_save_checkpoint"):
            state["datamodule_hook"] = _hook_state(trainer, datamodule.on_save_checkpoint)
    return state


def _checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The part of a Lightning checkpoint that hooks may look at. Its weights are the live ones."""
    import lightning

    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": trainer.lightning_module.state_dict(),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "loops": {},
    }


def _hook_state(trainer: Trainer, hook: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """What an ``on_save_checkpoint`` hook adds to a checkpoint or changes in it."""
    given = _checkpoint(trainer)
    checkpoint = dict(given)
    hook(checkpoint)
    return {k: clone(v) for k, v in checkpoint.items() if k not in given or v is not given[k]}


def _rewinds(callback: Callback) -> bool:
    if isinstance(callback, SentinelCallback):
        return callback.rewinds
    return not isinstance(callback, Timer)


def _callback_keys(trainer: Trainer) -> list[tuple[str, Callback]]:
    """Callbacks that go back, each with a key that is unique even where two share a ``state_key``."""
    keys, seen = [], dict[str, int]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        number = seen[callback.state_key] = seen.get(callback.state_key, -1) + 1
        if _rewinds(callback):
            keys.append((f"{callback.state_key}#{number}", callback))
    return keys


# Plain attributes that Lightning's own callbacks keep outside their state_dict.
_PLAIN: dict[type[Callback], tuple[str, ...]] = {
    ModelCheckpoint: (
        "current_score",
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    WeightAveraging: ("_latest_update_step", "_latest_update_epoch"),
}


def _held_modules(trainer: Trainer, callback: Callback) -> dict[str, nn.Module]:
    """Modules that a callback owns, such as averaged weights."""
    held = {n: v for n, v in vars(callback).items() if isinstance(v, nn.Module)}
    inside = _layout(trainer, fresh=False).inside if held else frozenset()
    return {n: v for n, v in held.items() if id(v) not in inside}


def _callback_states(trainer: Trainer, copies: HostCopies, old: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    states = {}
    for key, callback in _callback_keys(trainer):
        before = old.get(key, {})
        given = callback.state_dict()
        if not declares(callback, "fresh_state"):
            given = copies.tree(given, before.get("state_dict"))
        state: dict[str, Any] = {"state_dict": given}
        plain = [n for kind, names in _PLAIN.items() if isinstance(callback, kind) for n in names]
        if plain:
            state["plain"] = {n: clone(getattr(callback, n)) for n in plain if hasattr(callback, n)}
        if isinstance(callback, LearningRateMonitor):  # its lists only grow, and light snapshots are taken every step
            state["lengths"] = {name: len(rates) for name, rates in callback.lrs.items()}
        if not isinstance(callback, SentinelCallback):
            held = _held_modules(trainer, callback)
            if held:
                earlier = before.get("modules", {})
                state["modules"] = {n: copies.tree(_tensors_of(m), earlier.get(n)) for n, m in held.items()}
            # averaged weights are captured above; their hook would copy them a second time
            elif private.overrides(callback, "on_save_checkpoint") and not isinstance(callback, WeightAveraging):
                save = partial(callback.on_save_checkpoint, trainer, trainer.lightning_module)
                state["hook"] = _hook_state(trainer, save)
        if any(state.values()):
            states[key] = state
    return states


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# --- Restoring ----------------------------------------------------------------------------------------------------


def restore(trainer: Trainer, snapshot: Snapshot) -> None:
    """Go back to a snapshot. Call it inside ``on_train_batch_end`` for a snapshot that was taken there.

    A snapshot from before a batch can only be put back between two batches: :class:`~lightning_sentinel.Rollback`
    and :func:`resume` do so.

    Raises:
        RuntimeError: The snapshot belongs to another point of the loop, or does not fit the model or the loaders.
    """
    if private.in_batch(trainer) and not snapshot.after_batch:
        raise RuntimeError(
            f"The snapshot of step {snapshot.step} was taken before a batch and cannot be put back in the middle of one."
            " Ask Rollback.request for it, which waits for the end of the batch."
        )
    _restore(trainer, snapshot)


def restore_between_batches(trainer: Trainer, snapshot: Snapshot) -> None:
    """Go back from the end of one ``advance`` (see :class:`~.lightning_private.AdvanceControl`) to any snapshot."""
    _restore(trainer, snapshot)
    if snapshot.after_batch:
        private.finish_batch(trainer)
    else:
        private.advance_control(trainer).skip_advance_end()


def _restore(trainer: Trainer, snapshot: Snapshot) -> None:
    context = context_of(trainer)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    trainer.accumulate_grad_batches = snapshot.trainer["accumulate_grad_batches"]

    layout = _layout(trainer, fresh=True)
    parameters = layout.parameters
    if snapshot.params is not None:
        _match("parameters", parameters, snapshot.params, targets, sources)
    _match("buffers", dict(layout.buffers()), snapshot.buffers, targets, sources)
    copy_into(targets, sources)
    _restore_grads(parameters, snapshot.grads)
    for optimizer, state in zip(trainer.strategy.optimizers, snapshot.optimizers, strict=True):
        restore_optimizer(optimizer, state)
    comm_hook.put_back(trainer, snapshot.comm)
    for config, state in zip(trainer.lr_scheduler_configs, snapshot.schedulers, strict=True):
        config.scheduler.load_state_dict(clone(state))
    if snapshot.precision:
        trainer.precision_plugin.load_state_dict(clone(snapshot.precision))

    epoch = trainer.current_epoch
    private.load_loop_state(trainer, clone(snapshot.loops))
    restore_cursor(trainer, snapshot.cursor, context.ledger)
    private.load_result_state(trainer, snapshot.results)
    _restore_metrics(trainer, snapshot.metrics)
    private.load_logger_state(trainer, snapshot.logged)
    _restore_module(trainer, snapshot.module)
    _restore_callbacks(trainer, snapshot.callbacks, snapshot.trainer["should_stop"])
    _move_progress_bars(trainer, epoch)
    context.load_path_state(snapshot.path)
    context.forget_after(snapshot.step)
    rng.restore(snapshot.rng, trainer.strategy.root_device)


def _match(
    what: str, live: Mapping[str, Tensor], saved: dict[str, Tensor], targets: list[Tensor], sources: list[Tensor]
) -> None:
    """Pair live tensors with saved ones by name."""
    if live.keys() != saved.keys():
        odd = sorted(live.keys() ^ saved.keys())[:3]
        raise RuntimeError(
            f"The snapshot's {what} are not those of this model: {', '.join(odd)} exist only on one side."
        )
    for name, tensor in live.items():
        if local(tensor).shape != saved[name].shape:
            raise RuntimeError(
                f"{what[:-1].capitalize()} {name} has shape {tuple(local(tensor).shape)} here and"
                f" {tuple(saved[name].shape)} in the snapshot: it comes from another model or another sharding."
            )
        targets.append(tensor)
        sources.append(saved[name])


def _restore_grads(parameters: dict[str, nn.Parameter], grads: dict[str, Tensor] | None) -> None:
    for name, parameter in parameters.items():
        saved = None if grads is None else grads.get(name)
        if saved is None:
            parameter.grad = None
        elif parameter.grad is not None:
            copy_into([parameter.grad], [saved])
        else:
            parameter.grad = torch.empty_like(parameter)
            copy_into([parameter.grad], [saved])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put values back into the optimizer's own tensors, and make those that are missing.

    ``Optimizer.load_state_dict`` would cast moments to the parameter's dtype and allocate everything anew.
    """
    light = "state" not in saved
    if not light and type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(clone(saved))
        return
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise RuntimeError(
            f"The snapshot has {len(saved['param_groups'])} parameter groups, the optimizer has"
            f" {len(optimizer.param_groups)}: groups that come or go while training cannot be put back."
        )
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for key in [k for k in group if k not in values and k != "params"]:
            del group[key]
        for key, value in values.items():
            if key == "params":
                continue
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                copy_into([group[key]], [value])
            else:
                group[key] = clone(value)
    if light:
        return
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    indices = [i for g in saved["param_groups"] for i in g["params"]]
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for parameter, index in zip(parameters, indices, strict=True):
        values = saved["state"].get(index)
        if values is None:
            optimizer.state.pop(parameter, None)
            continue
        live = optimizer.state[parameter]
        for key in [k for k in live if k not in values]:
            del live[key]
        for key, value in values.items():
            if not isinstance(value, Tensor):
                live[key] = clone(value)
                continue
            current = live.get(key)
            if not isinstance(current, Tensor) or local(current).shape != value.shape or current.dtype != value.dtype:
                current = live[key] = _like_parameter(parameter, key, value, optimizer)
            targets.append(current)
            sources.append(value)
    copy_into(targets, sources)


def _like_parameter(parameter: Tensor, key: str, value: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Memory for one piece of optimizer state that the optimizer has not made itself yet."""
    if value.dim() == 0:
        # torch keeps step counts on the host unless the step runs on the device
        on_device = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
        return torch.empty_like(value, device=local(parameter).device if on_device and key == "step" else "cpu")
    if value.shape == local(parameter).shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return torch.empty_like(value, device=local(parameter).device)


def _restore_metrics(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    for name, metric in _metrics(trainer).items():
        state = states.get(name)
        if state is None:
            metric.reset()
            continue
        for attribute, value in state.items():
            if attribute in metric._defaults:
                value = (
                    [v.to(metric.device) for v in value]
                    if isinstance(value, list)
                    else value.detach().clone().to(metric.device)
                )
            setattr(metric, attribute, value)


def _restore_module(trainer: Trainer, state: dict[str, Any]) -> None:
    modules = dict(trainer.lightning_module.named_modules())
    for name, extra in state["extra"].items():
        modules[name].set_extra_state(clone(extra))
    if "hook" in state:
        trainer.lightning_module.on_load_checkpoint(_checkpoint(trainer) | clone(state["hook"]))
    datamodule = private.datamodule_of(trainer)
    if datamodule is not None:
        if state.get("datamodule"):
            datamodule.load_state_dict(clone(state["datamodule"]))
        if "datamodule_hook" in state:
            datamodule.on_load_checkpoint(_checkpoint(trainer) | clone(state["datamodule_hook"]))


def _restore_callbacks(trainer: Trainer, states: dict[str, dict[str, Any]], should_stop: bool) -> None:
    stopping = False
    for key, callback in _callback_keys(trainer):
        state = states.get(key)
        if state is None:
            continue
        if isinstance(callback, EarlyStopping):
            now = callback.state_dict()
            stopping |= any(now[k] != state["state_dict"][k] for k in ("stopped_epoch", "stopping_reason") if k in now)
        if state["state_dict"]:
            callback.load_state_dict(clone(state["state_dict"]))
        for name, value in state.get("plain", {}).items():
            setattr(callback, name, clone(value))
        for name, length in state.get("lengths", {}).items():
            assert isinstance(callback, LearningRateMonitor)
            del callback.lrs.get(name, [])[length:]
        held = _held_modules(trainer, callback)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensors in state.get("modules", {}).items():
            if name in held:
                _match(f"{name}s", _tensors_of(held[name]), tensors, targets, sources)
        copy_into(targets, sources)
        if "hook" in state:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, _checkpoint(trainer) | clone(state["hook"]))
        if isinstance(callback, ModelCheckpoint):
            _forget_missing_files(trainer, callback)
    if stopping:
        # early stopping asked for the end on the abandoned path; a timer or a person who asks is still heard
        trainer.should_stop = should_stop


def _forget_missing_files(trainer: Trainer, callback: ModelCheckpoint) -> None:
    """Keep only those of the restored best models whose files a later rotation has not deleted."""
    kept = {path: score for path, score in callback.best_k_models.items() if private.file_exists(callback, path)}
    kept = trainer.strategy.broadcast(kept)
    if kept.keys() == callback.best_k_models.keys():
        return
    callback.best_k_models = kept
    worst, best = (max, min) if callback.mode == "min" else (min, max)
    if kept:
        callback.kth_best_model_path = worst(kept, key=kept.__getitem__)
        callback.kth_value = kept[callback.kth_best_model_path]
        callback.best_model_path = best(kept, key=kept.__getitem__)
        callback.best_model_score = kept[callback.best_model_path]
    else:
        callback.kth_best_model_path = callback.best_model_path = ""
        callback.kth_value = torch.tensor(torch.inf if callback.mode == "min" else -torch.inf)
        callback.best_model_score = None


def _move_progress_bars(trainer: Trainer, epoch: int) -> None:
    """Progress bars set their position from the batch index by themselves; only the epoch in their title must go back."""
    if trainer.current_epoch == epoch:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TQDMProgressBar) and not callback.is_disabled:
            callback.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
        elif isinstance(callback, RichProgressBar) and callback.progress and callback.train_progress_bar_id is not None:
            callback.progress.update(
                callback.train_progress_bar_id, description=private.train_description(callback, trainer.current_epoch)
            )


def resume(trainer: Trainer, snapshot: Snapshot) -> None:
    """Continue from a snapshot in a new process; call it in ``on_train_start``.

    The first ``epoch_loop.advance`` of this fit restores the snapshot instead of training; from there the loop goes on as
    it did in the run that made the snapshot.
    """
    context = context_of(trainer)
    context.attempt = max(context.attempt, snapshot.attempt)
    context.restart_step = snapshot.step

    def first() -> bool:
        _restore(trainer, snapshot)
        if snapshot.after_batch:
            private.finish_batch(trainer)
        return snapshot.after_batch

    private.advance_control(trainer).first = first


# --- What is refused ----------------------------------------------------------------------------------------------


def state_problems(trainer: Trainer) -> list[str]:
    """Why the state of this run cannot be put back exactly, apart from the data position; empty if it can."""
    problems = []
    for optimizer in trainer.strategy.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            problems.append(
                "LBFGS evaluates its closure several times in a step, so a bad step cannot be kept out. Use an"
                " optimizer that evaluates it once."
            )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            problems.append("StochasticWeightAveraging replaces the schedulers while training; use WeightAveraging.")
        elif isinstance(callback, (BaseFinetuning, BackboneFinetuning)):
            problems.append(f"{type(callback).__name__} adds parameter groups while training; they cannot be put back.")
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        problems.append(
            f"{type(trainer.strategy).__name__} keeps weights and optimizer state where they cannot be read by name; use"
            " DDP or ModelParallelStrategy with fully_shard."
        )
    return problems


def light_problems(trainer: Trainer) -> list[str]:
    """Why light snapshots cannot take back a step here: state that changes with every batch and is large or unknown."""
    problems = []
    module, datamodule = trainer.lightning_module, private.datamodule_of(trainer)
    for owner in (module, *([] if datamodule is None else [datamodule])):
        if private.overrides(owner, "on_save_checkpoint"):
            problems.append(f"{type(owner).__name__}.on_save_checkpoint would run in every step.")
    for _, callback in _callback_keys(trainer):
        if isinstance(callback, SentinelCallback):
            continue
        if _held_modules(trainer, callback):
            problems.append(f"{type(callback).__name__} holds a module that would be copied in every step.")
        elif private.overrides(callback, "on_save_checkpoint"):
            problems.append(f"{type(callback).__name__}.on_save_checkpoint would run in every step.")
    return problems


# --- Payload ------------------------------------------------------------------------------------------------------


def to_payload(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as plain data that survives ``torch.save`` and ``torch.load(weights_only=True)``.

    Raises:
        ValueError: Something in it is neither a tensor, a number, a string nor a container; the message says where.
    """
    payload: dict[str, Any] = {"format": FORMAT}
    for entry in fields(snapshot):
        payload[entry.name] = to_plain(getattr(snapshot, entry.name), entry.name)
    return payload


def from_payload(payload: dict[str, Any]) -> Snapshot:
    """The snapshot that :func:`to_payload` wrote."""
    if payload.get("format") != FORMAT:
        raise ValueError(
            f"The snapshot has format {payload.get('format')!r}, this version reads format {FORMAT}; use the version"
            " of lightning-sentinel that wrote it."
        )
    return Snapshot(
        **{entry.name: from_plain(payload[entry.name]) for entry in fields(Snapshot) if entry.name in payload}
    )
