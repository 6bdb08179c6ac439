"""Faults that the recorded configuration injects belong to what the step computed: a drill's bundle replays with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map

from ..faults.base import Fault, Moment
from ..faults.computation import ModuleFault
from ..faults.data import DataFault

if TYPE_CHECKING:
    from .reading import Bundle

_INJECTOR = "FaultInjector"


class Drill:
    """The faults in computation and data; those in weights, optimizer state or schedule lie in the bundle already."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = [f for f in faults if isinstance(f, ModuleFault | DataFault)]
        self.moments: list[Moment] = []

    @classmethod
    def recorded(cls, config: Mapping[str, Any] | None) -> Drill:
        """The faults of every ``FaultInjector`` among the configuration's callbacks."""
        from ..config import build  # imports Hydra, which a run without it does not need

        return cls(
            [fault for node in recorded_callbacks(config or {}, _INJECTOR) for fault in build(node, "callbacks").faults]
        )

    @staticmethod
    def remembered(trainer: Trainer) -> dict[str, dict[str, Any]]:
        """By name, which samples the run's faults in data have hit so far on this rank, for the bundle.

        Such a fault lives in its samples, not in its steps: one made anew from the configuration would take the samples
        of whatever step is replayed for its first ones.
        """
        from ..callbacks.fault_injector import FaultInjector  # callbacks import this package

        injectors = (c for c in trainer.callbacks if isinstance(c, FaultInjector))  # type: ignore[attr-defined]
        return {f.name: f.state_dict() for c in injectors for f in c.faults if isinstance(f, DataFault)}

    def remember(self, states: Mapping[str, dict[str, Any]]) -> None:
        """What :meth:`remembered` has put into a bundle."""
        for fault in self.faults:
            if isinstance(fault, DataFault) and fault.name in states:
                fault.load_state_dict(states[fault.name])

    @property
    def names(self) -> list[str]:
        return [fault.name for fault in self.faults]

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        for fault in self.faults:
            fault.install(trainer, module)

    def uninstall(self) -> None:
        for fault in self.faults:
            fault.moment = None
            fault.uninstall()

    def hurt(
        self,
        trainer: Trainer,
        module: LightningModule,
        bundle: Bundle,
        batch: Any,
        ids: Sequence[str],
        *,
        fetched: bool,
    ) -> None:
        """The next micro-batch. One that was fetched again gets what the faults in data did; a captured one has it."""
        if not self.faults:
            return
        attempt = int(bundle.manifest["attempt"])
        names = tuple(map(str, ids))
        if fetched:
            self._bring(Moment(trainer, module, bundle.step, attempt, batch, names, live=False))
        self.moments.append(Moment(trainer, module, bundle.step, attempt, batch, names, live=False))

    def at(self, index: int) -> None:
        """Before micro-batch ``index`` is computed: the faults get a copy of it, to know where they are."""
        if index < len(self.moments):
            moment = self.moments[index]
            self._bring(replace(moment, batch=tree_map(_copied, moment.batch)))

    def _bring(self, moment: Moment) -> None:
        for fault in self.faults:
            fault.moment = moment
            if isinstance(fault, DataFault):
                fault.on_batch(moment)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def recorded_callbacks(config: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """Nodes of the configuration's callbacks of one class."""
    callbacks = config.get("callbacks") or config.get("trainer", {}).get("callbacks") or {}
    nodes = callbacks.values() if isinstance(callbacks, Mapping) else callbacks
    for node in nodes:
        if isinstance(node, Mapping) and str(node.get("_target_", "")).rpartition(".")[2] == name:
            yield node
