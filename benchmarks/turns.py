"""One run in which callbacks are on in some blocks of steps and off in the others, so that what they cost can be told.

There is one Trainer and one model: where their memory lies, and what else the machine does, slows the steps of both kinds
alike. Rounds of four blocks, ``off on on off`` and in every second one ``on off off on``, favour neither where steps
get steadily slower or faster.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import lightning as L
import numpy as np
from numpy.typing import NDArray

from lightning_sentinel.callbacks.base import SentinelCallback
from lightning_sentinel.state.lightning_private import passes_over_none

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

BLOCK = 6  # steps
ROUND = 4 * BLOCK
SETTLE = 2  # steps after a switch: they bring back what the other kind has driven out of the caches


class OwnTime:
    """Seconds inside chosen functions, by name; a function called by another of them is not counted a second time.

    What it takes to read the clock twice is measured at the start and taken off each call.

    Example:
        >>> own = OwnTime()
        >>> inner = own.timed("inner", lambda: None)
        >>> own.timed("outer", inner)()
        >>> sorted(own.seconds), own.calls["inner"]
        (['outer'], 0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.on = True
        self._inside = False
        self.cost = min(-(clock() - clock()) for _ in range(200))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.on:
                return function(*args, **kwargs)
            self._inside = True
            begin = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += self.clock() - begin - self.cost
                self.calls[name] += 1
                self._inside = False

        return run


class Instrument(L.Callback):
    """Times everything through which Lightning and torch enter the suite's callbacks.

    That is: the callbacks' hooks, the tracer's hooks on the model's layers, what :class:`~lightning_sentinel.Rollback` does
    around a batch, the capture of the step, and the hooks on the optimizers. Put it last.
    """

    def __init__(self, suite: Sequence[L.Callback], own: OwnTime, start: bool = False) -> None:
        self.own = own
        self._placed: list[tuple[L.Callback, str]] = []
        self._batches = 0
        more = ("_before_batch", "_after_batch", *(("setup",) if start else ()))
        for callback in suite:
            for name in (*(n for n in dir(callback) if n.startswith("on_")), *more):
                if self._time(callback, type(callback).__name__, name):
                    self._placed.append((callback, name))
            if hasattr(callback, "_flag"):
                callback._flag = self._timed_flags(callback._flag)
            if hasattr(callback, "actuator"):
                for name in ("_before_step", "_after_step"):
                    self._time(callback.actuator, "Actuator", name)

    def _timed_flags(self, make: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda path: self.own.timed("NonFiniteTracer.layers", make(path))

    def _time(self, owner: Any, label: str, name: str) -> bool:
        method = getattr(owner, name, None)
        inherited = getattr(L.Callback, name, None)
        if not callable(method) or getattr(type(owner), name, None) is inherited:
            return False
        setattr(owner, name, self.own.timed(f"{label}.{name}", method))
        return True

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._batches += 1
        if self._batches == 2 and passes_over_none():
            # The suite lets hooks rest that do nothing any more, but none that somebody has put in place of its own.
            for callback, name in self._placed:
                if isinstance(callback, SentinelCallback) and name in callback.idle_hooks(trainer):
                    setattr(callback, name, None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        captured = vars(strategy).get("on_train_batch_start")
        if captured is not None:
            strategy.on_train_batch_start = self.own.timed("StepCapture", captured)  # type: ignore[method-assign]


class Attached:
    """What is hooked into the parts of a fit at one moment, besides the list of callbacks.

    That is: every dictionary of hooks of every module and optimizer, and every method that an object of its own has put in
    place of its class's, on the Trainer, its loops, strategy and precision plugin, the modules and optimizers.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        modules, optimizers = list(trainer.lightning_module.modules()), trainer.optimizers
        loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization
        self._owners = [trainer, *loops, trainer.strategy, trainer.precision_plugin, *modules, *optimizers]
        self.hooks = [
            (owner, name, dict(value))
            for owner in (*modules, *optimizers)
            for name, value in vars(owner).items()
            if "_hooks" in name and isinstance(value, dict)
        ]
        self.methods = [(owner, _methods(owner)) for owner in self._owners]

    def restore(self) -> None:
        """Make it so again, in place: who has hooked something in can still take it out."""
        for owner, name, then in self.hooks:
            now = vars(owner)[name]
            if dict(now) != then:
                now.clear()
                now.update(then)
        for owner, methods in self.methods:
            for name in _methods(owner).keys() - methods.keys():
                del vars(owner)[name]
            vars(owner).update(methods)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attached) and self._told() == other._told()

    __hash__ = None  # type: ignore[assignment]

    def _told(self) -> Any:
        return (
            [(id(owner), name, list(hooks.items())) for owner, name, hooks in self.hooks],
            [(id(owner), methods) for owner, methods in self.methods],
        )


def _methods(owner: object) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if callable(value) and hasattr(type(owner), name)}


class Turns(L.Callback):
    """Turns the Trainer's other callbacks on and off between steps, with all that they have hooked in elsewhere.

    Put it first, alone or with the callbacks that are to be measured, into a Trainer with ``max_steps=len(turns.plan)``.
    A callback must not hook in anything before ``on_fit_start``. At the end of the fit, and where an exception ends it, all
    are on.

    Example:
        >>> turns = Turns(rounds=2, warm_up=12)
        >>> "".join("+" if on else "." for on in turns.plan)
        '++++++++++++......++++++++++++............++++++............++++++'

    Args:
        rounds: Rounds of four blocks.
        warm_up: Steps before them, with the callbacks on, that do not count; at least 1.
        timed: Code of the callbacks, by name. Whatever of it is called in a step that is off is an error.
        switch: Called with True or False for what is no callback; with True after the first step.

    Attributes:
        plan: By step, whether the callbacks are on.
        steps: By step, after the warm-up, seconds: ``wall`` from the end of the step before to its own end, ``timed`` ones by
            their name, and processor seconds of its parts. ``hooks``: where Lightning runs through the callbacks, its
            dispatch included; ``update``: from the gate to the end of the batch, with clipping and the optimizer;
            ``passes``: forward and backward; ``around``: the rest, such as what is done before a batch is fetched and
            between the callbacks and the forward.
        counts: By step, whether it counts.
        by_hook: Of each entry of ``timed`` the seconds of each hook in the steps that are on and count.
    """

    PARTS = ("around", "hooks", "passes", "update")
    # The hooks in which callbacks run in a step, and the part of the step that lies before each.
    HOOKS: ClassVar = {
        "on_train_batch_start": "around",
        "on_before_zero_grad": "passes",
        "on_before_backward": "passes",
        "on_after_backward": "passes",
        "on_before_optimizer_step": "passes",
        "on_train_batch_end": "update",
    }

    def __init__(
        self,
        rounds: int,
        warm_up: int,
        timed: Mapping[str, OwnTime] | None = None,
        switch: Callable[[bool], None] = lambda on: None,
    ) -> None:
        if warm_up < 1:
            raise ValueError(
                f"Turns(warm_up) must be at least 1, got {warm_up}: all hooks are placed in the first step."
            )
        self.plan = [True] * warm_up + [on for i in range(rounds) for on in round_of(i)]
        self.counts = [False] * warm_up + [c for i in range(rounds) for c in counting(round_of(i)).tolist()]
        self.warm_up, self.timed, self.switch = warm_up, dict(timed or {}), switch
        self.steps: dict[str, list[float]] = {name: [] for name in ("wall", *self.PARTS, *self.timed)}
        self.by_hook: dict[str, dict[str, float]] = {name: defaultdict(float) for name in self.timed}
        self._step, self._is_on, self._mark, self._begin = 0, True, 0.0, 0.0
        self._parts = dict.fromkeys(self.PARTS, 0.0)
        self._others: list[L.Callback] | None = None
        self._last = L.Callback()  # behind all others
        for name, part in self.HOOKS.items():
            setattr(self, name, functools.partial(self._end_part, part))
            setattr(self._last, name, functools.partial(self._end_part, "hooks"))

    def _end_part(self, part: str, *args: Any) -> None:
        now = time.process_time()
        self._parts[part] += now - self._mark
        self._mark = now

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.callbacks[0] is not self:  # type: ignore[attr-defined]
            raise ValueError("Turns must be the first callback: what others have hooked in before it cannot be told.")
        if trainer.max_steps != len(self.plan):
            raise ValueError(f"Turns has a plan for max_steps={len(self.plan)}, the Trainer has {trainer.max_steps}.")
        # The one point between two steps: all of the last one is done, and the next one's batch is not yet fetched.
        loop = trainer.fit_loop.epoch_loop
        loop.on_iteration_done = functools.partial(self._between, trainer, loop.on_iteration_done)  # type: ignore[method-assign]
        strategy: Any = trainer.strategy
        strategy.training_step = functools.partial(self._forward, strategy.training_step)
        self._bare = Attached(trainer)

    def _forward(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_part("around")
        return training_step(*args, **kwargs)

    def _between(self, trainer: L.Trainer, done: Callable[[], None]) -> None:
        wall = time.perf_counter() - self._begin
        self._end_part("around")
        done()
        if self._others is None:  # the first step is over, so all have begun
            self._others = list(trainer.callbacks[1:])  # type: ignore[attr-defined]
            self._set_callbacks(trainer, on=True)
            self.switch(True)
        if self._step >= self.warm_up:
            self._record(wall)
        self._step += 1
        self._turn(trainer, on=self._step >= len(self.plan) or self.plan[self._step])
        self._parts = dict.fromkeys(self.PARTS, 0.0)
        self._before = {name: (dict(own.calls), dict(own.seconds)) for name, own in self.timed.items()}
        self._begin, self._mark = time.perf_counter(), time.process_time()

    def _record(self, wall: float) -> None:
        self.steps["wall"].append(wall)
        for part, seconds in self._parts.items():
            self.steps[part].append(seconds)
        for name, own in self.timed.items():
            calls, before = self._before[name]
            called = [hook for hook, n in own.calls.items() if n > calls.get(hook, 0)]
            if called and not self._is_on:
                raise RuntimeError(f"step {self._step} is off, and yet these were called in it: {', '.join(called)}.")
            seconds_of = {hook: own.seconds[hook] - before.get(hook, 0.0) for hook in called}
            self.steps[name].append(sum(seconds_of.values()))
            if self.counts[self._step]:
                for hook, seconds in seconds_of.items():
                    self.by_hook[name][hook] += seconds

    def _turn(self, trainer: L.Trainer, on: bool) -> None:
        if on == self._is_on:
            return
        now = Attached(trainer)
        if on:
            if now != self._bare:
                raise RuntimeError(f"a hook was added or removed while all was off, before step {self._step}.")
            self._all.restore()
        else:
            self._all = now  # some hooks are placed anew while training goes on
            self._bare.restore()
        self._set_callbacks(trainer, on)
        self.switch(on)
        self._is_on = on

    def _set_callbacks(self, trainer: L.Trainer, on: bool) -> None:
        # In place: Lightning may be running through the list.
        trainer.callbacks[:] = [self, *(self._others if on and self._others else []), self._last]  # type: ignore[attr-defined]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not self._is_on:
            self._all.restore()
            self._set_callbacks(trainer, on=True)  # they have something to close, and are called after this one


def round_of(number: int) -> list[bool]:
    """Which steps of a round are on: ``off on on off``, or, where ``number`` is odd, ``on off off on``."""
    first = bool(number % 2)
    return [on for on in (first, not first, not first, first) for _ in range(BLOCK)]


def counting(on: Sequence[bool]) -> BoolArray:
    """Which steps of a round count: all but the first ``SETTLE`` after a switch, of which one is just before the round.

    Example:
        >>> "".join("x" if counts else "." for counts in counting(round_of(0)))
        '..xxxx..xxxxxxxxxx..xxxx'
    """
    since, found = 0, []
    for i, now in enumerate(on):
        since = since + 1 if i and on[i - 1] == now else 0
        found.append(since >= SETTLE)
    return np.array(found)


def trimmed_mean(values: FloatArray, share: float = 0.1) -> float:
    """Mean without the largest and the smallest ``share`` of the values.

    Example:
        >>> trimmed_mean(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 99.0]))
        1.5
    """
    ordered = np.sort(values)
    cut = int(share * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def median_interval(
    values: FloatArray, resamples: int = 10_000, seed: int = 0, runs: Sequence[int] = ()
) -> tuple[float, tuple[float, float]]:
    """Median and its 95 % bootstrap percentile interval.

    ``runs``: lengths of the runs from which the values come, one after the other. What differs from run to run, such as
    where the memory lies, is shared by a run's values: with several, runs are drawn first and then values within each.

    Example:
        >>> median, (low, high) = median_interval(np.array([1.0, 1.1, 0.9, 1.0, 1.05, 0.95]))
        >>> median, low <= median <= high
        (1.0, True)
    """
    rng = np.random.default_rng(seed)
    if len(runs) > 1:
        parts = np.split(values, np.cumsum(runs)[:-1])
        drawn = [
            np.concatenate(
                [rng.choice(parts[i], size=len(parts[i])) for i in rng.integers(len(parts), size=len(parts))]
            )
            for _ in range(resamples)
        ]
        medians = np.array([np.median(d) for d in drawn])
    else:
        medians = np.median(rng.choice(values, size=(resamples, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), (float(low), float(high))
