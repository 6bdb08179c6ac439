"""The ladder of experiments: cheapest first, each journalled, until one of them convicts.

Every rank climbs the same rungs: whatever is decided rests on gathered values, and an experiment that fails on one rank is
not available on any. A cause is named only where a measurement
leaves no other; otherwise the verdict is *undetermined*, with all that was measured.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..context import context_of
from ..incidents import Experiment, Finding, FindingKind, Incident, Verdict, VerdictKind
from ..record import StepRecord
from ..state import lightning_private as _private
from ..state.fingerprint import fingerprints, parted_ranks
from ..state.tree import local
from . import experiments as ex
from .nonfinite import (
    NOT_REPRODUCED,
    OPTIMIZER_STATE,
    REDUCTION,
    TraceReport,
    ids_of,
    trace_nonfinite,
    worst_micro_batches,
)
from .origin import is_bad
from .peers import Peers
from .replay import ReplayResult, ReplayUnavailableError, block_paths, replay
from .window import MicroBatch, StepWindow, healthy_windows, tensors

if TYPE_CHECKING:
    from ..state.snapshot import Snapshot

log = logging.getLogger("lightning_sentinel")
T = TypeVar("T")

DATA_FINDINGS = frozenset(
    {
        FindingKind.INVALID_BATCH,
        FindingKind.NO_SUPERVISED_TOKENS,
        FindingKind.REPEATED_SAMPLES,
        FindingKind.UNSEEN_SAMPLES,
    }
)
NONFINITE = frozenset(
    {
        FindingKind.NONFINITE_LOSS,
        FindingKind.NONFINITE_GRADS,
        FindingKind.NONFINITE_ACTIVATION,
        FindingKind.SCALE_COLLAPSE,
    }
)
HIGH, FINE = 0.5, 0.3  # shares of the jump: at least the one is "high", at most the other is "fine", between is neither


def investigate(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    incident: Incident,
    record: StepRecord,
    *,
    max_forwards: int = 12,
    max_seconds: float = 60.0,
) -> Verdict:
    """Find the cause of an incident at the gate of its step, before the update.

    Every rank calls it with the same incident and record, and gets the same verdict. Weights, gradients, random states,
    buffers, metrics, logs and data position are as before when it returns.

    Args:
        trainer: The Trainer.
        module: The LightningModule, not wrapped by the strategy.
        optimizer: The optimizer that is about to step.
        incident: What was found, and since when.
        record: The current step's record.
        max_forwards: At most so many forward passes (micro-batches) on each rank; 0 allows none.
        max_seconds: No further experiment starts after so many seconds, by the slowest rank's clock.
    """
    case = Investigation(trainer, module, optimizer, incident, record, max_forwards, max_seconds)
    return case.run()


class Investigation:
    """One incident's examination; each rung is a method that returns a verdict or None to climb on."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        incident: Incident,
        record: StepRecord,
        max_forwards: int,
        max_seconds: float,
    ) -> None:
        self.trainer, self.module, self.optimizer = trainer, module, optimizer
        self.incident, self.record = incident, record
        self.context, self.peers = context_of(trainer), Peers(trainer)
        self.max_forwards, self.max_seconds = max_forwards, max_seconds
        self.started, self.forwards = time.perf_counter(), 0
        self.experiments: list[Experiment] = []
        self.snapshots = self._common_snapshots()
        known = self._common_findings(incident.findings)
        self.findings: list[Finding] = [f for f in known if f.step == record.step] or known
        self.kinds = {f.kind for f in self.findings}
        self.collapse = min(
            (f.since_step for f in known if f.kind is FindingKind.SCALE_COLLAPSE), default=None
        )  # first overflow of the run of overflows that has brought the loss scale down
        self.since = min([f.since_step for f in self.findings] or [incident.since_step], default=record.step)
        self.since = min(self.since, record.step)
        self.watched = block_paths(module)
        self.main: ReplayResult | None = None
        self.trace: TraceReport | None = None
        losses = self._losses_by_rank()
        levels = [ex.level_before(column) for column in losses]
        self.base = np.array([level for level, _ in levels])
        self.noise = np.array([spread for _, spread in levels])
        self.jump = record.column("loss_nats") - self.base

    def _common_findings(self, mine: Sequence[Finding]) -> list[Finding]:
        """The findings of all ranks, each once, in rank order; one that only some ranks have names them."""
        if self.peers.size == 1:
            return list(mine)
        found: dict[str, tuple[Finding, list[int]]] = {}
        for rank, findings in enumerate(self.peers.gather(list(mine))):
            for finding in findings:
                key = json.dumps(finding.to_dict(), sort_keys=True, default=str)
                holders = found.setdefault(key, (finding, []))[1]
                if rank not in holders:
                    holders.append(rank)
        return [
            f if f.ranks or len(holders) == self.peers.size else dataclasses.replace(f, ranks=tuple(holders))
            for f, holders in found.values()
        ]

    def _common_snapshots(self) -> list[Snapshot]:
        """Snapshots with weights that every rank has and that are not newer than the record, oldest first."""
        own = {
            (s.step, s.attempt, s.known_good, s.mid_accumulation): s
            for s in self.context.snapshots
            if s.params is not None and s.step <= self.record.step
        }
        common = set.intersection(*map(set, self.peers.gather(list(own))))
        return [own[key] for key in sorted(common)]

    def _losses_by_rank(self) -> list[list[float]]:
        """Each rank's accepted losses before the incident, oldest first."""
        before = [r for r in self.context.history if r.step < self.since and r.world_size == self.record.world_size]
        return [[float(r.column("loss_nats")[rank]) for r in before] for rank in range(self.record.world_size)]

    # -------------------------------------------------------------------------------------------------- the ladder

    def run(self) -> Verdict:
        nonfinite = bool(self.kinds & NONFINITE) or self.record.has_nonfinite
        rungs: list[Callable[[], Verdict | None]] = [
            self.inputs,
            self.restart,
            self.stragglers,
            self.given_state,
            self.learning_rate,
            self.replicas,
            *([self.nonfinite] if nonfinite else [self.moments, self.weights, self.replay_step]),
            *([] if nonfinite else [self.sources, self.other_state]),
        ]
        verdict = None
        for rung in rungs:
            verdict = next((v for v in self.peers.gather(rung()) if v is not None), None)
            if verdict is not None:
                break
        if verdict is None:
            verdict = self.verdict(VerdictKind.UNDETERMINED, (), "No experiment convicted anybody.")
        evidence = {**verdict.evidence, "comparisons": self.comparisons(), "forwards": self.forwards}
        verdict = dataclasses.replace(verdict, experiments=tuple(self.experiments), evidence=evidence)
        return self.peers.from_first(verdict)

    def verdict(
        self,
        kind: VerdictKind,
        culprits: Iterable[str],
        sentence: str,
        *,
        since: int | None = None,
        reproducible: bool | None = None,
        samples: Iterable[str] = (),
        **evidence: Any,
    ) -> Verdict:
        since_step = self.since if since is None else since
        return Verdict(
            kind,
            tuple(dict.fromkeys(culprits)),
            sentence,
            min(since_step, self.record.step),
            reproducible,
            tuple(dict.fromkeys(samples)),
            evidence=evidence,
        )

    def note(self, name: str, result: str, /, **detail: Any) -> None:
        """Put one experiment down, in the verdict and in the journal."""
        self.experiments.append(Experiment(name, result, detail))
        self.context.write(
            self.trainer, "triage.experiment", incident=self.incident.number, name=name, result=result, detail=detail
        )

    def affords(self, forwards: int, name: str) -> bool:
        """Whether the budget covers so many more forward passes; all ranks decide alike."""
        mine = (self.forwards, -self.max_forwards, time.perf_counter() - self.started, -self.max_seconds)
        spent, least, seconds, shortest = (max(column) for column in zip(*self.peers.gather(mine), strict=True))
        fits = bool(spent + forwards <= -least and seconds < -shortest)
        if not fits:
            self.note(
                name,
                "not run: budget spent",
                forwards=self.forwards,
                max_forwards=self.max_forwards,
                seconds=round(seconds, 3),
                max_seconds=self.max_seconds,
            )
        return fits

    def measured(self, name: str, measure: Callable[[], T]) -> list[T] | None:
        """What ``measure`` gives on each rank; None on every rank, and put down, where it fails on any."""
        values, error = self.peers.measured(measure)
        if error:
            self.note(name, "not available", reason=error)
            return None
        return values

    def on(self, ranks: Sequence[int]) -> str:
        """`` on rank 1`` for a sentence; nothing where it holds for all ranks."""
        if not ranks or len(ranks) == self.peers.size:
            return ""
        return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def said(self, found: Sequence[Finding]) -> str:
        """The findings' own sentences, each once, with the ranks where only some have it."""
        said: dict[str, list[int]] = {}
        for f in found:
            said.setdefault(f.message, []).extend(f.ranks)
        sentences = []
        for message, ranks in said.items():
            where = self.on(sorted(set(ranks)))
            sentences.append(message if where.strip() in message else f"{message} (Only{where}.)")
        return " ".join(sentences[:4])

    # ------------------------------------------------------------------------------- 1: what is known without a look

    def inputs(self) -> Verdict | None:
        """What the batch validator found in the step's inputs."""
        found = [f for f in self.findings if f.kind in DATA_FINDINGS]
        if not found:
            self.note("inputs", "valid, as far as they are checked", samples=len(self.record.sample_ids))
            return None
        culprits = [c for f in found for c in f.culprits]
        samples = [c.removeprefix("sample:") for c in culprits if c.startswith("sample:")]
        since = min(f.since_step for f in found)
        kinds = sorted({str(f.kind) for f in found})
        self.note("inputs", "invalid", kinds=kinds, culprits=culprits[:32], since_step=since)
        if "cursor" in culprits:
            culprits, samples = ["cursor"], []
        sentence = self.said(found)
        return self.verdict(VerdictKind.DATA, culprits, sentence, since=since, samples=samples, kinds=kinds)

    def restart(self) -> Verdict | None:
        """What differs from the checkpoint after a restart."""
        found = [f for f in self.findings if f.kind is FindingKind.RESTART_JUMP]
        aligned = any(f.restart_aligned for f in self.findings)
        if not found:
            if aligned:
                self.note("restart", "near, nothing differs", restart_step=self.record.restart_step)
            return None
        culprits = [c for f in found for c in f.culprits]
        self.note("restart", "differs from the checkpoint", culprits=culprits, restart_step=self.record.restart_step)
        if "cursor" in culprits:
            kind, culprits = VerdictKind.DATA, ["cursor"]
        elif any(c == "scheduler" or c.startswith("optimizer:") for c in culprits):
            kind = VerdictKind.OPTIMIZATION
        else:
            kind = VerdictKind.UNDETERMINED
        sentence = self.said(found)
        since = min(f.since_step for f in found)
        return self.verdict(kind, culprits, sentence, since=since, restart_aligned=True)

    def stragglers(self) -> Verdict | None:
        """A rank that is only slow needs no experiment."""
        if not self.kinds or self.kinds - {FindingKind.STRAGGLER}:
            return None
        ranks = sorted({r for f in self.findings for r in f.ranks})
        self.note("step time", "slow ranks", ranks=ranks)
        sentence = " ".join(f.message for f in self.findings[:4])
        return self.verdict(VerdictKind.INFRASTRUCTURE, [f"rank:{r}" for r in ranks], sentence)

    def given_state(self) -> Verdict | None:
        """Parameters and buffers that were not finite before the first step."""
        found = [f for f in self.findings if f.kind is FindingKind.NONFINITE_STATE]
        if not found:
            return None
        culprits = [c for f in found for c in f.culprits]
        self.note("initial state", "not finite", culprits=culprits[:32])
        return self.verdict(VerdictKind.NUMERICS, culprits, found[0].message, since=0, reproducible=True)

    # -------------------------------------------------------------------------------------- 2: the plan and the state

    def learning_rate(self) -> Verdict | None:
        """The rates of the last steps against the schedule."""
        rates = list(self.context.rates)
        everyone = self.measured(
            "learning rate", lambda: (len(rates), ex.rate_off_plan(rates, self.since, self.record.step))
        )
        if everyone is None:
            return None
        guilty = [(rank, found) for rank, (_, found) in enumerate(everyone) if found is not None]
        if not guilty:
            known = all(steps for steps, _ in everyone)
            self.note("learning rate", "as planned" if known else "not recorded", steps=everyone[0][0])
            return None
        first = guilty[0][1]
        since, ranks = min(f.since_step for _, f in guilty), [rank for rank, _ in guilty]
        detail: dict[str, Any] = {
            "since_step": since,
            "last_step": first.last_step,
            "planned": list(first.planned),
            "actual": list(first.actual),
            "factor": first.factor,
            "ranks": ranks,
        }
        self.note("learning rate", "off plan", **detail)
        sentence = (
            f"From step {since} to {first.last_step} the learning rate{self.on(ranks)} was up to {first.factor:.4g} times"
            f" the planned one ({_first(first.actual):.4g} beside {_first(first.planned):.4g})."
        )
        return self.verdict(VerdictKind.OPTIMIZATION, ["optimizer:lr"], sentence, since=since, **detail)

    def _points(self) -> list[ex.StatePoint]:
        index = self.trainer.optimizers.index(self.optimizer)
        return ex.state_points(self.snapshots, self.optimizer, index, self.module, self.record.step)

    def _compared_with(self) -> list[int]:
        """Steps of the snapshots with which this optimizer's state can be compared."""
        if self.optimizer not in self.trainer.optimizers:
            return []
        return [s.step for s in self.snapshots if not s.mid_accumulation]

    def moments(self) -> Verdict | None:
        """Optimizer moments against those of the snapshot before, by what updates can have made of them."""
        if not self._compared_with():
            self.note("optimizer moments", "not compared: no snapshot from before")
            return None
        history = list(self.context.history)
        return self._convict_state(
            "optimizer moments", lambda: ex.impossible_moments(self._points(), self.optimizer, history)
        )

    def weights(self) -> Verdict | None:
        """Weights against those of the snapshot before, by how far updates can have moved them."""
        if not self._compared_with():
            return None
        rates = list(self.context.rates)
        return self._convict_state(
            "weights", lambda: ex.impossible_weights(self._points(), self.optimizer, self.module, rates)
        )

    def _convict_state(self, name: str, compare: Callable[[], ex.StateViolation | None]) -> Verdict | None:
        """The same verdict on every rank, from the first rank that found something; ``compare`` looks at this rank."""
        everyone = self.measured(name, compare)
        if everyone is None:
            return None
        guilty = [(rank, f) for rank, f in enumerate(everyone) if f is not None]
        if not guilty:
            self.note(name, "within what the updates allow", compared_with=self._compared_with())
            return None
        rank, violation = guilty[0]
        since, ranks = min(f.since_step for _, f in guilty), [r for r, _ in guilty]
        detail: dict[str, Any] = {
            "since_step": since,
            "elements": violation.elements,
            "numel": violation.numel,
            "ranks": ranks,
        }
        self.note(name, "impossible", name=violation.name, bound=violation.detail, **detail)
        sentence = (
            f"{violation.elements} elements of {violation.name}{self.on(ranks)} are out of bounds since the snapshot of"
            f" step {since}: {violation.detail}."
        )
        if name == "optimizer moments":
            return self.verdict(
                VerdictKind.OPTIMIZATION, [f"optimizer:{violation.name}"], sentence, since=since, **detail
            )
        culprits = [f"parameter:{violation.name}", f"rank:{rank}"]
        return self.verdict(VerdictKind.INFRASTRUCTURE, culprits, sentence, since=since, **detail)

    # --------------------------------------------------------------------------------------------- 3: non-finite values

    def nonfinite(self) -> Verdict | None:
        """Replay with the tracing armed."""
        window = self.context.window
        captured = self.peers.gather(window is not None and bool(window.micro_batches))
        if window is None or not all(captured) or not self.affords(1, "armed replay"):
            return self._not_replayed("The step could not be replayed.")
        try:
            trace = self._traced(self.max_forwards - self.forwards)
        except ReplayUnavailableError as error:
            self.note("armed replay", "not available", reason=str(error))
            return self._not_replayed(f"The step could not be replayed: {error}")
        self.trace = trace
        self.forwards += trace.forwards
        result = "reproduced" if trace.reproduced else "finite on replay"
        detail = {k: v for k, v in trace.to_dict().items() if k not in ("forwards", "traceback")}
        self.note("armed replay", result, **detail)
        return self._verdict_of_trace(trace, window)

    def _traced(self, forwards: int) -> TraceReport:
        from ..callbacks.base import find_callback
        from ..callbacks.nonfinite_tracer import NonFiniteTracer

        tracer = find_callback(self.trainer, NonFiniteTracer)
        if tracer is not None and not tracer.replay:
            raise ReplayUnavailableError("NonFiniteTracer was told not to replay (replay=False).")
        trace = trace_nonfinite if tracer is None else tracer.trace
        return trace(self.trainer, self.module, self.optimizer, self.record, max_forwards=forwards)

    def _verdict_of_trace(self, trace: TraceReport, window: StepWindow) -> Verdict:
        since, samples = self._affected(trace, window)
        where = {"operator": trace.name, "module": trace.module, "phase": trace.phase, "line": trace.line}
        match trace.kind:
            case "operator" | "constant":
                widened = self._widen(trace)
                culprits = [f"module:{trace.module}"]
                since, samples = self._with_earlier(culprits, since, samples)
                return self.verdict(
                    VerdictKind.NUMERICS,
                    culprits,
                    trace.sentence + widened,
                    since=since,
                    reproducible=True,
                    samples=samples,
                    ranks=list(trace.ranks),
                    value=trace.value,
                    inputs=trace.inputs,
                    **where,
                )
            case "batch":
                named = trace.samples or samples
                return self.verdict(
                    VerdictKind.DATA,
                    [f"sample:{s}" for s in named],
                    trace.sentence,
                    since=since,
                    reproducible=True,
                    samples=named,
                    entry=trace.name,
                )
            case "parameter" | "buffer":
                clean = self._newest_finite(trace.kind, trace.name)
                return self.verdict(
                    VerdictKind.NUMERICS,
                    [f"{trace.kind}:{trace.name}"],
                    trace.sentence,
                    since=since if clean is None else clean,
                    reproducible=True,
                    ranks=list(trace.ranks),
                )
            case _ if trace.kind == OPTIMIZER_STATE:
                key = trace.name.partition(" ")[0]
                return self.verdict(VerdictKind.OPTIMIZATION, [f"optimizer:{key}"], trace.sentence, reproducible=False)
            case _ if trace.kind == REDUCTION:
                return self.verdict(VerdictKind.NUMERICS, (), trace.sentence, since=since, reproducible=True, **where)
            case _:
                return self._not_reproduced(trace, samples)

    def _not_replayed(self, sentence: str) -> Verdict:
        since = self.since if self.collapse is None else min(self.since, self.collapse)
        samples = [] if self.collapse is None else self._samples_since(since)
        return self.verdict(VerdictKind.UNDETERMINED, (), sentence, since=since, samples=samples)

    def _collapse_not_reproduced(self, trace: TraceReport, since: int) -> Verdict:
        """Overflows that a replay of the last one does not show: many steps in a row are no fault of a rank's hardware."""
        since = min(since, self.since)
        module = [f"module:{trace.module}"] if trace.module else []
        return self.verdict(
            VerdictKind.NUMERICS if module else VerdictKind.UNDETERMINED,
            module,
            f"{trace.sentence} The gradients have overflowed in every step since step {since}, so it is no single event.",
            since=since,
            reproducible=False,
            samples=self._samples_since(since),
            phase=trace.phase,
        )

    def _samples_since(self, since: int) -> list[str]:
        """Ids of all ranks' samples in the non-finite steps from ``since`` on, this one included."""
        records = [r for r in self.context.history if r.has_nonfinite and since <= r.step < self.record.step]
        mine = [i for r in [*records, self.record] for i in r.sample_ids]
        return [i for ids in self.peers.gather(mine) for i in ids]

    def _not_reproduced(self, trace: TraceReport, samples: Sequence[str]) -> Verdict:
        if self.collapse is not None:
            return self._collapse_not_reproduced(trace, self.collapse)
        reasons = self._why_inexact()
        if reasons:
            self.note("replay fidelity", "the replay may differ from the step", reasons=reasons)
            sentence = f"{trace.sentence} The replay may differ from the step: {'; '.join(reasons)}."
            return self.verdict(VerdictKind.UNDETERMINED, (), sentence, reproducible=False, samples=samples)
        culprits = [f"module:{trace.module}"] if trace.module else []
        culprits += [f"rank:{r}" for r in trace.ranks]
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            culprits,
            trace.sentence,
            since=self.record.step,
            reproducible=False,
            phase=trace.phase,
        )

    def _why_inexact(self) -> list[str]:
        """Why a replay may differ from its step although nothing failed, on any rank."""
        window = self.context.window
        reasons = []
        if window is not None and any(m.changed_in_place for m in window.micro_batches):
            reasons.append("a batch was changed in place after its capture")
        if window is not None and self.trace is not None and self.trace.forwards < len(window.micro_batches):
            reasons.append("not all micro-batches were replayed")
        if any(m.__dict__.get("_compiled_call_impl") is not None for m in self.module.modules()) or getattr(
            self.module, "_compiler_ctx", None
        ):
            reasons.append("the step ran compiled, the replay did not")
        return sorted({reason for mine in self.peers.gather(reasons) for reason in mine})

    def _affected(self, trace: TraceReport, window: StepWindow) -> tuple[int, list[str]]:
        """First step of an unbroken run of non-finite steps that ends here, and the samples of all its windows."""
        steps = {r.step: r for r in self.context.history if r.has_nonfinite}
        since = self.record.step
        while since - 1 in steps:
            since -= 1
        since = min(since, self.since) if FindingKind.SCALE_COLLAPSE in self.kinds else since
        mine = [i for s, r in sorted(steps.items()) if s >= since for i in r.sample_ids]
        micro = window.micro_batches[trace.micro_batch] if trace.micro_batch < len(window.micro_batches) else None
        if trace.rank in (None, self.peers.rank) or self.peers.rank in trace.ranks:
            if trace.samples and self.peers.rank == trace.rank:
                mine += trace.samples
            elif micro is not None:
                mine += _ids_of(micro)
        samples = [i for ids in self.peers.gather(mine) for i in ids]
        if trace.samples and since == self.record.step:
            samples = [*trace.samples]
        return since, samples

    def _with_earlier(self, culprits: Sequence[str], since: int, samples: list[str]) -> tuple[int, list[str]]:
        """Steps of the same incident that were kept out of the history had the same cause: their samples count, too."""
        earlier = self.incident.verdict
        if earlier.kind is not VerdictKind.NUMERICS or not set(culprits) & set(earlier.culprits):
            return since, samples
        if _private.scaler_of(self.trainer) is not None and earlier.since_step is not None:
            since = min(since, earlier.since_step)  # each of these steps has lowered the loss scale
        return since, [*earlier.sample_ids, *samples]

    def _widen(self, trace: TraceReport) -> str:
        """Compute the step in float64: finite there means that a range was left, not that the values are undefined."""
        sharded = any(hasattr(p, "_local_tensor") for p in self.module.parameters())
        if sharded or not self.affords(1, "wider dtype"):
            return ""
        result = self._replay("wider dtype", dtype=torch.float64, micro_batches=[trace.micro_batch])
        if result is None:
            return ""
        finite = not self.peers.any(not result.finite)
        dtype = (trace.value or {}).get("dtype", "")
        outcome = "finite in float64" if finite else "not finite in float64 either"
        limit = f" It left the range of {dtype}{' (65,504)' if dtype == 'float16' else ''}." if finite else ""
        self.note("wider dtype", outcome, dtype=dtype, loss=result.loss, grad_norm=result.grad_norm)
        return f" The step is {outcome}.{limit}"

    def _newest_finite(self, kind: str, name: str) -> int | None:
        """Step of the newest snapshot, on all ranks, in which this tensor is finite."""
        for snapshot in reversed(self.snapshots):
            tensors_by_name = (snapshot.params or {}) if kind == "parameter" else snapshot.buffers
            bad, error = self.peers.measured(lambda held=tensors_by_name: is_bad(local(held[name])))  # type: ignore[misc]
            if not error and not any(bad):
                self.note("snapshots", f"{name} is finite", step=snapshot.step)
                return snapshot.step
        return None

    # -------------------------------------------------------------------------------------------------- 4: replicas

    def _compare_replicas(self) -> list[int]:
        """Ranks whose parameters or buffers differ from the others'; the experiment is put down."""
        if self.peers.size == 1:
            return []
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
            self.note("replicas", "not compared: the parameters are sharded")
            return []
        compared = self._fingerprints("replicas", lambda: self.module.named_parameters())
        if compared is None:
            return []
        self.parameter_names, tables = compared
        parted, rows = parted_ranks(tables)
        if not parted:
            self.note("replicas", "equal to the bit", tensors=len(self.parameter_names))
            return []
        differing = [self.parameter_names[i] for i in rows]
        self.note("replicas", "differ", ranks=parted, parameters=differing[:8], tensors=len(differing))
        self.parted_parameters = differing
        return parted

    def _fingerprints(
        self, name: str, named: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> tuple[list[str], Tensor] | None:
        """Names and every rank's fingerprints of these tensors, ``[world_size, n, 2]``; None where a rank has others."""

        def measure() -> tuple[list[str], Any]:
            names, table = fingerprints(named(), self.trainer.strategy.root_device)
            return names, table.cpu().numpy()

        everyone = self.measured(name, measure)
        if everyone is None:
            return None
        if any(names != everyone[0][0] for names, _ in everyone):
            self.note(name, "not available", reason="the ranks hold tensors of different names")
            return None
        return everyone[0][0], torch.stack([torch.from_numpy(table) for _, table in everyone])

    def replicas(self) -> Verdict | None:
        """Weights of the ranks against each other; the rank that is alone in its weights is convicted."""
        drift = [f for f in self.findings if f.kind is FindingKind.REPLICA_DRIFT]
        if drift:
            return self._drifted(drift[0])
        parted = self._compare_replicas()
        if not parted:
            return None
        if len(parted) == self.peers.size:
            parted = self._who_left()
        since = self._newest_equal_snapshot()
        named = ", ".join(self.parted_parameters[:3])
        sentence = (
            f"The weights of the ranks differ ({named}), rank {', '.join(map(str, parted)) or '?'} from the others."
        )
        if not parted:
            return self.verdict(
                VerdictKind.INFRASTRUCTURE, (), sentence, since=since, parameters=self.parted_parameters[:8]
            )
        culprits = [f"rank:{r}" for r in parted]
        return self.verdict(
            VerdictKind.INFRASTRUCTURE, culprits, sentence, since=since, parameters=self.parted_parameters[:8]
        )

    def _drifted(self, finding: Finding) -> Verdict:
        """``ReplicaConsistency`` has compared all there is, and named the rank where the replicas alone can tell it."""
        named = list(finding.ranks)
        tensors = [c for c in finding.culprits if not c.startswith("rank:")]
        self.note(
            "replicas", "differ", ranks=named, tensors=int(finding.score), decided_by=finding.evidence["decided_by"]
        )
        sentence = finding.message
        if not named and self._compare_replicas():
            named = self._who_left()
            if named:
                sentence += f" Rank {', '.join(map(str, named))} lies farther from the last common snapshot."
        since = self._newest_equal_snapshot(state=True)
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [*(f"rank:{r}" for r in named), *tensors],
            sentence,
            since=max(min(since, self.record.step), finding.since_step),
            decided_by=finding.evidence["decided_by"] if finding.ranks else "snapshot" if named else "nobody",
        )

    def _who_left(self) -> list[int]:
        """Without a majority: the rank that is farther from the common snapshot than the others, or whose loss is."""
        base = self.snapshots[-1].params if self.snapshots else None
        differing = set(self.parted_parameters)

        def measure() -> float:
            named = ((n, p) for n, p in self.module.named_parameters() if n in differing)
            return math.nan if base is None else ex.distance(named, base)

        far = np.array(self.measured("distance from the snapshot", measure) or [math.nan])
        if np.isfinite(far).all():
            others = float(np.min(far))
            guilty = [r for r, d in enumerate(far) if d > 3.0 * others + 1e-12]
            self.note("distance from the snapshot", "parted" if guilty else "alike", distances=[float(d) for d in far])
            if guilty and len(guilty) < len(far):
                return guilty
        named_ranks = sorted({r for f in self.findings if f.kind is FindingKind.RANK_OUTLIER for r in f.ranks})
        return named_ranks if len(named_ranks) < self.peers.size else []

    def _newest_equal_snapshot(self, state: bool = False) -> int:
        """Step of the newest snapshot in which the ranks' parameters are equal; else the incident's first step.

        With ``state`` the optimizers' state must be equal, too.
        """
        for snapshot in reversed(self.snapshots):
            params = sorted((snapshot.params or {}).items())
            if state:
                params += [(f"state {i}", t) for i, t in enumerate(tensors(snapshot.optimizers))]
            compared = self._fingerprints("snapshots", lambda params=params: params)  # type: ignore[misc]
            if compared is not None and not parted_ranks(compared[1])[0]:
                self.note("snapshots", "replicas are equal", step=snapshot.step)
                return snapshot.step
        return self.since

    # ---------------------------------------------------------------------------------------------------- 5: replays

    def _replay(self, name: str, window: StepWindow | None = None, **options: Any) -> ReplayResult | None:
        """One replay within the budget's count; None on every rank if any rank could not."""
        given = options.pop("micro_batches", None)
        current = self.context.window if window is None else window

        def choose() -> list[int]:
            if given is not None or current is None:
                return list(given or ())
            live = current.losses or self.context.scratch.get("live_losses") or []
            return worst_micro_batches(current, live, max(1, self.max_forwards - self.forwards))

        choices = self.measured(name, choose)
        if choices is None:
            return None
        # As many forwards on each rank: the forward of a sharded module is an exchange, too.
        chosen = choices[self.peers.rank][: min(map(len, choices))]
        self.forwards += len(chosen)
        results: list[ReplayResult] = []

        def run() -> None:
            results.append(
                replay(
                    self.trainer,
                    self.module,
                    self.optimizer,
                    window,
                    micro_batches=chosen,
                    watch=self.watched,
                    **options,
                )
            )

        return results[0] if self.measured(name, run) is not None else None

    def replay_step(self) -> Verdict | None:
        """The same step again: equal to the bit, or not."""
        if not self.affords(1, "replay"):
            return None
        self.main = result = self._replay("replay", keep_grads=False)
        if result is None:
            return None
        everyone = self.peers.gather((result.bitwise_equal, result.grads_equal, result.loss, self._live_loss(result)))
        losses = [loss for _, _, loss, _ in everyone]
        equal = [e for e, _, _, _ in everyone]
        detail = {
            "bitwise_equal": equal,
            "gradients_equal": [g for _, g, _, _ in everyone],
            "losses": losses,
            "live": [live for _, _, _, live in everyone],
        }
        if all(equal):
            self.note("replay", "equal to the bit", **detail)
            return None
        # Only a difference that makes up for the jump convicts; less may be the kernels' own noise.
        gone = [
            rank
            for rank, (bits, _, again, live) in enumerate(everyone)
            if bits is False and live - again >= HIGH * self.jump[rank] > 0 and self._is_jump(rank)
        ]
        self.note("replay", "the jump is gone" if gone else "not equal to the bit, but as high", **detail)
        reasons = self._why_inexact() if gone else []
        if not gone or reasons:
            return None
        sentence = (
            f"The replay of the same step gives {losses[gone[0]]:.4f} nats on rank {gone[0]}, the step gave"
            f" {everyone[gone[0]][3]:.4f}: its computation went wrong once."
        )
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [f"rank:{r}" for r in gone],
            sentence,
            since=self.record.step,
            reproducible=False,
        )

    def _live_loss(self, result: ReplayResult) -> float:
        """Mean of the live losses of the micro-batches that were replayed."""
        live = self.context.scratch.get("live_losses") or []
        chosen = [float(live[i]) for i in result.micro_batches if i < len(live)]
        return sum(chosen) / len(chosen) if chosen else math.nan

    def _is_jump(self, rank: int) -> bool:
        return bool(self.jump[rank] > 4.0 * self.noise[rank])

    def sources(self) -> Verdict | None:
        """Each source's loss before and since: exactly one that moved is the cause, if the weights are in order."""
        records = [r for r in self.context.history if r.step != self.record.step] + [self.record]
        shifts = ex.source_shifts(records, self.since)
        if not shifts:
            return None
        detail = {s.source: {"before": s.before, "after": s.after, "sigma": s.sigma} for s in shifts}
        lone = ex.lone_source(shifts)
        moved = [s.source for s in shifts if s.moved]
        self.note("sources", f"{lone.source} moved alone" if lone else f"{len(moved)} of {len(shifts)} moved", **detail)
        if lone is None or not self._older_data_is_fine(lone):
            return None
        sentence = (
            f"Since step {self.since} the loss of source {lone.source} stands at {lone.after:.4f} nats, {lone.before:.4f}"
            " before; the other sources have not moved, and data from before is as easy as it was."
        )
        samples = self._samples_of(lone.source)
        return self.verdict(
            VerdictKind.DATA, [f"source:{lone.source}"], sentence, reproducible=True, samples=samples, shift=lone.shift
        )

    def _older_data_is_fine(self, lone: ex.SourceShift) -> bool:
        """Whether a healthy window from before gives its old loss on the current weights."""
        change = self._healthy_change(None)
        if change is None:
            return False
        weight = float(np.nanmax(self.jump)) if np.isfinite(self.jump).any() else lone.shift
        limit = max(FINE * max(weight, 0.0), 0.25 * lone.shift)
        return change <= limit

    def _samples_of(self, source: str) -> list[str]:
        """Ids of this source's samples since the incident's first step, on all ranks."""
        window, sources = self.context.window, list(self.record.sources)

        def measure() -> list[str]:
            mine: list[str] = []
            for micro in window.micro_batches if window is not None else ():
                if isinstance(micro.batch, dict) and isinstance(micro.batch.get("source"), Tensor):
                    rows = (micro.batch["source"] == sources.index(source)).nonzero().flatten().tolist()
                    mine += ids_of(micro, tuple(rows)) if rows else ()
            for r in self.context.history:
                if r.step >= self.since:
                    mine += [i for i in r.sample_ids if i.startswith((f"{source}/", f"{source}:"))]
            return mine

        return list(dict.fromkeys(i for ids in self.measured("samples", measure) or [] for i in ids))

    def other_state(self) -> Verdict | None:
        """Other data on this state, this data on another state."""
        jumps = np.where(np.isfinite(self.jump), self.jump, -np.inf)
        height = float(jumps.max())
        suspects = [r for r in range(self.peers.size) if self._is_jump(r) and jumps[r] >= HIGH * height > 0]
        if self.main is None or not suspects:
            self.note("jump", "none to explain", jumps=[float(j) for j in self.jump])
            return None
        state_change = self._healthy_change(None)
        if state_change is None:
            return None
        if state_change >= HIGH * height:
            return self._state_is_damaged(height, state_change)
        if state_change > FINE * height:
            return None
        contrast, informative = self._contrast_on_snapshot(suspects, height)
        if informative and contrast < HIGH * height:
            return None
        if FindingKind.LEVEL_SHIFT in self.kinds or FindingKind.DIVERGENCE in self.kinds:
            return None  # a level that lasts is no matter of single samples
        return self._data(suspects, height, contrast if informative else None)

    def _healthy_change(self, weights: Snapshot | None) -> float | None:
        """How much higher than when it was trained on a healthy window's loss is, in nats; the worst rank's."""
        name = "healthy batch, current weights" if weights is None else "healthy batch, snapshot's weights"
        result, window = self._healthy_replay(name, weights)
        if result is None or window is None:
            return None
        live = [float(window.losses[i]) for i in result.micro_batches if i < len(window.losses)]
        mine = result.loss - sum(live) / len(live) if live else math.nan
        everyone = self.peers.gather((mine, result.loss))
        changes = [c for c, _ in everyone]
        worst = max(changes, default=math.nan) if all(map(math.isfinite, changes)) else math.nan
        outcome = f"{worst:+.4f} nats" if math.isfinite(worst) else "no live loss to compare with"
        self.note(name, outcome, step=window.step, changes=changes, losses=[loss for _, loss in everyone])
        return worst if math.isfinite(worst) else None

    def _healthy_replay(self, name: str, weights: Snapshot | None) -> tuple[ReplayResult | None, StepWindow | None]:
        windows = healthy_windows(self.trainer, self.since)
        if self.peers.any(not windows):
            self.note(name, "not run: no healthy window from before is kept")
            return None, None
        if not self.affords(1, name):
            return None, None
        options: dict[str, Any] = {} if weights is None else {"weights": weights}
        return self._replay(name, windows[0], backward=False, **options), windows[0]

    def _baseline_snapshot(self) -> Snapshot | None:
        """The newest snapshot from before the incident, one that is known good if there is one."""
        before = [s for s in self.snapshots if s.step <= self.since]
        good = [s for s in before if s.known_good]
        return (good or before)[-1] if before else None

    def _contrast_on_snapshot(self, suspects: Sequence[int], height: float) -> tuple[float, bool]:
        """Suspect batch minus healthy batch on an older state, in nats, and whether that state is close enough to tell."""
        snapshot = self._baseline_snapshot()
        if snapshot is None:
            self.note("same data, snapshot's weights", "not run: no snapshot from before")
            return math.nan, False
        if not self.affords(2, "same data, snapshot's weights"):
            return math.nan, False
        there = self._replay("same data, snapshot's weights", weights=snapshot, backward=False)
        change = self._healthy_change(snapshot)
        if there is None or change is None:
            return math.nan, False
        windows = healthy_windows(self.trainer, self.since)
        healthy = [float(x) for x in windows[0].losses]
        level = change + (sum(healthy) / len(healthy) if healthy else math.nan)
        contrasts = self.peers.gather(there.loss - level)
        contrast = max(contrasts[r] for r in suspects)
        informative = change < HIGH * height
        self.note(
            "same data, snapshot's weights",
            f"{contrast:+.4f} nats from the healthy batch",
            step=snapshot.step,
            losses=self.peers.gather(there.loss),
            informative=informative,
        )
        return contrast, informative

    def _state_is_damaged(self, height: float, change: float) -> Verdict | None:
        """Healthy data is high, too: since when, and the sentence for it. What damaged the state stays open."""
        since = self.since
        snapshot = self._baseline_snapshot()
        there = None if snapshot is None else self._healthy_change(snapshot)
        if snapshot is not None and there is not None and there < FINE * height:
            since = min(since, snapshot.step)
        sentence = (
            f"A healthy batch, too, is {change:.4f} nats above its loss: the state is damaged, not the data."
            + (f" The snapshot of step {since} is in order." if there is not None else "")
            + " Rates, moments and weights are within what was planned, so what damaged it is open."
        )
        return self.verdict(VerdictKind.UNDETERMINED, (), sentence, since=since, reproducible=True, state_change=change)

    def _data(self, suspects: Sequence[int], height: float, contrast: float | None) -> Verdict:
        """The data is hard on every state: the samples that carry the loss."""
        loud = self.measured("samples", lambda: self._loud_samples() if self.peers.rank in suspects else [])
        samples = [i for ids in loud or [] for i in ids]
        whose = " of rank " + ", ".join(map(str, suspects)) if self.peers.size > 1 else ""
        others = "" if contrast is None else f", and by {contrast:.4f} nats on the weights of an older snapshot"
        sentence = (
            f"The batch{whose} is {height:.4f} nats above the level on the current weights{others};"
            " a healthy batch is as easy as it was."
        )
        self.note("samples", f"{len(samples)} carry the loss", samples=samples[:64])
        culprits = [f"sample:{s}" for s in samples]
        return self.verdict(VerdictKind.DATA, culprits, sentence, reproducible=True, samples=samples, jump=height)

    def _loud_samples(self) -> list[str]:
        """Ids of this rank's samples whose loss carries the jump; all of the step's where single losses are not known."""
        window, result = self.context.window, self.main
        assert window is not None
        assert result is not None
        loud: list[str] = []
        base = float(self.base[self.peers.rank])
        known = [s[s.isfinite()] for s in result.sample_losses if s is not None]
        peak = max((float(s.max()) for s in known if s.numel()), default=math.nan)
        for index, losses in zip(result.micro_batches, result.sample_losses, strict=False):
            micro = window.micro_batches[index]
            ids = ids_of(micro)
            if losses is None or losses.numel() != len(ids):
                loud += ids
                continue
            loud += [i for i, x in zip(ids, losses.tolist(), strict=True) if x - base >= HIGH * (peak - base)]
        earlier = [
            i
            for r in self.context.history
            if self.since <= r.step < self.record.step
            and float(r.column("loss_nats")[self.peers.rank]) - base >= HIGH * float(self.jump[self.peers.rank])
            for i in r.sample_ids
        ]
        return [*earlier, *loud]

    # ----------------------------------------------------------------------------------------------- the comparisons

    def comparisons(self) -> dict[str, Any]:
        """The five comparisons that precede a hypothesis: each with its values, or why it is missing."""
        worst = self.record.worst_rank
        unrun = "not measured: the verdict needed no replay" if self.trace is None else "the armed replay measures none"
        main = self.main
        mine: dict[str, Any] = {"token_level_losses": unrun, "activation_norms": unrun}
        replayed = math.nan
        if main is not None:
            replayed = main.grad_norm
            known = [[round(x, 6) for x in s.tolist()] for s in main.sample_losses if s is not None]
            mine["token_level_losses"] = known or "not known: training_step sets no module.sample_loss_nats"
            mine["activation_norms"] = main.activation_rms or "not known: the module has no blocks to watch"
        try:
            mine["input_manifest"] = self._manifest()
        except Exception as failure:  # the user's batch: it may hold anything
            mine["input_manifest"] = f"not available: {type(failure).__name__}: {failure}"
        mine["replayed_grad_norm"] = replayed
        shown = self.peers.gather(mine)[worst]
        return {
            "token_level_losses": shown["token_level_losses"],
            "rank_values": {
                "loss_nats": [float(x) for x in self.record.column("loss_nats")[:64]],
                "level_before": [float(x) for x in self.base[:64]],
                "worst_rank": worst,
            },
            "gradient_norms": {
                "live": [float(x) for x in self.record.column("grad_norm")[:64]],
                "replayed": shown["replayed_grad_norm"],
                "before": float(np.median([r.grad_norm for r in self.context.history]))
                if self.context.history
                else math.nan,
            },
            "activation_norms": shown["activation_norms"],
            "input_manifest": shown["input_manifest"],
        }

    def _manifest(self) -> Any:
        """Ids, hash, shapes and integer ranges of this rank's micro-batches; never their content."""
        window = self.context.window
        if window is None or not window.micro_batches:
            return "not captured"
        from ..data.identity import batch_hash

        return [
            {
                "sample_ids": list(micro.sample_ids)[:64],
                "hash": batch_hash(micro.batch),
                "tensors": [_described(t) for t in tensors(micro.batch)][:16],
            }
            for micro in window.micro_batches[:8]
        ]


def _ids_of(micro: MicroBatch) -> tuple[str, ...]:
    """Ids of a micro-batch for a list that is exchanged right after: none where they cannot be made from its content."""
    try:
        return ids_of(micro)
    except Exception as failure:  # the user's batch: it may hold anything
        log.warning("the samples of a micro-batch have no ids: %s: %s", type(failure).__name__, failure)
        return ()


def _described(tensor: Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
        described |= {"min": int(tensor.min()), "max": int(tensor.max())}
    return described


def _first(values: Sequence[float]) -> float:
    return values[0] if values else math.nan


__all__ = ["NOT_REPRODUCED", "Investigation", "investigate"]
