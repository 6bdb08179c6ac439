"""The update that a replayed step would make, by the optimizer state of the checkpoint that the bundle refers to.

A bundle holds no optimizer state: that is twice the weights, copied at the gate of every incident. The newest usable
checkpoint from before the step has one. It is the step's own where the checkpoint was saved right before it; otherwise the
moments lack the updates in between, and the report says how many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..triage.experiments import rms
from ..triage.replay import norm_of
from .reading import Bundle, BundleError

NAMED = 5


@dataclass(frozen=True)
class UpdateCheck:
    """What the step's update would be.

    Attributes:
        available: Whether it could be computed.
        sentence: All of it in words; where it is not available, why.
        checkpoint: Path of the checkpoint whose optimizer state was used.
        checkpoint_step: Its step.
        behind: How many steps older it is than the incident's.
        learning_rates: Rates that were used, by parameter group: those of the incident's step.
        clipped_from: Norm of the gradient before clipping, where it was clipped.
        finite: Whether every weight is finite after the update.
        relative: Median over the weight matrices of the update's over the weight's root mean square.
        largest: ``[name, update over weight]`` of the parameters that move most for their size.
        broken_state: Optimizer state that no sequence of updates can have made: ``[what, parameter, elements]``.
    """

    available: bool
    sentence: str
    checkpoint: str = ""
    checkpoint_step: int = -1
    behind: int = 0
    learning_rates: tuple[float, ...] = ()
    clipped_from: float | None = None
    finite: bool | None = None
    relative: float = math.nan
    largest: list[tuple[str, float]] = field(default_factory=list)
    broken_state: list[tuple[str, str, int]] = field(default_factory=list)


def update_of(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    bundle: Bundle,
    gradient: Mapping[str, Tensor] | None,
) -> UpdateCheck:
    """Make the step's update on the replayed module, measure it, and take it back.

    Args:
        trainer: The session's.
        module: With the weights of the step.
        optimizer: Of the step; its state is replaced.
        bundle: The incident's.
        gradient: Mean over ranks of the step's gradient by parameter, before clipping; None where it is not known or not
            finite.
    """
    reference = bundle.run["state"]["checkpoint"]
    if reference is None:
        return UpdateCheck(
            False, "The update was not computed: no usable checkpoint was on disk when the incident opened."
        )
    if gradient is None:
        return UpdateCheck(
            False,
            "The update was not computed: the gradient of the step is not finite, or not all ranks were replayed.",
        )
    try:
        saved, path = _saved_state(bundle, reference)
    except BundleError as error:
        return UpdateCheck(False, f"The update was not computed: {error}")
    index, behind = int(bundle.run["optimizer"]["index"]), bundle.step - int(reference["step"])
    if index >= len(saved):
        return UpdateCheck(
            False,
            f"The update was not computed: {path} holds {len(saved)} optimizers, the step's is number {index + 1}.",
        )
    try:
        _load(optimizer, saved[index], bundle.run["optimizer"]["param_groups"])
    except (ValueError, RuntimeError, KeyError) as error:
        return UpdateCheck(False, f"The update was not computed: {path}: {error}")
    return _measured(trainer, module, optimizer, bundle, gradient, str(path), int(reference["step"]), behind)


def _saved_state(bundle: Bundle, reference: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Path]:
    """Every optimizer's state in the checkpoint, and where it lies."""
    from ..checkpoint.contents import OPTIMIZER
    from ..checkpoint.store import CheckpointError
    from ..state.plain import from_plain

    checkpoint, store = checkpoint_of(bundle, reference)
    if OPTIMIZER not in checkpoint.manifest.files:
        raise BundleError(
            f"{checkpoint.path} keeps the optimizer state in shards by rank, which one process does not join"
        )
    try:
        found: list[dict[str, Any]] = from_plain(store.load_torch(checkpoint, OPTIMIZER))
    except CheckpointError as error:
        raise BundleError(f"{checkpoint.path}: {error}") from None
    return found, checkpoint.path


def checkpoint_of(bundle: Bundle, reference: Mapping[str, Any]) -> tuple[Any, Any]:
    """The checkpoint that the bundle names, if it is still the same one, and the store that reads it."""
    from ..checkpoint.store import CheckpointError, CheckpointStore

    named = Path(reference["path"])
    path = next((p for p in (named, bundle.path.parents[1] / "checkpoints" / named.name) if p.is_dir()), None)
    if path is None:
        raise BundleError(f"{bundle.path} refers to {named}, which is gone")
    store = CheckpointStore(path.parent)
    try:
        checkpoint = store.read(path)
    except CheckpointError as error:
        raise BundleError(f"{path}: {error}") from None
    if checkpoint.sha256 != reference["sha256"]:
        raise BundleError(f"{path} is not the checkpoint that the bundle refers to: its manifest has another hash")
    return checkpoint, store


def _load(optimizer: Optimizer, saved: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """The saved moments, and the settings (the rate above all) of the incident's step."""
    from ..state.snapshot import restore_optimizer

    restore_optimizer(optimizer, saved)
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the run had {len(groups)} parameter groups, the rebuilt one has {len(optimizer.param_groups)}"
        )
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for key, value in settings.items():
            if key in group and key != "params" and isinstance(value, int | float) and not isinstance(value, bool):
                group[key] = type(group[key])(value) if isinstance(group[key], int | float) else group[key]


def _measured(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    bundle: Bundle,
    gradient: Mapping[str, Tensor],
    path: str,
    step: int,
    behind: int,
) -> UpdateCheck:
    named = dict(module.named_parameters())
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
    mine = {n: p for n, p in named.items() if id(p) in owned}
    broken = _broken(optimizer, {id(p): n for n, p in mine.items()})
    before = {n: p.detach().clone() for n, p in mine.items()}
    clip = bundle.run["trainer"].get("gradient_clip_val")
    clipped_from: float | None = None
    try:
        for name, parameter in named.items():
            grad = gradient.get(name)
            parameter.grad = None if grad is None or name not in mine else grad.to(parameter).clone()
        by_norm = bundle.run["trainer"].get("gradient_clip_algorithm") in (None, "norm")
        if clip and not by_norm:
            torch.nn.utils.clip_grad_value_(list(mine.values()), float(clip))
        norm = norm_of([p.grad for p in mine.values() if p.grad is not None])
        if clip and by_norm and norm > float(clip):
            torch.nn.utils.clip_grad_norm_(list(mine.values()), float(clip))
            clipped_from = norm
        optimizer.step()
        moved = {n: p.detach().double() - before[n].double() for n, p in mine.items()}
    finally:
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(before[name])
        for parameter in named.values():
            parameter.grad = None
    sizes = {n: rms(moved[n]) / max(rms(before[n].double()), 1e-30) for n in mine if moved[n].numel()}
    matrices = sorted(sizes[n] for n in sizes if before[n].dim() > 1 and math.isfinite(sizes[n]))
    finite = all(bool(m.isfinite().all()) for m in moved.values())
    largest = sorted(sizes.items(), key=lambda s: (math.isfinite(s[1]), -s[1] if math.isfinite(s[1]) else 0.0))[:NAMED]
    relative = matrices[len(matrices) // 2] if matrices else math.nan
    rates = tuple(float(g["lr"]) for g in optimizer.param_groups)
    since = "the step's own" if not behind else f"{behind} step{'s' if behind > 1 else ''} older"
    words = f"With the optimizer state of the checkpoint of step {step} ({since}) and the step's rate {rates[0]:.4g}"
    if clipped_from is not None:
        words += f", clipped from {clipped_from:.4g} to {float(clip):.4g}"
    if not finite:
        words += f", the update is not finite, first in {next(n for n, m in moved.items() if not m.isfinite().all())}."
    else:
        words += (
            f", the update moves the weights by {100 * relative:.3g} % of their size (median over the matrices; usual is"
            f" about 0.1 %), most in {largest[0][0]} ({100 * largest[0][1]:.3g} %)."
        )
    if broken:
        what, name, count = broken[0]
        words += f" The checkpoint's {what} of {name} are impossible already ({count} elements)."
    return UpdateCheck(True, words, path, step, behind, rates, clipped_from, finite, relative, largest, broken)


def _broken(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, str, int]]:
    """State that is not finite, and second moments that are negative."""
    found = []
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            bad = ~value.isfinite() | (value < 0 if key == "exp_avg_sq" else torch.zeros_like(value, dtype=torch.bool))
            if bool(bad.any()):
                found.append((key, names.get(id(parameter), "a parameter"), int(bad.sum())))
    return found[:NAMED]
