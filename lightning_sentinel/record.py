"""The record of one step: every signal of every rank, the same on every rank after one ``all_gather``.

Example:
    >>> record = StepRecord.from_losses(step=7, losses=[2.0] * 63 + [40.0])
    >>> round(record.mean_loss, 3), record.worst_rank
    (2.594, 63)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Column order of the gathered matrix. Every entry is one float64 per rank and step.
SIGNALS: tuple[str, ...] = (
    "loss_nats",  # token-weighted mean over the step's micro-batches, as the user means it (not divided, not scaled)
    "supervised_tokens",  # tokens that carry loss; the number of samples where the batch has no tokens
    "tokens",  # tokens processed in this step
    "grad_norm",  # total 2-norm before clipping, unscaled
    "update_norm",  # 2-norm of the last measured parameter update; NaN until the first measurement
    "nonfinite_loss",  # micro-batches of this step with a non-finite loss
    "nonfinite_grads",  # 1 where the gradient holds a non-finite value, else 0
    "loss_scale",  # loss scale in force during the step; 1 without a scaler
    "step_seconds",  # wall time since the previous gate
    "data_seconds",  # of which waiting for data
    "invalid_batch",  # findings that other callbacks of this rank left for the gate (batch, start, resume)
    "missing_grads",  # 1 where no parameter received a gradient, else 0
    "terminated",  # 1 where this rank has received SIGTERM, else 0
    "wait_seconds",  # part of step_seconds in which this rank waited for others in collectives, as far as it is seen
)
SIGNAL_INDEX = {name: i for i, name in enumerate(SIGNALS)}
_NONFINITE = [SIGNAL_INDEX["nonfinite_loss"], SIGNAL_INDEX["nonfinite_grads"]]
SOURCE_LOSS, SOURCE_TOKENS = "loss_nats/source:", "supervised_tokens/source:"


def source_signals(sources: Sequence[str]) -> tuple[str, ...]:
    """Names of the extra columns for a mixture's sources: a loss and a token count for each."""
    return tuple(prefix + name for name in sources for prefix in (SOURCE_LOSS, SOURCE_TOKENS))


@cache
def _sources(signals: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(s.removeprefix(SOURCE_LOSS) for s in signals if s.startswith(SOURCE_LOSS))


def weighted_mean(values: FloatArray, weights: FloatArray) -> float:
    """Mean of ``values`` weighted by ``weights``; zero weights are left out entirely (0 x NaN does not poison it)."""
    used = weights > 0
    total = float(weights[used].sum())
    return float((values[used] * weights[used]).sum() / total) if total > 0 else math.nan


@dataclass(frozen=True)
class StepRecord:
    """All signals of one optimizer step.

    Attributes:
        step: ``trainer.global_step`` at the gate, i.e. before this step's update (0 for the first one).
        attempt: Which pass over the steps this is; rises by one with each rollback.
        tokens: Tokens processed so far over all ranks, this step included.
        values: Signals by rank, ``[world_size, n_signals]`` float64.
        signals: Column names, :data:`SIGNALS` first, then two columns for each source of the mixture.
        learning_rates: Rate of each parameter group, as the optimizer will use it.
        sample_ids: Ids of this rank's samples in this step; never used for decisions (they differ between ranks).
        restart_step: Step at which this process resumed, or None.
    """

    step: int
    values: FloatArray
    attempt: int = 0
    tokens: int = 0
    signals: tuple[str, ...] = SIGNALS
    learning_rates: tuple[float, ...] = ()
    sample_ids: tuple[str, ...] = field(default=(), compare=False)
    restart_step: int | None = None

    @classmethod
    def of_one(cls, row: list[float], **facts: Any) -> StepRecord:
        """The record of a run on one rank, from its row as numbers; these are kept beside the matrix.

        ``facts``: every other field.
        """
        record = object.__new__(cls)  # a frozen dataclass is a call for each field, in every step
        record.__dict__.update(
            facts,
            numbers=row,
            world_size=1,
            mean_loss=row[0] if row[1] > 0 else math.nan,
            has_nonfinite=bool(row[_NONFINITE[0]] or row[_NONFINITE[1]]),
        )
        return record

    def __getattr__(self, name: str) -> FloatArray:
        """The matrix of :meth:`of_one`, made when somebody asks for it."""
        if name != "values" or "numbers" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        values = self.__dict__["values"] = np.array([self.numbers])
        return values

    def apart(self) -> StepRecord:
        """The same facts in an object of its own: what another thread works out from it does not turn up in this one."""
        record = object.__new__(type(self))
        record.__dict__.update(self.__dict__)
        return record

    @cached_property
    def world_size(self) -> int:
        return int(self.values.shape[0])

    @property
    def nbytes(self) -> int:
        """Of the matrix."""
        return 8 * self.world_size * len(self.numbers)

    def column(self, name: str) -> FloatArray:
        """One signal over all ranks, ``[world_size]``."""
        index = SIGNAL_INDEX.get(name)
        if index is None:
            index = self.signals.index(name)
        return self.values[:, index]

    @cached_property
    def numbers(self) -> list[float]:
        """The first rank's row as numbers: on one rank NumPy costs more than the arithmetic."""
        row: list[float] = self.values[0].tolist()
        return row

    def largest(self, name: str) -> float:
        """Largest value of one signal over the ranks."""
        if self.world_size == 1 and name in SIGNAL_INDEX:
            return self.numbers[SIGNAL_INDEX[name]]
        return float(self.column(name).max())

    def any(self, name: str) -> bool:
        """Whether a count or flag is set on any rank."""
        if self.world_size == 1 and name in SIGNAL_INDEX:
            return bool(self.numbers[SIGNAL_INDEX[name]])
        return bool(self.column(name).any())

    @cached_property
    def mean_loss(self) -> float:
        """Token-weighted mean loss over the ranks in nats; NaN if nothing is supervised."""
        if self.world_size == 1:
            loss, supervised = self.numbers[:2]
            return loss if supervised > 0 else math.nan
        return weighted_mean(self.column("loss_nats"), self.column("supervised_tokens"))

    @cached_property
    def worst_rank(self) -> int:
        """Rank with the largest (or a non-finite) loss."""
        if self.world_size == 1:
            return 0
        loss = self.column("loss_nats")
        return int(np.argmax(np.where(np.isfinite(loss), loss, np.inf)))

    @cached_property
    def grad_norm(self) -> float:
        """Largest gradient norm of the ranks (under DDP all are equal after the reduction)."""
        return self.largest("grad_norm")

    @cached_property
    def update_norm(self) -> float:
        """Largest update norm of the ranks; NaN if none has measured one."""
        if self.world_size == 1:
            norm = self.numbers[SIGNAL_INDEX["update_norm"]]
            return norm if math.isfinite(norm) else math.nan
        norms = self.column("update_norm")
        return float(np.nanmax(norms)) if np.isfinite(norms).any() else math.nan

    @cached_property
    def has_nonfinite(self) -> bool:
        if self.world_size == 1:
            return any(self.numbers[i] for i in _NONFINITE)
        return bool(self.values[:, _NONFINITE].any())

    @property
    def sources(self) -> tuple[str, ...]:
        return _sources(self.signals)

    @cached_property
    def source_losses(self) -> dict[str, float]:
        """:meth:`source_loss` of every source."""
        names = self.sources
        if not names:
            return {}
        if self.world_size == 1:
            pairs = iter(self.numbers[len(SIGNALS) :])
            return {n: loss if tokens > 0 else math.nan for n, loss, tokens in zip(names, pairs, pairs, strict=True)}
        columns = self.values[:, len(SIGNALS) :].reshape(self.world_size, len(names), 2)
        loss, tokens = columns[..., 0], columns[..., 1]
        used = tokens > 0
        weights = np.where(used, tokens, 0.0).sum(axis=0)
        sums = np.multiply(loss, tokens, out=np.zeros_like(loss), where=used).sum(axis=0)
        return {n: s / w if w > 0 else math.nan for n, s, w in zip(names, sums.tolist(), weights.tolist(), strict=True)}

    def source_loss(self, source: str) -> float:
        """Token-weighted mean loss of one source over the ranks in nats; NaN if it is absent from this step."""
        return weighted_mean(self.column(SOURCE_LOSS + source), self.column(SOURCE_TOKENS + source))

    @classmethod
    def from_losses(
        cls,
        step: int,
        losses: Sequence[float],
        *,
        supervised_tokens: Sequence[float] | float = 1.0,
        grad_norm: float = math.nan,
        update_norm: float = math.nan,
        attempt: int = 0,
        tokens: int = 0,
        restart_step: int | None = None,
    ) -> StepRecord:
        """A record from per-rank losses alone, for logs and tests."""
        values = np.zeros((len(losses), len(SIGNALS)))
        values[:, SIGNAL_INDEX["loss_nats"]] = losses
        values[:, SIGNAL_INDEX["supervised_tokens"]] = supervised_tokens
        values[:, SIGNAL_INDEX["tokens"]] = supervised_tokens
        values[:, SIGNAL_INDEX["grad_norm"]] = grad_norm
        values[:, SIGNAL_INDEX["update_norm"]] = update_norm
        values[:, SIGNAL_INDEX["nonfinite_loss"]] = ~np.isfinite(values[:, SIGNAL_INDEX["loss_nats"]])
        values[:, SIGNAL_INDEX["nonfinite_grads"]] = np.isinf(grad_norm)
        values[:, SIGNAL_INDEX["loss_scale"]] = 1.0
        return cls(step=step, values=values, attempt=attempt, tokens=tokens, restart_step=restart_step)
