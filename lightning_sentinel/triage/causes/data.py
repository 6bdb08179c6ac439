"""Other data on this state, this data on another state; sources before and since."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...incidents import FindingKind, Verdict, VerdictKind
from .. import experiments as ex
from ..ladder import FINE, HIGH, Ladder
from ..nonfinite import ids_of
from ..window import healthy_windows


class Data(Ladder):
    """Is it the batch, a source, or the state that it met?"""

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
