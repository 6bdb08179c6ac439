"""The plan and the state: rates against the schedule, moments and weights against what updates can have made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...incidents import Verdict, VerdictKind
from .. import experiments as ex
from ..ladder import Ladder


class State(Ladder):
    """Comparisons that need no forward pass."""

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

    def initialization(self) -> Verdict | None:
        """Before the first update the weights are the initial ones: does any matrix blow up what goes through it?"""
        if self.context.applied_steps > 0:
            return None
        everyone = self.measured("initial weights", lambda: ex.oversized_matrices(self.module))
        if everyone is None:
            return None
        found = next((f for f in everyone if f), [])
        self.note("initial weights", "too large" if found else "of a usual size", gains=dict(found[:8]))
        if not found:
            return None
        name, gain = found[0]
        sentence = (
            f"No update has been made yet, and {name} multiplies what goes through it by {gain:.3g} (root mean square times"
            f" the root of its inputs; initialisations by fan-in give about 1): it was initialised too large."
        )
        return self.verdict(
            VerdictKind.NUMERICS, [f"parameter:{n}" for n, _ in found], sentence, since=0, reproducible=True
        )

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


def _first(values: Sequence[float]) -> float:
    return values[0] if values else math.nan
