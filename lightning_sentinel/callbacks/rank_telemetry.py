"""The heartbeat: one small row per rank and step, gathered before the update, handed to every detector."""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..clipping import SharedNorm
from ..collectives import TwoStages, gather_flat
from ..context import RunContext
from ..data.identity import Part, parts, sample_ids, supervised_token_count, token_count
from ..detectors.nonfinite import NonFinite
from ..detectors.robust import sorted_median
from ..distributed.mesh import replicas_of, speaks_for_unit
from ..distributed.waiting import Waiting
from ..incidents import Finding, Severity
from ..journal import Journal
from ..lag import Facts, Lag
from ..limits import check_limits
from ..record import SIGNAL_INDEX, SIGNALS, SOURCE_LOSS, SOURCE_TOKENS, StepRecord, source_signals
from ..state.lightning_private import collective_timeout, scaler_of, train_loaders
from ..state.transfer import read_now
from ..state.tree import local
from .base import DetectorCallback, SentinelCallback, declares, gather_objects, rest_idle_hooks, wake_hooks

log = logging.getLogger("lightning_sentinel")

# Above this a squared float32 sum may have overflowed although every entry is finite (the root of the largest float32).
FLOAT32_SQUARE_LIMIT = 1.8e19

_NONE = type(None)
_PLAIN_OR_NONE = {Tensor, _NONE}
_PLAIN, _FLOAT, _FLOAT32 = {Tensor}, {float}, {torch.float32}
_GRAD, _DTYPE, _IS_SPARSE = attrgetter("grad"), attrgetter("dtype"), attrgetter("is_sparse")

# A step line holds every rank's loss up to so many ranks; beyond that those of the ranks furthest out.
ALL_RANKS, KEPT_OUTLIERS = 64, 8

# Findings that callbacks leave for the next gate, once.
ONCE = ("start_findings", "restart_findings")

GRAD_NORM, UPDATE_NORM, TOKENS, NONFINITE_GRADS, TERMINATED = (
    SIGNAL_INDEX[name] for name in ("grad_norm", "update_norm", "tokens", "nonfinite_grads", "terminated")
)


def token_probability(loss_nats: float) -> float:
    """Geometric-mean probability that the model gives to a token, ``exp(-loss)``.

    Example:
        >>> round(token_probability(2.05), 3), round(token_probability(2.90), 3)
        (0.129, 0.055)
    """
    return math.exp(-loss_nats) if not math.isnan(loss_nats) else math.nan


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Local gradients of the parameters that this optimizer steps, those that have one."""
    found = [*map(_GRAD, [p for group in optimizer.param_groups for p in group["params"]])]
    kinds = set(map(type, found))
    if _NONE in kinds:
        found = [g for g in found if g is not None]
    if kinds <= _PLAIN_OR_NONE and not any(map(_IS_SPARSE, found)):
        return found
    return [g.coalesce().values() if g.is_sparse else local(g) for g in found]


def is_sharded(optimizer: Optimizer) -> bool:
    """True if any of the optimizer's parameters is a DTensor: then every rank holds only a part of its gradient."""
    return any(hasattr(p, "_local_tensor") for group in optimizer.param_groups for p in group["params"])


def total_norm(
    tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32, shares: Sequence[float] | None = None
) -> Tensor:
    """2-norm over all tensors as a 0-dim float64 tensor, without a host synchronisation.

    Args:
        tensors: At least one.
        dtype: In which each tensor's own norm is computed.
        shares: What each tensor's norm is multiplied by: ``1 / sqrt(n)`` where it lies on ``n`` ranks and the squares of all
            ranks will be summed.
    """
    norms = _norms(list(tensors), dtype, set(map(_DTYPE, tensors)) == {dtype})
    return _total(norms if shares is None else torch._foreach_mul(list(norms), list(shares)))


def _total(norms: Sequence[Tensor]) -> Tensor:
    if norms[0].device.type == "cpu":
        return torch.tensor(math.hypot(*map(Tensor.item, norms)), dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)).double())
    return total


def _norms(tensors: list[Tensor], dtype: torch.dtype, own: bool) -> Sequence[Tensor]:
    """``own``: it is the dtype of all of them. Named, even that costs a conversion check for each."""
    return torch._foreach_norm(tensors, 2) if own else torch._foreach_norm(tensors, 2, dtype=dtype)


_Values = npt.NDArray[np.float64] | list[float]  # a record's matrix; of one rank on the CPU its row
_Row = tuple[StepRecord, bool, int, int, int]  # record, applied, applied steps so far, epoch, batch index


class RankTelemetry(SentinelCallback):
    """Gathers one :class:`~lightning_sentinel.record.StepRecord` per optimizer step and shows it to every detector.

    The gate is ``on_before_optimizer_step``: gradients are complete, unscaled and not yet clipped, and the weights are
    untouched. One ``all_gather`` of a few float64 per rank gives every rank the same matrix, so that all decide alike.

    Example:
        >>> from lightning_sentinel import RankTelemetry
        >>> RankTelemetry(update_norm_every_n_steps=20).update_norm_every_n_steps
        20

    Logged to ``trainer.loggers`` every ``trainer.log_every_n_steps`` steps:

    =============================  ================================================================
    key                            meaning
    =============================  ================================================================
    ``sentinel/loss_mean``         token-weighted mean over ranks, nats per token
    ``sentinel/loss_min``          smallest loss of a rank, nats
    ``sentinel/loss_median``       median over ranks, nats
    ``sentinel/loss_max``          largest loss of a rank, nats
    ``sentinel/worst_rank``        the rank with the largest loss
    ``sentinel/token_probability``  ``exp(-loss_mean)``: geometric-mean probability of a token
    ``sentinel/nats_below_uniform``  ``ln(vocabulary) - loss_mean``; the uniform guess is a baseline, not a ceiling
    ``sentinel/grad_norm``         2-norm before clipping, unscaled
    ``sentinel/update_norm``       2-norm of the last measured parameter update
    ``sentinel/loss_scale``        loss scale (only with a scaler)
    ``sentinel/step_seconds``      slowest rank, seconds between gates
    ``sentinel/data_seconds``      slowest rank, of which waiting for data
    ``sentinel/wait_seconds``      of which the rank that waited longest has waited for others
    ``sentinel/slowest_rank``      the rank with the longest time of its own, waiting for others left out (several ranks)
    ``sentinel/own_seconds``       that time (several ranks)
    ``sentinel/loss/<source>``     loss of one source of the mixture, nats
    ``sentinel/tokens``            tokens so far over all ranks
    ``sentinel/attempt``           which pass over this step it is
    =============================  ================================================================

    The loss is read in ``on_before_backward`` and given back as the user means it: multiplied by
    ``accumulate_grad_batches`` in automatic optimization and divided by the loss scale. In manual optimization it is what
    was passed to ``manual_backward``, summed over the calls of one ``training_step``.

    Args:
        update_norm_every_n_steps: Measure the update norm every so many steps (it needs a copy of the parameters);
            0 never.
        vocabulary_size: For the uniform baseline ``ln(vocabulary_size)``; None leaves that key out.
        token_count_fn: ``batch -> (tokens, supervised tokens)`` as numbers or 0-dim tensors. By default read off the
            batch: token ids and targets (ignored targets are -100), else the number of samples.
        sample_id_fn: ``batch -> ids``; by default the batch's own ids, else a content hash per sample.
        sources: Names of the mixture's sources, in the order of ``batch["source"]``; by default the loader's ``sources``.
            The loss per source needs ``module.sample_loss_nats`` (a detached ``[batch]`` tensor that ``training_step``
            sets) and, if samples differ in length, ``module.sample_tokens``.
        sync: ``"gate"`` reads each record before its update: one wait for the device a step. ``"lagged"``, for accelerators,
            reads it at the next step's gate without waiting; what is not finite is still kept out, on the device, under
            ``guard`` and ``recover``. Whatever else needs an answer, ``recover`` answers after going back to before the
            step, which then runs again under the gate; the other policies write it down. See ``docs/performance.md``.
        gather_within: Gather in two stages, first among so many neighbouring ranks (those of a node, or about the root of
            their number), then between such groups; it must divide the number of ranks. 0: in one. Worth it for thousands
            of ranks, see ``docs/distributed.md``; what is gathered is the same.
    """

    def __init__(
        self,
        update_norm_every_n_steps: int = 50,
        vocabulary_size: int | None = None,
        token_count_fn: Callable[[Any], tuple[Any, Any]] | None = None,
        sample_id_fn: Callable[[Any], Sequence[str | int]] | None = None,
        sources: Sequence[str] | None = None,
        sync: str = "gate",
        gather_within: int = 0,
    ) -> None:
        check_limits("RankTelemetry", locals())
        self.update_norm_every_n_steps = update_norm_every_n_steps
        self.vocabulary_size = vocabulary_size
        self.token_count_fn = token_count_fn
        self.sample_id_fn = sample_id_fn
        self.sources = sources
        self.sync = sync
        self.gather_within = gather_within
        self._stages: TwoStages | None = None
        self.lag = Lag(sync)
        self.nonfinite = NonFinite()
        self._signals = SIGNALS
        self._source_names: tuple[str, ...] = ()
        self._update_norm: Tensor | None = None
        self._before_update: list[Tensor] | None = None
        self._measuring = False
        self._rows: list[_Row] = []
        self._places: dict[tuple[int, ...], Tensor] = {}  # where in the row the values go that lie on the device
        self._clock = 0.0
        self._batch_clock = 0.0
        self._data_seconds = 0.0
        self._waiting: Waiting | None = None
        self._speaks = True
        self._seen_callbacks: list[Any] = []
        self._observers: list[Callable[[StepRecord], list[Finding]]] = []
        self._response: Any = None
        self.shared_norm = SharedNorm()
        self._on_host = False  # one rank on the CPU: the row is a list of numbers
        self._scaler: Any = None
        self._sharded: dict[int, bool] = {}  # by optimizer
        self._share: dict[int, float] = {}  # of a sharded run: 1 / sqrt(ranks on which this parameter's part lies)
        self._gated = False
        self._rested = False  # whether hooks that do nothing are passed over by now
        self._batch_idx = 0
        self._reset_window()

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        wake_hooks(trainer)  # where another callback's `on_exception` has raised, nobody has
        self._rested = False
        others = [c for c in trainer.callbacks if isinstance(c, RankTelemetry)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"found {len(others)} RankTelemetry callbacks, expected one: each would gather on its own."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "found LBFGS, which calls its closure several times a step; RankTelemetry expects one backward pass"
                    " and one update per step. Use another optimizer or leave lightning_sentinel out."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._source_names = tuple(self.sources or _loader_sources(trainer))
        self._signals = SIGNALS + source_signals(self._source_names)
        self._before_update, self._update_norm, self._measuring = None, None, False
        self._clock = self._batch_clock = time.perf_counter()
        self._data_seconds = 0.0
        self._waiting = Waiting(trainer.strategy.root_device) if trainer.world_size > 1 else None
        self._speaks = speaks_for_unit(pl_module.device_mesh)
        self._stages = None
        if self.gather_within and trainer.world_size > 1:
            timeout = collective_timeout(trainer)
            self._stages = TwoStages(trainer.world_size, self.gather_within, timeout)
        self._on_host = trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"
        self._scaler = scaler_of(trainer)
        self._sharded = {id(o): is_sharded(o) for o in trainer.optimizers}
        parameters = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
        self._share = {}
        if trainer.world_size > 1 and any(map(is_sharded, trainer.optimizers)):
            self._share = {id(p): replicas_of(p, trainer.world_size) ** -0.5 for p in parameters}
            if set(self._share.values()) == {1.0}:
                self._share = {}
        self._reset_window()
        self._rows, self._places, self._gated = [], {}, False
        self.shared_norm.start(trainer, pl_module, SentinelCallback)
        self.lag.start(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.lag.earlier is not None:  # the fit has ended sooner than was known at the last gate
            self._judge_earlier(trainer, pl_module, None)
            for row in self._rows:
                self._write_step(trainer, row)
            self._rows = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.shared_norm.stop()
        wake_hooks(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.shared_norm.stop()
        wake_hooks(trainer)

    def idle_hooks(self, trainer: Trainer) -> Collection[str]:
        return ("on_after_backward",) if self._waiting is None else ()

    def _reset_window(self) -> None:
        self._losses: list[Tensor] = []  # one per micro-batch, float32, as the user means it
        self._loss_number: float | None = None  # the newest of them where reading it costs nothing
        self._weights: list[Tensor | float] = []  # supervised tokens behind each of these losses
        self._counted = False  # True once a gate has counted the tokens of this window
        self._supervised: list[Tensor | float] = []
        self._tokens: list[Tensor | float] = []
        self._by_source: Tensor | None = None  # nats and tokens by source, [2, sources]; on the CPU:
        self._host_sources: list[list[float]] | None = None
        self._ids: list[str] = []
        self._backward_in_batch = 0

    # ------------------------------------------------------------------------------------------- collecting the window

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        context = self.context(trainer)
        self._data_seconds += time.perf_counter() - self._batch_clock
        if not self._rested and context.nominal_steps:  # all that is done once has been done
            self._rested = True
            rest_idle_hooks(trainer)
        if not self._tokens:
            context.held = False
            context.record = None
        self._batch, self._batch_idx = batch, batch_idx
        self._backward_in_batch = 0
        if self.token_count_fn is not None:
            tokens, supervised = self.token_count_fn(batch)
        else:
            found, all_supervised = parts_of(context, batch)
            tokens = token_count(batch, found)
            supervised = float(tokens) if all_supervised else supervised_token_count(batch, found=found)
        self._tokens.append(tokens)
        self._supervised.append(supervised)
        # The validator has named them already, and before it took bad samples out (a content hash would differ after).
        named = context.scratch.get("sample_ids")
        self._ids = list(named) if named is not None else [*self._ids, *sample_ids(batch, self.sample_id_fn)]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._waiting is not None:
            self._waiting.backward_begins(loss)
        value = loss.detach()
        if value.dtype is not torch.float32:
            value = value.float()
        if self._scaler is not None:
            value = value / self._scaler._get_scale_async()
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
            value = value * trainer.accumulate_grad_batches
        if not pl_module.automatic_optimization:
            # It is kept beyond the step, and the next run of a CUDA graph overwrites what the last one gave. In automatic
            # optimization Lightning has divided it: the tensor is its own.
            value = value.clone()
        if self._backward_in_batch:
            self._losses[-1] = self._losses[-1] + value
        else:
            self._losses.append(value)
            self._weights.append(self._supervised[-1])
        self._loss_number = self._losses[-1].item() if self._on_host else None
        self._backward_in_batch += 1
        if self._backward_in_batch == 1 and self._source_names:
            self._add_sources(pl_module)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waiting is not None:
            self._waiting.backward_ended()

    def _add_sources(self, pl_module: LightningModule) -> None:
        losses = getattr(pl_module, "sample_loss_nats", None)
        source = self._batch.get("source") if isinstance(self._batch, dict) else None
        if losses is None or not isinstance(source, Tensor) or losses.shape[0] != source.shape[0]:
            return
        counts = getattr(pl_module, "sample_tokens", None)
        n = len(self._source_names)
        if losses.device.type == "cpu":
            if self._host_sources is None:
                self._host_sources = [[0.0] * n, [0.0] * n]
            totals, tokens = self._host_sources
            shares = [1.0] * len(losses) if counts is None else counts.tolist()
            for i, nats, share in zip(source.tolist(), losses.tolist(), shares, strict=True):
                if share > 0:
                    totals[i] += nats * share
                    tokens[i] += share
            return
        weights = torch.ones_like(losses, dtype=torch.float64) if counts is None else counts.double()
        sums = torch.zeros(2, n, dtype=torch.float64, device=losses.device)
        sums[0].index_add_(0, source.long(), torch.where(weights > 0, losses.double() * weights, 0.0))
        sums[1].index_add_(0, source.long(), weights)
        self._by_source = sums if self._by_source is None else self._by_source + sums

    # ----------------------------------------------------------------------------------------------------- the gate

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        context = self.context(trainer)
        context.held = False
        facts, rows = self._pack(trainer, optimizer)
        context.drawn.append((facts.step, facts.sample_ids))
        context.rates.append((facts.step, facts.planned_rates, facts.learning_rates))
        self._gated = True
        if self.lag.earlier is not None:
            self._judge_earlier(trainer, pl_module, optimizer)
            if context.held:  # the run goes back to before the earlier step: this one has never been
                return
        if self.lag.reads_now(trainer, facts) or self.lag.keep_out(trainer, optimizer, _matrix(rows), facts):
            values: _Values = rows if isinstance(rows, list) else read_now(rows)
            if not (isinstance(values, list) and 1e-12 < values[GRAD_NORM] < FLOAT32_SQUARE_LIMIT):
                values = self._look_again(trainer, optimizer, values)
            facts.applied = self._judge(trainer, pl_module, optimizer, facts, values)
        self._start_update_norm(optimizer, facts.step, context.held)
        if not pl_module.automatic_optimization:
            # Another optimizer may follow in this batch: its record must not carry this one's loss, nor count tokens twice.
            self._losses, self._weights = [], []
            self._by_source = self._host_sources = None
            self._backward_in_batch, self._counted = 0, True

    def _judge(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
        facts: Facts,
        values: _Values,
    ) -> bool:
        """Make the record, show it to the detectors, and let the response answer; whether the update goes in."""
        context = self.context(trainer)
        record = self._record(trainer, facts, values)
        context.scratch["live_losses"] = facts.losses
        findings = self._findings(trainer, record, facts)
        response = self._response
        if response is not None:
            response.decide(trainer, pl_module, optimizer, record, findings)
        else:
            for finding in findings:
                context.write(trainer, "finding", finding=finding.to_dict())
        skipped_by_scaler = self._scaler is not None and record.any("nonfinite_grads")
        applied = facts.has_grads and not context.held and not skipped_by_scaler
        quiet = not findings or not any(f.severity is Severity.INCIDENT for f in findings)
        self._count(context, record, applied, quiet=quiet)
        self._rows.append((record, applied, context.applied_steps, facts.epoch, facts.batch_idx))
        return applied

    def _judge_earlier(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer | None) -> None:
        """The record of the step before this one, whose update is in or was kept out on the device."""
        context = self.context(trainer)
        facts, values, kept_out, again = self.lag.arrived()
        while context.history and context.history[-1].step >= facts.step:
            context.history.pop()  # a rollback has gone back to before this record was read
        record = self._record(trainer, facts, values)
        findings = self._findings(trainer, record, facts)
        applied = facts.has_grads and not kept_out
        quiet = again or not any(f.severity is Severity.INCIDENT for f in findings)
        self._count(context, record, applied, quiet=quiet)
        if again:
            context.record = None
            return
        self._rows.append((record, applied, context.applied_steps, facts.epoch, facts.batch_idx))
        response = self._response
        if response is not None:
            response.decide_late(
                trainer, pl_module, optimizer, record, findings, kept_out=kept_out, window=facts.window
            )
        else:
            for finding in findings:
                context.write(trainer, "finding", finding=finding.to_dict())
        if not context.held:
            context.record = None

    def _findings(self, trainer: Trainer, record: StepRecord, facts: Facts) -> list[Finding]:
        findings = list(self.nonfinite.observe(record))
        self._find_listeners(trainer)
        for observe in self._observers:
            findings += observe(record)
        # Of the batch validator, of the scan at the start and of a resume, of all ranks. Whether there are any was gathered
        # with the record, so that every rank takes part in the exchange or none does.
        if record.any("invalid_batch"):
            if facts.late and record.column("invalid_batch")[trainer.global_rank] > len(facts.findings):
                facts.findings = [*facts.findings, *(f for look in facts.late for f in look())]
            others = gather_objects(trainer, [f.to_dict() for f in facts.findings])
            findings.extend(Finding.from_dict(f) for f in others)
            for name in ONCE:
                self.context(trainer).scratch.pop(name, None)
        return findings

    def _find_listeners(self, trainer: Trainer) -> None:
        """Who looks at records and who answers them; looked for again where the Trainer's callbacks have changed."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self._seen_callbacks == callbacks:
            return
        self._seen_callbacks = list(callbacks)
        alone = trainer.world_size == 1
        self._observers = [
            c.detector.observe if getattr(c.observe, "__func__", None) is DetectorCallback.observe else c.observe
            for c in callbacks
            if c is not self and hasattr(c, "observe") and not (alone and declares(c, "compares_ranks"))
        ]
        self._response = next((c for c in callbacks if hasattr(c, "decide")), None)

    @staticmethod
    def _count(context: RunContext, record: StepRecord, applied: bool, *, quiet: bool) -> None:
        context.applied_steps += applied
        if not applied:
            context.unapplied.append(record.step)
        if not context.held and quiet:
            context.remember(record)

    def _record(self, trainer: Trainer, facts: Facts, values: _Values) -> StepRecord:
        context = self.context(trainer)
        if facts.riding:
            values = _take_rates(context, facts, values, trainer.global_rank)
        known: dict[str, Any] = {
            "step": facts.step,
            "attempt": facts.attempt,
            "signals": self._signals,
            "learning_rates": facts.learning_rates,
            "sample_ids": facts.sample_ids,
            "restart_step": context.restart_step,
        }
        if isinstance(values, list):
            values[NONFINITE_GRADS] = float(not math.isfinite(values[GRAD_NORM]))
            record = StepRecord.of_one(values, tokens=context.tokens + int(values[TOKENS]), **known)
            context.terminated_ranks = (0,) if values[TERMINATED] else ()
        else:
            self._finish_norms(values, facts.sharded)
            record = StepRecord(values=values, tokens=context.tokens + int(values[:, TOKENS].sum()), **known)
            context.terminated_ranks = tuple(int(rank) for rank in record.column("terminated").nonzero()[0])
        context.record = record
        context.tokens = record.tokens
        context.nominal_steps += 1
        return record

    def _pack(self, trainer: Trainer, optimizer: Optimizer) -> tuple[Facts, Tensor | list[float]]:
        """What the host knows of this step, and the gathered rows, ``[world_size, n_signals]``, on the device.

        Of one rank on the CPU the row as numbers: between two steps a kernel on a few numbers costs as much as all of this.
        """
        now = time.perf_counter()
        step_seconds, self._clock = now - self._clock, now
        grads = gradients(optimizer)
        device = trainer.strategy.root_device
        scale = 1.0 if self._scaler is None else scale_of_gradients(trainer, optimizer)
        norm: Tensor | float = 0.0
        if grads:
            norm = self._norm_of(optimizer, grads) / scale
        context = self.context(trainer)
        flags = context.scratch.get("batch_flags", ())
        sharded = self._sharded.get(id(optimizer))
        rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
        planned = _planned_rates(trainer, optimizer, context)
        plain = _FLOAT.issuperset(map(type, rates)) and (planned is None or _FLOAT.issuperset(map(type, planned)))
        riding = (
            [] if plain else [v for v in (*rates, *(planned or ())) if isinstance(v, Tensor) and v.device.type != "cpu"]
        )
        facts = Facts(
            step=trainer.global_step,
            attempt=context.attempt,
            learning_rates=tuple(rates) if plain else _on_host(rates),
            late=[look for _, look in flags] if flags else [],
            planned_rates=None if planned is None else tuple(planned) if plain else _on_host(planned),
            riding=len(riding),
            sample_ids=tuple(self._ids),
            findings=self._own_findings(context),
            losses=self._losses,
            has_grads=bool(grads),
            sharded=is_sharded(optimizer) if sharded is None else sharded,
            epoch=trainer.current_epoch,
            batch_idx=self._batch_idx,
            window=context.window,
        )
        invalid: Tensor | float = float(len(facts.findings))
        for flag, _ in flags:
            invalid = invalid + flag.double()
        row = self._row(context, norm, step_seconds, not grads, invalid, device)
        if isinstance(row, list):
            return facts, row
        if riding:
            row = torch.cat([row, torch.stack([v.to(device, torch.float64).reshape(()) for v in riding])])
        if self._waiting is None:
            return facts, gather_flat(row, trainer.world_size, self._stages)
        begin = time.perf_counter()
        rows = gather_flat(row, trainer.world_size, self._stages)
        self._waiting.add(time.perf_counter() - begin)  # into the next step's seconds, as the clock has it
        return facts, rows

    def _norm_of(self, optimizer: Optimizer, grads: list[Tensor]) -> Tensor | float:
        if self._share:
            return total_norm(grads, shares=self._shares(optimizer))
        single = set(map(_DTYPE, grads)) == _FLOAT32
        norms = _norms(grads, torch.float32, single)
        # What is clipped are the parameters' own gradients, each by a norm in its own dtype.
        if single and self.shared_norm.wanted and _PLAIN.issuperset(map(type, grads)):
            self.shared_norm.keep(grads, norms)
        return math.hypot(*map(Tensor.item, norms)) if self._on_host else _total(norms)

    def _shares(self, optimizer: Optimizer) -> list[float] | None:
        if not self._share:
            return None
        return [self._share[id(p)] for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _look_again(self, trainer: Trainer, optimizer: Optimizer, values: _Values) -> _Values:
        """The same values with an exact gradient norm where the cheap one is odd.

        The float32 sum may have overflowed or underflowed. Everybody sees it, so everybody looks again.
        """
        if isinstance(values, list):
            norm = values[GRAD_NORM]
            if not (norm < FLOAT32_SQUARE_LIMIT and (norm > 1e-12 or norm == 0)):
                values[GRAD_NORM] = float(self._exact_norm(trainer, optimizer))
            return values
        norms = values[:, GRAD_NORM]
        if not ((norms < FLOAT32_SQUARE_LIMIT) & ((norms > 1e-12) | (norms == 0))).all():
            exact = self._exact_norm(trainer, optimizer).reshape(1).to(trainer.strategy.root_device)
            norms[:] = read_now(gather_flat(exact, trainer.world_size))[:, 0]
        return values

    def _exact_norm(self, trainer: Trainer, optimizer: Optimizer) -> Tensor:
        """0-dim float64."""
        grads = gradients(optimizer)
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=trainer.strategy.root_device)
        return total_norm(grads, torch.float64, self._shares(optimizer)) / scale_of_gradients(trainer, optimizer)

    @staticmethod
    def _finish_norms(matrix: np.ndarray[Any, Any], sharded: bool) -> None:
        for index in (GRAD_NORM, UPDATE_NORM):
            column = matrix[:, index]
            if sharded:  # parts of one vector: the whole has the root of the summed squares
                column[:] = math.sqrt(float(np.square(column).sum()))
        matrix[:, NONFINITE_GRADS] = ~np.isfinite(matrix[:, GRAD_NORM])

    def _row(
        self,
        context: RunContext,
        norm: Tensor | float,
        step_seconds: float,
        no_grads: bool,
        invalid: Tensor | float,
        device: torch.device,
    ) -> Tensor | list[float]:
        """This rank's row, ``[n_signals]`` float64 on the device: host numbers in one copy, the rest stays there."""
        scaler = self._scaler
        loss, supervised, tokens, bad = self._window_totals(device)
        if not self._speaks:  # another rank of this replica has counted the same tokens
            supervised = tokens = 0.0
        values: tuple[Tensor | float, ...] = (  # in the order of SIGNALS
            loss,
            supervised,
            tokens,
            norm,
            math.nan if self._update_norm is None else self._update_norm,
            bad,
            0.0,  # nonfinite_grads follows from the gathered norms
            1.0 if scaler is None else scaler._get_scale_async(),
            step_seconds,
            self._data_seconds,
            invalid,
            float(no_grads and bool(self._losses)),
            float(context.terminating),
            self._waiting.take() if self._waiting is not None else 0.0,
        )
        if self._on_host:
            row = [v.item() if isinstance(v, Tensor) else v for v in values]
            return [*row, *self._host_source_row()] if self._source_names else row
        values = tuple(v.item() if isinstance(v, Tensor) and v.device.type == "cpu" else v for v in values)
        known = torch.tensor([math.nan if isinstance(v, Tensor) else v for v in values], dtype=torch.float64)
        on_device = known.to(device, non_blocking=True)
        places = tuple(i for i, value in enumerate(values) if isinstance(value, Tensor))
        if places:
            scalars = torch.stack([v.to(device, torch.float64).reshape(()) for v in values if isinstance(v, Tensor)])
            if places not in self._places:
                self._places[places] = torch.tensor(places, device=device)
            on_device.index_copy_(0, self._places[places], scalars)
        return torch.cat([on_device, self._source_row(device)]) if self._source_names else on_device

    def _window_totals(self, device: torch.device) -> tuple[Tensor | float, ...]:
        """Loss, supervised tokens, tokens and count of non-finite losses: numbers where the host knows them anyway."""
        tokens: Tensor | float = 0.0
        if not self._counted:
            one = self._tokens[0] if len(self._tokens) == 1 else None
            tokens = float(one) if isinstance(one, int) else _sum(self._tokens, device)
        if not self._losses:
            return math.nan, 0.0, tokens, 0.0
        if len(self._losses) == 1:
            loss, number = self._losses[0], self._loss_number
            if number is None and loss.device.type == "cpu":
                number = loss.item()
            if number is not None:
                return number, self._weights[0], tokens, float(not math.isfinite(number))
            return loss, self._weights[0], tokens, ~torch.isfinite(loss)
        losses = torch.stack(self._losses).to(device).double()
        weights = _stack(self._weights, device)
        bad = (~torch.isfinite(losses)).double().sum()
        loss = torch.where(weights > 0, losses * weights, 0.0).sum() / weights.sum()
        return loss, weights.sum(), tokens, bad

    def _host_source_row(self) -> list[float]:
        """Mean loss and tokens of each source in turn."""
        if self._host_sources is None or not self._speaks:
            return [math.nan, 0.0] * len(self._source_names)
        nats, tokens = self._host_sources
        return [x for s, t in zip(nats, tokens, strict=True) for x in (s / t if t else math.nan, t)]

    def _source_row(self, device: torch.device) -> Tensor:
        if self._by_source is None or not self._speaks:
            return torch.tensor(self._host_source_row(), dtype=torch.float64).to(device, non_blocking=True)
        sums = self._by_source
        return torch.stack([sums[0] / sums[1], sums[1]], dim=1).reshape(-1).to(device)

    @staticmethod
    def _own_findings(context: RunContext) -> list[Finding]:
        """What other callbacks of this rank have found since the last gate."""
        scratch = context.scratch
        found = list(scratch.get("batch_findings", ()))
        for name in ONCE:
            if name in scratch:
                found += scratch[name]
        return found

    # ----------------------------------------------------------------------------------- after the step: update norm

    def _start_update_norm(self, optimizer: Optimizer, step: int, held: bool) -> None:
        every = self.update_norm_every_n_steps
        self._measuring = bool(every) and step % every == 0 and not held
        if not self._measuring:
            return
        params = [local(p.detach()) for group in optimizer.param_groups for p in group["params"]]
        if self._before_update is None or len(self._before_update) != len(params):
            self._before_update = [torch.empty_like(p) for p in params]
        torch._foreach_copy_(self._before_update, params)
        self._measured = params
        self._measured_shares = None
        if self._share:
            self._measured_shares = [self._share[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._measuring and self._before_update is not None:
            torch._foreach_sub_(self._before_update, self._measured)
            self._update_norm = total_norm(self._before_update, shares=self._measured_shares)
            self._measuring = False
        for row in self._rows:
            self._write_step(trainer, row)
        if self._rows:
            self._log_metrics(trainer)
        if self._gated:
            self._reset_window()
            self.shared_norm.forget()
            self._data_seconds, self._gated = 0.0, False
        self._rows = []
        self._batch_clock = time.perf_counter()

    # ------------------------------------------------------------------------------------------------------- writing

    def _write_step(self, trainer: Trainer, row: _Row) -> None:
        context, record = self.context(trainer), row[0]
        every = int(context.scratch.get("step_interval", 1))
        if not every or record.step % every:
            return
        journal = context.journal
        if isinstance(journal, Journal):
            make = partial(_fields_elsewhere, *row, trainer.global_rank)
            journal.write_later("step", make, step=record.step, attempt=record.attempt, tokens=record.tokens)
        else:
            fields = step_fields(*row, trainer.global_rank)
            journal.write("step", step=record.step, attempt=record.attempt, tokens=record.tokens, **fields)

    def _log_metrics(self, trainer: Trainer) -> None:
        row = self._rows[-1]
        record = row[0]
        if not trainer.loggers or record.step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        fields = step_fields(*row, trainer.global_rank)
        metrics: dict[str, float] = {
            "loss_mean": fields["loss"],
            **{k: fields[k] for k in ("loss_min", "loss_median", "loss_max", "worst_rank", "grad_norm", "update_norm")},
            "token_probability": token_probability(fields["loss"]),
            "step_seconds": fields["step_seconds"],
            "data_seconds": fields["data_seconds"],
            "wait_seconds": fields["wait_seconds"],
            "tokens": record.tokens,
            "attempt": record.attempt,
            **{k: fields[k] for k in ("slowest_rank", "own_seconds") if k in fields},
        }
        if self.vocabulary_size is not None:
            metrics["nats_below_uniform"] = math.log(self.vocabulary_size) - fields["loss"]
        if self._scaler is not None:
            metrics["loss_scale"] = fields["loss_scale"]
        metrics |= {f"loss/{s}": v for s, v in fields["sources"].items()}
        named = {f"sentinel/{k}": float(v) for k, v in metrics.items() if not math.isnan(v)}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=record.step)

    def state_dict(self) -> dict[str, Any]:
        # A restore point may lie between two micro-batches: what the window has collected so far belongs to it.
        return {
            "nonfinite": self.nonfinite.state_dict(),
            "losses": list(self._losses),
            "weights": list(self._weights),
            "counted": self._counted,
            "supervised": list(self._supervised),
            "tokens": list(self._tokens),
            "by_source": self._by_source
            if self._host_sources is None
            else torch.tensor(self._host_sources, dtype=torch.float64),
            "ids": list(self._ids),
            "unread": self.lag.unread_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.nonfinite.load_state_dict(state_dict["nonfinite"])
        self._reset_window()
        self._losses = list(state_dict["losses"])
        self._weights, self._counted = list(state_dict["weights"]), state_dict["counted"]
        self._supervised = list(state_dict["supervised"])
        self._tokens = list(state_dict["tokens"])
        sums = state_dict["by_source"]
        if sums is not None and sums.device.type == "cpu":
            self._host_sources = sums.tolist()
        else:
            self._by_source = sums
        self._ids = list(state_dict["ids"])
        self.lag.go_back(state_dict.get("unread"))


# ------------------------------------------------------------------------------------------------------------- helpers


def outliers(losses: npt.NDArray[np.float64]) -> list[int]:
    """The ranks whose losses a line keeps where there are many: non-finite ones first, then the highest.

    Example:
        >>> outliers(np.array([2.0] * 70 + [math.nan, 9.0]))[:3]
        [70, 71, 0]
    """
    height = np.where(np.isfinite(losses), losses, np.inf)
    return [int(rank) for rank in np.argsort(-height, kind="stable")[:KEPT_OUTLIERS]]


def _one_rank(record: StepRecord) -> dict[str, Any]:
    """The signals of one rank, from its row as numbers."""
    row = record.numbers
    loss = row[0] if math.isfinite(row[0]) else math.nan
    nonfinite = [0] if row[SIGNAL_INDEX["nonfinite_loss"]] else []
    return {
        "loss": record.mean_loss,
        "loss_min": loss,
        "loss_median": loss,
        "loss_max": loss,
        "worst_rank": 0,
        "nonfinite_ranks": nonfinite,
        "nonfinite_rank_count": len(nonfinite),
        "grad_norm": row[GRAD_NORM],
        "update_norm": row[UPDATE_NORM] if math.isfinite(row[UPDATE_NORM]) else math.nan,
        "loss_scale": row[SIGNAL_INDEX["loss_scale"]],
        "step_seconds": row[SIGNAL_INDEX["step_seconds"]],
        "data_seconds": row[SIGNAL_INDEX["data_seconds"]],
        "wait_seconds": row[SIGNAL_INDEX["wait_seconds"]],
    }


def _several_ranks(record: StepRecord) -> dict[str, Any]:
    column = record.column("loss_nats")
    nonfinite = np.flatnonzero(record.column("nonfinite_loss")).tolist() if record.has_nonfinite else []
    if record.world_size <= ALL_RANKS:  # plain Python is faster for a few numbers
        finite = sorted(x for x in column.tolist() if math.isfinite(x)) or [math.nan]
        lowest, middle, highest = finite[0], sorted_median(finite), finite[-1]
    else:
        sound = column[np.isfinite(column)] if nonfinite else column
        lowest, middle, highest = (
            (float(sound.min()), float(np.median(sound)), float(sound.max())) if sound.size else (math.nan,) * 3
        )
    return {
        "loss": record.mean_loss,
        "loss_min": lowest,
        "loss_median": middle,
        "loss_max": highest,
        "worst_rank": record.worst_rank,
        # Where every rank of thousands is hit, a line is no place for all their names.
        "nonfinite_ranks": nonfinite[:ALL_RANKS],
        "nonfinite_rank_count": len(nonfinite),
        "grad_norm": record.grad_norm,
        "update_norm": record.update_norm,
        "loss_scale": float(record.column("loss_scale")[0]),
        **_seconds(record),
    }


def _seconds(record: StepRecord) -> dict[str, Any]:
    """Largest and median over the ranks of the seconds of a step, and the rank that took longest by itself.

    Under a data-parallel strategy the wall time of a step is everybody's: only what is left of it without the waiting for
    others, a rank's own time, tells who is slow.
    """
    columns = {name: record.column(name) for name in ("step_seconds", "data_seconds", "wait_seconds")}
    own = columns["step_seconds"] - columns["wait_seconds"]
    columns["own_seconds"] = own
    if record.world_size <= ALL_RANKS:
        middle = {name: sorted_median(sorted(column.tolist())) for name, column in columns.items()}
    else:
        middle = {name: float(np.median(column)) for name, column in columns.items()}
    return {
        **{name: float(column.max()) for name, column in columns.items()},
        # to the microsecond: the line is one of very many
        **{f"{name}_median": round(seconds, 6) for name, seconds in middle.items()},
        "slowest_rank": int(np.argmax(own)),
    }


def step_fields(
    record: StepRecord, applied: bool, applied_steps: int, epoch: int, batch_idx: int, rank: int
) -> dict[str, Any]:
    """Fields of a ``step`` event."""
    alone = record.world_size == 1
    fields = _one_rank(record) if alone else _several_ranks(record)
    mine = record.numbers[0] if alone else float(record.column("loss_nats")[rank])
    fields |= {
        "lr": list(record.learning_rates),
        "applied": applied,
        "applied_steps": applied_steps,
        "sample_ids": list(record.sample_ids),
        "epoch": epoch,
        # exact: two runs agree where these hex digits agree
        "loss_bits": struct.pack(">f", mine).hex() if abs(mine) < 3.4e38 or not math.isfinite(mine) else "overflow",
        "sources": record.source_losses,
    }
    if 1 < record.world_size <= ALL_RANKS:
        fields["rank_losses"] = [round(x, 6) for x in record.column("loss_nats").tolist()]
    elif record.world_size > ALL_RANKS:
        column = record.column("loss_nats")
        fields["outlier_losses"] = {str(r): round(float(column[r]), 6) for r in outliers(column)}
    fields["batch_idx"] = batch_idx
    return fields


def _fields_elsewhere(record: StepRecord, *facts: Any) -> dict[str, Any]:
    """:func:`step_fields` on the journal's thread, while training may read the same record."""
    return step_fields(record.apart(), *facts)


def _stack(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    if not values:
        return torch.zeros(1, dtype=torch.float64, device=device)
    if any(isinstance(v, Tensor) for v in values):
        # Filled there, not copied: a copy of a number to the device waits for the device.
        return torch.stack([_scalar(v, device) for v in values])
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)


def _matrix(rows: Tensor | list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64) if isinstance(rows, list) else rows


def parts_of(context: RunContext, batch: Any) -> tuple[list[Part], bool]:
    """The batch's parts, and whether each of its tokens is known to carry loss: from the validator, if it has looked."""
    known = context.scratch.get("batch_parts")
    return known[1:] if known is not None and known[0] is batch else (parts(batch), False)


def _sum(values: Sequence[Tensor | float], device: torch.device) -> Tensor | float:
    if any(isinstance(v, Tensor) for v in values):
        return _stack(values, device).sum()
    return float(sum(values))


def scale_of_gradients(trainer: Trainer, optimizer: Optimizer) -> Tensor | float:
    """What the gradients at the gate are still multiplied by: 1 unless a fused optimizer unscales by itself."""
    scaler = scaler_of(trainer)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scale: Tensor = scaler._get_scale_async().double().reshape(())
        return scale
    return 1.0


def _planned_rates(trainer: Trainer, optimizer: Optimizer, context: RunContext) -> list[Any] | None:
    """What the scheduler of this optimizer last set, a number or 0-dim tensor per parameter group; None without one.

    Looked for in every step: callbacks (``StochasticWeightAveraging``) put another one in its place.
    """
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if getattr(scheduler, "optimizer", None) is optimizer:
            rates: list[Any] | None = getattr(scheduler, "_last_lr", None)
            if rates is not None:
                factor = context.scratch.get("lr_factor")  # a reduction that is in force on purpose
                return rates if factor is None else [rate * factor for rate in rates]
    return None


def _on_host(rates: Sequence[Any]) -> tuple[float, ...]:
    """As numbers; NaN for one that lies on a device, which is known when the record has been read."""
    return tuple([math.nan if isinstance(r, Tensor) and r.device.type != "cpu" else float(r) for r in rates])


def _take_rates(context: RunContext, facts: Facts, values: _Values, rank: int) -> _Values:
    """Learning rates that have come with the rows, to where they belong; the rows without them."""
    assert isinstance(values, np.ndarray)
    told = iter(values[rank, -facts.riding :].tolist())
    facts.learning_rates = tuple([next(told) if math.isnan(r) else r for r in facts.learning_rates])
    if facts.planned_rates is not None:
        facts.planned_rates = tuple([next(told) if math.isnan(r) else r for r in facts.planned_rates])
    for i in range(len(context.rates) - 1, max(-1, len(context.rates) - 4), -1):
        if context.rates[i][0] == facts.step:
            context.rates[i] = (facts.step, facts.planned_rates, facts.learning_rates)
            break
    return values[:, : -facts.riding]


def _loader_sources(trainer: Trainer) -> Sequence[str]:
    """Sources of the first training loader that has any."""
    sources = next((loader.sources for loader in train_loaders(trainer) if hasattr(loader, "sources")), ())
    return [str(getattr(s, "name", s)) for s in sources]


__all__ = ["SOURCE_LOSS", "SOURCE_TOKENS", "RankTelemetry", "token_probability"]
