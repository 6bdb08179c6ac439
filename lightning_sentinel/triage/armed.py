"""One live step under autograd's anomaly mode, for its forward lines, without the error that anomaly mode would raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .origin import forward_lines
from .window import tensors


@dataclass(frozen=True)
class BackwardOrigin:
    """The first autograd node of a step whose backward gave a non-finite gradient.

    Attributes:
        node: Name of the node, e.g. ``SqrtBackward0``.
        lines: The user's lines of the forward that made it, outermost first.
        micro_batch: Index of the micro-batch within the step.
    """

    node: str
    lines: tuple[str, ...]
    micro_batch: int


class ArmedStep:
    """Anomaly mode notes the forward lines of each node; a hook on each node notes whether its gradient is finite.

    Neither changes a value. The flags stay on the device until :meth:`first` reads them.
    """

    def __init__(self) -> None:
        self._before: tuple[bool, bool] | None = None
        self._backwards = 0
        self._seen: list[tuple[str, dict[str, Any], int, Tensor]] = []

    def enable(self) -> None:
        """From here on the forward's lines are noted."""
        if self._before is None:
            self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=False)

    def disable(self) -> None:
        if self._before is not None:
            torch.autograd.set_detect_anomaly(*self._before)
            self._before = None

    def watch(self, loss: Tensor) -> None:
        """Hook every node of this loss's graph; the hooks go with the graph."""
        seen: set[Any] = set()
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name() != "torch::autograd::AccumulateGrad":
                metadata: Any = node.metadata  # a dict; its stub says a method
                node.register_hook(self._look(node.name(), metadata, self._backwards))
            waiting += [following for following, _ in node.next_functions]
        self._backwards += 1

    def _look(self, name: str, metadata: dict[str, Any], micro_batch: int) -> Callable[..., None]:
        def look(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            flags = [~g.detach().isfinite().all() for g in tensors(grad_inputs) if g.is_floating_point()]
            if flags:
                bad = flags[0] if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).any()
                self._seen.append((name, metadata, micro_batch, bad))

        return look

    def first(self) -> BackwardOrigin | None:
        """The first node, in the order of the backward, that gave a non-finite gradient."""
        for name, metadata, micro_batch, bad in self._seen:
            if bool(bad):
                return BackwardOrigin(name, forward_lines(metadata), micro_batch)
        return None
