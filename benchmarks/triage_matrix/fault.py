"""What a case of the matrix is: a fault that strikes in the real computation, and the verdict that would be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as L
from torch import nn

from lightning_sentinel.context import context_of

from .world import World, loader, warm_world

AT = 44  # step of the first strike: the detectors have a history and the run has snapshots
ALL = {1: None, 2: None}  # strikes on every rank
SECOND = {1: None, 2: 1}  # strikes on rank 1 where there are two


class Case(L.Callback):
    """One fault. It stands before the suite's callbacks and tells them nothing.

    Attributes:
        kind: The verdict that is right; ``none`` where nothing is wrong.
        culprits: What the verdict has to name, where it does not depend on the strike.
        ranks: Numbers of ranks it applies to, and the rank on which it strikes there (None: on all).
        duration: Steps on which it strikes; None for all that follow.
        patience: Steps after the first strike until the case is given up as not found.
        named: What has to be named, filled as the fault strikes.
        passing: True for an event that a second pass over its step does not meet again.
        instead: What may be named in its place: the samples that were hurt, where only their source tells all.
    """

    kind: ClassVar[str]
    culprits: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[dict[int, int | None]] = {1: None}
    duration: ClassVar[int | None] = 1
    patience: ClassVar[int] = 30
    fp16: ClassVar[bool] = False
    passing: ClassVar[bool] = False
    at: int = AT

    def __init__(self, seed: int, world_size: int = 1) -> None:
        self.seed, self.world_size = seed, world_size
        self.rank = self.ranks[world_size]
        self.named: set[str] = set(self.culprits)
        self.attempt: int | None = None
        self.instead: set[str] = set()
        self.fired = 0

    @classmethod
    def name(cls) -> str:
        return "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("_")

    # ------------------------------------------------------------------ the run

    def world(self) -> World:
        return warm_world(self.seed)

    def loader(self) -> Any:
        return loader(self.seed)

    def options(self) -> dict[str, Any]:
        """Further arguments of the Trainer."""
        return {}

    def suite(self, callbacks: Sequence[L.Callback]) -> list[L.Callback]:
        return list(callbacks)

    # ------------------------------------------------------------------ the strike

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        due = self.at <= step and (self.duration is None or step < self.at + self.duration)
        due = due and self.rank in (None, trainer.global_rank)
        attempt = context_of(trainer).attempt
        if due and self.passing:
            self.attempt = attempt if self.attempt is None else self.attempt
            due = self.attempt == attempt
        pl_module.armed = due
        if due:
            self.fired += 1
            self.strike(trainer, pl_module, batch)
        self.after(trainer, pl_module, batch)

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        """Do the harm of this step."""

    def after(self, trainer: Any, world: World, batch: Any) -> None:
        """On every step, whether or not it strikes."""


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> nn.Module:
    """Give a module another class: same parameters, same path, other code."""
    module.__class__ = kind
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def on_output(world: World, path: str, change: Callable[[Any], Any]) -> None:
    """``change`` the output of a module while the world is armed."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if world.armed else output

    world.get_submodule(path).register_forward_hook(hook)
