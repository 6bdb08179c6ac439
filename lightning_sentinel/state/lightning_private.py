"""Every private name of Lightning (and of torch, torchmetrics and torchdata) that the suite touches, in one place.

Checked on lightning 2.6.4 (the oldest supported) and 2.6.6, torchmetrics 1.8 and torchdata 0.11. :func:`missing_names`
compares :data:`NAMES` with what is installed; a test fails with the name when one of them has moved.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import _set_rng_states
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.call import _call_callback_hooks
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .rng import numpy_state, python_state

_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]

# (module, attribute path, the version that it was checked on). Attributes that only exist on instances are listed in
# INSTANCE_NAMES with the path from the Trainer.
NAMES: tuple[tuple[str, str, str], ...] = (
    ("lightning.fabric.utilities.data", "_set_sampler_epoch", "2.6.6"),
    ("lightning.fabric.utilities.types", "_Stateful", "2.6.6"),
    ("lightning.pytorch.loops.fetchers", "_DataFetcher.__iter__", "2.6.6"),
    ("lightning.pytorch.loops.fetchers", "_PrefetchDataFetcher", "2.6.6"),
    ("lightning.pytorch.loops.fetchers", "_DataLoaderIterDataFetcher", "2.6.6"),
    ("lightning.pytorch.loops.loop", "_Loop.reset_restart_stage", "2.6.6"),
    ("lightning.pytorch.loops.loop", "_Loop.on_save_checkpoint", "2.6.6"),
    ("lightning.pytorch.loops.loop", "_Loop.on_load_checkpoint", "2.6.6"),
    ("lightning.pytorch.loops.progress", "_BaseProgress.load_state_dict", "2.6.6"),
    ("lightning.pytorch.loops.fit_loop", "_FitLoop._should_accumulate", "2.6.6"),
    ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop.advance", "2.6.6"),
    ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end", "2.6.6"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result", "_ResultMetric", "2.6.6"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result", "_Metadata", "2.6.6"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result", "_Sync", "2.6.6"),
    (
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.on_batch_end",
        "2.6.6",
    ),
    (
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.update_train_step_metrics",
        "2.6.6",
    ),
    ("lightning.pytorch.utilities.combined_loader", "CombinedLoader._state_dicts", "2.6.6"),
    ("lightning.pytorch.utilities.combined_loader", "CombinedLoader._load_state_dicts", "2.6.6"),
    ("lightning.pytorch.utilities.combined_loader", "_ModeIterator", "2.6.6"),
    ("lightning.pytorch.utilities.combined_loader", "_MaxSizeCycle", "2.6.6"),
    ("lightning.pytorch.callbacks.progress.rich_progress", "RichProgressBar._get_train_description", "2.6.6"),
    ("lightning.pytorch.utilities.combined_loader", "_shutdown_workers_and_reset_iterator", "2.6.6"),
    ("lightning.pytorch.trainer.connectors.checkpoint_connector", "_CheckpointConnector.dump_checkpoint", "2.6.6"),
    ("lightning.fabric.utilities.seed", "_set_rng_states", "2.6.6"),
    ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop._build_kwargs", "2.6.6"),
    ("lightning.pytorch.trainer.call", "_call_callback_hooks", "2.6.6"),
    ("lightning.pytorch.plugins.precision", "Precision.clip_grad_by_norm", "2.6.6"),
    ("lightning.pytorch.plugins.precision", "Precision.main_params", "2.6.6"),
    ("torch.nn", "Module._compiled_call_impl", "torch 2.13"),
    ("torch.nn", "Module._call_impl", "torch 2.13"),
    ("torch.overrides", "_pop_mode", "torch 2.13"),
    ("torch.overrides", "_push_mode", "torch 2.13"),
    ("torch._C", "_current_graph_task_id", "torch 2.13"),
    ("torch._C", "_current_autograd_node", "torch 2.13"),
    ("torch.autograd", "_get_sequence_nr", "torch 2.13"),
    ("torch.amp.grad_scaler", "GradScaler._get_scale_async", "torch 2.13"),
    ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "torch 2.13"),
    ("torch.amp.grad_scaler", "OptState.READY", "torch 2.13"),
)

INSTANCE_NAMES: tuple[tuple[str, str], ...] = (
    ("fit_loop._combined_loader", "2.6.6"),
    ("fit_loop._data_fetcher", "2.6.6"),
    ("fit_loop.epoch_loop.val_loop._combined_loader", "2.6.6"),
    ("fit_loop._combined_loader_states_to_load", "2.6.6"),
    ("fit_loop._restarting", "2.6.6"),
    ("fit_loop._loaded_from_state_dict", "2.6.6"),
    ("fit_loop._resuming_from_checkpoint", "2.6.6"),
    ("fit_loop.epoch_progress", "2.6.6"),
    ("fit_loop.epoch_loop.batch_progress", "2.6.6"),
    ("fit_loop.epoch_progress.current.completed", "2.6.6"),
    ("fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed", "2.6.6"),
    ("fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed", "2.6.6"),
    ("fit_loop.epoch_loop._results", "2.6.6"),
    ("fit_loop.epoch_loop._batches_that_stepped", "2.6.6"),
    ("fit_loop.epoch_loop._skip_next_val", "2.6.6"),
    ("_checkpoint_connector", "2.6.6"),
    ("_logger_connector._first_loop_iter", "2.6.6"),
    ("_logger_connector._current_fx", "2.6.6"),
    ("_logger_connector._callback_metrics", "2.6.6"),
    ("_logger_connector._logged_metrics", "2.6.6"),
    ("_logger_connector._progress_bar_metrics", "2.6.6"),
    ("_signal_connector._sigterm_notifier_fn", "2.6.6"),
    ("_signal_connector.received_sigterm", "2.6.6"),
    ("strategy.optimizers", "2.6.6"),
    ("strategy._lightning_optimizers", "2.6.6"),
    ("_loggers", "2.6.6"),
)

METRIC_NAMES = ("_defaults", "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced")
RESULT_NAMES = ("_update_count", "_computed", "_forward_cache", "has_reset", "value", "meta", "is_tensor")
AVERAGING_NAMES = ("_average_model", "_latest_update_step", "_latest_update_epoch")
ITERATOR_NAMES = ("_idx", "_consumed")
CHECKPOINT_NAMES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "_fs")


def missing_names(trainer: Trainer) -> list[str]:
    """Private names that the installed versions no longer have, each with the version it was last seen on."""
    import torchmetrics

    missing = []
    for module, path, version in NAMES:
        try:
            owner: Any = import_module(module)
            for part in path.split("."):
                owner = getattr(owner, part)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path} (checked on {version})")
    for path, version in INSTANCE_NAMES:
        owner = trainer
        try:
            for part in path.split("."):
                owner = getattr(owner, part)
        except AttributeError:
            missing.append(f"Trainer.{path} (checked on {version})")
    metric = torchmetrics.MeanMetric()
    missing += [f"torchmetrics.Metric.{n} (checked on 1.8)" for n in METRIC_NAMES if not hasattr(metric, n)]
    result = _ResultMetric(_Metadata("training_step", "x"), True)
    missing += [f"_ResultMetric.{n} (checked on 2.6.6)" for n in RESULT_NAMES if not hasattr(result, n)]
    checkpoint = ModelCheckpoint()
    missing += [f"ModelCheckpoint.{n} (checked on 2.6.6)" for n in CHECKPOINT_NAMES if not hasattr(checkpoint, n)]
    if not hasattr(DDPStrategy(), "_model_averaging_period"):
        missing.append("DDPStrategy._model_averaging_period (checked on 2.6.6)")
    averaging = WeightAveraging()
    missing += [f"WeightAveraging.{n} (checked on 2.6.6)" for n in AVERAGING_NAMES if not hasattr(averaging, n)]
    iterator = _MaxSizeCycle([[0]])
    missing += [f"_MaxSizeCycle.{n} (checked on 2.6.6)" for n in ITERATOR_NAMES if not hasattr(iterator, n)]
    return missing


@cache
def passes_over_none() -> bool:
    """Whether Lightning leaves out a callback's hook that is None, as all versions have that this was checked on."""
    trainer: Any = SimpleNamespace(lightning_module=None, profiler=PassThroughProfiler())
    trainer.callbacks = [SimpleNamespace(state_key="", on_train_batch_start=None)]
    try:
        _call_callback_hooks(trainer, "on_train_batch_start")
    except Exception:  # it calls None, or asks for more than is here: hooks stay what they are
        return False
    return True


# --- Where in the loop are we? ------------------------------------------------------------------------------------


def in_batch(trainer: Trainer) -> bool:
    """True between the start of a batch and the end of its ``on_train_batch_end`` hooks."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.ready > current.completed)


@contextmanager
def at_step(trainer: Trainer, step: int, epoch: int) -> Iterator[None]:
    """Inside, ``trainer.global_step`` and ``trainer.current_epoch`` are those of another step; nothing else moves."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if trainer.lightning_module.automatic_optimization:
        steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        steps = loop.manual_optimization.optim_step_progress.total
    before = steps.completed, epochs.completed
    steps.completed, epochs.completed = step, epoch
    try:
        yield
    finally:
        steps.completed, epochs.completed = before


def window_open(trainer: Trainer) -> bool:
    """True where the batches so far leave an accumulation unfinished (automatic optimization only)."""
    loop = trainer.fit_loop.epoch_loop
    if not trainer.lightning_module.automatic_optimization or loop.batch_progress.current.ready == 0:
        return False
    return bool(loop._should_accumulate())


class AdvanceControl:
    """Calls placed around ``epoch_loop.advance`` of one fit: before a batch is fetched, and after all its hooks.

    The point before a batch is the one place in the loop where nothing of the previous batch is pending (validation,
    plateau schedulers and loggers have run) and nothing of the next has begun, so a state taken there can be put back
    without repeating or leaving out anything.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.first: Callable[[], bool] | None = None
        self.layout: Any = None  # where the module's state lies; see snapshot.py
        self._loop = loop = trainer.fit_loop.epoch_loop
        self._advance = loop.advance
        loop.advance = self._controlled  # type: ignore[method-assign]

    def _controlled(self, data_fetcher: _DataFetcher) -> None:
        if self.first is not None:
            first, self.first = self.first, None
            if first():
                return
        for call in list(self.before):
            call()
        self._advance(data_fetcher)
        for call in list(self.after):
            call()

    def skip_advance_end(self) -> None:
        """Leave out the ``on_advance_end`` that follows: the restored state lies after it."""
        loop = self._loop

        def skipped(data_fetcher: _DataFetcher) -> None:
            loop.__dict__.pop("on_advance_end", None)

        loop.on_advance_end = skipped  # type: ignore[method-assign]


def advance_control(trainer: Trainer) -> AdvanceControl:
    """The control of this Trainer's training loop, made on first use. It does nothing while no call is registered."""
    loop = trainer.fit_loop.epoch_loop
    control = vars(loop).get("_sentinel_control")
    if not isinstance(control, AdvanceControl):
        control = AdvanceControl(trainer)
        loop._sentinel_control = control
    return control


def finish_batch(trainer: Trainer) -> None:
    """What ``advance`` does after ``on_train_batch_end``, for a state that was taken inside that hook."""
    trainer._logger_connector.on_batch_end()
    trainer.fit_loop.epoch_loop.batch_progress.increment_completed()
    trainer._logger_connector.update_train_step_metrics()


# --- Loops --------------------------------------------------------------------------------------------------------


def _progress_state(progress: _BaseProgress) -> dict[str, Any]:
    # ``asdict`` of the same thing costs twenty times as much, and light snapshots are taken every step.
    return {k: _progress_state(v) if isinstance(v, _BaseProgress) else v for k, v in vars(progress).items()}


def loop_state(trainer: Trainer) -> dict[str, Any]:
    """What ``fit_loop.state_dict()`` returns (loader states included), plus the epoch loop's flag for validation."""
    state: dict[str, Any] = {}

    def walk(loop: _Loop, prefix: str) -> None:
        state[prefix + "state_dict"] = dict(loop.on_save_checkpoint())
        for name, value in vars(loop).items():
            if isinstance(value, _BaseProgress):
                state[prefix + name] = _progress_state(value)
            elif isinstance(value, _Loop):
                walk(value, f"{prefix}{name}.")

    walk(trainer.fit_loop, "")
    return state


def take_loader_states(loop_state: dict[str, Any]) -> list[dict[str, Any]]:
    """The loaders' states, moved out of what :func:`loop_state` returned."""
    states: list[dict[str, Any]] = loop_state["state_dict"].pop("combined_loader", [])
    return states


def load_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load the loops' progress and leave no trace of a restart: this is a jump, not a resume."""
    trainer.fit_loop.load_state_dict(state)
    trainer.fit_loop._combined_loader_states_to_load = []

    def clear(loop: _Loop) -> None:
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
        for value in vars(loop).values():
            if isinstance(value, _Loop):
                clear(value)

    clear(trainer.fit_loop)
    trainer.fit_loop.epoch_loop._skip_next_val = False


# --- Lightning's own checkpoint ---


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """What ``trainer.save_checkpoint`` writes, with the live tensors in it. Every rank calls it; no rank waits after it."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def saves_one_file(trainer: Trainer) -> bool:
    """True where the strategy's checkpoint is one file that rank 0 writes."""
    strategy = trainer.strategy
    if type(strategy).save_checkpoint is Strategy.save_checkpoint:
        return True
    return isinstance(strategy, ModelParallelStrategy) and not strategy._save_distributed_checkpoint


def cursor_was_dropped(trainer: Trainer) -> bool:
    """True where a plain resume has a data position that it did not give to the loaders: they were set up too early."""
    return bool(trainer.fit_loop._combined_loader_states_to_load)


# --- Loaders and fetcher ------------------------------------------------------------------------------------------


def train_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders, flattened; empty before the first epoch was set up."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def validation_loaders(trainer: Trainer) -> list[Any]:
    """The validation loaders of a fit, flattened; empty before they were set up."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def combined_mode(trainer: Trainer) -> str:
    combined = trainer.fit_loop._combined_loader
    return "" if combined is None else combined._mode


def is_stateful(loader: object) -> bool:
    return isinstance(loader, _Stateful)


def datamodule_of(trainer: Trainer) -> Any:
    """The datamodule, or None. Its checkpoint hooks come from a mixin that static types do not show."""
    return trainer.datamodule  # type: ignore[attr-defined]


def set_sampler_epochs(trainer: Trainer) -> None:
    epoch = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    for loader in train_loaders(trainer):
        _set_sampler_epoch(loader, epoch)


def fetcher_of(trainer: Trainer) -> Any:
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None:
        raise RuntimeError("The training loader is not set up yet: snapshots exist only while a fit is running.")
    return fetcher


def iterate_without_prefetch(fetcher: _DataFetcher) -> None:
    """New iterators over the loaders. The fetcher's own ``__iter__`` would draw a batch, which is restored instead."""
    _DataFetcher.__iter__(fetcher)


def fetch_ahead(fetcher: Any) -> None:
    """Draw one batch ahead, as the prefetching fetcher does after handing one out."""
    try:
        fetcher.batches.append(_DataFetcher.__next__(fetcher))
    except StopIteration:
        fetcher.done = not fetcher.batches


def uses_dataloader_iter(trainer: Trainer) -> bool:
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def combined_iterator(trainer: Trainer) -> Any:
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else combined._iterator


def iterator_position(iterator: Any) -> tuple[int, list[bool] | None]:
    """Batches handed out, and in ``max_size_cycle`` mode which loaders have run out once (``_idx``, ``_consumed``)."""
    return iterator._idx, list(iterator._consumed) if hasattr(iterator, "_consumed") else None


def set_iterator_position(iterator: Any, index: int, consumed: list[bool] | None) -> None:
    iterator._idx = index
    if consumed is not None:
        iterator._consumed = list(consumed)


def move_iterator(iterator: Any, by: int) -> None:
    iterator._idx += by


def stop_workers(loader: Any) -> None:
    """End the loader's worker processes now; without this they live until the garbage collector finds them."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


# --- Logged values ------------------------------------------------------------------------------------------------


def logger_state(trainer: Trainer) -> dict[str, Any]:
    connector = trainer._logger_connector
    return {
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
    }


def load_logger_state(trainer: Trainer, state: dict[str, Any]) -> None:
    connector = trainer._logger_connector
    connector._first_loop_iter = state["first_loop_iter"]
    connector._current_fx = state["current_fx"]
    connector._callback_metrics = dict(state["callback"])
    connector._logged_metrics = dict(state["logged"])
    connector._progress_bar_metrics = dict(state["progress_bar"])


_RESULT_FIELDS = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
_BUILTIN_REDUCTIONS: dict[str, Any] = {"sum": sum, "max": max, "min": min}
_META_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def result_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Values accumulated by ``self.log`` in this epoch, by key. Lightning replaces these tensors and never edits them."""
    state = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = result.meta
        sync = meta.sync
        state[key] = {
            "fields": {
                n: getattr(result, n)
                for n in _RESULT_FIELDS
                if hasattr(result, n) and (result.is_tensor or n != "value")
            },
            "meta": {n: getattr(meta, n) for n in _META_FIELDS}
            | {
                "reduce_fx": meta.reduce_fx.__name__,
                "builtin": meta.reduce_fx in _BUILTIN_REDUCTIONS.values(),
                "dataloader_idx": meta.dataloader_idx,
                "metric_attribute": meta.metric_attribute,
                "sync": sync._should,
                "rank_zero_only": sync.rank_zero_only,
            },
            "is_tensor": result.is_tensor,
        }
    return state


def load_result_state(trainer: Trainer, state: dict[str, dict[str, Any]]) -> None:
    """Put the epoch's logged values back. Keys of the abandoned path go; keys unknown to a new process are made."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [k for k in results if k not in state]:
        del results[key]
    for key, saved in state.items():
        result = results.get(key)
        if result is None:
            meta = dict(saved["meta"])
            sync = _Sync(
                _should=meta.pop("sync"), fn=trainer.strategy.reduce, rank_zero_only=meta.pop("rank_zero_only")
            )
            # Lightning takes `max` and `torch.max` for different arguments of the same key
            reductions = _BUILTIN_REDUCTIONS if meta.pop("builtin") else vars(torch)
            made = _Metadata(**{**meta, "reduce_fx": reductions[meta["reduce_fx"]]})
            made.sync = sync
            result = results[key] = _ResultMetric(made, saved["is_tensor"])
            if not saved["is_tensor"]:
                # a metric that the module holds: the object of this process stands in for the one that was logged
                result.value = dict(trainer.lightning_module.named_modules())[meta["metric_attribute"]]
        for name, value in saved["fields"].items():
            setattr(result, name, value)


def active_results(trainer: Trainer) -> Iterator[Any]:
    """Metric objects that were given to ``self.log`` and are not tensors."""
    for result in trainer.fit_loop.epoch_loop._results.values():
        if not result.is_tensor:
            yield result.value


# --- Lightning's own callbacks ---


def file_exists(callback: ModelCheckpoint, path: str) -> bool:
    """Asked of the filesystem that the callback writes to (``ModelCheckpoint._fs``)."""
    return bool(callback._fs.exists(path))


def train_description(callback: Any, epoch: int) -> str:
    """What a rich progress bar calls an epoch (``_get_train_description``)."""
    return str(callback._get_train_description(epoch))


# --- Hooks that a user may override -------------------------------------------------------------------------------


def overrides(instance: object, hook: str) -> bool:
    """True where the user's class (not Lightning's) defines the hook."""
    for cls in type(instance).__mro__:
        if hook in vars(cls):
            return cls not in (LightningModule, LightningDataModule, Callback) and not cls.__module__.startswith(
                "lightning.pytorch.core."
            )
    return False


# --- Signals ------------------------------------------------------------------------------------------------------


def note_sigterm(trainer: Trainer, note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` on SIGTERM instead of ``_SignalConnector._sigterm_notifier_fn``; returns what undoes it.

    That one runs a collective inside the signal handler. The signal still goes to processes that Lightning's launcher has
    started, once. Takes effect where Lightning registers its handlers, which is after ``setup`` of a fit.
    """
    connector = trainer._signal_connector
    passed_on = False

    def notifier(signum: Any, _: Any) -> None:
        nonlocal passed_on
        note()
        launcher: Any = trainer.strategy.launcher
        if not passed_on and launcher is not None:
            passed_on = True
            launcher.kill(signum)

    connector._sigterm_notifier_fn = notifier  # type: ignore[method-assign]
    return lambda: vars(connector).pop("_sigterm_notifier_fn", None)


def set_received_sigterm(trainer: Trainer) -> None:
    """Make ``trainer.received_sigterm`` true."""
    trainer._signal_connector.received_sigterm = True


# --- Replaying a step ------------------------------------------------------------------------------------------------


def rng_states() -> dict[str, Any]:
    """Global random states of torch, CUDA, NumPy and Python, in the form of Lightning's ``_collect_rng_states``.

    Not by that function: it costs three times as much where NumPy's state has not moved, and it starts CUDA on a machine
    that has it although the run does not use it.
    """
    return {
        "torch": torch.default_generator.get_state(),
        "python": python_state(),
        "numpy": numpy_state(),
        "torch.cuda": torch.cuda.get_rng_state_all() if _CUDA and torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what :func:`rng_states` returned (``_set_rng_states``)."""
    _set_rng_states(states)


def training_step_arguments(trainer: Trainer, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The positional arguments that the loop gives ``training_step`` (``epoch_loop._build_kwargs``)."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx).values())


def lightning_optimizers(trainer: Trainer) -> list[Any]:
    """The wrappers that ``self.optimizers()`` hands out (``strategy._lightning_optimizers``)."""
    return list(trainer.strategy._lightning_optimizers)


def loggers(trainer: Trainer) -> list[Any]:
    return trainer._loggers


def set_loggers(trainer: Trainer, value: list[Any]) -> None:
    trainer._loggers = value


def current_hook(module: LightningModule) -> str | None:
    """Name of the hook that ``self.log`` believes to be in (``_current_fx_name``)."""
    return module._current_fx_name


def set_current_hook(module: LightningModule, value: str | None) -> None:
    module._current_fx_name = value


def scaler_of(trainer: Trainer) -> Any | None:
    """The gradient scaler of the precision plugin, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def scale_of(trainer: Trainer) -> torch.Tensor | None:
    """A copy of the loss scale as the scaler holds it on its device (``GradScaler._scale``), or None before its first use."""
    scaler = scaler_of(trainer)
    scale = getattr(scaler, "_scale", None)
    return None if scale is None else scale.detach().clone()


def no_replicas(trainer: Trainer) -> str | None:
    """Why the ranks of this strategy hold no replicas that must be equal at every step; None where they do or may."""
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        return None
    if not isinstance(strategy, DDPStrategy):
        return f"{type(strategy).__name__} keeps no replicas that can be compared"
    if strategy._model_averaging_period is not None:
        return "the replicas differ by design between two averagings of the model (model_averaging_period)"
    return None


def shards(trainer: Trainer) -> bool:
    """Whether the strategy lets the module shard its parameters; those that it does not shard are not synchronised."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def ddp_ignored(trainer: Trainer) -> frozenset[str]:
    """Parameters and buffers that DDP was told to leave alone (``_ddp_params_and_buffers_to_ignore`` of the module)."""
    return frozenset(getattr(trainer.lightning_module, "_ddp_params_and_buffers_to_ignore", ()))


def partitions_state(optimizer: Optimizer) -> bool:
    """Whether each rank's optimizer holds the state of its own part only (``ZeroRedundancyOptimizer``)."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def found_inf(trainer: Trainer, optimizer: Optimizer) -> bool | None:
    """What the scaler's own check found for this optimizer in this step; None where it has not looked."""
    scaler = scaler_of(trainer)
    if scaler is None:
        return None
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag.item()) for flag in found.values()) if found else None


def was_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """True if this optimizer's gradients have been divided by the loss scale in this step (``OptState``)."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def intercept_batch_start(trainer: Trainer, hook: Callable[[Any, int], None]) -> Callable[[], None]:
    """Call ``hook(batch, batch_idx)`` right before ``training_step``; returns what undoes it.

    ``strategy.on_train_batch_start`` is the last hook before ``training_step``: whatever random numbers the hooks of
    callbacks and module draw have been drawn by then.
    """
    strategy = trainer.strategy
    inner = strategy.on_train_batch_start

    def on_train_batch_start(batch: Any, batch_idx: int) -> None:
        inner(batch, batch_idx)
        hook(batch, batch_idx)

    strategy.on_train_batch_start = on_train_batch_start  # type: ignore[method-assign]
    held = weakref.ref(strategy)  # what undoes it must not keep the strategy, and with it the Trainer, alive

    def undo() -> None:
        strategy = held()
        if strategy is not None:
            strategy.__dict__.pop("on_train_batch_start", None)

    return undo


def intercept_norm_clipping(trainer: Trainer, clip: Callable[[Optimizer, float], bool]) -> Callable[[], None] | None:
    """Ask ``clip(optimizer, most)`` first where Lightning clips gradients by their norm; returns what undoes it.

    None where the precision plugin has its own way to do so (``FSDPPrecision``, ``DeepSpeedPrecision``, one that somebody
    put into the instance) or names other parameters than the optimizer's.
    """
    plugin = trainer.precision_plugin
    for name in ("clip_grad_by_norm", "main_params"):
        if name in vars(plugin) or getattr(type(plugin), name) is not getattr(Precision, name):
            return None
    inner = plugin.clip_grad_by_norm

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        if not clip(optimizer, clip_val):
            inner(optimizer, clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    def undo() -> None:
        if vars(plugin).get("clip_grad_by_norm") is clip_grad_by_norm:  # else somebody has put another one around it
            del plugin.clip_grad_by_norm

    return undo


class _InsteadOfCompiled:
    """``call`` in place of the compiled code of a module that was compiled on its own (``module.compile()``)."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        self.module, self.inner, self.call = module, module._compiled_call_impl, call
        module._compiled_call_impl = call

    @property
    def in_place(self) -> bool:
        return self.module._compiled_call_impl is self.call

    def remove(self) -> None:
        if self.in_place:
            self.module._compiled_call_impl = self.inner


class AroundCompiled(_InsteadOfCompiled):
    """A forward hook of a module that was compiled on its own, outside the compiled region.

    What ``register_forward_hook`` registers becomes part of the module's graph.
    """

    def __init__(self, module: torch.nn.Module, hook: Callable[[torch.nn.Module, Any, Any], None]) -> None:
        inner: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            hook(module, args, output)
            return output

        super().__init__(module, call)


class EagerWhile(_InsteadOfCompiled):
    """Runs a module that was compiled on its own eagerly while ``condition`` says so: then hooks within it are called."""

    def __init__(self, module: torch.nn.Module, condition: Callable[[], bool]) -> None:
        inner: Any = module._compiled_call_impl
        eager: Any = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not condition():
                return inner(*args, **kwargs)
            return eager(*args, **kwargs)

        super().__init__(module, call)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the module was compiled on its own."""
    return module._compiled_call_impl is not None


def hold_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a module keeps something that ``torch.compile`` has made: its ``forward``, another method, a function.

    What ``torch.compile`` returns carries ``_torchdynamo_orig_callable``, or has a ``forward`` that does; Lightning puts such
    a ``training_step`` into a LightningModule that is compiled as a whole.
    """
    modules = list(modules)
    kept = [v for m in modules for key, v in m.__dict__.items() if callable(v) and key != "_compiled_call_impl"]
    # Each class once, but anew at each call: at each full snapshot all modules are asked, and a class may be changed.
    classes = {c for kind in {type(m) for m in modules} for c in kind.__mro__}
    kept += [v for c in classes if c.__module__.partition(".")[0] != "torch" for v in vars(c).values() if callable(v)]
    return any(hasattr(v, "_torchdynamo_orig_callable") for v in kept)


def runs_compiled(module: torch.nn.Module) -> bool:
    """Whether something of a step runs compiled, as far as the module shows it."""
    modules = list(module.modules())
    return any(map(is_compiled, modules)) or hold_compiled(modules)


@contextmanager
def compiling_nothing() -> Iterator[list[str]]:
    """Compiled code runs where there is some for the inputs at hand; what would have to be compiled runs eagerly.

    The same as the stance ``eager_on_recompile``, but what ran eagerly is told: the names of the functions are in the list.
    ``torch._dynamo.eval_frame._callback_from_stance`` is what decides in torch 2.13; where that is another, only the stance
    is set, and the list says so.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing was ever compiled
        yield []
        return
    try:
        from torch._dynamo.convert_frame import has_tensor_in_frame
        from torch._dynamo.trace_rules import check
        from torch._dynamo.types import ConvertFrameReturn

        inner, passed = dynamo._callback_from_stance, ConvertFrameReturn(apply_to_code=False)
    except (ImportError, AttributeError, TypeError):
        with torch.compiler.set_stance("eager_on_recompile"):
            yield ["not known in this version of torch"]
        return
    told: list[str] = []

    def callback_from_stance(callback: Any) -> Any:
        callback = inner(callback)
        if callback in (None, False):
            return callback

        def tell(frame: Any, *args: Any, **kwargs: Any) -> Any:
            if not check(frame.f_code) and has_tensor_in_frame(frame):
                told.append(frame.f_code.co_qualname)
            return passed

        tell._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # its compiled code is looked up by this
        return tell

    dynamo._callback_from_stance = callback_from_stance
    try:
        yield told
    finally:
        dynamo._callback_from_stance = inner


def uses_cuda_graphs(device: torch.device) -> bool:
    """Whether compiled code has been put into CUDA graphs on this device (``torch._inductor.cudagraph_trees``)."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return trees.get_manager(index, create_if_none_exists=False) is not None


@contextmanager
def without_mode(mode: Any) -> Iterator[None]:
    """Takes one mode off torch's stack of function modes, whatever lies on it, and puts it back.

    Compiled code holds only under the modes under which it was compiled (``torch.overrides._pop_mode``, ``_push_mode``).
    """
    overrides: Any = torch.overrides

    def down_to() -> list[Any]:
        """What lay above ``mode``, the topmost first; with ``mode`` itself it is off the stack then."""
        above = []
        while (top := overrides._pop_mode()) is not mode:
            above.append(top)
        return above

    above = down_to()
    for other in reversed(above):
        overrides._push_mode(other)
    try:
        yield
    finally:
        for _ in above:
            overrides._pop_mode()
        for other in (mode, *reversed(above)):
            overrides._push_mode(other)


def in_backward() -> bool:
    """True while autograd runs a backward on this thread (also under the recomputation of a checkpoint)."""
    return torch._C._current_graph_task_id() != -1


def shard_place(tensor: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """Shape of the whole tensor and offset of this rank's part in it; None for a tensor that is no ``DTensor``.

    ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``.
    """
    if not hasattr(tensor, "_local_tensor"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return list(tensor.shape), list(offset)


def sharded_groups(module: torch.nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are divided at the moment.

    ``FSDPModule._get_fsdp_state()._fsdp_param_groups``, in torch 2.13; before, the one ``_fsdp_param_group``.
    """
    from torch.distributed.fsdp import FSDPModule

    states: list[Any] = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
    groups = [
        g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)]
    ]
    return [group for group in groups if group is not None and group.is_sharded]


def divide_again(groups: list[Any]) -> None:
    """After a forward without a backward: FSDP2 holds on to the whole parameters of a root, and waits for its backward."""
    for group in groups:
        group._training_state = type(group._training_state).IDLE
        if not group.is_sharded:
            group.reshard()
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def collective_timeout(trainer: Trainer) -> timedelta:
    """Time-out of the default process group's collectives (``ProcessGroup._get_backend``, ``Backend.Options._timeout``)."""
    world: Any = torch.distributed.group.WORLD
    timeout: timedelta = world._get_backend(trainer.strategy.root_device).options._timeout
    return timeout


def comm_hook_states(trainer: Trainer) -> list[Any]:
    """State of each communication hook that is registered with DDP (``DistributedDataParallel._comm_hooks``)."""
    return [state for _, state in getattr(trainer.strategy.model, "_comm_hooks", ())]


def next_node_number() -> int:
    """Sequence number that the next autograd node of this thread will get (``torch.autograd._get_sequence_nr``)."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node() -> Any | None:
    """The autograd node whose backward runs on this thread (``torch._C._current_autograd_node``), or None."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """Sequence number of an autograd node (``Node._sequence_nr``)."""
    return int(node._sequence_nr())
