"""The state is damaged: since when, by what, and which part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...incidents import Verdict, VerdictKind
from ...state.tree import local
from .. import experiments as ex
from ..ladder import FINE, HIGH
from .computation import Computation

if TYPE_CHECKING:
    from ...state.snapshot import Snapshot

CURED = 0.3  # share of the damage that may be left where a part of the state was put back
QUIET = 100.0  # growth of the gradients over the root of their second moments from which epsilon should have held the update
RATIO = 1.0  # update over rate of an element: Adam's steady state stays below
TOO_FAR = 0.1  # update over weight, root mean squares, in one step; usual is about 1e-3
STRIDE = 0.03  # the same over the way between two snapshots, per step: updates cancel in part


class Damage(Computation):
    """A healthy batch is high, too: what has happened to the state that it meets?"""

    def damage(self, height: float, change: float) -> Verdict:
        """The verdict on a damaged state."""
        good = self._since_when(height)
        since = self.since if good is None else min(self.since, good.step)
        verdict = self._kept_state(good, change, since) or self.backward() or self._step_size(good, since)
        if verdict is not None:
            return verdict
        near = self.record.restart_step
        restart = f" The process has restarted at step {near}." if near is not None else ""
        sentence = (
            f"A healthy batch, too, is {change:.4f} nats above its loss: the state is damaged, not the data."
            + (f" The snapshot of step {good.step} is in order." if good is not None else "")
            + " Rates, moments, weights and gradients are within what was planned, so what damaged it is open."
            + restart
        )
        return self.verdict(
            VerdictKind.UNDETERMINED,
            (),
            sentence,
            since=since,
            reproducible=True,
            state_change=change,
            restart_step=near,
        )

    def _since_when(self, height: float) -> Snapshot | None:
        """The newest snapshot on which the healthy batch is fine, found by bisection."""
        points = [s for s in self.snapshots if not s.mid_accumulation]
        low, high, good = 0, len(points) - 1, None
        while low <= high:
            middle = (low + high + 1) // 2
            change = self._healthy_change(points[middle])
            if change is None:
                break
            if change < FINE * height:
                good, low = points[middle], middle + 1
            else:
                high = middle - 1
        if good is not None:
            self.note("bisected snapshots", f"in order until step {good.step}", steps=[s.step for s in points])
        return good

    # -------------------------------------------------------------------------------- what no optimizer writes to

    def _kept_state(self, good: Snapshot | None, change: float, since: int) -> Verdict | None:
        """Put back what no optimizer moves (buffers, averaged copies): where that cures, the part of it that does."""
        if good is None:
            return None
        owned = {id(p) for o in self.trainer.optimizers for g in o.param_groups for p in g["params"]}
        window = self.context.window
        now = {} if window is None else window.buffers
        own = dict(self.module.named_parameters())
        kept: dict[str, tuple[str, Tensor]] = {
            name: ("buffer", b)
            for name, b in good.buffers.items()
            if name in now and b.is_floating_point() and b.numel()
        }
        kept |= {n: ("parameter", p) for n, p in (good.params or {}).items() if n in own and id(own[n]) not in owned}

        def measure() -> tuple[list[str], list[str]]:
            return sorted(kept), [n for n, (k, t) in kept.items() if _differs(now[n] if k == "buffer" else own[n], t)]

        everyone = self.measured("what no optimizer moves", measure)
        # Every rank looks at the same names, whatever has moved on it.
        common = set.intersection(*(set(held) for held, _ in everyone or [([], [])]))
        names = sorted(common & {n for _, moved in everyone or [] for n in moved})
        if not names:
            return None
        left = self._with_put_back(kept, names)
        if left is None or left > CURED * change:
            return None
        while len(names) > 1:
            half = names[: len(names) // 2]
            left = self._with_put_back(kept, half)
            if left is None:
                return None
            if left <= CURED * change:
                names = half
                continue
            other = self._with_put_back(kept, names[len(half) :])
            if other is None or other > CURED * change:
                break  # both halves are needed
            names = names[len(half) :]
        named = [f"{kept[n][0]}:{n}" for n in names]
        differing = self._ranks_with_another([(n, *kept[n]) for n in names])
        sentence = (
            f"A healthy batch is {change:.4f} nats above its loss, and fine again with {', '.join(names[:4])} of step"
            f" {good.step} in an otherwise unchanged state: it was overwritten since."
        )
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [*named, *(f"rank:{r}" for r in differing)],
            sentence,
            since=min(since, good.step),
            reproducible=True,
        )

    def _with_put_back(self, kept: Mapping[str, tuple[str, Tensor]], names: list[str]) -> float | None:
        """How high the healthy batch is on the current state with these parts of an older one, in nats."""
        buffers = {n: kept[n][1] for n in names if kept[n][0] == "buffer"}
        parameters = {n: kept[n][1] for n in names if kept[n][0] == "parameter"}
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return self._healthy_change(None, f"healthy batch, {shown} put back", buffers=buffers, parameters=parameters)

    def _ranks_with_another(self, parts: list[tuple[str, str, Tensor]]) -> list[int]:
        """Ranks, on several, where these tensors have moved while they have not on the others."""
        if self.peers.size == 1:
            return []
        window, own = self.context.window, dict(self.module.named_parameters())
        now = {} if window is None else window.buffers

        def measure() -> float:
            pairs = [(local(now[n] if kind == "buffer" else own[n]), local(t)) for n, kind, t in parts]
            return max(
                (float((a.detach().double() - b.to(a.device).double()).abs().max()) for a, b in pairs), default=0.0
            )

        everyone = self.measured("how far each rank's have moved", measure)
        if everyone is None:
            return []
        least = min(everyone)
        found = [r for r, d in enumerate(everyone) if d > 3.0 * least + 1e-12]
        return found if len(found) < self.peers.size else []

    # ---------------------------------------------------------------------------------------------- the step's size

    def _step_size(self, good: Snapshot | None, since: int) -> Verdict | None:
        """Everything is as planned and the backward is right: was the planned step too large?"""
        name = "size of the update"

        points = [s for s in self.snapshots if s.step >= since] or []

        def measure() -> tuple[dict[str, Any] | None, list[float]]:
            grads = None if self.main is None else self.main.grads
            size = ex.update_size(self.optimizer, self.module, grads or {}, self._optimizer_states(good))
            strides = [] if size is None else [ex.stride(a, b) for a, b in pairwise(points)] + self._last_stride(points)
            return size, strides

        everyone = self.measured(name, measure)
        found, strides = (None, []) if everyone is None else everyone[0]
        if found is None:
            return None
        rates = [actual for step, _, actual in self.context.rates if step <= self.record.step]
        early = found["updates"] <= 2.0 / (1.0 - found["beta2"])
        peak = max((max(r, default=0.0) for r in rates), default=0.0)
        # An untuned linear warm-up takes 2 / (1 - beta2) steps (Ma and Yarats 2021, On the adequacy of untuned warmup).
        steps_to_peak = next((i for i, r in enumerate(rates) if max(r, default=0.0) >= 0.5 * peak), 0)
        abrupt = early and steps_to_peak < 0.1 * (2.0 / (1.0 - found["beta2"]))
        if found["growth"] >= QUIET and found["ratio"] >= RATIO:
            self.note(name, "more than epsilon holds", **found)
            sentence = (
                f"The gradients have grown {found['growth']:.3g} times beyond what the snapshot's second moments remember"
                f" (root mean square {found['remembered']:.3g}); epsilon is {found['eps']:.3g} and does not hold the update,"
                f" which moves an element by {found['ratio']:.2f} times the rate in one step."
            )
            return self.verdict(
                VerdictKind.OPTIMIZATION, ["optimizer:eps"], sentence, since=since, reproducible=True, **found
            )
        found["stride"] = max(strides or [0.0])
        if found["relative"] >= TOO_FAR or found["stride"] >= STRIDE:
            largest = max(found["relative"], found["stride"])
            self.note(name, "too large for the weights", steps_to_peak=steps_to_peak, **found)
            sentence = (
                f"One update moves the weights by {100 * largest:.0f} % of their size (usual is about 0.1 %), at a"
                f" rate of {peak:.4g} that is what the schedule says."
                + (f" It was reached after {steps_to_peak} steps: the warm-up is missing." if abrupt else "")
            )
            return self.verdict(
                VerdictKind.OPTIMIZATION, ["optimizer:lr"], sentence, since=since, reproducible=True, **found
            )
        self.note(name, "usual", **found)
        return None

    def _last_stride(self, points: Sequence[Snapshot]) -> list[float]:
        """Relative movement of the weights per step from the newest of these snapshots to now."""
        if not points or points[-1].step >= self.record.step:
            return []
        now = {n: local(p.detach()) for n, p in self.module.named_parameters()}
        return [ex.stride_between(points[-1].params or {}, now, self.record.step - points[-1].step)]

    def _optimizer_states(self, snapshot: Snapshot | None) -> Mapping[int, Mapping[str, Any]]:
        if snapshot is None or self.optimizer not in self.trainer.optimizers:
            return {}
        states: Mapping[int, Mapping[str, Any]] = snapshot.optimizers[self.trainer.optimizers.index(self.optimizer)][
            "state"
        ]
        return states


def _differs(now: Tensor, then: Tensor) -> bool:
    a, b = local(now.detach()), local(then.detach())
    return a.shape == b.shape and not torch.equal(a.cpu(), b.cpu())


__all__ = ["HIGH", "Damage"]
