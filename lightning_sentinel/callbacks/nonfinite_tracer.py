"""Names the first non-finite value of a step, by replaying the step before its update."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..incidents import Finding, FindingKind
from ..record import StepRecord
from ..state import lightning_private as _private
from ..triage.nonfinite import TraceReport, trace_nonfinite
from ..triage.origin import Range, is_bad
from ..triage.replay import ReplayUnavailableError, block_paths, local
from ..triage.sandbox import is_replaying
from ..triage.window import ensure_capture, tensors
from .base import SentinelCallback, find_callback

log = logging.getLogger("lightning_sentinel")


class NonFiniteTracer(SentinelCallback):
    """On a non-finite loss or gradient, replays the step before the update and names what made the value.

    The replay has the same micro-batches, random states and weights as the step, and leaves no trace. It names operator,
    module, line, forward or backward, samples, micro-batch and rank, or says that a parameter, a buffer, the batch or the
    reduction between ranks brought the value in. Flags at module boundaries, kept on the device in normal steps, name the
    module of a value that does not come again.

    Under :class:`~lightning_sentinel.IncidentResponse` the triage asks for the trace; with only
    :class:`~lightning_sentinel.RankTelemetry` it is made as soon as a record shows a non-finite value.

    Example:
        >>> from lightning_sentinel import NonFiniteTracer
        >>> NonFiniteTracer(boundaries=["layers.*"], every_n=10).every_n
        10

    Journalled: ``triage.nonfinite`` (see :class:`~lightning_sentinel.triage.nonfinite.TraceReport`), and
    ``triage.nonfinite_state`` for each non-finite parameter or buffer found before the first step. Nothing is logged.

    Args:
        boundaries: Modules whose outputs are flagged in normal steps: ``"auto"`` takes the elements of every
            ``nn.ModuleList`` and their direct children; a list of shell-style patterns of ``named_modules()`` paths; an empty
            list turns the flags off.
        every_n: Flag every so many steps.
        anomaly: Run the replay under autograd's anomaly mode: the report then has the forward's traceback of a
            non-finite backward (slower).
        max_traces: At most so many traces in one fit without an ``IncidentResponse``.
    """

    def __init__(
        self,
        boundaries: str | Sequence[str] = "auto",
        every_n: int = 1,
        anomaly: bool = False,
        max_traces: int = 16,
    ) -> None:
        if isinstance(boundaries, str) and boundaries != "auto":
            raise ValueError(
                f"NonFiniteTracer: boundaries is {boundaries!r}, expected 'auto' or a list of module path patterns,"
                f" e.g. [{boundaries!r}]."
            )
        if every_n < 1:
            raise ValueError(f"NonFiniteTracer: every_n is {every_n}, expected 1 or more.")
        if max_traces < 0:
            raise ValueError(f"NonFiniteTracer: max_traces is {max_traces}, expected 0 or more.")
        self.boundaries, self.every_n, self.anomaly, self.max_traces = boundaries, every_n, anomaly, max_traces
        self.reports: list[TraceReport] = []
        self._traced: tuple[int, int] | None = None
        self._fit: tuple[Trainer, LightningModule, Optimizer | None] | None = None
        self._hooks: list[tuple[nn.Module, str, RemovableHandle]] = []

    # ------------------------------------------------------------------------------------------------- life of a fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ensure_capture(trainer)
        self.reports, self._traced = [], None
        self._fit = (trainer, pl_module, None)
        self._remove_hooks()
        modules = dict(pl_module.named_modules())
        paths = block_paths(pl_module, self.boundaries)
        if not paths and self.boundaries and not isinstance(self.boundaries, str):
            log.warning(
                "NonFiniteTracer: no module matches boundaries=%s; the first module paths are %s.",
                list(self.boundaries),
                [p for p in modules if p][:5],
            )
        self._hooks = [(modules[p], p, self._register(modules[p], p)) for p in paths]
        if trainer.global_step == 0:
            self._scan_state(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_hooks()
        self._fit = None

    def _remove_hooks(self) -> None:
        for _, _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    @torch.no_grad()
    def _scan_state(self, trainer: Trainer, module: LightningModule) -> None:
        """Non-finite parameters and buffers before training starts. A buffer of plain infinities is taken for a mask."""
        named = [("parameter", n, local(p)) for n, p in module.named_parameters()]
        named += [("buffer", n, local(b)) for n, b in module.named_buffers()]
        findings = self.context(trainer).scratch.setdefault("start_findings", [])
        for kind, name, tensor in named:
            if not is_bad(tensor) or (kind == "buffer" and not bool(tensor.isnan().any())):
                continue
            seen = Range.of(tensor)
            message = (
                f"The {kind} {name} holds {seen.nonfinite} non-finite of {seen.numel} values before the first step;"
                " expected none. Check its initialisation, or the checkpoint it was loaded from."
            )
            findings.append(
                Finding(
                    kind=FindingKind.NONFINITE_STATE,
                    detector="nonfinite_tracer",
                    step=trainer.global_step,
                    score=float(seen.nonfinite),
                    threshold=0.0,
                    unit="values",
                    message=message,
                    ranks=(trainer.global_rank,) if trainer.world_size > 1 else (),
                    culprits=(f"{kind}:{name}",),
                )
            )
            self.context(trainer).write(
                trainer, "triage.nonfinite_state", kind=kind, name=name, nonfinite=seen.nonfinite, numel=seen.numel
            )
            log.warning(message)

    # ---------------------------------------------------------------------------------------- flags at the boundaries

    def _register(self, module: nn.Module, path: str) -> RemovableHandle:
        return module.register_forward_hook(self._flag(path))

    def _flag(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Inside a compiled region a flag would change the graph, and with it the numbers of the run.
            if torch.compiler.is_compiling() or not module.training or self._fit is None or _private.in_backward():
                return
            trainer = self._fit[0]
            window = self.context(trainer).window
            if window is None or is_replaying(trainer) or window.step % self.every_n:
                return
            total = _total(output)
            if total is not None:
                window.boundary_flags.append((len(window.micro_batches) - 1, path, total))

        return hook

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # A hook that somebody registered later runs after ours and may change the output: be the last again.
        for i, (module, path, handle) in enumerate(self._hooks):
            if next(reversed(module._forward_hooks)) != handle.id:
                handle.remove()
                self._hooks[i] = (module, path, self._register(module, path))

    # ------------------------------------------------------------------------------------------------------ the trace

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._fit = (trainer, pl_module, optimizer)
        record = self.context(trainer).record
        if record is not None and (record.step, record.attempt) == (trainer.global_step, self.context(trainer).attempt):
            self.observe(
                record
            )  # RankTelemetry stands before us in the Trainer and has asked already, without an optimizer

    def observe(self, record: StepRecord) -> list[Finding]:
        """Trace at once where nobody else will ask for it. States nothing: the record's own findings stand."""
        from .incident_response import IncidentResponse

        if self._fit is None or not record.has_nonfinite:
            return []
        trainer, module, optimizer = self._fit
        if optimizer is None:
            return []
        key = (record.attempt, record.step)
        if self._traced == key or len(self.reports) >= self.max_traces or find_callback(trainer, IncidentResponse):
            return []
        self._traced = key
        try:
            self.trace(trainer, module, optimizer, record)
        except ReplayUnavailableError as error:
            log.warning("NonFiniteTracer cannot replay step %d: %s", record.step, error)
        return []

    def trace(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        record: StepRecord | None = None,
        *,
        max_forwards: int | None = None,
    ) -> TraceReport:
        """Replay the current step and name its first non-finite value. Every rank calls it alike."""
        report = trace_nonfinite(trainer, module, optimizer, record, anomaly=self.anomaly, max_forwards=max_forwards)
        self.reports.append(report)
        return report


def _total(output: Any) -> Tensor | None:
    """Sum over a module's floating-point outputs in float32 or wider: not finite where any of them is not."""
    total: Tensor | None = None
    for out in tensors(output):
        if out.is_floating_point() and out.numel():
            part = out.detach().sum(dtype=torch.promote_types(out.dtype, torch.float32))
            total = part if total is None else total + part
    return total
