"""Comparisons that need no forward pass: rates against the plan, optimizer state and weights against a snapshot, replicas
against each other, sources before and after. Each states only what arithmetic rules out, so an unusual run is not accused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..record import SOURCE_TOKENS, StepRecord
from ..state.tree import local

if TYPE_CHECKING:
    from ..state.snapshot import Snapshot

MAD_TO_SIGMA = 1.4826
RATE_TOLERANCE = 1e-6  # relative: a rate that went through float32 is still on plan
RATE_JUMP = 1.5  # a rate below this multiple of the plan is not taken for the cause of a jump in the loss
UNPLANNED_JUMP = 3.0  # the same where there is no scheduler and the plan is the rate so far
ROUNDING = 0.02  # relative slack of the bounds on moments: k roundings of float32 or bfloat16 states
NEGLIGIBLE = 1e-30

Rates = tuple[int, tuple[float, ...] | None, tuple[float, ...]]


# ----------------------------------------------------------------------------------------------- the learning rate


@dataclass(frozen=True)
class OffPlan:
    """Where the learning rate left its plan.

    Attributes:
        since_step: First step off plan.
        last_step: Last step off plan.
        planned: What was planned at the step with the largest deviation, one rate for each parameter group.
        actual: What was used there.
        factor: Largest multiple of the planned rate.
    """

    since_step: int
    last_step: int
    planned: tuple[float, ...]
    actual: tuple[float, ...]
    factor: float


def rate_off_plan(rates: Iterable[Rates], since_step: int, last_step: int) -> OffPlan | None:
    """The newest stretch in which the rate was well above its plan and that can have caused what began at ``since_step``.

    A run whose rate differs from the schedule all along (a callback that edits it) keeps its habitual factor as its plan.

    Args:
        rates: ``(step, planned, actual)`` by step, as :class:`~lightning_sentinel.context.RunContext` keeps them.
        since_step: First step of the incident.
        last_step: Step of the record at hand.

    Example:
        >>> history = [(s, (0.1,), (0.1,)) for s in range(20)] + [(20, (0.1,), (5.0,)), (21, (0.1,), (0.1,))]
        >>> found = rate_off_plan(history, since_step=21, last_step=21)
        >>> found.since_step, round(found.factor)
        (20, 50)
    """
    factors = [
        (step, _factor(planned, actual), planned, actual) for step, planned, actual in rates if step <= last_step
    ]
    if not factors:
        return None
    if all(planned is None for _, _, planned, _ in factors):
        return _rate_jump(factors, since_step)
    habit = _habit([f for step, f, _, _ in factors if step < since_step])
    off = [abs(f / habit - 1.0) > RATE_TOLERANCE for _, f, _, _ in factors]
    end = max((i for i, bad in enumerate(off) if bad), default=-1)
    if end < 0:
        return None
    start = end
    while start > 0 and off[start - 1]:
        start -= 1
    stretch = factors[start : end + 1]
    _, factor, planned, actual = max(stretch, key=lambda f: f[1])
    began, ended = stretch[0][0], stretch[-1][0]
    # The update of the last step off plan shows in the loss of the next; a stretch long over is another story.
    if factor < RATE_JUMP * habit or start == 0 or ended < since_step - 3 or began > last_step:
        return None
    return OffPlan(began, ended, planned or (), actual, factor / habit)


def _factor(planned: tuple[float, ...] | None, actual: tuple[float, ...]) -> float:
    """Largest ratio of actual to planned rate over the groups; 1 where nothing is planned."""
    if planned is None or len(planned) != len(actual):
        return 1.0
    ratios = [a / p if p > 0 else (1.0 if a == p else math.inf) for p, a in zip(planned, actual, strict=True)]
    return max(ratios, key=lambda r: abs(math.log(r)) if 0 < r < math.inf else math.inf, default=1.0)


def _habit(factors: Sequence[float]) -> float:
    """Usual factor between rate and plan: 1 unless most of the past was off plan, too."""
    finite = [f for f in factors if 0 < f < math.inf]
    off = [f for f in finite if abs(f - 1.0) > RATE_TOLERANCE]
    return float(np.max(off)) if finite and len(off) * 2 > len(finite) else 1.0


def _rate_jump(factors: Sequence[tuple[int, float, Any, tuple[float, ...]]], since_step: int) -> OffPlan | None:
    """Without a scheduler: the rate is some multiple of what it has been."""
    past = [actual for step, _, _, actual in factors if step < since_step - 3][-32:]
    if len(past) < 8:
        return None
    usual = tuple(float(x) for x in np.max(np.array(past), axis=0))
    for step, _, _, actual in factors:
        ratio = _factor(usual, actual)
        if step >= since_step - 3 and ratio >= UNPLANNED_JUMP:
            return OffPlan(step, step, usual, actual, ratio)
    return None


# --------------------------------------------------------------------------------------- optimizer state and weights


@dataclass(frozen=True)
class StatePoint:
    """Optimizer state and weights at one step, of a snapshot or of now.

    Attributes:
        step: ``trainer.global_step`` there.
        states: State of each parameter by its index, as in ``optimizer.state_dict()["state"]``.
        params: Parameters by name.
    """

    step: int
    states: Mapping[int, Mapping[str, Any]]
    params: Mapping[str, Tensor]


@dataclass(frozen=True)
class StateViolation:
    """Something in the state that no sequence of updates can have made.

    Attributes:
        name: ``exp_avg_sq``, ``exp_avg``, or the name of a parameter.
        since_step: Step of the newest state that is still in order.
        elements: How many elements are out of bounds.
        numel: Of how many.
        detail: Which bound, in words.
    """

    name: str
    since_step: int
    elements: int
    numel: int
    detail: str


def state_points(
    snapshots: Iterable[Snapshot], optimizer: Optimizer, index: int, module: nn.Module, step: int
) -> list[StatePoint]:
    """Full snapshots that are not newer than ``step``, oldest first, then the state of now."""
    full = sorted((s for s in snapshots if s.params is not None and s.step <= step), key=lambda s: s.step)
    points = [StatePoint(s.step, s.optimizers[index]["state"], s.params or {}) for s in full if not s.mid_accumulation]
    params = {name: local(p.detach()) for name, p in module.named_parameters()}
    return [*points, StatePoint(step, optimizer.state_dict()["state"], params)]


def impossible_moments(
    points: Sequence[StatePoint], optimizer: Optimizer, history: Sequence[StepRecord]
) -> StateViolation | None:
    """Moments of Adam that cannot follow from those of the snapshot before.

    After k updates ``v_k >= beta2^k v_0`` and ``v_k <= beta2^k v_0 + (1 - beta2^k) G^2``, with ``G`` the largest gradient
    norm in between: no element of a gradient is larger than its norm, and clipping only makes it smaller. Likewise for
    the first moment.
    """
    last = points[-1]
    for state in last.states.values():
        v = state.get("exp_avg_sq")
        if isinstance(v, Tensor) and bool((local(v) < 0).any()):
            broken = int((local(v) < 0).sum())
            since = _newest_clean(points, lambda s: not bool((local(s["exp_avg_sq"]) < 0).any()))
            return StateViolation("exp_avg_sq", since, broken, v.numel(), "negative second moments")
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return None
    groups = _group_of(optimizer)
    for before, after in pairwise(points):
        bound = _largest_gradient(history, before.step, after.step)
        for i, state in after.states.items():
            if i in before.states and i in groups:
                found = _moments_of(before.states[i], state, groups[i], bound, before.step)
                if found is not None:
                    return found
    return None


def _newest_clean(points: Sequence[StatePoint], clean: Any) -> int:
    for point in reversed(points[:-1]):
        if all(clean(s) for s in point.states.values() if "exp_avg_sq" in s):
            return point.step
    return points[0].step


def _group_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Settings of each parameter by its index in ``state_dict``."""
    return {i: group for group in optimizer.state_dict()["param_groups"] for i in group["params"]}


def _largest_gradient(history: Sequence[StepRecord], start: int, end: int) -> float | None:
    """Largest gradient norm of the steps ``start .. end - 1``; None if one of them is not known."""
    norms = {r.step: r.grad_norm for r in history if start <= r.step < end and not r.has_nonfinite}
    if any(step not in norms or not math.isfinite(norms[step]) for step in range(start, end)):
        return None
    return max(norms.values(), default=0.0)


def _moments_of(
    before: Mapping[str, Any], after: Mapping[str, Any], group: Mapping[str, Any], gradient: float | None, step: int
) -> StateViolation | None:
    v0, v1 = before.get("exp_avg_sq"), after.get("exp_avg_sq")
    m0, m1 = before.get("exp_avg"), after.get("exp_avg")
    if not all(isinstance(t, Tensor) for t in (v0, v1, m0, m1)):
        return None
    v0, v1, m0, m1 = (local(t).detach() for t in (v0, v1, m0, m1) if isinstance(t, Tensor))
    if v0.shape != v1.shape:
        return None
    v0, m0 = v0.to(v1.device, torch.float32), m0.to(m1.device, torch.float32)
    v1, m1 = v1.float(), m1.float()
    updates = float(after.get("step", 0)) - float(before.get("step", 0))
    if updates < 0:
        return StateViolation("exp_avg_sq", step, v1.numel(), v1.numel(), "its step count has gone back")
    beta1, beta2 = (float(b) for b in group["betas"])
    kept1, kept2 = beta1**updates, beta2**updates
    low = v1 < kept2 * v0 * (1.0 - ROUNDING) - NEGLIGIBLE
    if bool(low.any()):
        return _violation("exp_avg_sq", step, low, f"below beta2^{updates:g} = {kept2:.4g} of the snapshot's value")
    if gradient is None or (group.get("weight_decay") and not group.get("decoupled_weight_decay", True)):
        return None
    slack = 1.0 + ROUNDING
    high = v1 > (kept2 * v0 + (1.0 - kept2) * gradient**2) * slack + NEGLIGIBLE
    if bool(high.any()):
        return _violation("exp_avg_sq", step, high, f"above what gradients of norm {gradient:.4g} can have made of it")
    far = (m1 - kept1 * m0).abs() > (1.0 - kept1) * gradient * slack + ROUNDING * m0.abs() + NEGLIGIBLE
    if bool(far.any()):
        return _violation("exp_avg", step, far, f"farther than gradients of norm {gradient:.4g} can have moved it")
    return None


def _violation(name: str, step: int, where: Tensor, detail: str) -> StateViolation:
    return StateViolation(name, step, int(where.sum()), where.numel(), detail)


def impossible_weights(
    points: Sequence[StatePoint], optimizer: Optimizer, module: nn.Module, rates: Iterable[Rates]
) -> StateViolation | None:
    """A parameter that moved farther since the last snapshot than the updates in between can have moved it.

    An update of Adam moves no element by more than ``lr * max(1, (1 - beta1) / sqrt(1 - beta2))`` (twice that is allowed
    here) and the weight decay's share. Where earlier snapshots lie farther apart than that, too, something else edits
    the weights as a habit, and nobody is accused.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or len(points) < 2:
        return None
    used = {step: max(actual, default=0.0) for step, _, actual in rates}
    owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names = {name: owned[id(p)] for name, p in module.named_parameters() if id(p) in owned}
    found = [_moved_too_far(a, b, names, used) for a, b in pairwise(points)]
    return found[-1] if found[-1] is not None and not any(found[:-1]) else None


def _moved_too_far(
    before: StatePoint, after: StatePoint, groups: Mapping[str, Mapping[str, Any]], used: Mapping[int, float]
) -> StateViolation | None:
    steps = range(before.step, after.step)
    if any(s not in used for s in steps):
        return None
    rate = sum(used[s] for s in steps)
    for name, group in groups.items():
        old, new = before.params.get(name), after.params.get(name)
        if old is None or new is None or old.shape != new.shape or not new.is_floating_point():
            continue
        old, new = local(old).to(new.device).float(), local(new).float()
        beta1, beta2 = (float(b) for b in group["betas"])
        reach = 2.0 * rate * max(1.0, (1.0 - beta1) / math.sqrt(max(1.0 - beta2, 1e-12)))
        decay = rate * float(group.get("weight_decay", 0.0))
        # What is not finite is the armed replay's to explain: an update may have overflowed.
        far = ((new - old).abs() > reach + (decay + 1e-2) * old.abs() + 1e-6) & new.isfinite()
        if bool(far.any()):
            farthest = float((new - old).abs().max())
            detail = f"moved by {farthest:.4g} where {len(steps)} updates reach {reach:.4g}"
            return StateViolation(name, before.step, int(far.sum()), far.numel(), detail)
    return None


OVERSIZED = 100.0  # gain of a matrix, by its root mean square and its number of inputs, that no initialisation means


def oversized_matrices(module: nn.Module) -> list[tuple[str, float]]:
    """Names and gains of weight matrices far larger than any initialisation by fan-in, the largest first.

    The gain is ``rms * sqrt(inputs)``: 1 for LeCun (1998), ``sqrt(2)`` for He (2015). Embeddings are no matrices here.
    """
    rows = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    found = []
    for name, p in module.named_parameters():
        w = local(p.detach())
        if w.dim() < 2 or id(p) in rows or not w.is_floating_point() or not w.numel():
            continue
        gain = rms(w.double()) * math.sqrt(w[0].numel())
        if not gain <= OVERSIZED:
            found.append((name, gain))
    return sorted(found, key=lambda f: -f[1])


def update_size(
    optimizer: Optimizer,
    module: nn.Module,
    grads: Mapping[str, Tensor],
    remembered: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any] | None:
    """How large Adam's next update is, by its own moments: over the rate, over the weights, and over what it remembers.

    Args:
        optimizer: Adam or AdamW; anything else gives None.
        module: Whose parameters these are.
        grads: The step's gradients by path.
        remembered: The optimizer's states of an older snapshot by parameter index; empty: nothing is remembered.

    Returns:
        ``ratio``: root mean square of ``|m| / (sqrt(v) + eps)``, bias-corrected, of the parameter with the largest one;
        ``relative``: median over the weight matrices of the update's over the weight's root mean square;
        ``growth``: median over parameters of the gradient's over the remembered second moments' root mean square
        (``remembered``); ``updates``, ``beta2`` and ``eps`` of the first group.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return None
    names = {id(p): n for n, p in module.named_parameters()}
    index = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    ratios, relative, growth, second, updates = [0.0], [], [], [], 0.0
    for group in optimizer.param_groups:
        beta1, beta2 = (float(b) for b in group["betas"])
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            m, v, count = state.get("exp_avg"), state.get("exp_avg_sq"), float(state.get("step", 0.0))
            if m is None or v is None or count < 1:
                continue
            updates = max(updates, count)
            m_hat = local(m).double() / (1.0 - beta1**count)
            v_hat = local(v).double().clamp(min=0.0) / (1.0 - beta2**count)
            ratio = rms(m_hat / (v_hat.sqrt() + group["eps"]))
            ratios.append(ratio)
            weight = rms(local(p.detach()).double())
            if p.dim() > 1 and weight > 0:
                relative.append(float(group["lr"]) * ratio / weight)
            old, grad = remembered.get(index[id(p)], {}), grads.get(names.get(id(p), ""))
            if grad is not None and isinstance(old.get("exp_avg_sq"), Tensor) and float(old.get("step", 0.0)) >= 1:
                then = local(old["exp_avg_sq"]).double().clamp(min=0.0) / (1.0 - beta2 ** float(old["step"]))
                before = math.sqrt(float(then.mean())) if then.numel() else 0.0
                second.append(before)
                growth.append(rms(local(grad).double()) / max(before + float(group["eps"]), 1e-300))
    if not updates:
        return None
    group = optimizer.param_groups[0]
    return {
        "ratio": max(ratios),
        "relative": float(np.median(relative)) if relative else 0.0,
        "growth": float(np.median(growth)) if growth else 0.0,
        "remembered": float(np.median(second)) if second else math.nan,
        "updates": updates,
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
    }


def stride(before: Snapshot, after: Snapshot) -> float:
    """How far the weights went per step between two snapshots, relative to their size."""
    return stride_between(before.params or {}, after.params or {}, after.step - before.step)


def stride_between(before: Mapping[str, Tensor], after: Mapping[str, Tensor], steps: int) -> float:
    """Median over the weight matrices of the movement's over the weight's root mean square, per step."""
    found = []
    for name, p in before.items():
        if name in after and p.dim() > 1 and p.is_floating_point():
            old = local(p.detach()).double()
            new = local(after[name].detach()).to(old.device).double()
            size = rms(old)
            if size > 0 and old.shape == new.shape:
                found.append(rms(new - old) / size)
    return float(np.median(found)) / max(steps, 1) if found else 0.0


def rms(x: Tensor) -> float:
    """Root mean square; 0 of an empty tensor."""
    return math.sqrt(float(x.square().mean())) if x.numel() else 0.0


# -------------------------------------------------------------------------------------------------------- replicas


def distance(params: Iterable[tuple[str, Tensor]], snapshot: Mapping[str, Tensor]) -> float:
    """2-norm of the difference between parameters and a snapshot; infinite where it is not a number."""
    total = 0.0
    for name, p in params:
        if name in snapshot:
            mine = local(p.detach()).double()
            total += float((mine - local(snapshot[name]).to(mine.device).double()).square().sum())
    return math.sqrt(total) if math.isfinite(total) else math.inf


# --------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class SourceShift:
    """How one source's loss has moved, in nats.

    Attributes:
        before: Median before.
        after: Median since.
        sigma: Robust spread before.
        moved: True if it moved by more than its spread explains.
    """

    source: str
    before: float
    after: float
    sigma: float
    moved: bool

    @property
    def shift(self) -> float:
        return self.after - self.before


def source_shifts(records: Sequence[StepRecord], since_step: int) -> list[SourceShift]:
    """Each source's loss before and since a step; sources with too few values (8 before, 3 since) are left out."""
    if not records:
        return []
    shifts = []
    for source in records[-1].sources:
        values = [(r.step, r.source_loss(source)) for r in records if source in r.sources]
        before = [v for step, v in values if step < since_step and math.isfinite(v)][-48:]
        after = [v for step, v in values if step >= since_step and math.isfinite(v)]
        if len(before) < 8 or len(after) < 3:
            continue
        center, sigma = _center_and_spread(before)
        now = float(np.median(after))
        shifts.append(SourceShift(source, center, now, sigma, now - center > max(4.0 * sigma, 0.05 * abs(center))))
    return shifts


@dataclass(frozen=True)
class MixtureShift:
    """The mean moved because the sources' shares did.

    Attributes:
        grown: Sources whose share has grown.
        before: Share of each source's tokens before, by name.
        after: The same since.
        recomposed: Mean loss since, had the shares stayed, over the sources that are known from before, in nats.
    """

    grown: tuple[str, ...]
    before: dict[str, float]
    after: dict[str, float]
    recomposed: float


def mixture_shift(records: Sequence[StepRecord], since_step: int) -> MixtureShift | None:
    """Whether a change of the sources' shares alone explains the rise of the mean; needs 8 records before, 2 since."""
    if not records or len(records[-1].sources) < 2:
        return None
    names = records[-1].sources
    before = [r for r in records if r.step < since_step and r.sources == names][-48:]
    after = [r for r in records if r.step >= since_step and r.sources == names]
    if len(before) < 8 or len(after) < 2:
        return None
    tokens = [{n: float(r.column(SOURCE_TOKENS + n).sum()) for n in names} for r in (*before, *after)]
    shares = np.array([[t[n] / max(sum(t.values()), 1.0) for n in names] for t in tokens])
    old, new = shares[: len(before)], shares[len(before) :]
    spread = np.maximum(old.std(0), 1.0 / len(before)) / math.sqrt(len(after))
    grown = [i for i in range(len(names)) if new[:, i].mean() - old[:, i].mean() > max(0.15, 4.0 * spread[i])]
    if not grown:
        return None
    stayed = [n for i, n in enumerate(names) if i not in grown]

    def mean_over(chosen: Sequence[StepRecord]) -> list[float]:
        weights = {n: float(old[:, i].mean()) for i, n in enumerate(names)}
        losses = []
        for r in chosen:
            known = [(r.source_loss(n), weights[n]) for n in stayed]
            known = [(x, w) for x, w in known if math.isfinite(x) and w > 0]
            if known:
                losses.append(sum(x * w for x, w in known) / sum(w for _, w in known))
        return losses

    was, now = mean_over(before), mean_over(after)
    if len(was) < 8 or not now:
        return None
    center, sigma = _center_and_spread(was)
    recomposed = float(np.median(now))
    # What the grown sources are like is not asked: they may be hard. The others must not have moved.
    if recomposed - center > max(4.0 * sigma / math.sqrt(len(now)), 0.05 * abs(center)):
        return None
    return MixtureShift(
        tuple(names[i] for i in grown),
        {n: float(old[:, i].mean()) for i, n in enumerate(names)},
        {n: float(new[:, i].mean()) for i, n in enumerate(names)},
        recomposed,
    )


def lone_source(shifts: Sequence[SourceShift]) -> SourceShift | None:
    """The source that moved alone, while all others stayed; None if there is no such one."""
    moved = [s for s in shifts if s.moved]
    if len(moved) != 1 or len(shifts) < 2:
        return None
    others = [s for s in shifts if not s.moved]
    return moved[0] if all(s.shift < 0.35 * moved[0].shift for s in others) else None


def _center_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Where a (slowly falling) series stands at its end, and its robust spread around its trend."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y), dtype=np.float64)
    half = len(y) // 2
    rise = float(np.median(y[half:]) - np.median(y[:half]))
    slope = min(rise / max(float(np.median(x[half:]) - np.median(x[:half])), 1.0), 0.0)
    rest = y - slope * (x - x[-1])
    center = float(np.median(rest))
    spread = float(MAD_TO_SIGMA * np.median(np.abs(rest - center)))
    return center, max(spread, 0.005 * abs(center))


def level_before(losses: Sequence[float]) -> tuple[float, float]:
    """Expected loss and robust spread from accepted losses, oldest first; NaN without three of them."""
    finite = [x for x in losses if math.isfinite(x)][-48:]
    if len(finite) < 3:
        return math.nan, math.nan
    return _center_and_spread(finite)
