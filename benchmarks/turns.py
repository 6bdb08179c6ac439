"""Trainers of one process that take turns, so that what they cost can be compared while the machine is busy elsewhere.

Each *lane* is a Trainer in a thread of its own. Exactly one lane runs at any time; it hands over at the beginning of a
step, after a block of steps. What a block took is compared only with its neighbour in time.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


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
        more = ("_before_batch", "_after_batch", *(("setup",) if start else ()))
        for callback in suite:
            for name in (*(n for n in dir(callback) if n.startswith("on_")), *more):
                self._time(callback, type(callback).__name__, name)
            if hasattr(callback, "_flag"):
                callback._flag = self._timed_flags(callback._flag)
            if hasattr(callback, "actuator"):
                for name in ("_before_step", "_after_step"):
                    self._time(callback.actuator, "Actuator", name)

    def _timed_flags(self, make: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda path: self.own.timed("NonFiniteTracer.layers", make(path))

    def _time(self, owner: Any, label: str, name: str) -> None:
        method = getattr(owner, name, None)
        inherited = getattr(L.Callback, name, None)
        if callable(method) and getattr(type(owner), name, None) is not inherited:
            setattr(owner, name, self.own.timed(f"{label}.{name}", method))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        captured = vars(strategy).get("on_train_batch_start")
        if captured is not None:
            strategy.on_train_batch_start = self.own.timed("StepCapture", captured)  # type: ignore[method-assign]


class Lane:
    """One Trainer with what makes it different from the others.

    Attributes:
        name: How it is called in the table.
        wall: Wall seconds of each step that counts, a list for each block.
        cpu: Processor seconds of the process, likewise.
        own: Seconds inside instrumented code in each block, likewise (one number for a block).
    """

    def __init__(
        self,
        name: str,
        fit: Callable[[Lane], None],
        *,
        resume: Callable[[], None] = lambda: None,
        pause: Callable[[], None] = lambda: None,
        own: OwnTime | None = None,
        part: OwnTime | None = None,
    ) -> None:
        self.name, self.fit, self.resume, self.pause = name, fit, resume, pause
        self.own_time = own
        self.part_time = part  # of that, what is to be shown by itself
        self.wall: list[list[float]] = []
        self.cpu: list[list[float]] = []
        self.own: list[float] = []
        self.error: BaseException | None = None
        self._go = threading.Event()
        self._done = threading.Event()
        self._steps_left = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._mark: tuple[float, float] | None = None
        self.callback = _Turns(self)

    # ------------------------------------------------------------------------------------------- the conductor's side

    def run(self, steps: int, *, count: bool = True) -> None:
        """Let the lane make so many steps, and wait for it."""
        self.wall.append([])
        self.cpu.append([])
        before = self.own_time.total if self.own_time else 0.0
        self._steps_left = steps
        self._done.clear()
        if self._thread.ident is None:
            self._thread.start()
        self._go.set()
        self._done.wait()
        if self.error is not None:
            raise self.error
        self.own.append((self.own_time.total if self.own_time else 0.0) - before)
        if not count:
            self.wall.pop(), self.cpu.pop(), self.own.pop()

    def end(self) -> None:
        """Let the fit end."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._stop = True
            self._go.set()
            self._thread.join()

    # -------------------------------------------------------------------------------------------------- the lane's side

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._wait()
        try:
            self.fit(self)
            if not self._stop:
                raise RuntimeError(f"the Trainer of {self.name} ended after too few steps")
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    def _wait(self) -> None:
        self._go.wait()
        self._go.clear()
        if not self._stop:
            self.resume()

    def at_step_start(self) -> bool:
        """Called at the beginning of each step; True where the fit shall end."""
        wall, cpu = time.perf_counter(), time.process_time()
        if self._mark is not None:
            self.wall[-1].append(wall - self._mark[0])
            self.cpu[-1].append(cpu - self._mark[1])
            self._steps_left -= 1
        if self._steps_left <= 0:
            self.pause()
            self._done.set()
            self._wait()
        if self._stop:
            return True
        self._mark = (time.perf_counter(), time.process_time())
        return False


class _Turns(L.Callback):
    """First in the Trainer: a step lasts from the beginning of its batch to the beginning of the next one."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> int | None:
        if self.lane.at_step_start():
            trainer.should_stop = True
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1
            return -1
        return None


class Phases:
    """Processor seconds of the parts of a step, told by a callback before all others and one behind them.

    ``hooks``: in which Lightning runs through the callbacks, its own dispatch included; ``update``: from the gate to the end
    of the batch, with clipping and the optimizer. Forward and backward are left out: how fast they are depends more on where
    a Trainer's memory lies than on what its callbacks do.
    """

    HOOKS = (
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    )

    def __init__(self) -> None:
        self.hooks: list[float] = []
        self.update: list[float] = []
        self._mark = 0.0
        self.first, self.last = L.Callback(), L.Callback()
        for name in self.HOOKS:
            setattr(self.first, name, functools.partial(self._before, name))
            setattr(self.last, name, functools.partial(self._after, name))

    def _before(self, hook: str, *args: Any) -> None:
        now = time.process_time()
        if hook == "on_train_batch_start":
            self.hooks.append(0.0)
        elif hook == "on_train_batch_end":
            self.update.append(now - self._mark)
        self._mark = time.process_time()

    def _after(self, hook: str, *args: Any) -> None:
        self.hooks[-1] += time.process_time() - self._mark
        self._mark = time.process_time()


@contextmanager
def ended(lanes: Sequence[Lane]) -> Iterator[None]:
    """End all lanes, whatever happens."""
    try:
        yield
    finally:
        for lane in lanes:
            lane.end()


def in_pairs(bare: Lane, other: Lane, rounds: int, block: int) -> dict[str, FloatArray]:
    """Rounds of four blocks: ``bare other other bare``, and the other way round in every second one.

    What gets steadily slower or faster within a round favours neither.

    Returns:
        ``wall`` and ``cpu``: by round the ratio other / bare of the median step, ``[rounds]``; ``steps_bare`` and
        ``steps_other``: wall seconds of every step.
    """
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    for i in range(rounds):
        first = len(bare.wall), len(other.wall)
        one, two = (bare, other) if i % 2 else (other, bare)
        for lane in (one, two, two, one):
            lane.run(block)
        for name in ratios:
            here = [s for b in getattr(bare, name)[first[0] :] for s in b]
            there = [s for b in getattr(other, name)[first[1] :] for s in b]
            ratios[name].append(float(np.median(there) / np.median(here)))
    steps = {
        f"steps_{name}": np.array([s for b in lane.wall[-2 * rounds :] for s in b])
        for name, lane in (("bare", bare), ("other", other))
    }
    return {name: np.array(values) for name, values in ratios.items()} | steps


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
