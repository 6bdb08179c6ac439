"""What all rungs of the triage share: the step at hand, the budget, the notes, and replays within them.

Every rank climbs the same rungs: whatever is decided rests on gathered values, and an experiment that fails on one rank is
not available on any.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..context import context_of
from ..incidents import Experiment, Finding, FindingKind, Incident, Spent, Verdict, VerdictKind
from ..record import StepRecord
from . import experiments as ex
from .nonfinite import TraceReport, ids_of, worst_micro_batches
from .peers import Peers
from .replay import ReplayResult, block_paths, replay
from .tokens import hook_of
from .window import MicroBatch, StepWindow, healthy_windows

if TYPE_CHECKING:
    from ..state.snapshot import Snapshot

log = logging.getLogger("lightning_sentinel")
T = TypeVar("T")

BUDGET_SPENT = "not run: budget spent"

HIGH, FINE = 0.5, 0.3  # shares of the jump: at least the one is "high", at most the other is "fine", between is neither


class Ladder:
    """One incident's examination, without its rungs."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        incident: Incident,
        record: StepRecord,
        max_forwards: int,
        max_seconds: float,
        spent: Spent | None = None,
    ) -> None:
        self.trainer, self.module, self.optimizer = trainer, module, optimizer
        self.incident, self.record = incident, record
        self.context, self.peers = context_of(trainer), Peers(trainer)
        self.max_forwards, self.max_seconds = max_forwards, max_seconds
        # Earlier examinations of this incident count: they had the same budget.
        self.before = Spent() if spent is None else spent
        self.started, self.forwards = time.perf_counter() - self.before.seconds, self.before.forwards
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
        self.healthy_rms: dict[str, float] = {}  # of a healthy batch on the current state, by module
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

    @property
    def seconds(self) -> float:
        """What the incident's examinations have taken by this rank's clock, this one included."""
        return time.perf_counter() - self.started

    def affords(self, forwards: int, name: str) -> bool:
        """Whether the budget covers so many more forward passes; all ranks decide alike."""
        mine = (self.forwards, -self.max_forwards, self.seconds, -self.max_seconds)
        spent, least, seconds, shortest = (max(column) for column in zip(*self.peers.gather(mine), strict=True))
        fits = bool(spent + forwards <= -least and seconds < -shortest)
        if not fits:
            self.note(
                name,
                BUDGET_SPENT,
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

    # ------------------------------------------------------------------------------------------------------- replays

    def _forwards(self, *, tokens: bool) -> int:
        """Forward passes of one replayed micro-batch: the module's ``token_losses`` may run one of its own."""
        return 2 if tokens and hook_of(self.module) is not None else 1

    def _replay(self, name: str, window: StepWindow | None = None, **options: Any) -> ReplayResult | None:
        """One replay within the budget's count; None on every rank if any rank could not.

        ``passes``: How often these micro-batches will be run, this time included.
        """
        given, more = options.pop("micro_batches", None), options.pop("passes", 1) - 1
        current = self.context.window if window is None else window
        forwards = self._forwards(tokens=options.get("tokens", False))

        def choose() -> list[int]:
            if given is not None or current is None:
                return list(given or ())
            live = current.losses or self.context.scratch.get("live_losses") or []
            return worst_micro_batches(current, live, max(1, (self.max_forwards - self.forwards) // (forwards + more)))

        choices = self.measured(name, choose)
        if choices is None:
            return None
        # As many forwards on each rank: the forward of a sharded module is an exchange, too.
        chosen = choices[self.peers.rank][: min(map(len, choices))]
        self.forwards += len(chosen) * forwards
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

    def _why_inexact(self) -> list[str]:
        """Why a replay may differ from its step although nothing failed, on any rank."""
        window = self.context.window

        def measure() -> list[str]:
            reasons = []
            if window is not None and any(m.changed_in_place for m in window.micro_batches):
                reasons.append("a batch was changed in place after its capture")
            main = self.main
            traced = main if self.trace is not None else None
            if window is not None and traced is not None and len(traced.micro_batches) < len(window.micro_batches):
                reasons.append("not all micro-batches were replayed")
            if main is not None and main.eager:
                reasons.append("the step ran compiled, the replay did not")
            return reasons

        everyone, error = self.peers.measured(measure)
        return sorted({r for mine in everyone for r in mine} | ({error} if error else set()))

    def _healthy_change(
        self,
        weights: Snapshot | None,
        name: str = "",
        *,
        buffers: Mapping[str, Tensor] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> float | None:
        """How much higher than when it was trained on a healthy window's loss is, in nats; the worst rank's.

        Args:
            weights: A snapshot to compute on; None: the current state, with the buffers that the suspect step met.
            name: Name of the experiment.
            buffers: These in place of that state's.
            parameters: These in place of that state's.
        """
        name = name or ("healthy batch, current weights" if weights is None else "healthy batch, snapshot's weights")
        windows = healthy_windows(self.trainer, self.since)
        if self.peers.any(not windows):
            self.note(name, "not run: no healthy window from before is kept")
            return None
        if not self.affords(1, name):
            return None
        options: dict[str, Any] = {"parameters": parameters} if parameters else {}
        if weights is not None:
            options["weights"] = weights
            there = dict(weights.buffers)
        else:
            there = {} if self.context.window is None else dict(self.context.window.buffers)
        result = self._replay(name, windows[0], backward=False, buffers=there | dict(buffers or {}), **options)
        if result is None:
            return None
        window = windows[0]
        live = [float(window.losses[i]) for i in result.micro_batches if i < len(window.losses)]
        mine = result.loss - sum(live) / len(live) if live else math.nan
        everyone = self.peers.gather((mine, result.loss))
        changes = [c for c, _ in everyone]
        worst = max(changes, default=math.nan) if all(map(math.isfinite, changes)) else math.nan
        outcome = f"{worst:+.4f} nats" if math.isfinite(worst) else "no live loss to compare with"
        detail: dict[str, Any] = {"step": window.step, "changes": changes, "losses": [loss for _, loss in everyone]}
        if weights is not None:
            detail["snapshot"] = weights.step
        else:
            self.healthy_rms = dict(result.activation_rms)
        self.note(name, outcome, **detail)
        return worst if math.isfinite(worst) else None

    def _baseline_snapshot(self) -> Snapshot | None:
        """The newest snapshot from before the incident, one that is known good if there is one."""
        before = [s for s in self.snapshots if s.step <= self.since]
        good = [s for s in before if s.known_good]
        return (good or before)[-1] if before else None

    def _is_jump(self, rank: int) -> bool:
        return bool(self.jump[rank] > 4.0 * self.noise[rank])


def known_ids(micro: MicroBatch) -> tuple[str, ...]:
    """Ids of a micro-batch for a list that is exchanged right after: none where they cannot be made from its content."""
    try:
        return ids_of(micro)
    except Exception as failure:  # the user's batch: it may hold anything
        log.warning("the samples of a micro-batch have no ids: %s: %s", type(failure).__name__, failure)
        return ()
