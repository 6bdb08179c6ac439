"""A value that is not finite: the armed replay names what made it; wider numbers tell a range from an undefined value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from ...incidents import FindingKind, Verdict, VerdictKind
from ...state import lightning_private as _private
from ...state.tree import local
from ..alone import Widened, widened
from ..ladder import Ladder, known_ids
from ..nonfinite import COMPILED, OPTIMIZER_STATE, REDUCTION, TraceReport, trace_nonfinite
from ..origin import is_bad
from ..replay import Call, ReplayUnavailableError
from ..window import StepWindow


class NonFiniteCause(Ladder):
    """The replay with the tracing armed, and what follows from it."""

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
        self.note("replay as it ran, compiled" if trace.compiled == "finite" else "armed replay", result, **detail)
        return self._verdict_of_trace(trace, window)

    def _traced(self, forwards: int) -> TraceReport:
        from ...callbacks.base import find_callback
        from ...callbacks.nonfinite_tracer import NonFiniteTracer

        tracer = find_callback(self.trainer, NonFiniteTracer)
        if tracer is not None and not tracer.replay:
            raise ReplayUnavailableError("NonFiniteTracer was told not to replay (replay=False).")
        trace = trace_nonfinite if tracer is None else tracer.trace
        report = trace(
            self.trainer, self.module, self.optimizer, self.record, max_forwards=forwards, watch=self.watched
        )
        self.main = report.replay
        return report

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
                    trace.sentence + self._where_alone(trace) + widened,
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
            case _ if trace.kind == COMPILED:
                return self.verdict(
                    VerdictKind.NUMERICS,
                    [f"module:{trace.module}"] if trace.module else [],
                    trace.sentence + self._where_alone(trace),
                    since=since,
                    reproducible=True,
                    samples=samples,
                    ranks=list(trace.ranks),
                    **where,
                )
            case _ if trace.kind == OPTIMIZER_STATE:
                key = trace.name.partition(" ")[0]
                return self.verdict(VerdictKind.OPTIMIZATION, [f"optimizer:{key}"], trace.sentence, reproducible=False)
            case _ if trace.kind == REDUCTION:
                culprits = [f"parameter:{trace.name}"] if trace.name else []
                return self.verdict(
                    VerdictKind.NUMERICS, culprits, trace.sentence, since=since, reproducible=True, **where
                )
            case _:
                return self._not_reproduced(trace, samples)

    def _where_alone(self, trace: TraceReport) -> str:
        """Which ranks show it, where not all of them do."""
        ranks, world = sorted(trace.ranks), self.trainer.world_size
        if not ranks or len(ranks) >= world:
            return ""
        named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f" Of {world} ranks only on rank{'s' * (len(ranks) > 1)} {named}."

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
                mine += known_ids(micro)
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
        """Wider numbers: finite there means that a range was left, not that the values are undefined.

        First the guilty module alone, from its inputs in the step, in float32 and float64, without autocast; then the whole
        step in float64.
        """
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
            return ""
        alone = self._widen_alone(trace)
        if not self.affords(1, "wider dtype"):
            return alone
        result = self._replay("wider dtype", dtype=torch.float64, micro_batches=[trace.micro_batch])
        if result is None:
            return alone
        finite = not self.peers.any(not result.finite)
        dtype = (trace.value or {}).get("dtype", "")
        outcome = "finite in float64" if finite else "not finite in float64 either"
        limit = f" It left the range of {dtype}{' (65,504)' if dtype == 'float16' else ''}." if finite else ""
        self.note("wider dtype", outcome, dtype=dtype, loss=result.loss, grad_norm=result.grad_norm)
        return f"{alone} The step is {outcome}.{limit}"

    def _widen_alone(self, trace: TraceReport) -> str:
        """The module that the trace names, alone from its inputs in the step, in wider numbers."""
        name = "guilty module alone"
        known = trace.module in dict(self.module.named_modules()) and bool(trace.module)
        if not known or not self.affords(1, name):
            return ""
        found: list[Widened] = []

        def inside(calls: Mapping[str, Call]) -> None:
            if trace.module in calls:
                found.extend(widened(calls[trace.module]))

        chosen = [trace.micro_batch]
        if self._replay(name, backward=False, micro_batches=chosen, calls=[trace.module], inside=inside) is None:
            return ""
        everyone = self.peers.gather([asdict(w) for w in found])
        mine = next((w for r, w in enumerate(everyone) if w and (trace.rank is None or r == trace.rank)), [])
        if not mine:
            self.note(name, "not available", reason="it was not called in the forward")
            return ""
        words = "; ".join(
            f"{'finite' if w['finite'] else 'not finite'} in {w['dtype']} (up to {w['largest']:.4g} from inputs up to"
            f" {w['largest_input']:.4g})"
            for w in mine
        )
        self.note(name, words, module=trace.module, operator=trace.name, results=mine)
        return f" Alone, forward, {trace.module} is {words}."

    def _newest_finite(self, kind: str, name: str) -> int | None:
        """Step of the newest snapshot, on all ranks, in which this tensor is finite."""
        for snapshot in reversed(self.snapshots):
            tensors_by_name = (snapshot.params or {}) if kind == "parameter" else snapshot.buffers
            bad, error = self.peers.measured(lambda held=tensors_by_name: is_bad(local(held[name])))  # type: ignore[misc]
            if not error and not any(bad):
                self.note("snapshots", f"{name} is finite", step=snapshot.step)
                return snapshot.step
        return None
