"""The callback that lets faults loose on a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from ..faults.base import Fault, Moment
from ..faults.computation import HookedFault
from ..triage.sandbox import EAGER
from .base import SentinelCallback

log = logging.getLogger("lightning_sentinel")


class FaultInjector(SentinelCallback):
    """Hurts a run on purpose, in its real data, computation and state, and counts every strike.

    It comes before the suite's other callbacks: what it does to a batch is what the loader delivered, as far as they
    can know. It draws nothing from the generators that the training uses, so a run in which no fault fires is
    bit-identical to one without it. Its counters do not go back with a rollback.

    Events: ``fault.injected`` with ``name``, ``fired`` and what exactly was changed, one for each strike; ``fault.missed`` at
    the end, with a warning, for a fault of a module whose steps have come and that never struck.

    Example:
        >>> from lightning_sentinel import FaultInjector
        >>> from lightning_sentinel.faults import CorruptBatch
        >>> injector = FaultInjector([CorruptBatch(step=120)])
        >>> injector.fired
        {'corrupt_batch': 0}

    Args:
        faults: The faults, as a sequence or as the values of a mapping (the form that configuration files have).
        journal: Whether strikes are written to the journal. Off, the run looks exactly as a real failure does.
        sample_id_fn: Names a batch's samples; None takes the ids that the batch brings, or else a hash of each sample.
    """

    rewinds = False

    def __init__(
        self,
        faults: Sequence[Fault] | Mapping[str, Fault] | None = None,
        journal: bool = True,
        sample_id_fn: Callable[[Any], Sequence[Any]] | None = None,
    ) -> None:
        self.faults: list[Fault] = list(faults.values() if isinstance(faults, Mapping) else faults or ())
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise TypeError(
                    f"FaultInjector: faults holds a {type(fault).__name__}, expected lightning_sentinel.faults.Fault."
                )
        names = [fault.name for fault in self.faults]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"FaultInjector: several faults are called {twice}; give each its own name=.")
        self.journal = journal
        self.sample_id_fn = sample_id_fn
        self._trainer: Trainer | None = None
        self._moment: Moment | None = None
        self._due: set[str] = set()  # names of faults whose step has come
        self._stance: Any = None  # while a step that would run compiled runs eagerly

    @property
    def fired(self) -> dict[str, int]:
        """How often each fault struck on this rank."""
        return {fault.name: fault.fired for fault in self.faults}

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._due = trainer, set()
        for fault in self.faults:
            fault.report = self._report
            fault.install(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.faults:
            return
        from ..data.identity import sample_ids

        context = self.context(trainer)
        self._moment = Moment(
            trainer=trainer,
            module=pl_module,
            step=trainer.global_step,
            attempt=context.attempt,
            batch=batch,
            sample_ids=tuple(sample_ids(batch, self.sample_id_fn)),
        )
        for fault in self.faults:
            fault.moment = self._moment
            if fault.due(self._moment):
                self._due.add(fault.name)
            fault.on_batch(self._moment)
        self._set_stance()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._moment is not None:
            self._moment.live = False
            self._set_stance()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        moment, self._moment = self._moment, None
        for fault in self.faults:
            fault.moment = None
            if moment is not None:
                fault.on_batch_end(moment)
        self._set_stance()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._uninstall()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._uninstall()

    def _uninstall(self) -> None:
        self._moment = None
        for fault in self.faults:
            fault.moment = None
            fault.uninstall()
        self._set_stance()
        self._say_missed()

    def _set_stance(self) -> None:
        """What is compiled as a whole runs eagerly as long as a fault strikes in it, in a replay as in the step itself."""
        strikes = any(isinstance(f, HookedFault) and f.whole and f.strikes_now() for f in self.faults)
        if strikes == (self._stance is not None) or self._trainer is None:
            return
        scratch = self.context(self._trainer).scratch
        if strikes:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
            scratch[EAGER] = True
        else:
            self._stance.__exit__(None, None, None)
            self._stance = None
            scratch.pop(EAGER, None)

    def _say_missed(self) -> None:
        for fault in self.faults:
            why = fault.why_missed()
            if self._trainer is None or fault.fired or fault.name not in self._due or not why:
                continue
            message = f"The fault {fault.name} was due from step {fault.step} on and never struck: {why}."
            log.warning(message)
            if self.journal:
                self.context(self._trainer).write(self._trainer, "fault.missed", name=fault.name, message=message)
        self._due = set()

    def _report(self, fault: Fault, details: dict[str, Any]) -> None:
        if self.journal and self._trainer is not None:
            context = self.context(self._trainer)
            context.write(self._trainer, "fault.injected", name=fault.name, fired=fault.fired, **details)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {fault.name: fault.state_dict() for fault in self.faults}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for fault in self.faults:
            if fault.name in state_dict:
                fault.load_state_dict(state_dict[fault.name])
