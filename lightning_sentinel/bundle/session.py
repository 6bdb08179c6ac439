"""A Trainer on one device, brought to where the incident's step was, in whose sandbox the step is computed again.

It is a real ``fit`` that ends before its first batch: model, precision, optimizers and loader are set up by Lightning, so
``self.trainer``, ``self.log`` and ``self.optimizers()`` in ``training_step`` find what they expect.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from ..checkpoint.plain import decode
from ..context import context_of
from ..state import lightning_private as private
from ..state import rng
from .reading import Bundle, BundleError

T = TypeVar("T")
_TRUE = ("32-true", "64-true", "bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")


class _OverError(Exception):
    """Ends the fit where the work is done; never leaves this module."""


class _Session(Callback):
    def __init__(self, work: Callable[[Trainer, LightningModule], Any]) -> None:
        self.work = work
        self.result: Any = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.result = self.work(trainer, pl_module)
        raise _OverError


def in_session(
    bundle: Bundle,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    device: str,
    work: Callable[[Trainer, LightningModule], T],
) -> T:
    """Call ``work(trainer, module)`` in a fit on one device. This process's random state and settings come back."""
    session = _Session(work)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_settings(bundle.run["numerics"]))
        stack.enter_context(_quiet())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-sentinel-replay-"))
        trainer = _trainer(bundle, device, session, folder)
        arguments: dict[str, Any] = {"datamodule": datamodule}
        if datamodule is None and not private.overrides(model, "train_dataloader"):
            arguments = {"train_dataloaders": [0]}  # every batch comes from the bundle
        try:
            trainer.fit(model, **arguments)
        except _OverError:
            pass
        else:
            raise BundleError("the fit ended before its first epoch: the data module has no training batch.")
        finally:
            for loader in private.train_loaders(trainer):
                private.stop_workers(loader)
    result: T = session.result
    return result


def _trainer(bundle: Bundle, device: str, session: Callback, folder: str) -> Trainer:
    facts = bundle.run["trainer"]
    where = torch.device(device)
    accelerator = {"cuda": "gpu"}.get(where.type, where.type)
    precision = str(facts["precision"])
    how: dict[str, Any]
    if precision in _TRUE:
        how = {"precision": precision}
    else:
        how = {"plugins": [MixedPrecision(precision, where.type)]}  # type: ignore[arg-type]
    return Trainer(
        accelerator=accelerator,
        devices=[where.index or 0] if accelerator != "cpu" else 1,
        accumulate_grad_batches=int(facts["accumulate_grad_batches"]),
        max_steps=max(int(facts["max_steps"]), -1),
        max_epochs=-1 if facts["max_epochs"] is None else int(facts["max_epochs"]),
        callbacks=[session],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **how,
    )


def place(trainer: Trainer, module: LightningModule, bundle: Bundle, part: Mapping[str, Any]) -> list[str]:
    """Put loop progress, train and eval mode and frozen parameters where one rank had them. Returns what could not be."""
    notes = []
    if part["loops"]:
        try:
            private.load_loop_state(trainer, decode(part["loops"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            notes.append(f"trainer.global_step could not be set to {bundle.step} ({type(error).__name__}: {error})")
    evaluating, frozen = set(part["eval_modules"]), set(part["frozen"])
    for path, child in module.named_modules():
        child.training = path not in evaluating
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    context = context_of(trainer)
    context.attempt, context.tokens = int(bundle.manifest["attempt"]), int(bundle.manifest["tokens"])
    return notes


def load_weights(module: LightningModule, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy parameters in by name; BundleError says how the rebuilt model differs from the recorded one."""
    own = dict(module.named_parameters())
    missing, strange = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    shapes = [
        f"{n} is {list(own[n].shape)}, recorded {list(w.shape)}"
        for n, w in weights.items()
        if n in own and own[n].shape != w.shape
    ]
    problems = [
        *([f"it lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"] if missing else []),
        *([f"it has {', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''} beside them"] if strange else []),
        *shapes[:3],
    ]
    if problems:
        raise BundleError(
            f"{type(module).__name__} is not the model of the bundle: {'; '.join(problems)}. Build it from the"
            " configuration and the code that the run had."
        )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


@contextlib.contextmanager
def _settings(numerics: Mapping[str, Any]) -> Iterator[None]:
    """Settings that decide about bits, as the run had them: threads change the order of sums."""
    before = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    state = rng.capture()
    try:
        torch.set_num_threads(int(numerics["threads"]))
        torch.set_float32_matmul_precision(numerics["float32_matmul_precision"])
        torch.set_default_dtype(getattr(torch, numerics["default_dtype"]))
        torch.use_deterministic_algorithms(bool(numerics["deterministic"]), warn_only=True)
        yield
    finally:
        threads, precision, dtype, deterministic, warn_only = before
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        rng.restore(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's advice about a Trainer that never trains helps nobody."""
    loggers = [logging.getLogger(n) for n in ("lightning.pytorch", "lightning.fabric")]
    levels = [x.level for x in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
