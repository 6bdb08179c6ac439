"""The same step again: equal to the bit, or not."""

from __future__ import annotations

import math

from ...incidents import Verdict, VerdictKind
from ..ladder import HIGH, Ladder
from ..replay import ReplayResult


class Replayed(Ladder):
    """Same weights, same micro-batches, same random states, on every rank."""

    def replay_step(self) -> Verdict | None:
        """The same step again: equal to the bit, or not."""
        if not self.affords(1, "replay"):
            return None
        self.main = result = self._replay("replay", keep_grads=True)
        if result is None:
            return None
        everyone = self.peers.gather((result.bitwise_equal, result.grads_equal, result.loss, self._live_loss(result)))
        losses = [loss for _, _, loss, _ in everyone]
        equal = [e for e, _, _, _ in everyone]
        detail = {
            "bitwise_equal": equal,
            "gradients_equal": [g for _, g, _, _ in everyone],
            "losses": losses,
            "live": [live for _, _, _, live in everyone],
        }
        if all(equal):
            self.note("replay", "equal to the bit", **detail)
            return None
        # Only a difference that makes up for the jump convicts; less may be the kernels' own noise.
        gone = [
            rank
            for rank, (bits, _, again, live) in enumerate(everyone)
            if bits is False and live - again >= HIGH * self.jump[rank] > 0 and self._is_jump(rank)
        ]
        self.note("replay", "the jump is gone" if gone else "not equal to the bit, but as high", **detail)
        reasons = self._why_inexact() if gone else []
        if not gone or reasons:
            return None
        sentence = (
            f"The replay of the same step gives {losses[gone[0]]:.4f} nats on rank {gone[0]}, the step gave"
            f" {everyone[gone[0]][3]:.4f}: its computation went wrong once."
        )
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [f"rank:{r}" for r in gone],
            sentence,
            since=self.record.step,
            reproducible=False,
        )

    def _live_loss(self, result: ReplayResult) -> float:
        """Mean of the live losses of the micro-batches that were replayed."""
        live = self.context.scratch.get("live_losses") or []
        chosen = [float(live[i]) for i in result.micro_batches if i < len(live)]
        return sum(chosen) / len(chosen) if chosen else math.nan
