"""Faults in the training state: weights, learning rate, optimizer moments, schedule and data cursor."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..state.lightning_private import fetcher_of, train_loaders
from .base import Fault, Moment, nearest

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class BadRank(Fault):
    """One rank's weights are overwritten in place, its replicas keep theirs.

    Args:
        parameter: Name of the parameter in ``named_parameters()`` of the LightningModule.
        std: Standard deviation of the normal noise that is written. For an output layer of width ``d`` behind a
            normalised stream and a byte vocabulary, the loss becomes about ``2.8 * std * sqrt(d)`` nats.
        seed: Seed of the fault's own random numbers.
    """

    default_name = "bad_rank"

    def __init__(
        self,
        step: int,
        parameter: str,
        std: float = 1.0,
        seed: int = 0,
        rank: int | None = 1,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, 1, rank, on_replay, name)
        if std <= 0.0:
            raise ValueError(f"{self.name}: std is {std}, expected more than 0.")
        self.parameter, self.std, self.seed = parameter, std, seed
        self._last: tuple[int, int] | None = None  # step and attempt of the newest strike: one for all micro-batches

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        self._parameter(module)

    def _parameter(self, module: LightningModule) -> Tensor:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if self.parameter not in parameters:
            raise ValueError(
                f"{self.name}: {type(module).__name__} has no parameter {self.parameter!r}."
                f" Nearest names: {nearest(self.parameter, parameters)}."
            )
        return parameters[self.parameter]

    def on_batch(self, moment: Moment) -> None:
        if not self.due(moment) or self._last == (moment.step, moment.attempt):
            return
        self._last = (moment.step, moment.attempt)
        weight = self._parameter(moment.module)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(self.seed))
        with torch.no_grad():
            weight.copy_(noise * self.std)
        self.struck(moment, parameter=self.parameter, std=self.std)


class LearningRateSpike(Fault):
    """The rate of every parameter group is multiplied for some steps, after the scheduler has set it.

    It is put back right after each step, so that the scheduler goes on from the planned rate.

    Args:
        factor: Factor on the rate.
    """

    default_name = "lr_spike"

    def __init__(
        self,
        step: int,
        duration: int | None = 3,
        factor: float = 50.0,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, rank, on_replay, name)
        if factor <= 0.0:
            raise ValueError(f"{self.name}: factor is {factor}, expected more than 0.")
        self.factor = factor
        self._spiked: dict[Optimizer, list[tuple[float, float]]] = {}  # planned and spiked rate of each group
        self._handles: list[RemovableHandle] = []

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        # The scheduler steps before on_train_batch_end: only the optimizer's own hook is early enough.
        self._handles = [o.register_step_post_hook(lambda o, *_: self._put_back(o)) for o in trainer.optimizers]

    def uninstall(self) -> None:
        self._put_back(*self._spiked)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_batch(self, moment: Moment) -> None:
        if self._spiked or not self.due(moment):
            return
        for optimizer in moment.trainer.optimizers:
            rates = [group["lr"] for group in optimizer.param_groups]
            self._spiked[optimizer] = [(rate, rate * self.factor) for rate in rates]
            for group, (_, spiked) in zip(optimizer.param_groups, self._spiked[optimizer], strict=True):
                group["lr"] = spiked
        planned, spiked = self._spiked[moment.trainer.optimizers[0]][0]
        self.struck(moment, factor=self.factor, planned=planned, rate=spiked)

    def on_batch_end(self, moment: Moment) -> None:
        if moment.trainer.global_step != moment.step:
            self._put_back(*self._spiked)  # where the scaler skipped the step, the optimizer's hook did not run

    def _put_back(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            for group, (planned, spiked) in zip(optimizer.param_groups, self._spiked.pop(optimizer, ()), strict=False):
                if group["lr"] == spiked:
                    group["lr"] = planned


class OptimizerCorruption(Fault):
    """One kind of optimizer state is overwritten with a finite value, such as a second moment that is far too small.

    Args:
        key: Key of the state, e.g. ``exp_avg_sq`` or ``exp_avg`` of Adam.
        value: What is written to each of its elements.
    """

    default_name = "optimizer_corruption"
    first_step = 1  # before the first update there is no state

    def __init__(
        self,
        step: int,
        key: str = "exp_avg_sq",
        value: float = 1e-14,
        duration: int | None = 1,
        rank: int | None = None,
        on_replay: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(step, duration, rank, on_replay, name)
        self.key, self.value = key, value
        self._last: tuple[int, int] | None = None  # step and attempt of the newest strike: one for all micro-batches

    def on_batch(self, moment: Moment) -> None:
        if not self.due(moment) or self._last == (moment.step, moment.attempt):
            return
        states = [state for o in moment.trainer.optimizers for state in o.state.values()]
        hit = [state[self.key] for state in states if isinstance(state.get(self.key), Tensor)]
        if not hit:
            have = sorted({str(key) for state in states for key in state})
            raise ValueError(f"{self.name}: no optimizer state {self.key!r} at step {moment.step}; there is {have}.")
        with torch.no_grad():
            for tensor in hit:
                tensor.fill_(self.value)
        self._last = (moment.step, moment.attempt)
        self.struck(moment, key=self.key, value=self.value, tensors=len(hit))


class SchedulerReset(Fault):
    """At a restart the schedule begins anew: its counter is 0 and the rate that of the first step.

    Strikes before the first step of a process that has resumed; in one that starts from scratch it does nothing.

    Args:
        step: A restart before this step is left alone.
    """

    default_name = "scheduler_reset"

    def __init__(self, step: int = 1, rank: int | None = None, name: str | None = None) -> None:
        super().__init__(step, None, rank, name=name)
        self._restarted: bool | None = None

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        self._restarted = None

    def on_batch(self, moment: Moment) -> None:
        if self._restarted is not None:
            return
        self._restarted = moment.step > 0
        if not self._restarted or not self.due(moment) or self.fired:
            return
        live = [config.scheduler for config in moment.trainer.lr_scheduler_configs]
        if not live:
            raise ValueError(
                f"{self.name}: the module has no learning-rate scheduler; return one from configure_optimizers."
            )
        before = [group["lr"] for o in moment.trainer.optimizers for group in o.param_groups]
        # What a restart does that never loads the schedule: build it anew.
        with torch.random.fork_rng():
            fresh = schedulers_of(moment.module.configure_optimizers())
        for scheduler, new in zip(live, fresh, strict=True):
            scheduler.load_state_dict(new.state_dict())
            for group, new_group in zip(scheduler.optimizer.param_groups, new.optimizer.param_groups, strict=True):
                group["lr"] = new_group["lr"]
        after = [group["lr"] for o in moment.trainer.optimizers for group in o.param_groups]
        self.struck(moment, rate_before=before[0], rate=after[0])


def schedulers_of(configured: Any) -> list[Any]:
    """The schedulers in what ``configure_optimizers`` returns, in any of its forms."""
    if isinstance(configured, dict):
        found = configured.get("lr_scheduler")
        return [] if found is None else [found["scheduler"] if isinstance(found, dict) else found]
    if isinstance(configured, list | tuple):
        if len(configured) == 2 and all(isinstance(part, list) for part in configured):
            return [found["scheduler"] if isinstance(found, dict) else found for found in configured[1]]
        return [scheduler for part in configured for scheduler in schedulers_of(part)]
    return []


class CursorRewind(Fault):
    """The loader starts over: from ``step`` on it delivers what it delivered at the beginning of the fit.

    Strikes between two steps, so the batch of ``step`` is the first repeated one. Where the loader has a ``state_dict``
    it goes back to the position that it had when the first batch was out; where it has none, its iterator is made anew.
    """

    default_name = "cursor_rewind"
    first_step = 2  # the loader goes back to its second batch, which has to be behind it

    def __init__(
        self, step: int, rank: int | None = None, on_replay: bool | None = None, name: str | None = None
    ) -> None:
        super().__init__(step, 1, rank, on_replay, name)
        self._states: list[Any] | None = None

    def install(self, trainer: Trainer, module: LightningModule) -> None:
        self._states = None

    def on_batch(self, moment: Moment) -> None:
        # Not earlier: asking torchdata's loader before its first batch would make an iterator and draw random numbers.
        if self._states is None:
            self._states = [
                copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None
                for loader in train_loaders(moment.trainer)
            ]

    def on_batch_end(self, moment: Moment) -> None:
        step = moment.trainer.global_step
        if step == moment.step or not self.due(moment, step):  # within an accumulation the step stays what it was
            return
        for loader, state in zip(train_loaders(moment.trainer), self._states or (), strict=True):
            if state is not None:
                loader.load_state_dict(copy.deepcopy(state))
        restart_iteration(moment.trainer)
        self.struck(moment, loaders=len(self._states or ()))


def restart_iteration(trainer: Trainer) -> None:
    """Make the train loaders' iterators anew; how far the epoch has come is left as it is."""
    fetcher = fetcher_of(trainer)
    fetched = fetcher.fetched
    iter(fetcher)
    fetcher.fetched = fetched
    if fetcher.length is not None:
        fetcher.done = fetched >= fetcher.length
