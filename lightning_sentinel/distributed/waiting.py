"""Seconds that this rank has waited for other ranks, so that a slow rank is told from those that wait for it.

Under a data-parallel strategy every rank takes the same wall time for a step: the slow one computes, the others wait for
it where gradients are reduced. The engine's callback queue shows where that begins: what is queued when a backward pass
starts runs when its computing is done, before what DDP queues when its last bucket is full, which is to wait for the
reductions. From there to the end of the backward pass this rank waits.

On a host backend (gloo) these are wall seconds. On an accelerator the host runs ahead of the device and waits for nobody;
there the same two places are marked by events on the compute stream and read when they have passed, never waited for.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

_KEPT = 64  # marks not yet passed


class Waiting:
    """Collects the waiting of one rank between two gates.

    Args:
        device: Where the step is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds = 0.0
        self._computed: float | None = None
        self._mark: Any = None
        self._marks: list[tuple[Any, Any]] = []
        self._event: Any = None
        if device.type != "cpu":
            self._event = getattr(torch.get_device_module(device), "Event", None)

    def backward_begins(self, loss: Tensor) -> None:
        """``loss`` is what the backward pass starts from."""
        self._computed = self._mark = None
        if loss.requires_grad:
            register: Any = loss.register_hook
            register(self._queue)

    def _queue(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._computing_is_done)

    def _computing_is_done(self) -> None:
        self._computed = time.perf_counter()
        if self._event is not None:
            self._mark = self._event(enable_timing=True)
            self._mark.record()

    def backward_ended(self) -> None:
        if self._computed is None:
            return
        if self._event is None:
            self._seconds += time.perf_counter() - self._computed
        elif len(self._marks) < _KEPT:
            end = self._event(enable_timing=True)
            end.record()
            self._marks.append((self._mark, end))
        self._computed = self._mark = None

    def add(self, seconds: float) -> None:
        """Waiting that was seen elsewhere, such as in the suite's own gather."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds since the last call; device time is counted once it has passed, at the earliest one step later."""
        seconds, self._seconds = self._seconds, 0.0
        while self._marks and self._marks[0][1].query():
            start, end = self._marks.pop(0)
            seconds += float(start.elapsed_time(end)) / 1e3
        return seconds
