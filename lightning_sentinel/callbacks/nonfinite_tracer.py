"""Names the first non-finite value of a step, by replaying the step before its update."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..context import RunContext
from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..record import StepRecord
from ..state import lightning_private as _private
from ..state.transfer import Transfer
from ..state.tree import local
from ..triage.armed import ArmedStep
from ..triage.nonfinite import TraceReport, first_bad_boundary, trace_nonfinite
from ..triage.origin import Range, is_bad
from ..triage.replay import ReplayUnavailableError, block_paths, outer_blocks, total_of
from ..triage.sandbox import REPLAYING
from ..triage.window import StepWindow, ensure_capture
from .base import SentinelCallback, find_callback

log = logging.getLogger("lightning_sentinel")

# Steps between two in which a value is looked for that reaches neither loss nor gradient: reading a layer's output once
# more costs a CPU as much as everything else that the suite does in a step.
ON_CPU_EVERY = 8
# Forwards between two after which it is looked for layers whose output is written over before the loss is known.
LEARN_EVERY = 16

_is_compiling = torch.compiler.is_compiling


class NonFiniteTracer(SentinelCallback):
    """On a non-finite loss or gradient, replays the step before the update and names what made the value.

    The replay has the same micro-batches, random states and weights as the step, and leaves no trace. It names operator,
    module, line, forward or backward, samples, micro-batch and rank, or says that a parameter, a buffer, the batch or the
    reduction between ranks brought the value in. Flags at module boundaries, kept on the device in normal steps, name the
    module of a value that does not come again. A flag whose value reaches neither loss nor gradient is an alarm.

    Under :class:`~lightning_sentinel.IncidentResponse` the triage asks for the trace; with only
    :class:`~lightning_sentinel.RankTelemetry` it is made as soon as a record shows a non-finite value.

    Example:
        >>> from lightning_sentinel import NonFiniteTracer
        >>> NonFiniteTracer(boundaries=["layers.*"], every_n=10).every_n
        10

    Journalled: ``triage.nonfinite`` (see :class:`~lightning_sentinel.triage.nonfinite.TraceReport`),
    ``triage.nonfinite_state`` for each non-finite parameter or buffer found before the first step, ``triage.anomaly`` for
    each armed step, and as ``finding`` (``nonfinite_activation``, an alarm, in the journal of the rank that saw it) the
    first watched module whose output was not finite in a step whose loss and gradients are. It is stated once for as long
    as the same module stays the first in the flagged steps. Nothing is logged to the loggers.

    Args:
        boundaries: Modules whose outputs are flagged in normal steps: ``"auto"`` takes a model's layers, that is the
            elements of its outermost ``nn.ModuleList`` s (without one, the module's children); a list of shell-style
            patterns of ``named_modules()`` paths, such as ``["layers.*"]`` for the layers and all that is in them, says
            more of a value that does not come again, at one more sum over an output for each; an empty list turns the
            flags off. What comes again on a replay is traced to its operator in any case.
        every_n: Flag every so many steps; None: in every step on an accelerator, in every eighth on the CPU. There a step
            in between is flagged, too, if its loss is not finite: outputs are kept until it is known. On the CPU the flags
            are read in the same step, elsewhere one step later.
        anomaly: Run the replay under autograd's anomaly mode: the report then has the forward's traceback of a
            non-finite backward (slower).
        max_traces: At most so many traces in one fit without an ``IncidentResponse``, and so many armed steps.
        replay: Compute the step again. Without it nothing is replayed, neither by the triage; with ``anomaly`` the live
            step after a non-finite one is armed instead: anomaly mode notes its forward lines, and the first backward
            that gives a non-finite gradient is journalled with them. Nothing is raised and no value changes.
    """

    def __init__(
        self,
        boundaries: str | Sequence[str] = "auto",
        every_n: int | None = None,
        anomaly: bool = False,
        max_traces: int = 16,
        replay: bool = True,
    ) -> None:
        if isinstance(boundaries, str) and boundaries != "auto":
            raise ValueError(
                f"NonFiniteTracer: boundaries is {boundaries!r}, expected 'auto' or a list of module path patterns,"
                f" e.g. [{boundaries!r}]."
            )
        check_limits("NonFiniteTracer", locals())
        self.boundaries, self.every_n, self.anomaly, self.max_traces = boundaries, every_n, anomaly, max_traces
        self.replay = replay
        self.reports: list[TraceReport] = []
        self._traced: tuple[int, int] | None = None
        self._fit: tuple[Trainer, LightningModule, Optimizer | None] | None = None
        self._context: RunContext | None = None
        self._hooks: list[tuple[nn.Module, str, _Handle]] = []
        self._around = True  # whether a module that is compiled on its own may be among them
        self._within: list[tuple[nn.Module, str]] = []  # the layers' children
        self._deeper: list[_Handle] = []  # of one step, on these
        self._holds, self._every = False, 1
        self._holding = False  # in this forward
        self._anchor = False  # this step starts at a full snapshot, from which it may be computed again
        self._forget()

    def _forget(self) -> None:
        """State of one fit, as at its start."""
        self._taken: tuple[list[tuple[int, str, Tensor | float]] | None, int] = (None, 0)
        self._unread: deque[_Flags] = deque()
        self._in_record: deque[tuple[int, int]] = deque(maxlen=8)  # (attempt, step) whose record is not finite itself
        self._alarmed = ""  # the first bad boundary of the last flagged step
        self._held: list[_Held] = []  # outputs of a forward whose loss is not known yet
        self._overwritten: set[str] = set()  # paths whose output is changed in place before that
        self._forwards = 0  # whose outputs were held
        self._handles = -1  # hooks that torch had handed out when ours were last seen to be the last
        self._arm_next, self._armed_steps = False, 0
        self._armed: ArmedStep | None = None

    # ------------------------------------------------------------------------------------------------- life of a fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ensure_capture(trainer)
        self.reports, self._traced = [], None
        self._forget()
        self._fit, self._context = (trainer, pl_module, None), self.context(trainer)
        self._remove_hooks()
        modules = dict(pl_module.named_modules())
        paths = outer_blocks(pl_module) if self.boundaries == "auto" else block_paths(pl_module, self.boundaries)
        if not paths and self.boundaries and not isinstance(self.boundaries, str):
            log.warning(
                "NonFiniteTracer: no module matches boundaries=%s; the first module paths are %s.",
                list(self.boundaries),
                [p for p in modules if p][:5],
            )
        self._hooks = [(modules[p], p, self._register(modules[p], p)) for p in paths]
        if self.boundaries == "auto":
            self._within = [(modules[p], p) for p in block_paths(pl_module) if p not in paths]
        self._holds = trainer.strategy.root_device.type == "cpu"
        self._every = self.every_n or (ON_CPU_EVERY if self._holds else 1)
        if trainer.global_step == 0:
            self._scan_state(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_flags(trainer, everything=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._disarm()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._disarm()
        self._remove_hooks()
        self._fit = self._context = None

    def _remove_deeper(self) -> None:
        for handle in self._deeper:
            handle.remove()
        self._deeper = []

    def _remove_hooks(self) -> None:
        self._remove_deeper()
        for _, _, handle in self._hooks:
            handle.remove()
        self._hooks, self._within = [], []

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

    def _register(self, module: nn.Module, path: str) -> _Handle:
        if _private.is_compiled(module):
            return _private.AroundCompiled(module, self._flag(path))
        return module.register_forward_hook(self._flag(path))

    def _flag(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Inside a compiled region a flag would change the graph, and with it the numbers of the run.
            if _is_compiling() or not module.training:
                return
            if self._holding and type(output) is Tensor and path not in self._overwritten:
                self._held.append((path, output, output._version))
                return
            context = self._context
            if context is None or _private.in_backward():
                return
            window = context.window
            if window is None or context.scratch.get(REPLAYING):
                return
            due = self._due(window.step)
            if (due or self._holds) and (total := total_of(output)) is not None:
                if due:
                    window.boundary_flags.append((len(window.micro_batches) - 1, path, _at_hand(total)))
                else:
                    self._held.append((path, total, 0))

        return hook

    def _due(self, step: int) -> bool:
        return step % self._every == 0 or self._anchor

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if RemovableHandle.next_id != self._handles or self._around:
            self._be_last()
        if self._arm_next and self._opens_a_step(trainer):
            self._arm_next = False
            self._armed = ArmedStep()
            self._armed_steps += 1
        if self._armed is not None:
            self._armed.enable()
        step = trainer.global_step
        self._anchor = False
        for snapshot in self.context(trainer).snapshots:
            if snapshot.step == step and snapshot.params is not None:
                self._anchor = True
                self._look_deeper(pl_module)
        self._holding = self._holds and not self._due(step)

    def _be_last(self) -> None:
        """A hook that somebody registered later runs after ours and may change the output: be the last again."""
        for i, (module, path, handle) in enumerate(self._hooks):
            if isinstance(handle, _private.AroundCompiled):
                last = handle.in_place
            else:
                last = next(reversed(module._forward_hooks), None) == handle.id
            if not last:
                handle.remove()
                self._hooks[i] = (module, path, self._register(module, path))
        self._around = any(isinstance(handle, _private.AroundCompiled) for _, _, handle in self._hooks)
        self._handles = RemovableHandle.next_id

    def _look_deeper(self, module: LightningModule) -> None:
        """In a step that starts at a full snapshot also flag what lies within the blocks: it may be computed again.

        Not in compiled modules: another hook would have them compiled anew.
        """
        if self._deeper or self.boundaries != "auto" or _private.runs_compiled(module):
            return
        self._deeper = [self._register(inner, path) for inner, path in self._within]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._armed is not None:
            self._armed.watch(loss)
        self._holding = False  # what runs from here on is a recomputation, unless another loss follows
        if self._held:
            window, learn = self.context(trainer).window, self._forwards % LEARN_EVERY == 0
            self._forwards += 1
            finite = window is None or math.isfinite(loss.item())
            if learn or not finite:
                self._let_go(None if finite else window)
            self._held = []

    @torch.no_grad()
    def _let_go(self, window: StepWindow | None) -> None:
        """Look at the outputs that were held, and flag them in this window, where the loss they led to is not finite.

        Until here the graph holds them as well, so this takes no memory.
        """
        sound = []
        for entry in self._held:
            path, output, version = entry
            if output._version == version:
                sound.append(entry)
            else:
                self._overwritten.add(path)  # what it was is gone: from now on it is flagged at once
        if window is None:
            return
        for path, output, _ in sound:
            total = total_of(output)
            if total is not None:
                window.boundary_flags.append((len(window.micro_batches) - 1, path, _at_hand(total)))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            self._holding = self._holds and not self._due(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._holding = False
        if self._armed is not None:
            self._armed.disable()  # until the step's next micro-batch
        self._held = []  # a loss that nobody announced
        if self._deeper:
            self._remove_deeper()
        if self._unread:
            self._read_flags(trainer)

    def _opens_a_step(self, trainer: Trainer) -> bool:
        """Whether the batch that starts now is the first of its optimizer step: the capture has not seen it yet."""
        window = self.context(trainer).window
        return window is None or (window.step, window.attempt) != (trainer.global_step, self.context(trainer).attempt)

    def _take_flags(self, window: StepWindow) -> None:
        """At the gate: reduce the step's flags to one value on the device, and let it be copied to the host."""
        known = self._taken[1] if self._taken[0] is window.boundary_flags else 0
        flags = window.boundary_flags[known:]
        self._taken = (window.boundary_flags, len(window.boundary_flags))
        if not flags:
            return
        bad: Transfer | bool = any(not math.isfinite(t) for _, _, t in flags if isinstance(t, float))
        elsewhere = [t.detach() for _, _, t in flags if isinstance(t, Tensor)]
        if elsewhere and not bad:
            device = elsewhere[0].device
            wide = any(total.dtype == torch.float64 for total in elsewhere)
            totals = torch.stack([t.to(device, torch.float64 if wide else torch.float32) for t in elsewhere])
            bad = Transfer(~totals.isfinite().all())
        if bad is False and not self._unread:
            self._alarmed = ""
            return
        samples = [m.sample_ids for m in window.micro_batches]
        self._unread.append(_Flags(window.step, window.attempt, flags, samples, bad))

    def _read_flags(self, trainer: Trainer, everything: bool = False) -> None:
        """Read what lies on the host, and elsewhere what is a step old: the device is done with that."""
        while self._unread and (everything or isinstance(self._unread[0].bad, bool) or len(self._unread) > 1):
            taken = self._unread.popleft()
            if not (taken.bad if isinstance(taken.bad, bool) else bool(taken.bad.read())):
                self._alarmed = ""
            elif (taken.attempt, taken.step) not in self._in_record:
                self._alarm(trainer, taken)

    def _alarm(self, trainer: Trainer, taken: _Flags) -> None:
        bad = [(micro_batch, path) for micro_batch, path, t in taken.flags if not math.isfinite(float(t))]
        micro_batch, path = bad[0]
        if path == self._alarmed:
            return
        self._alarmed = path
        samples = taken.samples[micro_batch] if micro_batch < len(taken.samples) else ()
        several = trainer.world_size > 1
        finding = Finding(
            kind=FindingKind.NONFINITE_ACTIVATION,
            detector="nonfinite_tracer",
            step=taken.step,
            score=float(len(bad)),
            threshold=0.0,
            unit="boundaries",
            severity=Severity.ALARM,
            message=(
                f"The output of {path}{f' on rank {trainer.global_rank}' if several else ''} is not finite at step"
                f" {taken.step}, the first of {len(bad)} such among {len(taken.flags)} watched outputs; loss and gradients"
                " are finite, so a mask or a branch hides it. If it is meant to be so, leave the module out of boundaries."
            ),
            ranks=(trainer.global_rank,) if several else (),
            culprits=(f"module:{path}",),
            evidence={
                "micro_batch": micro_batch,
                "boundaries": list(dict.fromkeys(p for _, p in bad))[:8],
                "samples": list(samples)[:64],
            },
        )
        context = self.context(trainer)
        context.journal.write(
            "finding", step=taken.step, attempt=taken.attempt, tokens=context.tokens, finding=finding.to_dict()
        )
        log.warning(finding.message)

    # --------------------------------------------------------------------------------------------- the armed live step

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.disable()
            self._armed = None

    def _finish_armed_step(self, trainer: Trainer, armed: ArmedStep) -> None:
        """At the gate of the armed step: journal the first backward that was not finite, with its forward's lines."""
        self._armed = None
        armed.disable()
        origin = armed.first()
        if origin is None:
            message = "Every gradient of the armed step was finite."
            self.context(trainer).write(trainer, "triage.anomaly", found=False, message=message)
            return
        window = self.context(trainer).window
        # A value made in the forward meets the backward near the loss; the boundaries are nearer to where it was made.
        _, boundary = (first_bad_boundary(window) if window is not None else None) or (0, "")
        message = f"The backward of {origin.node} gave a non-finite gradient; its forward ran in: " + (
            " | ".join(origin.lines[-3:]) or "no line of the user's code"
        )
        self.context(trainer).write(
            trainer,
            "triage.anomaly",
            found=True,
            node=origin.node,
            lines=list(origin.lines),
            micro_batch=origin.micro_batch,
            boundary=boundary,
            message=message,
        )
        log.warning(message)

    # ------------------------------------------------------------------------------------------------------ the trace

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._fit = (trainer, pl_module, optimizer)
        self._holding = False  # a replay is no forward of the run
        context = self.context(trainer)
        if context.window is not None and context.window.boundary_flags:
            self._take_flags(context.window)
        if self._armed is not None:
            self._finish_armed_step(trainer, self._armed)
        record = context.record
        if record is not None and (record.step, record.attempt) == (trainer.global_step, context.attempt):
            # RankTelemetry stands before us in the Trainer and has asked already, without an optimizer
            self.observe(record)

    def observe(self, record: StepRecord) -> list[Finding]:
        """Trace at once where nobody else will ask for it. States nothing: the record's own findings stand."""
        if self._fit is None:
            return []
        trainer, module, optimizer = self._fit
        window = self.context(trainer).window
        if window is not None and window.boundary_flags:
            self._take_flags(window)  # before a healthy step's flags are let go
        if not record.has_nonfinite:
            return []
        from .incident_response import IncidentResponse

        self._in_record.append((record.attempt, record.step))
        if not self.replay:
            self._arm_next = self.anomaly and self._armed_steps < self.max_traces
            return []
        if optimizer is None:
            return []
        key = (record.attempt, record.step)
        window = self.context(trainer).window
        if window is not None and window.step != record.step:
            return []  # read one step later: what could be replayed is the next step
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
        watch: Sequence[str] = (),
    ) -> TraceReport:
        """Replay the current step and name its first non-finite value. Every rank calls it alike."""
        if not self.replay:
            raise ReplayUnavailableError("this NonFiniteTracer was told not to replay (replay=False).")
        report = trace_nonfinite(
            trainer, module, optimizer, record, anomaly=self.anomaly, max_forwards=max_forwards, watch=watch
        )
        self.reports.append(report)
        return report


_Handle = RemovableHandle | _private.AroundCompiled
_Held = tuple[str, Tensor, int]  # module path, output or its sum, and its version then


@dataclass
class _Flags:
    """One step's flags between the gate and the time when they are read."""

    step: int
    attempt: int
    flags: list[tuple[int, str, Tensor | float]]
    samples: list[tuple[str, ...]]  # ids by micro-batch
    bad: Transfer | bool  # whether any flag is not finite, on its way where they lie on a device


def _at_hand(total: Tensor) -> Tensor | float:
    """The number itself where reading it does not wait for a device."""
    return total.item() if total.device.type == "cpu" else total
