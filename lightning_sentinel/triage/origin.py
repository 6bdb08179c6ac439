"""Follows every non-finite value of an armed replay back to the operator that made it from finite ones.

A dispatch mode sees each operator of forward and backward. What is non-finite and came from non-finite inputs inherits their
origin; what came from finite inputs is one. At the end only those count that *reached* the loss or a gradient: a mask of
``-inf`` that a softmax turns into zeros is intended, and is an origin only where an operator turns it into NaN.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..state import lightning_private as _private
from .window import tensors

TRAINING_STEP = "training_step"
ROWS_WITHIN = 4  # operators after the origin: the first batch-major result among them tells the samples
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_SKIPPED_FILES = ("site-packages", "dist-packages", "lightning_sentinel/triage")


def is_bad(tensor: Tensor) -> bool:
    """True if a real floating-point tensor holds a NaN or an infinity."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.is_sparse or tensor.is_quantized:
        return False
    return not bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class Range:
    """Values of one tensor: how many are not finite, and the range of the rest."""

    shape: tuple[int, ...]
    dtype: str
    nonfinite: int
    numel: int
    finite_min: float | None
    finite_max: float | None

    @classmethod
    def of(cls, tensor: Tensor) -> Range:
        finite = torch.isfinite(tensor)
        rest = tensor.detach()[finite]
        low, high = (rest.min().item(), rest.max().item()) if rest.numel() else (None, None)
        return cls(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nonfinite=tensor.numel() - int(finite.sum()),
            numel=tensor.numel(),
            finite_min=low,
            finite_max=high,
        )


@dataclass
class Origin:
    """Where a non-finite value came from.

    Attributes:
        kind: ``operator``, ``batch``, ``parameter``, ``buffer``, ``constant`` (a non-finite value that no operator of this
            step made) or ``collective`` (it came from another rank).
        name: The operator, or the name of the parameter, buffer or batch entry.
        module: Path of the module whose call made it; ``training_step`` outside any module.
        phase: ``before the step``, ``forward`` or ``backward, <autograd node>``.
        line: ``function:line`` of the user's code; for a backward the line of its forward.
        micro_batch: Index of the micro-batch.
        rows: Samples of the micro-batch that are not finite, by position; empty where that is all of them, None where it
            cannot be told.
        value: The tensor that was made.
        inputs: The operator's floating-point inputs.
        intended: An explicit infinity, such as a mask; an origin only where it becomes NaN.
        order: Position among all operators of the replay.
        reached: ``loss`` or ``gradient``: what it was followed back from.
        traceback: With anomaly mode and for a backward: the user's lines of the forward, outermost first.
    """

    kind: str
    name: str
    module: str = ""
    phase: str = "before the step"
    line: str = ""
    micro_batch: int = 0
    rows: tuple[int, ...] | None = None
    value: Range | None = None
    inputs: tuple[Range, ...] = ()
    intended: bool = False
    order: int = 0
    reached: str = ""
    traceback: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def overflowed(self) -> bool:
        """Whether finite inputs left the range of the result's dtype."""
        return self.value is not None and self.kind == "operator" and all(r.nonfinite == 0 for r in self.inputs)


@dataclass
class OriginTrace:
    """Arms the tracing for the replays inside its ``with``.

    Args:
        module: The module whose parameters and buffers are looked at.
        scopes: Paths of the modules whose call is running, innermost last (kept by the sandbox).
    """

    module: LightningModule
    scopes: list[str]
    origins: dict[int, Origin] = field(default_factory=dict)
    given: list[Origin] = field(default_factory=list)
    micro_batch: int = 0
    batch_size: int = 0

    def __post_init__(self) -> None:
        self._mode = _Mode(self)
        self._entered = False
        self._count = 0
        self._parameter_shapes = {tuple(p.shape) for p in self.module.parameters()}
        self._forward_of: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> OriginTrace:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._entered = False
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching; :meth:`first` may be asked afterwards."""
        self.__exit__(None, None, None)

    # ------------------------------------------------------------- values that no operator of this step has made

    def enter_state(self) -> None:
        """Look at the parameters and buffers that the step starts from."""
        self._outside("parameter", self.module.named_parameters())
        self._outside("buffer", self.module.named_buffers())

    def enter_batch(self, batch: Any, index: int) -> None:
        """Look at one micro-batch before it is used."""
        self.micro_batch = index
        found = tensors(batch)
        self.batch_size = next((int(t.shape[0]) for t in found if t.dim()), 0)
        named = batch.items() if isinstance(batch, dict) else enumerate(found)
        self._outside("batch", ((str(n), t) for n, value in named for t in tensors(value)))

    def _outside(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            value = getattr(tensor, "_local_tensor", tensor)
            if not is_bad(value):
                continue
            constant = kind == "buffer" and not bool(value.isnan().any())  # a registered mask of -inf
            rows = self.bad_rows(value) if kind == "batch" else None
            origin = Origin(
                kind, name, micro_batch=self.micro_batch, rows=rows, value=Range.of(value), intended=constant
            )
            self.origins[_key(value)] = origin
            if not constant:
                self.given.append(origin)

    def bad_rows(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Rows of a batch-major tensor that are not finite, empty if all are; None for a tensor of another layout."""
        size = self.batch_size
        if not tensor.dim() or not size or tensor.shape[0] % size or not tensor.is_floating_point():
            return None
        if tensor.shape[0] != size and tuple(tensor.shape) in self._parameter_shapes:
            return None  # more likely the gradient of a parameter
        rows = (~torch.isfinite(tensor.detach())).reshape(size, -1).any(1).nonzero().flatten().tolist()
        return tuple(rows) if len(rows) < size else ()

    # --------------------------------------------------------------------------------------------- one operator

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, entering: list[Tensor] | None) -> None:
        """One operator has run. ``entering``: its non-finite inputs, where it may have overwritten them."""
        self._count += 1
        here = self._here()
        if here[2] == "forward":
            # The autograd node of this operator was just made: its number leads the backward to module and line.
            self._forward_of.setdefault(_private.next_node_number() - 1, here[:2])
        if "empty" in str(func) or "copy_in" in str(func):
            return  # memory that is not written yet
        collective = func.namespace in _COLLECTIVES
        inputs = tensors((args, kwargs))
        bad = entering
        for out in tensors((result, _written(func, args, kwargs))):
            if collective or is_bad(out):
                if bad is None:
                    bad = [t for t in inputs if is_bad(t)]
                origin = self._origin_of(func, out, bad, here, collective, inputs, (args, kwargs))
                self.origins[_key(out)] = origin
                fresh = self._count - origin.order <= ROWS_WITHIN
                if not collective and origin.rows is None and fresh and origin.kind in ("operator", "constant"):
                    origin.rows = self.bad_rows(out)
            elif all(_key(out) != _key(t) for t in inputs):
                self.origins.pop(_key(out), None)  # an address that is used again

    def _here(self) -> tuple[str, str, str]:
        """Module, line and phase of the operator that has just run."""
        node = _private.running_node()
        recomputed = torch.is_grad_enabled()  # only a checkpoint records a graph while a backward runs
        if node is not None and not recomputed:
            module, line = self._forward_of.get(_private.node_number(node), ("", ""))
            return module, line, f"backward, {node.name()}"
        if _private.in_backward() and not recomputed:
            return "", "", "backward, callback"
        return self.scopes[-1] if self.scopes else TRAINING_STEP, _user_line(), "forward"

    def _origin_of(
        self,
        func: Any,
        out: Tensor,
        bad: list[Tensor],
        here: tuple[str, str, str],
        collective: bool,
        inputs: list[Tensor],
        arguments: Any,
    ) -> Origin:
        parents = [self.origins[_key(t)] for t in bad if _key(t) in self.origins]
        culprit = next((o for o in parents if not o.intended), None)
        if culprit is not None:
            return culprit
        nan = not collective and bool(out.isnan().any())
        if parents and not nan:
            return parents[0]
        unexplained = bool(bad) and not parents
        if unexplained and _key(out) in self.origins:
            return self.origins[_key(out)]
        module, line, phase = here
        explicit = any(isinstance(a, float) and not math.isfinite(a) for a in tree_leaves(arguments))
        if collective:
            kind, intended = "collective", False
        elif unexplained:
            kind, intended = "constant", not nan
        else:
            kind, intended = "operator", explicit and not parents and not nan
        return Origin(
            kind,
            str(func),
            module=module,
            phase=phase,
            line=line,
            micro_batch=self.micro_batch,
            value=None if collective else Range.of(out),
            inputs=tuple(Range.of(t) for t in inputs if t.is_floating_point() and not t.is_meta)[:4],
            intended=intended,
            order=self._count,
            traceback=_forward_traceback() if phase.startswith("backward") else (),
        )

    # ------------------------------------------------------------------------------------------------- the result

    def first(self, losses_and_grads: Sequence[Tensor], grads: Sequence[Tensor]) -> Origin | None:
        """The first origin that reached the loss or a gradient.

        A non-finite value that came from outside the step (batch, parameter, buffer) counts where nothing else explains
        the loss.
        """
        gradient_keys = {_key(g) for g in grads}
        found: list[Origin] = []
        for tensor in losses_and_grads:
            if is_bad(tensor) and _key(tensor) in self.origins:
                origin = self.origins[_key(tensor)]
                origin.reached = origin.reached or ("gradient" if _key(tensor) in gradient_keys else "loss")
                found.append(origin)
        own = [o for o in found if o.kind != "collective"]
        if own:
            return min(own, key=lambda o: o.order)
        if self.given and (found or any(is_bad(t) for t in losses_and_grads)):
            return self.given[0]
        return found[0] if found else None


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: OriginTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        entering = None
        if func._schema.is_mutable or func.namespace in _COLLECTIVES:
            entering = [t for t in tensors((args, kwargs)) if is_bad(t)]  # it may overwrite them
        result = func(*args, **kwargs)
        self.trace.saw(func, args, kwargs, result, entering)
        return result


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that the operator writes into: some return nothing."""
    return [
        args[i] if i < len(args) else kwargs.get(a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]


def _user_line() -> str:
    """``function:line`` of the innermost frame outside torch, Lightning and triage."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _SKIPPED_FILES):
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}:{frame.f_lineno}"


def _forward_traceback() -> tuple[str, ...]:
    """The user's lines that made the autograd node that runs now, as anomaly mode has noted them."""
    node = _private.running_node()
    return forward_lines(node.metadata if node is not None else {})


def forward_lines(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The user's lines among those that anomaly mode has put into an autograd node's metadata, outermost first."""
    frames = metadata.get("traceback_", [])
    lines = [f.strip().replace("\n", " ") for f in frames]
    return tuple(line for line in lines if not any(part in line for part in _SKIPPED_FILES))[-8:]
