"""Has the computation itself changed? A healthy step again from its own state, a rank's batch on another rank, gradients
against finite differences, and what the collective gave against what went into it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...incidents import Verdict, VerdictKind
from ...state.tree import local
from ..alone import STEP, Slope, wrong_backwards
from ..ladder import FINE, HIGH, Ladder
from ..replay import Call, ReplayResult
from ..window import KEPT_BYTES, MicroBatch, StepWindow, anchor_windows, tensors

PARTED = 1e-3  # relative difference of a module's output from which it is another one
NORM_PARTED = 0.2  # relative difference of gradient norms from which the backward is another one
COORDINATES = 65_536  # of the gradient that are exchanged to find each rank's part in the reduction
PART_OFF = 0.05  # how far a rank's part in the reduced gradient may be from 1
SLOPE_WRONG = 0.2  # relative disagreement of gradient and finite difference over the whole model


ANCHOR = "healthy step from its own snapshot"


@dataclass(frozen=True)
class Anchored:
    """A healthy step's replay from the snapshot at which it starts.

    Attributes:
        window: What was replayed.
        result: What came out on this rank.
        changes: By rank: replayed minus live loss, nats.
        norms: By rank: relative difference of the gradient norms; NaN where they are not to be compared.
    """

    window: StepWindow
    result: ReplayResult
    changes: list[float]
    norms: list[float]


class Computation(Ladder):
    """Same inputs, same state, another result."""

    _anchored: Anchored | None = None
    _anchor_is_known = False

    def computation(self) -> Verdict | None:
        """A healthy step from before, from its own snapshot: it must give its loss again, and so must its modules."""
        anchored = self.anchor()
        if anchored is None:
            return None
        height = float(np.nanmax(np.where(np.isfinite(self.jump), self.jump, -np.inf)))
        usual = np.nan_to_num(self.noise)
        gone = [r for r, c in enumerate(anchored.changes) if not abs(c) <= max(4.0 * float(usual[r]), FINE * height)]
        backward = [r for r, n in enumerate(anchored.norms) if n > NORM_PARTED] if not gone else []
        outcome = "gives another loss" if gone else "gives another gradient" if backward else "gives its loss again"
        first = self._first_parted(anchored.window, anchored.result, gone)
        self.note(
            ANCHOR,
            outcome,
            step=anchored.window.step,
            changes=[float(c) for c in anchored.changes],
            gradient_changes=[float(n) for n in anchored.norms],
            first_parted=first,
        )
        if backward:
            return self.backward()
        return self._changed(anchored.window, gone, first, anchored.changes) if gone else None

    def anchor(self) -> Anchored | None:
        """Replay the newest healthy step that starts at a full snapshot; once, whoever asks."""
        if not self._anchor_is_known:
            self._anchored, self._anchor_is_known = self._replay_anchor(), True
        return self._anchored

    def _replay_anchor(self) -> Anchored | None:
        windows = {w.step: w for w in anchor_windows(self.trainer, self.since)}
        snapshots = {s.step: s for s in self.snapshots if not s.mid_accumulation}
        common = set.intersection(*map(set, self.peers.gather([s for s in windows if s in snapshots])))
        if not common:
            self.note(ANCHOR, "not run: no healthy step that starts at a snapshot is kept")
            return None
        step = max(common)
        if not self.affords(1, ANCHOR):
            return None
        window = windows[step]
        result = self._replay(ANCHOR, window, weights=snapshots[step])
        if result is None:
            return None
        live = [float(window.losses[i]) for i in result.micro_batches if i < len(window.losses)]
        mine = result.loss - sum(live) / len(live) if live else math.nan
        known = {r.step: r.grad_norm for r in self.context.history}.get(step, math.nan)
        whole = len(result.micro_batches) == len(window.micro_batches)
        # Under several ranks the live norm is that of the reduced gradient, with which a local one is not to be compared.
        comparable = self.peers.size == 1 and whole and known > 0
        norm = abs(result.grad_norm / known - 1.0) if comparable else math.nan
        everyone = self.peers.gather((mine, norm))
        return Anchored(window, result, [c for c, _ in everyone], [n for _, n in everyone])

    def _first_parted(self, window: StepWindow, result: ReplayResult, gone: Sequence[int]) -> str:
        """First watched module, in forward order, whose output is another one than in the live step, on the first rank."""
        live = {(i, path): total for i, path, total in reversed(window.boundary_flags)}

        def measure() -> str:
            for i, path, now in result.sums if self.peers.rank in gone else ():
                before = live.get((i, path))
                if before is not None and not abs(now - float(before)) <= PARTED * max(
                    abs(now), abs(float(before)), 1e-6
                ):
                    return path
            return ""

        return next((path for path in self.measured("first module that has parted", measure) or [] if path), "")

    def _changed(self, window: StepWindow, gone: Sequence[int], first: str, changes: Sequence[float]) -> Verdict | None:
        """Not what it was: does it at least give the same each time?"""
        snapshot = next(s for s in self.snapshots if s.step == window.step)
        again = None
        if self.affords(1, "healthy step once more"):
            again = self._replay("healthy step once more", window, weights=snapshot, backward=False)
        live = [float(x) for x in window.losses]
        mine = again.loss - sum(live) / len(live) if again is not None and live else math.nan
        repeats = self.peers.gather(mine)
        wavering = [
            r for r in gone if math.isfinite(repeats[r]) and abs(repeats[r] - changes[r]) > 1e-3 * abs(changes[r])
        ]
        change = max(abs(float(changes[r])) for r in gone)
        told = (
            f"The healthy step {window.step}, from its own weights, batch and random states, is now {change:.4f} nats from"
            f" the loss it had{self.on(gone)}"
        )
        if wavering or len(gone) < self.peers.size:
            how = "and gives something else every time" if wavering else "while the other ranks give theirs again"
            return self.verdict(
                VerdictKind.INFRASTRUCTURE,
                [f"rank:{r}" for r in wavering or gone],
                f"{told}, {how}: that rank's computation is at fault.",
                reproducible=not wavering,
            )
        where = f" The first module whose output is another one is {first}." if first else ""
        return self.verdict(
            VerdictKind.NUMERICS,
            [f"module:{first}"] if first else [],
            f"{told}: neither data nor state, but what is computed from them has changed.{where}",
            reproducible=True,
            change=change,
        )

    # ----------------------------------------------------------------------------------- one batch on several ranks

    def _elsewhere(self, suspect: int) -> list[float] | None:
        """Losses of the suspect rank's worst micro-batch on every rank, from the same weights; None where not run."""
        name = "the same batch on every rank"
        window = self.context.window

        def pack() -> bytes | None:
            """Pickled here: a batch that cannot be is this rank's failure, and not an exchange that it never reaches."""
            if self.peers.rank != suspect or window is None or self.main is None or window.nbytes > KEPT_BYTES:
                return None
            index = self.main.micro_batches[int(np.argmax(np.nan_to_num(self.main.losses, nan=-np.inf)))]
            micro = window.micro_batches[index]
            return pickle.dumps(tree_map(_to_cpu, (micro.batch, micro.batch_idx, micro.rng, dict(window.buffers))))

        packed = self.measured(name, pack)
        sent = None if packed is None else packed[suspect]
        if sent is None or not self.affords(1, name):
            return None
        unpacked: list[StepWindow] = []

        def unpack() -> None:
            payload, device = pickle.loads(sent), self.trainer.strategy.root_device
            batch, batch_idx, _, buffers = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, payload)
            # random states stay where they are
            micro = MicroBatch(batch, batch_idx, payload[2], [t._version for t in tensors(batch)])
            unpacked.append(StepWindow(self.record.step, self.record.attempt, [micro], buffers))

        if self.measured(name, unpack) is None:
            return None
        result = self._replay(name, unpacked[0], backward=False, micro_batches=[0])
        if result is None:
            return None
        losses = self.peers.gather(result.loss)
        self.note(name, f"{losses[suspect]:.6g} on rank {suspect}", losses=losses, of_rank=suspect)
        return losses

    def same_batch(self) -> Verdict | None:
        """Some ranks jump and others do not: is it their batch, or are they alone in what they make of it?"""
        if self.peers.size == 1 or self.main is None:
            return None
        jumps = np.where(np.isfinite(self.jump), self.jump, -np.inf)
        height = float(jumps.max())
        suspects = [r for r in range(self.peers.size) if self._is_jump(r) and jumps[r] >= HIGH * height > 0]
        if not suspects or len(suspects) == self.peers.size:
            return None
        worst = max(suspects, key=lambda r: float(jumps[r]))
        losses = self._elsewhere(worst)
        if losses is None:
            return None
        others = [x for r, x in enumerate(losses) if r != worst]
        away = min(abs(losses[worst] - x) for x in others)
        agree = max(others) - min(others) <= FINE * height
        if not agree or not away >= max(HIGH * height, 4.0 * float(np.nan_to_num(self.noise[worst]))):
            return None
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [f"rank:{worst}"],
            f"From the same weights rank {worst} gives {losses[worst]:.4f} nats for its batch; given the same batch, the"
            f" other ranks give {others[0]:.4f}. It is alone in its answer.",
            reproducible=True,
        )

    # ------------------------------------------------------------------------------------------------- the reduction

    def reduction(self) -> Verdict | None:
        """Gradients that the ranks have, against what the collective made of them: each rank's part should be 1."""
        name = "reduce again"
        if self.peers.size == 1 or self.main is None:
            return None
        grads, window = self.main.grads, self.context.window
        whole = window is not None and len(self.main.micro_batches) == len(window.micro_batches)

        def measure() -> tuple[list[float], list[float]] | None:
            if grads is None or not whole or any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
                return None
            pairs = [
                (local(p.grad), grads[n])
                for n, p in sorted(self.module.named_parameters())
                if p.grad is not None and n in grads
            ]
            if not pairs or any(a.is_sparse or b.is_sparse for a, b in pairs):
                return None
            stride = max(1, sum(a.numel() for a, _ in pairs) // COORDINATES)
            live = torch.cat([a.detach().reshape(-1)[::stride].double() for a, _ in pairs])
            mine = torch.cat([b.detach().reshape(-1)[::stride].double() for _, b in pairs])
            return live.tolist(), mine.tolist()

        everyone = self.measured(name, measure)
        if everyone is None or any(pair is None for pair in everyone):
            return None
        given = np.array([pair[1] for pair in everyone if pair is not None])
        reduced = np.array([pair[0] for pair in everyone if pair is not None])
        if given.shape != reduced.shape or not (np.isfinite(given).all() and np.isfinite(reduced).all()):
            return None
        parts = [float(x) for x in np.linalg.lstsq(given.T / len(given), reduced[0], rcond=None)[0]]
        size = max(float(np.linalg.norm(reduced[0])), 1e-300)
        rest = float(np.linalg.norm(reduced[0] - given.mean(0))) / size
        explained = float(np.linalg.norm(reduced[0] - np.array(parts) @ given / len(given))) <= PART_OFF * size
        parted = [r for r, row in enumerate(reduced) if not np.allclose(row, reduced[0], rtol=1e-4, atol=0)]
        off = [r for r, p in enumerate(parts) if abs(p - 1.0) > PART_OFF] if rest > PART_OFF else []
        outcome = "not what was given" if rest > PART_OFF else "the mean of what was given"
        self.note(name, outcome, parts=parts, relative_difference=rest, ranks_with_another_result=parted)
        if rest <= PART_OFF and not parted:
            return None
        if off and explained and len(off) < self.peers.size:
            part = ", ".join(f"{parts[r]:.4g}" for r in off)
            sentence = (
                f"The reduced gradient is not the mean of the ranks' gradients: rank {', '.join(map(str, off))} is in it"
                f" {part} times instead of once."
            )
            return self.verdict(
                VerdictKind.INFRASTRUCTURE, [f"rank:{r}" for r in off], sentence, reproducible=True, parts=parts
            )
        if parted and len(parted) < self.peers.size:
            sentence = f"Rank {', '.join(map(str, parted))} was given another reduced gradient than rank 0."
            return self.verdict(VerdictKind.INFRASTRUCTURE, [f"rank:{r}" for r in parted], sentence, reproducible=True)
        return None

    # -------------------------------------------------------------------------------------------------- the backward

    def backward(self) -> Verdict | None:
        """Is the gradient the slope of the loss? A directional finite difference in float64, then each module alone."""
        name = "gradient against finite difference"
        slope = self._slope(name)
        if slope is None:
            return None
        everyone = self.peers.gather(slope)
        wrong = [r for r, s in enumerate(everyone) if not s.disagreement <= SLOPE_WRONG]
        detail: dict[str, Any] = {
            "gradient": [s.backward for s in everyone],
            "measured": [s.measured for s in everyone],
        }
        self.note(name, "wrong" if wrong else "right", ranks=wrong, **detail)
        if not wrong:
            return None
        worst = everyone[wrong[0]]
        told = (
            f"Along the gradient the loss should rise by {worst.backward:.4g} nats per unit; a finite difference in float64"
            f" measures {worst.measured:.4g}{self.on(wrong)}"
        )
        if len(wrong) < self.peers.size:
            return self.verdict(
                VerdictKind.INFRASTRUCTURE,
                [f"rank:{r}" for r in wrong],
                f"{told}, while on the other ranks they agree: that rank's gradients are at fault.",
                reproducible=True,
                **detail,
            )
        guilty = self._wrong_modules()
        return self.verdict(
            VerdictKind.NUMERICS,
            [f"module:{path}" for path in guilty],
            f"{told}: a backward is finite and wrong."
            + (
                f" Alone, from its own inputs, that of {', '.join(guilty)} disagrees with its finite difference."
                if guilty
                else ""
            ),
            reproducible=True,
            **detail,
        )

    def _slope(self, name: str) -> Slope | None:
        """Slope of this rank's loss along its own gradient, both in float64; None on every rank where it is not to be had."""
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()) or not self.affords(3, name):
            return None
        there = self._replay(name, dtype=torch.float64, keep_grads=True, passes=3)
        if there is None:
            return None
        main, grads = self.main, there.grads or {}
        weights: dict[str, Tensor] = {}

        def measure() -> tuple[float, float, float]:
            weights.update({n: p.detach().double() for n, p in self.module.named_parameters() if n in grads})
            norm = math.sqrt(sum(float(w.square().sum()) for w in weights.values()))
            size = said = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
            if size > 0 and main is not None and main.grads is not None and main.micro_batches == there.micro_batches:
                # What the run itself computed, hooks on its parameters included, along the direction that was measured.
                own = [float((main.grads[n].double() * g.double()).sum()) for n, g in grads.items() if n in main.grads]
                said = sum(own) / size
            return size, said, STEP * max(norm, 1e-6)

        sizes = self.measured(name, measure)
        if sizes is None or not all(math.isfinite(size) and size > 0 for size, _, _ in sizes):
            return None
        size, said, step = sizes[self.peers.rank]
        ends = []
        for sign in (1.0, -1.0):
            moved: dict[str, Tensor] = {}

            def move(sign: float = sign, moved: dict[str, Tensor] = moved) -> None:
                moved.update({n: w + sign * step / size * grads[n] for n, w in weights.items()})

            if self.measured(name, move) is None:
                return None
            end = self._replay(
                name, dtype=torch.float64, parameters=moved, backward=False, micro_batches=list(there.micro_batches)
            )
            if end is None:
                return None
            ends.append(end.loss)
        # The gradient is of the losses as they go into the backward, each divided by the accumulation.
        count = max(len(there.losses), 1)
        divided = self.trainer.accumulate_grad_batches if self.module.automatic_optimization else 1
        return Slope(said, (ends[0] - ends[1]) / (2.0 * step) * count / divided)

    def _wrong_modules(self) -> list[str]:
        """Watched modules whose backward, alone, disagrees with a finite difference; on every rank the same list."""
        name = "each module's backward alone"
        if not self.affords(4, name):
            return []
        inner = [p for p in self.watched if not any(o.startswith(p + ".") for o in self.watched)]
        rest = [n for n, _ in self.module.named_children()]
        found: dict[str, Slope] = {}

        def inside(calls: Mapping[str, Call]) -> None:
            found.update(wrong_backwards(calls))

        paths = list(dict.fromkeys([*inner, *(r for r in rest if not any(p.startswith(r + ".") for p in inner))]))
        self._replay(name, dtype=torch.float64, backward=False, calls=paths, inside=inside)
        self.forwards += 3  # each module alone once with a backward and twice without: together three passes
        mine = {path: (s.backward, s.measured) for path, s in found.items()}
        everyone = self.peers.gather(mine)
        guilty = [p for p in paths if all(p in m for m in everyone)]
        self.note(name, f"{len(guilty)} of {len(paths)} disagree", modules=guilty, slopes=mine)
        return guilty


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
