"""A mixture of sources whose position is one small dict: resumable to the sample, on any number of ranks.

All ranks walk through one global sequence of *draws*. Draw ``k`` picks a source by a random number that depends on the
seed and ``k`` alone, with the weights that the schedule plans for draw ``k``; then it takes that source's next sample, in a
permutation that depends on the seed, the source's name and the pass over the source alone. A global batch is the next
``batch_size x world_size`` draws, of which each rank computes its own. So the position is three kinds of number (draws so
far, the next raw draw, one pointer per source), equal on every rank and independent of how many there are.

An excluded sample is drawn and dropped before it is counted: the order of all others stays what it would have been.

Example:
    >>> class Squares:
    ...     name = "squares"
    ...     def __len__(self): return 4
    ...     def sample(self, index): return {"input_ids": np.array([index, index * index])}
    ...     def sample_id(self, index): return f"squares/{index}"
    >>> loader = MixtureLoader([Squares()], batch_size=2, steps_per_epoch=2, seed=1)
    >>> sorted(sample for batch in loader for sample in batch["sample_id"])
    ['squares/0', 'squares/1', 'squares/2', 'squares/3']
    >>> loader.state_dict()["pointers"]
    {'squares': 4}
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

STATE_VERSION = 1
AHEAD = 2  # batches that a trainer may have fetched ahead and can give back
UNIFORM_BLOCK = 1024
RESERVED_KEYS = ("source", "sample_id", "sample_pass")

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@runtime_checkable
class Source(Protocol):
    """One source of a mixture. Samples are pure: the same index always gives the same arrays and the same id."""

    name: str

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Mapping[str, Any]:
        """Arrays of one sample by name, without the batch dimension."""
        ...

    def sample_id(self, index: int) -> str:
        """Stable id, unique over all sources."""
        ...


def _philox(seed: int, stream: str, number: int) -> np.random.Philox:
    """A bit generator for one purpose. Its raw bits, unlike ``Generator`` methods, never change between NumPy versions."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{number}".encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))


class Schedule:
    """Weights of the sources over draws.

    Args:
        sources: Names of the sources.
        weights: One mapping of weights, or knots ``{"draw": int, "weights": {...}}`` in rising order, the first at draw 0.
            A source that is not named has weight 0. Weights need not sum to 1.
        interpolation: ``constant`` keeps a knot's weights until the next knot; ``linear`` moves between them in a straight
            line.
    """

    def __init__(
        self,
        sources: Sequence[str],
        weights: Mapping[str, float] | Sequence[Mapping[str, Any]] | None,
        interpolation: Literal["constant", "linear"] = "constant",
    ) -> None:
        if interpolation not in ("constant", "linear"):
            raise ValueError(f"interpolation is {interpolation!r}, expected 'constant' or 'linear'")
        if weights is None:
            weights = dict.fromkeys(sources, 1.0)
        knots = [{"draw": 0, "weights": weights}] if isinstance(weights, Mapping) else list(weights)
        if not knots:
            raise ValueError("weights has no knot; give at least {'draw': 0, 'weights': {...}}")
        self.sources = list(sources)
        self.interpolation = interpolation
        self.draws: IntArray = np.array([_knot_draw(knot) for knot in knots], dtype=np.int64)
        if self.draws[0] != 0:
            raise ValueError(f"the first knot of weights is at draw {self.draws[0]}, expected draw 0")
        if (np.diff(self.draws) <= 0).any():
            raise ValueError(f"the knots of weights are at draws {self.draws.tolist()}, expected rising draws")
        self.weights: FloatArray = np.array([self._knot_weights(knot) for knot in knots])

    def _knot_weights(self, knot: Mapping[str, Any]) -> list[float]:
        draw, named = knot["draw"], knot["weights"]
        for name, weight in named.items():
            if name not in self.sources:
                near = get_close_matches(str(name), self.sources, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"weights at draw {draw} name {name!r}, but the sources are {self.sources}{hint}")
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name!r} at draw {draw} is {weight}, expected a finite number >= 0")
        values = [float(named.get(name, 0.0)) for name in self.sources]
        total = sum(values)
        if total <= 0:
            raise ValueError(f"the weights at draw {draw} sum to 0; at least one source needs a weight > 0")
        return [value / total for value in values]

    def at(self, draws: IntArray) -> FloatArray:
        """Weights at each draw, ``[n_draws, n_sources]``, each row summing to 1."""
        if len(self.draws) == 1:
            return np.broadcast_to(self.weights[0], (len(draws), len(self.sources)))
        if self.interpolation == "constant":
            return self.weights[np.searchsorted(self.draws, draws, side="right") - 1]
        return np.stack([np.interp(draws, self.draws, column) for column in self.weights.T], axis=1)

    def span(self, draw: int) -> int | None:
        """Number of the span of draws, from this one's knot to the next, over which the weights stay; None if they move."""
        if len(self.draws) == 1:
            return 0
        return int(np.searchsorted(self.draws, draw, side="right")) if self.interpolation == "constant" else None

    @property
    def ever_used(self) -> npt.NDArray[np.bool_]:
        """Which sources have a weight > 0 at some draw, ``[n_sources]``."""
        return np.asarray((self.weights > 0).any(axis=0))


def _knot_draw(knot: Any) -> int:
    if not isinstance(knot, Mapping) or "draw" not in knot or "weights" not in knot:
        raise ValueError(f"a knot of weights is {knot!r}, expected {{'draw': int, 'weights': {{...}}}}")
    return int(knot["draw"])


class MixtureLoader:
    """Draws batches from a weighted mixture of sources; see the module's text for how.

    A batch is a dict: each array of the sources' samples stacked to ``[B, ...]``, ``source`` ``[B]`` int64 (index into
    :attr:`sources`), ``sample_id`` (list of ``B`` strings) and ``sample_pass`` (list of ``B`` integers: how many passes over
    its source came before the one that this sample belongs to).

    An epoch is ``steps_per_epoch`` batches; the stream goes on where the epoch before ended. Without ``steps_per_epoch`` the
    loader has no length and never ends. The position lives on the loader, so ``load_state_dict`` also moves a running
    iterator.

    Args:
        sources: The sources; names must be unique.
        weights: Weights by source, or knots ``{"draw": int, "weights": {...}}`` over draws, i.e. samples over all ranks. None
            weighs all sources alike.
        batch_size: Samples for each rank and step.
        seed: Seed of the order.
        interpolation: ``constant`` or ``linear`` weights between the knots.
        steps_per_epoch: Batches in an epoch, or None.
        rank: This process's place among those that share the data; None asks ``torch.distributed`` when an iterator is made.
        world_size: Number of processes that share the data; None likewise.
    """

    global_cursor = True  # the position is the same on every rank, whatever their number

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Mapping[str, float] | Sequence[Mapping[str, Any]] | None = None,
        batch_size: int = 1,
        seed: int = 0,
        interpolation: Literal["constant", "linear"] = "constant",
        steps_per_epoch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._sources = list(sources)
        self._check_sources()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(
                f"steps_per_epoch is {steps_per_epoch}, expected at least 1, or None for an endless stream"
            )
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 <= rank < world_size = {world_size}")
        self.sources = [source.name for source in self._sources]
        self.schedule = Schedule(self.sources, weights, interpolation)
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = steps_per_epoch
        self._given_rank = None if rank is None or world_size is None else (rank, world_size)
        self._lengths: IntArray = np.array([len(source) for source in self._sources], dtype=np.int64)
        self._draws = 0
        self._raw = 0
        self._pointers: IntArray = np.zeros(len(self._sources), dtype=np.int64)
        self._batches = 0
        self._loaded = False
        self._known_weights: tuple[int, frozenset[str], dict[str, float]] | None = None  # of the present span of draws
        self._before: deque[dict[str, Any]] = deque(maxlen=AHEAD)
        self._excluded: frozenset[str] = frozenset()
        self._excluded_samples: frozenset[str] = frozenset()
        self._open: npt.NDArray[np.bool_] = self._lengths > 0
        self._orders: dict[int, tuple[int, IntArray]] = {}
        self._uniforms: tuple[int, FloatArray] = (-1, np.empty(0))
        self._check_open(self._open, "the mixture can not be drawn from")

    def _check_sources(self) -> None:
        if not self._sources:
            raise ValueError("MixtureLoader has no source; give at least one")
        names = [source.name for source in self._sources]
        if len(set(names)) != len(names):
            raise ValueError(f"the names of the sources are {names}, expected each name once")
        empty = [source.name for source in self._sources if len(source) == 0]
        if empty:
            raise ValueError(f"the sources {empty} are empty; every source of a mixture needs at least one sample")

    # -- position ----------------------------------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """Samples drawn so far, over all ranks."""
        return self._draws

    @property
    def passes(self) -> dict[str, int]:
        """Completed passes over each source."""
        return {name: int(p // n) for name, p, n in zip(self.sources, self._pointers, self._lengths, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The full position, plain numbers and strings, the same on every rank."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "lengths": dict(zip(self.sources, self._lengths.tolist(), strict=True)),
            **self._position(),
            "excluded": sorted(self._excluded),
            "before": [dict(position) for position in self._before],
        }

    def _position(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "raw": self._raw,
            "pointers": dict(zip(self.sources, self._pointers.tolist(), strict=True)),
            "batches": self._batches,
        }

    @staticmethod
    def state_before(state: Mapping[str, Any], batches: int) -> dict[str, Any]:
        """The state as it was so many batches earlier: for batches that were fetched ahead and are not to be used."""
        before = list(state.get("before", ()))
        if batches > len(before):
            raise ValueError(
                f"the loader state knows its position {len(before)} batches back, {batches} were asked for; resume with the"
                " number of ranks that wrote it"
            )
        kept = len(before) - batches
        return {**state, **(before[kept] if batches else {}), "before": before[:kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, written by any rank of any world size; the next batch is the one that would have come there."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"the loader state has version {state.get('version')!r}, expected {STATE_VERSION}")
        here = {"seed": self.seed, "lengths": dict(zip(self.sources, self._lengths.tolist(), strict=True))}
        for key, value in here.items():
            if state[key] != value:
                raise ValueError(
                    f"the loader state was written with {key} = {state[key]}, this loader has {value}; the order of the data"
                    " would differ. Use the same data and seed, or start a new run."
                )
        self.exclude(state["excluded"])
        self._draws = int(state["draws"])
        self._raw = int(state["raw"])
        self._pointers = np.array([state["pointers"][name] for name in self.sources], dtype=np.int64)
        self._batches = int(state["batches"])
        self._before = deque((dict(position) for position in state.get("before", ())), maxlen=AHEAD)
        self._loaded = True

    # -- weights -----------------------------------------------------------------------------------------------------------

    def weights_at(self, draw: int) -> dict[str, float]:
        """Weights that the schedule plans for a draw; they sum to 1."""
        return dict(zip(self.sources, self.schedule.at(np.array([draw]))[0].tolist(), strict=True))

    def mixture_weights(self) -> dict[str, float]:
        """Weights in force for the next draw, after exclusions; they sum to 1."""
        # Asked for in every step: between two knots they stay, unless something is excluded.
        span = self.schedule.span(self._raw)
        if span is not None:
            if self._known_weights is None or self._known_weights[:2] != (span, self._excluded):
                weights = self._weights(np.array([self._raw]))[0].tolist()
                self._known_weights = (span, self._excluded, dict(zip(self.sources, weights, strict=True)))
            return dict(self._known_weights[2])
        return dict(zip(self.sources, self._weights(np.array([self._raw]))[0].tolist(), strict=True))

    @property
    def transitions(self) -> list[int]:
        """Draws at which the schedule has a knot."""
        return [int(draw) for draw in self.schedule.draws[1:]]

    def _weights(self, raw: IntArray) -> FloatArray:
        planned = self.schedule.at(raw)
        if self._open.all():
            return planned
        weights = planned * self._open
        total = weights.sum(axis=1, keepdims=True)
        # where the plan knows only excluded sources, those that it uses at other draws share their weight
        rest = (self._open & self.schedule.ever_used).astype(np.float64)
        return np.where(total > 0, weights / np.where(total > 0, total, 1.0), rest / rest.sum())

    # -- exclusion ---------------------------------------------------------------------------------------------------------

    @property
    def excluded(self) -> frozenset[str]:
        """Names that are not drawn, ``sample:<id>`` and ``source:<name>``."""
        return self._excluded

    def exclude(self, names: Iterable[str]) -> None:
        """Draw none of these from the next batch on; ``names`` are *all* that are excluded, not only the new ones.

        The order of the remaining samples is the one without exclusion, less the excluded. An excluded source's weight goes
        to the others. Unknown sample ids are harmless; an unknown source or nothing left to draw is a ``ValueError``,
        and then nothing changes.
        """
        names = frozenset(names)
        samples = frozenset(name.removeprefix("sample:") for name in names if name.startswith("sample:"))
        closed = frozenset(name.removeprefix("source:") for name in names if name.startswith("source:"))
        unknown = sorted(name for name in names if not name.startswith(("sample:", "source:")))
        if unknown:
            raise ValueError(f"{unknown[0]!r} can not be excluded; write 'sample:<id>' or 'source:<name>'")
        if strangers := sorted(closed - set(self.sources)):
            raise ValueError(f"source {strangers[0]!r} can not be excluded; the sources are {self.sources}")
        open_ = np.array(
            [name not in closed and self._has_other_than(i, samples) for i, name in enumerate(self.sources)]
        )
        self._check_open(open_, f"excluding {len(names)} names leaves nothing to draw")
        self._excluded, self._excluded_samples, self._open = names, samples, open_

    def _has_other_than(self, source: int, samples: frozenset[str]) -> bool:
        if len(samples) < self._lengths[source]:
            return True
        return any(self._sources[source].sample_id(i) not in samples for i in range(int(self._lengths[source])))

    def _check_open(self, open_: npt.NDArray[np.bool_], what: str) -> None:
        if not (open_ & self.schedule.ever_used).any():
            used = [name for name, u in zip(self.sources, self.schedule.ever_used, strict=True) if u]
            raise ValueError(
                f"{what}: every source with a weight is excluded ({used}); revert a quarantine or add data"
            )

    # -- drawing -----------------------------------------------------------------------------------------------------------

    def _uniform(self, raw: IntArray) -> FloatArray:
        """Random numbers in [0, 1), one for each raw draw, made in blocks."""
        out = np.empty(len(raw))
        for block in range(int(raw[0]) // UNIFORM_BLOCK, int(raw[-1]) // UNIFORM_BLOCK + 1):
            if self._uniforms[0] != block:
                bits = _philox(self.seed, "draw", block).random_raw(UNIFORM_BLOCK)
                self._uniforms = (block, (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
            mine = raw // UNIFORM_BLOCK == block
            out[mine] = self._uniforms[1][raw[mine] % UNIFORM_BLOCK]
        return out

    def _order(self, source: int, number: int) -> IntArray:
        """Permutation of a source in one pass over it."""
        cached = self._orders.get(source)
        if cached is None or cached[0] != number:
            bits = _philox(self.seed, f"order/{self.sources[source]}", number).random_raw(int(self._lengths[source]))
            cached = self._orders[source] = (number, np.argsort(bits, kind="stable"))
        return cached[1]

    def _draw_raw(self, count: int) -> tuple[IntArray, IntArray, IntArray]:
        """The next ``count`` raw draws: source, index into it, pass over it. Moves the raw position."""
        raw = np.arange(self._raw, self._raw + count, dtype=np.int64)
        edges = np.cumsum(self._weights(raw), axis=1)
        chosen = (self._uniform(raw)[:, None] * edges[:, -1:] >= edges).sum(axis=1).astype(np.int64)
        index, number = np.empty_like(chosen), np.empty_like(chosen)
        for source in np.unique(chosen):
            mine = np.flatnonzero(chosen == source)
            length = self._lengths[source]
            pointers = self._pointers[source] + np.arange(len(mine))
            number[mine] = pointers // length
            for one in range(int(pointers[0] // length), int(pointers[-1] // length) + 1):
                here = pointers // length == one
                index[mine[here]] = self._order(int(source), one)[pointers[here] % length]
            self._pointers[source] += len(mine)
        self._raw += count
        return chosen, index, number

    def _draw(self, count: int) -> list[tuple[int, int, int]]:
        """The next ``count`` draws that are not excluded, as (source, index, pass)."""
        drawn: list[tuple[int, int, int]] = []
        while len(drawn) < count:
            sources, indices, numbers = (a.tolist() for a in self._draw_raw(count - len(drawn)))
            for source, index, number in zip(sources, indices, numbers, strict=True):
                if not self._excluded_samples or self._id(source, index) not in self._excluded_samples:
                    drawn.append((source, index, number))
        self._draws += count
        return drawn

    def _id(self, source: int, index: int) -> str:
        return self._sources[source].sample_id(index)

    def source(self, name: str) -> Source:
        """The source of this name."""
        return self._sources[self.sources.index(name)]

    def fetch(self, ids: Iterable[str]) -> dict[str, Any]:
        """The batch of these samples, in this order, wherever the stream is; its position does not move.

        A batch of the stream also tells which pass over its source a sample belongs to; this one says 0.

        Raises:
            KeyError: With the ids that no source has.
        """
        wanted = list(map(str, ids))
        missing = set(wanted)
        places: dict[str, tuple[int, int]] = {}
        for source, length in enumerate(self._lengths.tolist()):
            for index in range(length if missing else 0):
                name = self._id(source, index)
                if name in missing:
                    places[name] = (source, index)
                    missing.discard(name)
                    if not missing:
                        break
        if missing:
            names = sorted(missing)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise KeyError(f"the sources {self.sources} have no sample {shown}.")
        drawn = [places[name] for name in wanted]
        batch: dict[str, Any] = collate([self._sources[s].sample(i) for s, i in drawn], wanted)
        batch["source"] = torch.tensor([source for source, _ in drawn], dtype=torch.int64)
        batch["sample_id"] = wanted
        batch["sample_pass"] = [0] * len(wanted)
        return batch

    def _next_batch(self, rank: int, world_size: int) -> dict[str, Any]:
        self._before.append(self._position())
        drawn = self._draw(self.batch_size * world_size)[rank * self.batch_size : (rank + 1) * self.batch_size]
        self._batches += 1
        samples = [self._sources[source].sample(index) for source, index, _ in drawn]
        ids = [self._id(source, index) for source, index, _ in drawn]
        batch: dict[str, Any] = collate(samples, ids)
        batch["source"] = torch.tensor([source for source, _, _ in drawn], dtype=torch.int64)
        batch["sample_id"] = ids
        batch["sample_pass"] = [number for _, _, number in drawn]
        return batch

    # -- iteration ---------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        if self._given_rank is not None:
            return self._given_rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """A new epoch of the stream, or the rest of the epoch whose state was just loaded (never an empty one)."""
        return _MixtureIterator(self)

    def __len__(self) -> int:
        if self.steps_per_epoch is None:
            raise TypeError("a MixtureLoader without steps_per_epoch is endless and has no len()")
        return self.steps_per_epoch


class _MixtureIterator:
    """Holds no position of its own, so that the loader's state is all there is."""

    def __init__(self, loader: MixtureLoader) -> None:
        self._loader = loader
        self._rank, self._world_size = loader._place()
        self._continues = loader._loaded
        self._started = False
        loader._loaded = False

    def __iter__(self) -> _MixtureIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        loader = self._loader
        steps = loader.steps_per_epoch
        if not self._started:
            self._started = True
            finished = steps is not None and loader._batches >= steps
            if finished or not (self._continues or loader._loaded):
                loader._batches = 0
        elif steps is not None and loader._batches >= steps:
            raise StopIteration
        loader._loaded = False
        return loader._next_batch(self._rank, self._world_size)


def collate(samples: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> dict[str, Any]:
    """Stack the arrays of samples to ``[B, ...]`` tensors; says which sample does not fit."""
    keys = list(samples[0])
    for name, sample in zip(ids, samples, strict=True):
        if list(sample) != keys:
            raise ValueError(f"sample {name} has the keys {list(sample)}, the batch's first sample {ids[0]} has {keys}")
    if taken := [key for key in keys if key in RESERVED_KEYS]:
        raise ValueError(f"sample {ids[0]} has the key {taken[0]!r}, which the loader itself fills")
    return {key: _stack([np.asarray(sample[key]) for sample in samples], key, ids) for key in keys}


def _stack(arrays: list[npt.NDArray[Any]], key: str, ids: Sequence[str]) -> Tensor:
    for name, array in zip(ids, arrays, strict=True):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"{key!r} of sample {name} is {array.dtype}{list(array.shape)}, that of the batch's first sample {ids[0]} is"
                f" {arrays[0].dtype}{list(arrays[0].shape)}; samples of a batch must have one shape"
            )
    return torch.from_numpy(np.stack(arrays))
