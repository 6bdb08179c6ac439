"""The same step again: equal to the bit, or not."""

from __future__ import annotations

import math

from ...incidents import Verdict, VerdictKind
from ..ladder import HIGH
from ..replay import ReplayResult
from ..tokens import NOT_HEARD_COMPILED
from .computation import Computation

REPEATS = 2  # further replays that tell a one-off from a rank that wavers


class Replayed(Computation):
    """Same weights, same micro-batches, same random states, on every rank."""

    def replay_step(self) -> Verdict | None:
        """The same step again: equal to the bit, or not."""
        if not self.affords(self._forwards(tokens=True), "replay"):
            return None
        self.main = result = self._replay("replay", keep_grads=True, tokens=True)
        if result is None:
            return None
        self._listen(result)
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
        again = self._again()
        noise = self._noise()
        live = [x for _, _, _, x in everyone]
        spread = [max(column) - min(column) for column in zip(losses, *again, strict=True)]
        steady = [r for r in range(self.peers.size) if equal[r]]
        # One healthy step is one draw of the noise; where nobody is steady, the replays of this step are further ones.
        doubt = [float(n) if steady else max(float(n), w) for n, w in zip(noise, spread, strict=True)]
        # Only a difference that makes up for the jump convicts, and only beyond the noise of replays.
        gone = [
            r
            for r in range(self.peers.size)
            if equal[r] is False
            and live[r] - losses[r] >= max(HIGH * float(self.jump[r]), 4.0 * doubt[r])
            and self._is_jump(r)
        ]
        wavering = [r for r, width in enumerate(spread) if equal[r] is False and width > 4.0 * noise[r]]
        detail |= {"again": again, "noise": noise, "spread": spread}
        outcome = "the jump is gone" if gone else "not equal to the bit, but as high"
        self.note("replay", outcome, one_off=[r for r in gone if r not in wavering], wavering=wavering, **detail)
        # Without a rank that gives the same each time, a computation that wavers is judged by a healthy step (see there).
        flaky = [r for r in wavering if steady and r not in gone and self._is_jump(r)]
        if not (gone or flaky) or self._why_inexact():
            return None
        if flaky and not gone:
            sentence = (
                f"Rank {', '.join(map(str, flaky))} gives another loss every time the same step is computed (within"
                f" {max(spread[r] for r in flaky):.4g} nats); rank {steady[0]} gives its own to the bit."
            )
            return self.verdict(
                VerdictKind.INFRASTRUCTURE, [f"rank:{r}" for r in flaky], sentence, reproducible=False, spread=spread
            )
        once = gone[0] not in wavering
        how = f"went wrong once; {1 + len(again)} replays agree" if once else "gives something else each time"
        sentence = (
            f"The replay of the same step gives {losses[gone[0]]:.4f} nats on rank {gone[0]}, the step gave"
            f" {live[gone[0]]:.4f}: its computation {how}."
        )
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [f"rank:{r}" for r in gone],
            sentence,
            since=self.record.step,
            reproducible=False,
            one_off=once,
        )

    def _listen(self, result: ReplayResult) -> None:
        """Hear the tokens' losses in the eager form of a step whose loss is computed in compiled code."""
        name = "replay in eager form"
        deaf = result.no_tokens == NOT_HEARD_COMPILED
        if not self.peers.any(deaf) or not self.affords(1, name):
            return
        heard = self._replay(name, tokens=True, backward=False, eager=True)
        if heard is not None:
            result.tokens, result.no_tokens = heard.tokens, heard.no_tokens
            result.activation_rms = heard.activation_rms
            self.note(name, "for the losses of single tokens", loss=heard.loss)

    def _again(self) -> list[list[float]]:
        """Losses by rank of further replays of the step, forward only."""
        found = []
        for _ in range(REPEATS):
            if not self.affords(1, "replay once more"):
                break
            result = self._replay("replay once more", backward=False)
            if result is None:
                break
            found.append(self.peers.gather(result.loss))
        return found

    def _noise(self) -> list[float]:
        """By rank: how far the replay of a healthy step of this run is from that step, in nats; 0 where not known."""
        anchored = self.anchor()
        if anchored is None:
            return [0.0] * self.peers.size
        return [abs(float(c)) if math.isfinite(c) else 0.0 for c in anchored.changes]

    def _live_loss(self, result: ReplayResult) -> float:
        """Mean of the live losses of the micro-batches that were replayed."""
        live = self.context.scratch.get("live_losses") or []
        chosen = [float(live[i]) for i in result.micro_batches if i < len(live)]
        return sum(chosen) / len(chosen) if chosen else math.nan
