"""One rank away from the others: the failure that a mean hides.

For each rank the detector knows its own usual distance from the median of the ranks (ranks see different data) and its own
noise. What is left of the distance today, over the noise, is the rank's score; sums over the last two and three steps find
smaller faults that stay. Works from 2 ranks (each is then judged against its own history) to tens of thousands.

Example:
    >>> from lightning_sentinel.record import StepRecord
    >>> [finding] = RankOutlier().observe(StepRecord.from_losses(0, [2.0] * 63 + [40.0]))
    >>> finding.ranks, finding.culprits
    ((63,), ('rank:63',))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from ..record import FloatArray, StepRecord
from .robust import MAD_TO_SIGMA

BoolArray = npt.NDArray[np.bool_]
# The largest recent healthy score is forgotten at this rate a step.
PEAK_DECAY = 0.999
# Share of a rank's lateness that the median rank must have waited for it, to take the one for the cause of the other.
WAITED_FOR = 0.5
# A lateness below is of the size of a logger's or the journal's own work on rank 0, and nobody would move a rank for it.
HELD_UP_SECONDS = 0.02
FEW = 4  # records whose noise says nothing yet
# The largest score of the first records is soon surpassed: of losses with exponential tails (few samples a rank) the largest
# of the next hundred scores may be four times that of the first 64. The margin above it is widened by so many times the
# cube of warm-up over history: to the fivefold when the history begins to count, by 0.2 % after 200 records.
SHORT_HISTORY = 4.0
# Without history a rank must leave the largest of the others behind by so many spreads of the logarithm of their losses over
# the median. Few losses say little about their spread: it starts at a factor of e^0.7, which counts for four of them.
COLD_SPREADS, COLD_PRIOR, COLD_PRIOR_WEIGHT = 4.0, 0.7, 4.0
# Or, where the others agree, by a multiple of their whole range that chance passes about this often.
COLD_CHANCE = 1e-3


@dataclass(eq=False)
class RankOutlier:
    """Names ranks whose loss leaves its usual place among the ranks, and ranks that the others wait for.

    A rank is slow that computes for longer than the median rank, or that needs longer in all (its data included) while the
    others are seen to wait for it; of two ranks the quicker one is the measure. It is an alarm, and an incident where the
    others wait for it by 20 ms a step or more.

    Args:
        threshold: Score of one step, in robust sigma, from which a rank is named.
        false_per_step: Probability that a step names any healthy rank, were the scores normal; sets the thresholds of
            the sums over two and three steps by the number of ranks.
        tail: Multiple of the largest recent score of a healthy rank that a score must pass.
        cold_threshold: Same while there is too little history, in sigma of the spread between ranks.
        cold_relative: Smallest distance that counts without history, as a fraction of the median loss.
        min_jump: Smallest distance that counts, in nats.
        min_relative: Smallest distance that counts, as a fraction of the median loss.
        warmup: Records of history before offsets and noise are trusted.
        memory: Records over which offsets and noise are averaged.
        max_named: Ranks named in one finding, worst first.
        straggler: Multiple of the median rank's time from which a rank is slow.
        straggler_steps: Steps in a row that make a slow rank a straggler.
    """

    threshold: float = 7.5
    false_per_step: float = 3e-7
    tail: float = 1.3
    cold_threshold: float = 10.0
    cold_relative: float = 0.5
    min_jump: float = 0.02
    min_relative: float = 0.01
    warmup: int = 16
    memory: int = 100
    max_named: int = 16
    straggler: float = 1.5
    straggler_steps: int = 20
    name: ClassVar[str] = "rank_outlier"

    def __post_init__(self) -> None:
        check_limits("RankOutlier", vars(self))
        self._seen = 0
        self._offset: FloatArray = np.empty(0)
        self._noise: FloatArray = np.empty(0)  # per-rank mean square
        self._common = math.nan
        self._last: FloatArray = np.empty((2, 0))  # scores of the two steps before
        self._peak: FloatArray = np.zeros(3)  # largest healthy scores lately, over one, two and three steps
        self._named: set[int] = set()
        self._ratios: FloatArray = np.zeros((3, 0))  # while there is no history: see _leaves_others_behind
        self._slow: FloatArray = np.empty(0)  # steps in a row in which a rank was slow
        self._held: FloatArray = np.empty(0)  # of which the others were seen to wait for it
        self._slow_named: set[int] = set()

    def observe(self, record: StepRecord) -> list[Finding]:
        if record.world_size < 2:
            return []
        if len(self._offset) != record.world_size:
            self._start(record.world_size)
        return self._losses(record) + self._times(record)

    def _start(self, world_size: int) -> None:
        self._seen = 0
        self._offset, self._noise = np.zeros(world_size), np.zeros(world_size)
        self._common = math.nan
        self._last = np.zeros((2, world_size))
        self._peak = np.zeros(3)
        self._named = set()
        self._ratios = np.zeros((3, world_size))
        self._slow, self._held = np.zeros(world_size), np.zeros(world_size)
        self._slow_named = set()

    def _losses(self, record: StepRecord) -> list[Finding]:
        loss, tokens = record.column("loss_nats"), record.column("supervised_tokens")
        used = np.isfinite(loss) & (tokens > 0)
        voters = int(used.sum())  # ranks without tokens, and all but one of a tensor-parallel replica, have no say
        if voters < 2:
            return []
        warm = self._seen >= self.warmup
        # A mean over fewer tokens is noisier by the square root; at most by a factor of four, whatever a rank claims.
        weight = np.sqrt(np.clip(tokens / float(np.median(tokens[used])), 1 / 16, 16.0))
        adjusted = np.where(used, loss - self._offset, 0.0)
        common = float(np.median(adjusted if used.all() else adjusted[used]))
        scale = self._scale(common, adjusted, used, weight)
        # The mean of the ranks that agree is steadier than the median of all.
        agree = used & (np.abs(adjusted - common) < 3.0 * scale)
        if warm and voters >= 4 and agree.any():
            common = float(adjusted[agree].mean())
        residual = np.where(used, adjusted - common, 0.0)
        # A rank that is part of the mean pulls it along; the same scale for one that is not needs the same shrinkage.
        joined = float(agree.sum())
        score = residual / scale
        if warm and voters >= 4:
            score = np.where(agree, score, score * (joined / (joined + 1.0)))
        elif voters < 4:
            # The median of two or three is no majority: the rank must also have left its own level upwards.
            score = np.where(adjusted - self._common > 0.5 * residual, score, np.minimum(score, 0.0))
        sums = np.stack(
            (score, (score + self._last[0]) / math.sqrt(2.0), (score + self._last[0] + self._last[1]) / math.sqrt(3.0))
        )
        least = max(self.min_jump, (self.min_relative if warm else self.cold_relative) * abs(common))
        thresholds = self._thresholds(record.world_size, warm)
        over = sums > thresholds[:, None]
        bad = over.any(axis=0) & (residual >= least)
        if not warm and voters >= 4:
            bad = self._leaves_others_behind(loss, used, bad)
        fresh = sorted(set(np.flatnonzero(bad).tolist()) - self._named, key=lambda r: -float(score[r]))
        findings = (
            [self._finding(record, fresh, loss, common, residual, scale, sums, over, thresholds)] if fresh else []
        )
        self._accept(residual, weight, used, used & ~bad & (score < 6.0), common, sums, bad)
        self._last = np.stack((np.clip(score, -3.0, 10.0), self._last[0]))
        # Named once for as long as it stays away.
        self._named = {r for r in self._named | set(fresh) if score[r] > 0.5 * self.threshold}
        return findings

    def _thresholds(self, world_size: int, warm: bool) -> FloatArray:
        """Limits for the scores of one, two and three steps."""
        if not warm:
            return np.full(3, self.cold_threshold)
        normal = NormalDist().inv_cdf(1.0 - self.false_per_step / world_size)
        normal *= 1.0 + 4.0 / self._seen  # offsets and noise are estimates
        tail = self.tail * (1.0 + SHORT_HISTORY * (self.warmup / self._seen) ** 3)
        limits: FloatArray = np.maximum((max(self.threshold, normal), normal, normal), tail * self._peak)
        return limits

    def _leaves_others_behind(self, loss: FloatArray, used: BoolArray, suspects: BoolArray) -> BoolArray:
        """Which suspects are further above all other ranks than chance takes one, whatever the tail of the losses is.

        The spread between a handful of ranks in one step may be small by chance, and losses of small batches have heavy
        tails: a rank may be any number of sigma away. What counts is the logarithm of the loss over the step's median. A
        rank must leave the largest that the *others* have had so far behind, either by ``COLD_SPREADS`` of the root mean
        square of theirs, or, in this step alone, by ``COLD_CHANCE ** (-1 / (n - 1))`` times the range of the ``n`` others:
        that ``n`` losses lie within a range ``r`` has a chance of the order of ``r ** (n - 1)``. A rank is not excused by
        its own earlier losses, nor by other suspects of the same step.
        """
        level = float(np.median(loss[used]))
        if level <= 0:
            return np.zeros_like(suspects)  # no ratio means anything: wait for the history
        ratio = np.log(np.maximum(np.where(used, loss, level), 1e-9 * level) / level)
        seen = used & ~suspects
        count, square, top = self._ratios
        count, square = count + seen, square + np.where(seen, ratio * ratio, 0.0)
        top = np.maximum(top, np.where(seen, ratio, 0.0))
        second, first = np.sort(top)[-2:]
        others_top = np.where(top == first, second, first)
        weight = COLD_PRIOR_WEIGHT + count.sum() - count
        spread = np.sqrt((COLD_PRIOR_WEIGHT * COLD_PRIOR**2 + square.sum() - square) / weight)
        named: BoolArray = suspects & (ratio > others_top + COLD_SPREADS * spread)
        others = ratio[seen]
        if len(others) > 2:
            multiple = COLD_CHANCE ** (-1.0 / (len(others) - 1))
            named |= suspects & (ratio > others.max() + multiple * float(np.ptp(others)))
        late = suspects & ~named  # part of the tail after all
        top = np.where(late, np.maximum(top, ratio), top)
        self._ratios = np.stack((count + late, square + np.where(late, ratio * ratio, 0.0), top))
        return named

    def _scale(self, common: float, adjusted: FloatArray, used: BoolArray, weight: FloatArray) -> FloatArray:
        """Noise of each rank in nats, ``[world_size]``."""
        if self._seen >= self.warmup:
            pooled = float(np.median(self._noise))
            # Own noise only where it clearly exceeds the others': its estimate wavers by a seventh.
            noise = np.where(self._noise > 2.0 * pooled, self._noise, pooled)
            scale: FloatArray = np.maximum(np.sqrt(noise) / weight, max(1e-4 * abs(common), 1e-9))
            return scale
        if used.sum() < 4:  # too few to know a spread from: only the ranks' own history counts
            spread = math.inf if self._seen < FEW else float(np.sqrt(self._noise.max()))
        else:
            spread = MAD_TO_SIGMA * float(np.median(np.abs(adjusted[used] - common)))
        return np.full(len(used), max(spread, 0.01 * abs(common), 1e-9))

    def _accept(
        self,
        residual: FloatArray,
        weight: FloatArray,
        used: BoolArray,
        good: BoolArray,
        common: float,
        sums: FloatArray,
        bad: BoolArray,
    ) -> None:
        if bad.mean() > 0.5:
            return
        self._seen += 1
        rate = max(1.0 / self._seen, 1.0 / self.memory)
        self._offset += np.where(good, rate * residual, 0.0)
        # The offset moves by `rate` towards the value, so (1 - rate) of the square is noise; the first value says nothing.
        if self._seen > 1:
            noise_rate = max(1.0 / (self._seen - 1), 1.0 / self.memory)
            square = (residual * weight) ** 2 * (1.0 - rate)
            self._noise += np.where(good, noise_rate * (square - self._noise), 0.0)
        if self._seen > self.warmup:
            quiet = np.where(good, sums, 0.0).max(axis=1)
            self._peak = np.maximum(self._peak * PEAK_DECAY, quiet)
        elif self._seen > FEW:
            # How long the tail is must be known when the history begins to be trusted, or the first of its kind is named.
            usual = math.sqrt(float(np.median(self._noise)))
            if usual > 0:
                highest = float(np.where(used & ~bad, residual * weight, 0.0).max()) / usual
                self._peak = np.maximum(self._peak, highest / np.sqrt([1.0, 2.0, 3.0]))
        self._common = common if math.isnan(self._common) else self._common + 0.2 * (common - self._common)

    def _finding(
        self,
        record: StepRecord,
        fresh: list[int],
        loss: FloatArray,
        common: float,
        residual: FloatArray,
        scale: FloatArray,
        sums: FloatArray,
        over: Any,
        thresholds: FloatArray,
    ) -> Finding:
        worst = fresh[0]
        length = int(np.argmax(over[:, worst]))
        named = tuple(fresh[: self.max_named])
        more = f" ({len(fresh)} ranks in all)" if len(fresh) > 1 else ""
        self_offset = float(self._offset[worst])
        return Finding(
            kind=FindingKind.RANK_OUTLIER,
            detector=self.name,
            step=record.step,
            score=float(sums[length, worst]),
            threshold=float(thresholds[length]),
            unit="robust sigma",
            severity=Severity.INCIDENT,
            since_step=record.step - length,
            ranks=named,
            culprits=tuple(f"rank:{r}" for r in named),
            window=min(self._seen, self.memory),
            message=f"Rank {worst} is at loss {loss[worst]:.4f} at step {record.step}{more}; the level of"
            f" {record.world_size} ranks is {common:.4f} and this rank's usual offset {self_offset:+.4f}, so it is"
            f" {residual[worst]:.4f} nats or {sums[length, worst]:.1f} robust sigma off over {length + 1} step(s) (sigma"
            f" {scale[worst]:.4f}, limit {thresholds[length]:g}); the mean, {record.mean_loss:.4f}, hides it.",
            evidence={
                "loss": float(loss[worst]),
                "level": common,
                "mean": record.mean_loss,
                "offset": self_offset,
                "steps": length + 1,
            },
        )

    def _times(self, record: StepRecord) -> list[Finding]:
        wait, data = record.column("wait_seconds"), record.column("data_seconds")
        own = record.column("step_seconds") - wait  # until the others can go on
        busy = own - data
        if not np.isfinite(busy).all():
            return []
        usual, usual_own, usual_wait = _usual(busy), _usual(own), _usual(-wait) * -1.0
        if usual <= 0:
            return []
        # Whoever is late lets the others wait: a rank whose data is late is told from one that has time.
        held_up = (usual_wait - wait) >= WAITED_FOR * (own - usual_own)
        slow = (busy > self.straggler * usual) | ((own > self.straggler * usual_own) & held_up)
        self._slow = np.where(slow, self._slow + 1, 0.0)
        self._held = np.where(slow, self._held + held_up, 0.0)
        self._slow_named &= set(np.flatnonzero(slow).tolist())
        fresh = sorted(set(np.flatnonzero(self._slow >= self.straggler_steps).tolist()) - self._slow_named)
        if not fresh:
            return []
        self._slow_named |= set(fresh)
        worst = max(fresh, key=lambda r: float(own[r]))
        by_data = not busy[worst] > self.straggler * usual
        mine, others = (own, usual_own) if by_data else (busy, usual)
        named = tuple(fresh[: self.max_named])
        waited_for = 2.0 * self._held[worst] > self._slow[worst]
        serious = bool(waited_for) and float(own[worst]) - usual_own >= HELD_UP_SECONDS
        what = "needs" if by_data else "computes for"
        left_out = "waiting for others left out" if by_data else "waiting for data and for others left out"
        return [
            Finding(
                kind=FindingKind.STRAGGLER,
                detector=self.name,
                step=record.step,
                score=float(mine[worst]) / others,
                threshold=self.straggler,
                unit="x median time of its own",
                severity=Severity.INCIDENT if serious else Severity.ALARM,
                since_step=record.step - self.straggler_steps + 1,
                ranks=named,
                culprits=tuple(f"rank:{r}" for r in named),
                window=self.straggler_steps,
                message=f"Rank {worst} {what} {mine[worst]:.3f} s at step {record.step} ({left_out}), the median rank"
                f" {'' if by_data else 'for '}{others:.3f} s: {mine[worst] / others:.2f} times, above {self.straggler:g} for"
                f" {self.straggler_steps} steps in a row. Until its batch was there it took {data[worst]:.3f} s. It waits"
                f" {wait[worst]:.3f} s for others, the median rank {usual_wait:.3f} s.",
                evidence={
                    "seconds": float(mine[worst]),
                    "median_seconds": others,
                    "compute_seconds": float(busy[worst]),
                    "median_compute_seconds": usual,
                    "data_seconds": float(data[worst]),
                    "median_data_seconds": _usual(data),
                    "wait_seconds": float(wait[worst]),
                    "median_wait_seconds": usual_wait,
                },
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._seen,
            "offset": self._offset.copy(),
            "noise": self._noise.copy(),
            "common": self._common,
            "last": self._last.copy(),
            "peak": self._peak.copy(),
            "named": sorted(self._named),
            "ratios": self._ratios.copy(),
            "slow": self._slow.copy(),
            "held": self._held.copy(),
            "slow_named": sorted(self._slow_named),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = int(state["seen"])
        self._offset = np.array(state["offset"], dtype=np.float64)
        self._noise = np.array(state["noise"], dtype=np.float64)
        self._common = float(state["common"])
        self._last = np.array(state["last"], dtype=np.float64)
        self._peak = np.array(state["peak"], dtype=np.float64)
        self._named = set(state["named"])
        # states from before this was kept have none
        self._ratios = np.array(state.get("ratios", np.zeros((3, len(self._offset)))), dtype=np.float64)
        self._slow = np.array(state["slow"], dtype=np.float64)
        self._held = np.array(state.get("held", np.zeros(len(self._slow))), dtype=np.float64)  # likewise
        self._slow_named = set(state["slow_named"])


def _usual(values: FloatArray) -> float:
    """The lower median: of two ranks the smaller value, so that a slow one does not raise its own measure."""
    return float(np.sort(values)[(len(values) - 1) // 2])
