"""Names the first non-finite value of a step: what made it, where, for which samples, on which rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..context import context_of
from ..record import StepRecord
from ..state import lightning_private as _private
from ..state.tree import local
from .origin import TRAINING_STEP, Origin, is_bad
from .peers import Peers
from .replay import ReplayResult, ReplayUnavailableError, replay
from .window import MicroBatch, StepWindow, tensors

NOT_REPRODUCED, REDUCTION, OPTIMIZER_STATE = "not_reproduced", "reduction", "optimizer_state"
COMPILED = "compiled"


@dataclass
class TraceReport:
    """The first non-finite value of one step, the same on every rank.

    Attributes:
        step: The step.
        kind: ``operator`` or ``constant`` (made in this step), ``batch``, ``parameter``, ``buffer`` (given to it),
            ``optimizer_state``, ``reduction`` (every local value is finite, their reduction is not) or
            ``compiled`` (the step is not finite again as it ran, compiled, and finite in its eager form) or
            ``not_reproduced`` (the replay is finite).
        name: The operator, or the name of the parameter, buffer, batch entry or optimizer state.
        module: Path of the module, or ``training_step``; empty where none is known.
        phase: ``forward`` or ``backward, <autograd node>`` or ``before the step``.
        line: ``function:line`` of the code.
        rank: The first rank on which it was found; None where no rank is known.
        ranks: All of them.
        micro_batch: Index of the micro-batch within the step.
        samples: Ids of the samples concerned; empty where it is all of the batch, or not known.
        value: Count of non-finite values and range of the finite rest of the tensor that was made.
        inputs: The same of the operator's inputs.
        compiled: What the replay of a compiled step as it ran gave, ``again`` or ``finite``; ``not available`` where it could
            not be run so; empty where nothing is compiled.
        sentence: All of it in words.
        origin: What the replay found on ``rank``.
        by_rank: What each rank found, in words.
        seconds: Wall time, the slowest rank's.
        forwards: Forward passes of all replays.
        replay: What the replay that decided measured on this rank: the armed one, or that of the compiled step.
    """

    step: int
    kind: str
    name: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    micro_batch: int = 0
    samples: tuple[str, ...] = ()
    value: dict[str, Any] | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    compiled: str = ""
    sentence: str = ""
    origin: Origin | None = None
    by_rank: list[str] = field(default_factory=list)
    seconds: float = 0.0
    forwards: int = 0
    replay: ReplayResult | None = field(default=None, repr=False, compare=False)

    @property
    def reproduced(self) -> bool:
        return self.kind not in (NOT_REPRODUCED, OPTIMIZER_STATE)

    def to_dict(self) -> dict[str, Any]:
        plain = {
            k: getattr(self, k) for k in self.__dataclass_fields__ if k not in ("origin", "step", "rank", "replay")
        }
        return plain | {
            "at_rank": self.rank,
            "reproduced": self.reproduced,
            "traceback": list(self.origin.traceback) if self.origin else [],
        }


@dataclass
class _Local:
    """What one rank knows."""

    origin: Origin | None
    samples: tuple[str, ...]
    finite: bool
    live_loss_bad: bool
    boundary: tuple[int, str] | None  # micro-batch and module path of the first bad output in the live step
    live_grad_module: str
    optimizer_state: str
    seconds: float
    forwards: int
    gradients: str  # names and sizes of the replayed gradients that can be reduced again, as one string
    eager: bool = False  # something that the step ran compiled ran in its eager form
    finite_loss: bool = True
    again: tuple[int, str] | None = None  # as boundary, in the replay
    grad_module: str = ""  # as live_grad_module, in the replay


def trace_nonfinite(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    record: StepRecord | None = None,
    *,
    anomaly: bool = False,
    max_forwards: int | None = None,
    watch: Sequence[str] = (),
) -> TraceReport:
    """Replay the current step with the tracing armed. Every rank calls it alike and gets the same report.

    A step that ran compiled is first replayed as it ran: whether the value comes again is asked of that. Only if it does,
    the eager form is run to name where it is made.

    Raises:
        ReplayUnavailableError: The step cannot be replayed on some rank; raised on every rank, with that rank's reason.
    """
    context = context_of(trainer)
    window = context.window
    peers = Peers(trainer)
    live: Sequence[Tensor | float] = context.scratch.get("live_losses") or []
    step = record.step if record else trainer.global_step
    runs: list[ReplayResult] = []

    def replayed(losses: Sequence[Tensor | float], limit: int | None, **options: Any) -> tuple[list[_Local], str]:
        def measure() -> _Local:
            chosen = worst_micro_batches(window, losses, limit)
            runs.append(
                replay(
                    trainer,
                    module,
                    optimizer,
                    keep_grads=True,
                    micro_batches=chosen,
                    watch=watch,
                    tokens=True,
                    **options,
                )
            )
            assert window is not None  # replay has refused otherwise
            return _look(trainer, module, optimizer, window, record, runs[-1])

        return peers.measured(measure)

    as_it_ran: list[_Local] = []
    is_compiled = peers.any(_private.runs_compiled(module))
    graphs = _private.uses_cuda_graphs(trainer.strategy.root_device)
    if is_compiled and not graphs and (max_forwards is None or max_forwards > 1):
        as_it_ran, _ = replayed(live, None if max_forwards is None else max_forwards - 1, by_micro_batch=True)
    asked = bool(as_it_ran) and not any(x.eager for x in as_it_ran)
    rounds = [as_it_ran] if as_it_ran else []
    compiled = runs[-1] if asked else None
    if not asked or not all(x.finite for x in as_it_ran):
        first = None if compiled is None else compiled.first_bad
        losses = [math.nan if i == first else x for i, x in enumerate(live)]
        spent = max((x.forwards for x in as_it_ran), default=0)
        left = None if max_forwards is None else max(1, max_forwards - spent)
        eager, error = replayed(losses, left, armed=True, anomaly=anomaly)
        if error:
            raise ReplayUnavailableError(error.removeprefix(f"{ReplayUnavailableError.__name__}: "))
        rounds.append(eager)
    everyone = rounds[-1]
    if compiled is not None and everyone is not as_it_ran and all(x.finite and x.origin is None for x in everyone):
        report = _only_compiled(step, as_it_ran)
    else:
        report = _combine(step, everyone, module, peers, runs[-1].grads or {})
    if is_compiled:
        report.compiled = "not available" if not asked else "finite" if everyone is as_it_ran else "again"
    report.forwards = sum(max(x.forwards for x in each) for each in rounds)
    report.by_rank = [_in_words(x) for x in everyone]
    report.seconds = sum(max(x.seconds for x in each) for each in rounds)
    report.replay = runs[-1]
    context.write(trainer, "triage.nonfinite", **report.to_dict())
    return report


def _only_compiled(step: int, as_it_ran: list[_Local]) -> TraceReport:
    """Not finite each time it runs compiled, finite in its eager form."""
    bad = [(r, x) for r, x in enumerate(as_it_ran) if not x.finite]
    rank, mine = bad[0]
    micro_batch, path = mine.again or (0, mine.grad_module)
    where = f"first in the output of {path}" if mine.again else f"last in the gradients of {path}" if path else ""
    return TraceReport(
        step,
        COMPILED,
        name="torch.compile",
        module=path,
        phase="forward" if mine.again or not mine.finite_loss else "backward",
        rank=rank,
        ranks=tuple(r for r, _ in bad),
        micro_batch=micro_batch,
        sentence=f"The step is not finite again as it ran, compiled{where and f', {where}'}; in its eager form it is finite"
        " everywhere: what was compiled computes something else.",
    )


def worst_micro_batches(window: StepWindow | None, live: Sequence[Tensor | float], limit: int | None) -> list[int]:
    """Which micro-batches to run where not all can be: those with the highest (or a non-finite) live loss, in order."""
    count = len(window.micro_batches) if window is not None else 0
    if limit is None or count <= limit:
        return list(range(count))
    losses = [float(x) for x in live] if len(live) == count else [0.0] * count
    ranked = sorted(
        range(count), key=lambda i: (math.isfinite(losses[i]), -losses[i] if math.isfinite(losses[i]) else 0.0)
    )
    return sorted(ranked[: max(limit, 1)])


def ids_of(micro: MicroBatch, rows: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """Sample ids of these rows of a micro-batch (all rows if none are given), by content where it carries no ids."""
    ids = micro.sample_ids
    if not ids:
        from ..data.identity import sample_ids

        ids = tuple(sample_ids(micro.batch))
    return tuple(ids[r] for r in rows if r < len(ids)) if rows else ids


def _look(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    window: StepWindow,
    record: StepRecord | None,
    result: ReplayResult,
) -> _Local:
    live = context_of(trainer).scratch.get("live_losses") or []
    origin = result.origin
    samples: tuple[str, ...] = ()
    if origin is not None and origin.rows and origin.micro_batch < len(window.micro_batches):
        samples = ids_of(window.micro_batches[origin.micro_batch], origin.rows)
    if record is not None:
        live_bad = bool(record.column("nonfinite_loss")[trainer.global_rank] > 0)
    else:
        live_bad = any(is_bad(x) for x in live)
    return _Local(
        origin=origin,
        samples=samples,
        finite=result.finite,
        live_loss_bad=live_bad,
        boundary=first_bad_boundary(window),
        live_grad_module=_last_bad_gradient(_live_grads(module)) if trainer.world_size == 1 else "",
        optimizer_state=_bad_optimizer_state(optimizer, module),
        seconds=result.seconds,
        forwards=len(result.micro_batches),
        eager=result.eager,
        finite_loss=all(map(math.isfinite, result.losses)),
        again=next(((i, path) for i, path, total in result.sums if not math.isfinite(total)), None),
        grad_module=_last_bad_gradient((result.grads or {}).items()),
        gradients=" ".join(f"{n}:{g.numel()}" for n, g in _reducible(result.grads or {})),
    )


def _reducible(gradients: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(n, g) for n, g in sorted(gradients.items()) if not g.is_sparse]


def first_bad_boundary(window: StepWindow) -> tuple[int, str] | None:
    """First watched module, in forward order of the live step, whose output was not finite."""
    for micro_batch, path, total in window.boundary_flags:
        if not math.isfinite(float(total)):
            return micro_batch, path
    return None


def _live_grads(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    return ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)


def _last_bad_gradient(named: Iterable[tuple[str, Tensor]]) -> str:
    """Module of the last parameter with a non-finite gradient: a backward that breaks spoils what lies before it."""
    last = ""
    for name, grad in named:
        if any(is_bad(g) for g in tensors(grad)):
            last = name.rpartition(".")[0]
    return last


def _bad_optimizer_state(optimizer: Optimizer, module: LightningModule) -> str:
    names = {id(p): n for n, p in module.named_parameters()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and is_bad(local(value)):
                return f"{key} of {names.get(id(p), 'a parameter')}"
    return ""


def _combine(
    step: int, everyone: list[_Local], module: LightningModule, peers: Peers, gradients: dict[str, Tensor]
) -> TraceReport:
    """One report from what all ranks found; a pure function of the gathered facts, but for the repeated reduction."""
    found = [(r, x) for r, x in enumerate(everyone) if x.origin is not None and x.origin.kind != "collective"]
    if found:
        return _reproduced(step, found)
    bad_losses = tuple(r for r, x in enumerate(everyone) if x.live_loss_bad)
    boundaries = [(r, x.boundary) for r, x in enumerate(everyone) if x.boundary is not None]
    if peers.size > 1 and not bad_losses and not boundaries:
        reduced = _reduces_badly(module, peers, everyone, gradients)
        if reduced is not None:
            dtype, parameter = reduced
            sentence = f"Every rank's own gradient is finite; their reduction{dtype and f' in {dtype}'} is not"
            sentence += f", first in {parameter}." if parameter else "."
            return TraceReport(step, REDUCTION, name=parameter, phase="reduction", sentence=sentence)
    states = [(r, x.optimizer_state) for r, x in enumerate(everyone) if x.optimizer_state]
    if states and not bad_losses and not boundaries:
        rank, name = states[0]
        sentence = f"The replay is finite, but the optimizer state {name} is not."
        return TraceReport(step, OPTIMIZER_STATE, name=name, rank=rank, ranks=(rank,), sentence=sentence)
    if boundaries:
        rank, boundary = boundaries[0]
        micro_batch, path = boundary if boundary is not None else (0, "")
        ranks = tuple(r for r, _ in boundaries)
        where = f"the output of {path} on rank {rank}"
    else:
        ranks = bad_losses or ((0,) if peers.size == 1 else ())
        path, micro_batch = everyone[0].live_grad_module if not bad_losses else "", 0
        rank = ranks[0] if ranks else -1
        where = f"the {'loss' if bad_losses else 'gradient'}" + (f" on rank {rank}" if ranks else "")
        where += f", last in the parameters of {path}" if path else ""
    return TraceReport(
        step,
        NOT_REPRODUCED,
        module=path,
        phase="forward" if boundaries or bad_losses else "backward",
        rank=rank if rank >= 0 else None,
        ranks=ranks,
        micro_batch=micro_batch,
        sentence=f"In the step {where} was not finite; the replay of the same step is finite everywhere.",
    )


def _reproduced(step: int, found: list[tuple[int, _Local]]) -> TraceReport:
    # What was given to the step explains what was made in it, whichever rank saw it.
    given = [f for f in found if f[1].origin is not None and f[1].origin.kind in ("parameter", "buffer", "batch")]
    rank, mine = min(given or found, key=lambda f: (f[1].origin.order if f[1].origin else 0, f[0]))
    origin = mine.origin
    assert origin is not None
    same = tuple(r for r, x in found if x.origin and (x.origin.kind, x.origin.name) == (origin.kind, origin.name))
    report = TraceReport(
        step,
        origin.kind,
        name=origin.name,
        module=origin.module or (TRAINING_STEP if origin.kind in ("operator", "constant") else ""),
        phase=origin.phase,
        line=origin.line,
        rank=rank,
        ranks=same or (rank,),
        micro_batch=origin.micro_batch,
        samples=mine.samples,
        value=asdict(origin.value) if origin.value else None,
        inputs=[asdict(r) for r in origin.inputs],
        origin=origin,
    )
    report.sentence = _in_words(mine)
    return report


def _in_words(x: _Local) -> str:
    origin = x.origin
    if origin is None:
        return "finite on replay" if x.finite else "not finite on replay, origin unknown"
    if origin.kind == "collective":
        return f"came in through {origin.name}"
    value = origin.value
    stats = f"{value.nonfinite} of {value.numel} {value.dtype} values not finite" if value else ""
    if value is not None and value.finite_min is not None:
        stats += f", the rest in [{value.finite_min:.4g}, {value.finite_max:.4g}]"
    if origin.kind in ("parameter", "buffer", "batch"):
        return f"The {origin.kind} {origin.name} is not finite before the step: {stats}."
    where = f"{origin.module or 'an unknown module'}" + (f" ({origin.line})" if origin.line else "")
    what = "comes in as a constant at" if origin.kind == "constant" else "is first made by"
    return f"In the {origin.phase.partition(',')[0]} of {where} a non-finite value {what} {origin.name}: {stats}."


def _reduces_badly(
    module: LightningModule, peers: Peers, everyone: list[_Local], gradients: dict[str, Tensor]
) -> tuple[str, str] | None:
    """Whether the sum over ranks of the replayed, finite gradients is not finite when it is taken again.

    Returns:
        The dtype in which it is not, where that is narrower than the gradients' (a communication hook may cast them), and
        the first parameter; None if it is finite.
    """
    if any(hasattr(p, "_local_tensor") for p in module.parameters()):
        # Sharded: the replay has reduced already.
        return ("", "") if all(not x.finite for x in everyone) else None
    # The reduction needs the same gradients on every rank; a rank that has others would leave the rest waiting in it.
    comparable = everyone[0].gradients and all(x.gradients == everyone[0].gradients for x in everyone)
    if not all(x.finite for x in everyone) or not comparable or not dist.is_initialized():
        return None
    named = _reducible(gradients)
    for dtype in (None, torch.float16):
        copies: list[Tensor] = []

        def prepare(dtype: torch.dtype | None = dtype, copies: list[Tensor] = copies) -> bool:
            copies.append(
                torch.cat([(g if dtype is None else g.to(dtype)).detach().reshape(-1).clone() for _, g in named])
            )
            return is_bad(copies[0])

        own, error = peers.measured(prepare)  # a copy of all gradients may find no room on one rank
        if error:
            return None
        flat = copies[0]
        dist.all_reduce(flat)
        parts = torch.split(flat, [g.numel() for _, g in named])
        first = next((n for (n, _), part in zip(named, parts, strict=True) if is_bad(part)), "")
        bad = [n for n in peers.gather(first) if n]
        if bad or any(own):
            return ("" if dtype is None else "float16"), next(iter(bad), "")
    return None
