"""Other data on this state, this data on another state; sources before and since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ...incidents import FindingKind, Verdict, VerdictKind
from .. import experiments as ex
from ..ladder import FINE, HIGH
from ..nonfinite import ids_of
from ..window import healthy_windows
from .damage import Damage


class Data(Damage):
    """Is it the batch, a source, or the state that it met?"""

    def sources(self) -> Verdict | None:
        """Each source's loss before and since: exactly one that moved is the cause, if the weights are in order."""
        records = [r for r in self.context.history if r.step != self.record.step] + [self.record]
        mixture = ex.mixture_shift(records, self.since)
        if mixture is not None:
            return self._mixture(mixture)
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

    def _mixture(self, found: ex.MixtureShift) -> Verdict:
        """The sources' shares have changed and the sources have not: nothing is wrong with any sample."""
        self.note(
            "mixture", "the shares have moved", before=found.before, after=found.after, recomposed=found.recomposed
        )
        grown = ", ".join(f"{n} from {found.before[n]:.0%} to {found.after[n]:.0%}" for n in found.grown)
        sentence = (
            f"Since step {self.since} the mixture is another one ({grown} of the tokens); over the other sources the loss is"
            f" {found.recomposed:.4f} nats, as before. No sample is at fault."
        )
        culprits = ["mixture", *(f"source:{n}" for n in found.grown)]
        return self.verdict(VerdictKind.DATA, culprits, sentence, reproducible=True)

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
            return self.damage(height, state_change)
        lasting = FindingKind.LEVEL_SHIFT in self.kinds or FindingKind.DIVERGENCE in self.kinds
        if state_change > FINE * height:
            return self.damage(height, state_change) if lasting else None
        contrast, informative = self._contrast_on_snapshot(suspects, height)
        if informative and contrast < HIGH * height:
            return None
        if lasting:
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

    def _data(self, suspects: Sequence[int], height: float, contrast: float | None) -> Verdict:
        """The data is high on every state: the samples that carry the loss, those that are wrong and those that are hard."""
        loud = self.measured("samples", lambda: self._loud_samples() if self.peers.rank in suspects else _Loud())
        everyone = loud or []
        wrong = [i for found in everyone for i in found.wrong]
        hard = [i for found in everyone for i in found.hard]
        whose = " of rank " + ", ".join(map(str, suspects)) if self.peers.size > 1 else ""
        others = "" if contrast is None else f", and by {contrast:.4f} nats on the weights of an older snapshot"
        sentence = (
            f"The batch{whose} is {height:.4f} nats above the level on the current weights{others};"
            " a healthy batch is as easy as it was."
        )
        places = {k: v for found in everyone for k, v in found.places.items()}
        surprise = {k: v for found in everyone for k, v in found.surprise.items()}
        result = f"{len(wrong)} carry the loss" if wrong or not hard else f"{len(hard)} are hard, none is wrong"
        detail: dict[str, Any] = {"places": places, "surprise": surprise, "source_rank": self._source_ranks()}
        self.note("samples", result, samples=wrong[:64], hard=hard[:64], **detail)
        if hard and not wrong:
            sentence += (
                " But the model has expected a loss of that height on these tokens: they are hard, not wrong, and nothing is"
                " to be quarantined."
            )
            return self.verdict(
                VerdictKind.DATA, (), sentence, reproducible=True, jump=height, hard_samples=hard[:64], **detail
            )
        source = self._whole_source(suspects, wrong)
        if source is not None:
            sentence += (
                f" All its samples of source {source} are, none of another source, and so it was in the step before."
            )
            return self.verdict(
                VerdictKind.DATA,
                [f"source:{source}"],
                sentence,
                reproducible=True,
                samples=wrong,
                jump=height,
                **detail,
            )
        if places:
            sample, position = next(iter(places.items()))
            sentence += f" The loss is highest at position {position} of sample {sample}."
        culprits = [f"sample:{s}" for s in wrong]
        return self.verdict(
            VerdictKind.DATA, culprits, sentence, reproducible=True, samples=wrong, jump=height, **detail
        )

    def _whole_source(self, suspects: Sequence[int], wrong: Sequence[str]) -> str | None:
        """The source whose samples are all wrong in this step, two of them at least, and whose loss was high before, too."""
        window, sources = self.context.window, list(self.record.sources)

        def measure() -> dict[str, list[str]]:
            mine: dict[str, list[str]] = {}
            for micro in window.micro_batches if window is not None else ():
                source = micro.batch.get("source") if isinstance(micro.batch, dict) else None
                if isinstance(source, Tensor):
                    for sample, k in zip(ids_of(micro), source.tolist(), strict=True):
                        mine.setdefault(sources[k], []).append(sample)
            return mine

        everyone = self.measured("samples by source", measure) if sources else None
        members: dict[str, list[str]] = {}
        for rank, mine in enumerate(everyone or []):
            for name, samples in mine.items():
                members.setdefault(name, []).extend(samples if rank in suspects else [])
        concerned = [name for name, samples in members.items() if set(samples) & set(wrong)]
        if len(concerned) != 1 or len(members[concerned[0]]) < 2 or not set(members[concerned[0]]) <= set(wrong):
            return None
        name = concerned[0]
        losses = [(r.step, r.source_loss(name)) for r in self.context.history if name in r.sources]
        level, spread = ex.level_before([x for step, x in losses if step < self.since])
        newer = [x for step, x in losses if self.since <= step < self.record.step and math.isfinite(x)]
        now = self.record.source_loss(name)
        high = [x for x in newer if x - level >= HIGH * (now - level) and x - level > 4.0 * spread]
        return name if newer and len(high) == len(newer) else None

    def _loud_samples(self) -> _Loud:
        """This rank's samples whose loss carries the jump; all of the step's where single losses are not known."""
        window, result = self.context.window, self.main
        assert window is not None
        assert result is not None
        found, base = _Loud(), float(self.base[self.peers.rank])
        rows: list[tuple[str, float, float, int | None]] = []  # id, loss, surprise, loudest position
        for index, losses, tokens in zip(result.micro_batches, result.sample_losses, result.tokens, strict=False):
            ids = ids_of(window.micro_batches[index])
            known = None if tokens is None else tokens.by_sample(len(ids))
            if losses is None and known is not None:
                losses = known[0].nanmean(1)
            if losses is None or losses.numel() != len(ids):
                found.wrong += ids
                continue
            for row, (sample, loss) in enumerate(zip(ids, losses.tolist(), strict=True)):
                surprise, place = math.nan, None
                if known is not None and bool(known[0][row].isfinite().any()):
                    surprise = loss - float(known[1][row].nanmean())
                    place = int(known[0][row].nan_to_num(nan=-math.inf).argmax())
                rows.append((sample, loss, surprise, place))
        peak = max((loss for _, loss, _, _ in rows if math.isfinite(loss)), default=math.nan)
        for sample, loss, surprise, place in rows:
            if not loss - base >= HIGH * (peak - base):
                continue
            # A trained model expects its own entropy: as much as it is above that, it has been contradicted.
            is_hard = math.isfinite(surprise) and surprise < HIGH * (loss - base)
            (found.hard if is_hard else found.wrong).append(sample)
            if math.isfinite(surprise):
                found.surprise[sample] = round(surprise, 4)
            if place is not None and not is_hard:
                found.places[sample] = place
        if found.wrong and len(found.wrong) == len(rows):  # all are: then those of the high steps before count, too
            earlier = [
                i
                for r in self.context.history
                if self.since <= r.step < self.record.step
                and float(r.column("loss_nats")[self.peers.rank]) - base >= HIGH * float(self.jump[self.peers.rank])
                for i in r.sample_ids
            ]
            found.wrong = [*earlier, *found.wrong]
        return found

    def _source_ranks(self) -> dict[str, float]:
        """Share of the earlier batches of each source that were below this one's loss."""
        ranks = {}
        for source in self.record.sources:
            now = self.record.source_loss(source)
            before = [
                x for r in self.context.history if source in r.sources and math.isfinite(x := r.source_loss(source))
            ]
            if math.isfinite(now) and before:
                ranks[source] = round(sum(x < now for x in before) / len(before), 4)
        return ranks


@dataclass
class _Loud:
    """One rank's samples that carry the jump.

    Attributes:
        wrong: Ids of those whose loss the model did not expect, or of which that is not known.
        hard: Ids of those whose loss is what the model expected of them.
        places: Position of the highest loss by sample.
        surprise: Loss over expected loss by sample, nats.
    """

    wrong: list[str] = field(default_factory=list)
    hard: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    surprise: dict[str, float] = field(default_factory=dict)
