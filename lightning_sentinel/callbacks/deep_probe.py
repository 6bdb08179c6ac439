"""Looks into the model at a slow interval and at every incident; warns before a magnitude leaves its dtype's range."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..probes.collect import Stats, rounded
from ..probes.generic import QUANTILES
from ..probes.observer import Observer
from ..probes.training import NAMED, Groups, moment_report, moments
from ..probes.trend import Approach, RangeTrend
from ..state import lightning_private as private
from ..state.tree import local
from ..triage.nonfinite import worst_micro_batches
from ..triage.replay import ReplayResult, ReplayUnavailableError, replay
from ..triage.sandbox import is_replaying
from ..triage.tokens import TokenLosses
from ..triage.window import ensure_capture
from .base import SentinelCallback, find_callback, gather_objects
from .incident_response import IncidentResponse
from .rank_telemetry import scale_of_gradients

log = logging.getLogger("lightning_sentinel")

CLOSER_LOOK = 10  # times as often while a magnitude is near its limit
NEAR_BITS = 4.0  # a sixteenth of the limit


@dataclass
class _Look:
    """One probe between the gate and the end of its batch."""

    step: int
    reason: str
    incident: int | None
    started: float
    stats: Stats
    observer: Observer | None
    optimizer: Optimizer
    groups: Groups
    micro_batch: int = 0
    unavailable: str = ""
    missing: list[str] = field(default_factory=list)
    before: list[Tensor] | None = None
    parameters: list[Tensor] = field(default_factory=list)
    grads_of: str = "step"
    places: dict[str, list[int]] = field(default_factory=dict)
    tokens: TokenLosses | None = None
    no_tokens: str = ""
    problem: str = ""  # why this rank could not measure; then none does


class DeepProbe(SentinelCallback):
    """Measures what a curve does not show, every ``every_n_steps`` steps and at every incident.

    A forward of the captured micro-batch runs again in the sandbox of the triage, with hooks that exist only there: a step
    that is not probed costs nothing, a compiled model is probed in its eager form, and random states, buffers, metrics, logs
    and the data position are untouched. All statistics stay on the device until one copy to the host.

    What is measured:

    - the residual stream by depth (``stream_rms``, ``stream_max`` of the elements of every ``nn.ModuleList``);
    - attention logits (largest by head), entropy by head, rows that are masked throughout;
    - what the registered probes of the modules give (:func:`lightning_sentinel.probes.register_probe`);
    - quantiles of the single tokens' losses, from ``cross_entropy``, ``nll_loss`` or an index into a ``log_softmax``, or from
      the module's own ``token_losses(batch, batch_idx)`` where its loss has no logits at hand;
    - norms of gradients, weights and the update, by block and by group of the optimizer; parameters whose gradient is zero;
    - least and largest value of each kind of optimizer state, and where they lie;
    - the distance of every probed output to the largest number of its dtype, in doublings (``headroom_bits``). Where that
      will be used up within ``horizon_steps``, or less than one doubling is left, a finding ``range_trend`` warns.

    On several ranks all look at the same steps; each journals its own data, and the range is that of the worst rank. At an
    incident each rank's probe goes into the incident's bundle, too.

    Example:
        >>> from lightning_sentinel import DeepProbe
        >>> DeepProbe(every_n_steps=500).horizon_steps
        4000

    Journalled: ``probe.deep`` (see ``docs/probes.md``), and as ``finding`` the alarm ``range_trend`` with ``module:<path>``.
    Nothing is logged to the loggers.

    Args:
        every_n_steps: Steps between two probes; a tenth of it while less than four doublings are left. 0: only at incidents.
        incidents: Also probe the step at which an incident is opened, before the update, with this rank's own gradients.
        horizon_steps: How far ahead growth is followed; None for eight intervals.
        max_modules: Modules of one class that are probed at most, spread evenly over the depth.
        max_incidents: At most so many incidents are probed in one fit.
    """

    fresh_state = True

    def __init__(
        self,
        every_n_steps: int = 250,
        incidents: bool = True,
        horizon_steps: int | None = None,
        max_modules: int = 32,
        max_incidents: int = 16,
    ) -> None:
        check_limits("DeepProbe", locals())
        self.every_n_steps, self.incidents = every_n_steps, incidents
        self.horizon_steps = horizon_steps if horizon_steps is not None else 8 * max(every_n_steps, 1)
        self.max_modules, self.max_incidents = max_modules, max_incidents
        self.trend = RangeTrend(self.horizon_steps)
        self._next = every_n_steps
        self._forget()

    def _forget(self) -> None:
        self._look: _Look | None = None
        self._seen = 0
        self._told = False

    # ------------------------------------------------------------------------------------------------- life of a fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        ensure_capture(trainer)
        self._seen = len(self.context(trainer).incidents)
        self._probed_incidents = 0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._look = None

    # ------------------------------------------------------------------------------------------------------- the gate

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """After the answer to the record: an incident of this step is known, and whether its update is held."""
        if is_replaying(trainer):
            return
        context, step = self.context(trainer), trainer.global_step
        opened = context.incidents[self._seen :]
        self._seen = len(context.incidents)
        if opened and self.incidents and self._probed_incidents < self.max_incidents:
            self._probed_incidents += 1
            look = self._begin(trainer, pl_module, optimizer, "incident", opened[-1].number)
            # Written at once: the run may be stopped, or go back, at the end of this batch.
            measured = self._end(trainer, look)
            response = find_callback(trainer, IncidentResponse)
            if response is not None:
                for incident in opened:
                    response.bundles.add_probe(trainer, incident.number, measured)
        if self.every_n_steps and step >= self._next and not context.held:
            self._next = (step // self.every_n_steps + 1) * self.every_n_steps
            self._look = self._begin(trainer, pl_module, optimizer, "interval", None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._look is not None:
            look, self._look = self._look, None
            self._end(trainer, look)

    # ------------------------------------------------------------------------------------------------------ measuring

    def _begin(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, reason: str, incident: int | None
    ) -> _Look:
        started = time.perf_counter()
        look = _Look(
            trainer.global_step, reason, incident, started, Stats(), None, optimizer, Groups(module, optimizer)
        )
        result = self._forward(trainer, module, look)
        with _noted(look):
            self._training(trainer, module, look, result)
        return look

    def _forward(self, trainer: Trainer, module: LightningModule, look: _Look) -> ReplayResult | None:
        """The captured micro-batch again, watched; None where it can't be computed again."""
        context = self.context(trainer)
        at_incident = look.reason == "incident"
        sharded = any(hasattr(p, "_local_tensor") for p in module.parameters())
        window = context.window
        problem = "" if window is not None and window.micro_batches else "no micro-batch was captured"
        if private.uses_dataloader_iter(trainer):
            problem = "training_step fetches its own batches"
        # A sharded forward is an exchange: all ranks run it or none.
        problems = [p for p in gather_objects(trainer, [problem]) if p]
        if problems or window is None:
            look.unavailable = problems[0]
            return None
        if at_incident and not sharded:
            live = context.scratch.get("live_losses") or []
            look.micro_batch = worst_micro_batches(window, live, 1)[0]
        observer = look.observer = Observer(self.max_modules)
        try:
            result = replay(
                trainer,
                module,
                look.optimizer,
                # The backward gives this rank's own gradients, and makes a sharded module gather its parts again.
                backward=at_incident or sharded,
                keep_grads=at_incident,
                micro_batches=[look.micro_batch],
                instrument=observer.watching,
                tokens=True,
            )
            look.tokens, look.no_tokens = result.tokens[0] if result.tokens else None, result.no_tokens
        except ReplayUnavailableError as error:
            look.unavailable = str(error)
            return None
        except Exception as error:  # the user's training_step, a second time
            if sharded:
                raise  # the other ranks wait inside the forward
            look.unavailable = f"{type(error).__name__}: {error}"[:300]
            return None
        finally:
            look.stats = observer.stats
        return result

    @torch.no_grad()
    def _training(self, trainer: Trainer, module: LightningModule, look: _Look, result: ReplayResult | None) -> None:
        """Gradients at the gate (at an incident this rank's own, from the replay), weights, moments."""
        device, groups = trainer.strategy.root_device, look.groups
        if look.reason == "incident":
            look.grads_of = "this rank"
            own = {} if result is None or result.grads is None else result.grads
            grads: list[Tensor | None] = [own.get(name) for name in groups.names]
            scale: Tensor | float = 1.0
        else:
            grads = [p.grad for p in groups.parameters]
            scale = scale_of_gradients(trainer, look.optimizer)
        self._norms(look, "gradient", grads, device, scale)
        look.missing = [n for n, g in zip(groups.names, grads, strict=True) if g is None]
        self._norms(look, "weight", list(groups.parameters), device)
        for key, (places, lows, highs) in moments(look.optimizer, device).items():
            look.places[key] = places
            look.stats.values += [(f"optimizer:{key}", "min", lows), (f"optimizer:{key}", "max", highs)]
        if look.reason == "interval":
            look.parameters = [local(p.detach()) for p in groups.parameters]
            look.before = [torch.empty_like(p) for p in look.parameters]
            torch._foreach_copy_(look.before, look.parameters)

    @staticmethod
    def _norms(
        look: _Look, what: str, tensors: list[Tensor | None], device: torch.device, scale: Tensor | float = 1.0
    ) -> None:
        by_group, each = look.groups.norms(tensors, device)
        look.stats.values.append((f"norms:{what}", "groups", by_group / scale))
        look.stats.values.append((f"norms:{what}", "each", each / scale))

    @torch.no_grad()
    def _end(self, trainer: Trainer, look: _Look) -> dict[str, Any]:
        """Measure the update, read everything at once, judge the range, write it down; the fields of ``probe.deep``."""
        device = trainer.strategy.root_device
        with _noted(look):
            if look.before is not None and not look.problem:
                torch._foreach_sub_(look.before, look.parameters)
                self._norms(look, "update", list(look.before), device)
        look.before, look.parameters = None, []
        problems, magnitudes = self._worst_of_ranks(trainer, look, device)
        if problems:
            return self._given_up(trainer, look, problems)
        look.stats.values.append(("ranges", "all", magnitudes))
        read = look.stats.read(device)
        ranges = _ranges(look.stats, _numbers(read.pop("ranges")["all"]))
        warned = self.trend.look(look.step, ranges) if look.reason == "interval" else []
        event = _event(look, read)
        closest = self.trend.closest if look.reason == "interval" else None
        if closest is not None:
            path, bits = closest
            magnitude, limit = ranges[path]
            event["range"] = {"path": path, "max": rounded(magnitude), "limit": limit, "headroom_bits": rounded(bits)}
            if bits <= NEAR_BITS or warned:
                self._next = min(self._next, look.step + max(1, self.every_n_steps // CLOSER_LOOK))
        event["seconds"] = round(time.perf_counter() - look.started, 4)
        context = self.context(trainer)
        event = {"step": look.step, "attempt": context.attempt, "tokens": context.tokens, **event}
        context.scratch["deep_probe"] = event
        context.journal.write("probe.deep", **event)
        for approach in warned:
            self._warn(trainer, look.step, approach)
        if look.unavailable and not self._told:
            self._told = True
            log.info("DeepProbe: the modules can't be probed: %s.", look.unavailable)
        return event

    @staticmethod
    def _worst_of_ranks(trainer: Trainer, look: _Look, device: torch.device) -> tuple[list[str], Tensor]:
        """What went wrong on which rank; and the largest magnitudes over the ranks, ``[n]``: all then judge alike."""
        values = torch.zeros(0, dtype=torch.float64, device=device)
        with _noted(look):
            mine = [m.reshape(()).to(device) for _, m, _ in look.stats.ranges]
            values = torch.stack(mine) if mine else values
        problem = f"rank {trainer.global_rank}: {look.problem}" if look.problem else ""
        told = gather_objects(trainer, [(problem, [path for path, _, _ in look.stats.ranges])])
        if problems := [p for p, _ in told if p]:
            return problems, values
        if any(paths != told[0][1] for _, paths in told):  # one rank's replay failed, or its data took another way
            look.stats.ranges = []
            return [], values.new_zeros(0)
        if trainer.world_size > 1 and len(values):
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return [], values

    def _given_up(self, trainer: Trainer, look: _Look, problems: list[str]) -> dict[str, Any]:
        """A probe that could not be made on some rank is none on any: said, and training goes on."""
        context, reason = self.context(trainer), "; ".join(problems[:NAMED])
        event: dict[str, Any] = {"step": look.step, "attempt": context.attempt, "tokens": context.tokens}
        event |= {"reason": look.reason, "incident": look.incident, "unavailable": reason}
        event |= {"modules": {}, "groups": {}, "seconds": round(time.perf_counter() - look.started, 4)}
        context.journal.write("probe.deep", **event)
        if trainer.is_global_zero:
            log.warning("DeepProbe could not measure step %d: %s", look.step, reason)
        return event

    def _warn(self, trainer: Trainer, step: int, approach: Approach) -> None:
        growth = (
            f"it doubles every {1.0 / approach.bits_per_step:.3g} steps and will pass it in about"
            f" {approach.steps_left:.0f} steps"
            if approach.bits_per_step > 0.0
            else "less than one doubling is left"
        )
        message = (
            f"The values at {approach.path or 'the module'} reach {approach.magnitude:.4g} at step {step}, the largest finite"
            f" number of their dtype is {approach.limit:.5g}: {growth}. Look at the residual stream by depth in probe.deep;"
            " lower the learning rate, put a norm in front, or compute this module in a wider dtype."
        )
        finding = Finding(
            kind=FindingKind.RANGE_TREND,
            detector="deep_probe",
            step=step,
            score=rounded(approach.bits),
            threshold=0.0,
            unit="doublings left",
            message=message,
            severity=Severity.ALARM,
            culprits=(f"module:{approach.path}",),
            evidence={
                "magnitude": rounded(approach.magnitude),
                "limit": approach.limit,
                "bits_per_step": rounded(approach.bits_per_step),
                "steps_left": rounded(approach.steps_left),
            },
        )
        context = self.context(trainer)
        context.journal.write(
            "finding", step=step, attempt=context.attempt, tokens=context.tokens, finding=finding.to_dict()
        )
        if trainer.is_global_zero:
            log.warning("%s", message)

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "trend": self.trend.dumps()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]
        self.trend.loads(state_dict["trend"])


# ------------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _noted(look: _Look) -> Iterator[None]:
    """What fails while this rank measures is told to the others where they would wait for it."""
    try:
        yield
    except Exception as error:  # no memory for a copy, say
        look.problem = look.problem or f"{type(error).__name__}: {error}"[:300]


def _numbers(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _ranges(stats: Stats, magnitudes: list[float]) -> dict[str, tuple[float, float]]:
    """The magnitude nearest to its limit of each path."""
    found: dict[str, tuple[float, float]] = {}
    for (path, _, limit), magnitude in zip(stats.ranges, magnitudes, strict=True):
        if path not in found or magnitude / limit > found[path][0] / found[path][1]:
            found[path] = (magnitude, limit)
    return found


def _event(look: _Look, read: dict[str, dict[str, float | list[float]]]) -> dict[str, Any]:
    """The fields of ``probe.deep``."""
    names, groups = look.groups.names, look.groups.groups
    norms = {w: read.pop(f"norms:{w}") for w in ("gradient", "weight", "update") if f"norms:{w}" in read}
    by_group: dict[str, dict[str, float]] = {g: {} for g in groups}
    for what, values in norms.items():
        for group, value in zip(groups, _numbers(values["groups"]), strict=True):
            by_group[group][what] = value
    for values_of in by_group.values():
        if values_of.get("weight") and "update" in values_of:
            values_of["update_to_weight"] = rounded(values_of["update"] / values_of["weight"])
    gradients = _numbers(norms["gradient"]["each"])
    zero = [n for n, g in zip(names, gradients, strict=True) if g == 0.0 and n not in set(look.missing)]
    state = {}
    for key, places in look.places.items():
        values = read.pop(f"optimizer:{key}")
        state[key] = moment_report(names, places, _numbers(values["min"]), _numbers(values["max"]))
    observer = look.observer
    return {
        "reason": look.reason,
        "incident": look.incident,
        "micro_batch": look.micro_batch,
        "modules": {path: {"kind": look.stats.kinds.get(path, ""), **values} for path, values in read.items()},
        "groups": by_group,
        "gradients_of": look.grads_of,
        "dead_gradients": {"zero": zero[:NAMED], "zero_count": len(zero), "none": look.missing[:NAMED]},
        "optimizer": state,
        "token_losses": _token_losses(look),
        "left_out": 0 if observer is None else observer.left_out,
        "failed": {} if observer is None else dict(list(observer.failed.items())[:NAMED]),
        "unavailable": look.unavailable,
    }


def _token_losses(look: _Look) -> dict[str, Any]:
    """Quantiles of the single tokens' losses, or why there are none."""
    if look.tokens is None:
        return {"unavailable": look.no_tokens or look.unavailable}
    values = look.tokens.quantiles(QUANTILES)
    return {
        "heard": look.tokens.heard,
        "targets": int((~look.tokens.loss.isnan()).sum()),
        "loss_nats": {f"{q:g}": rounded(x) for q, x in zip(QUANTILES, values, strict=False)},
    }
