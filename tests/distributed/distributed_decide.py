"""Prints what one rank decides on thousands of random matrices: ``python distributed_decide.py RANK STREAMS STEPS``.

The matrices are the same for every rank; whatever may differ between ranks (the process, its hash seed, its own sample ids,
its clock) does differ.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from lightning_sentinel import (
    DivergenceDetector,
    LossScaleMonitor,
    RankOutlierDetector,
    SpikeDetector,
)
from lightning_sentinel.detectors import NonFinite
from lightning_sentinel.incidents import Action, Severity, Verdict, VerdictKind
from lightning_sentinel.policy import Policy, Situation, case_of
from lightning_sentinel.record import SIGNAL_INDEX, SIGNALS, StepRecord, source_signals

SOURCES = ("prose", "code")


def matrices(stream: int, steps: int) -> Any:
    """A run of random shape: ranks, noise, and now and then anything that a rank can send."""
    draw = np.random.default_rng([17, stream])
    ranks = int(draw.choice([1, 2, 3, 4, 8, 33]))
    signals = (*SIGNALS, *(source_signals(SOURCES) if stream % 2 else ()))
    sigma, offsets = draw.uniform(0.01, 0.3), 0.2 * draw.standard_normal(ranks)
    for step in range(steps):
        values = np.zeros((ranks, len(signals)))
        column = SIGNAL_INDEX
        values[:, column["loss_nats"]] = 2 + 3 / (1 + step) ** 0.4 + offsets + sigma * draw.standard_normal(ranks)
        values[:, column["supervised_tokens"]] = draw.integers(0, 5, ranks) * 256
        values[:, column["tokens"]] = 1024
        values[:, column["grad_norm"]] = abs(1 + draw.standard_normal(ranks))
        values[:, column["update_norm"]] = np.nan if draw.random() < 0.5 else 0.1
        values[:, column["loss_scale"]] = 2.0 ** draw.integers(0, 17)
        values[:, column["step_seconds"]] = abs(0.1 + 0.01 * draw.standard_normal(ranks))
        values[:, len(SIGNALS) :] = abs(draw.standard_normal((ranks, len(signals) - len(SIGNALS))))
        if draw.random() < 0.15:
            rank, what = int(draw.integers(ranks)), draw.integers(6)
            if what == 0:
                values[rank, column["loss_nats"]] = draw.choice([np.nan, np.inf, -np.inf, 40.0, 1e30])
            elif what == 1:
                values[rank, column["grad_norm"]] = draw.choice([np.nan, np.inf, 0.0, 1e20])
                values[rank, column["nonfinite_grads"]] = 1
            elif what == 2:
                values[rank, column["supervised_tokens"]] = 0
                values[rank, column["loss_nats"]] = np.nan
            elif what == 3:
                values[rank, column["step_seconds"]] *= 5
            elif what == 4:
                values[:, column["loss_nats"]] += draw.uniform(0, 8)
            else:
                values[:, column["missing_grads"]] = 1
            values[:, column["nonfinite_loss"]] = ~np.isfinite(values[:, column["loss_nats"]])
        yield step, values, signals, draw


def decisions(rank: int, stream: int, steps: int) -> list[Any]:
    callbacks = [NonFinite(), SpikeDetector(), DivergenceDetector(), RankOutlierDetector(), LossScaleMonitor()]
    policy = Policy(mode="recover")
    taken: list[Any] = []
    repetition = 0
    for step, values, signals, draw in matrices(stream, steps):
        own = tuple(f"rank{rank}/{step}/{i}" for i in range(3))
        record = StepRecord(step=step, values=values, signals=signals, tokens=step * 1024, sample_ids=own)
        findings = [f for c in callbacks for f in c.observe(record)]
        taken += [f.to_dict() for f in findings]
        serious = [f for f in findings if f.severity is Severity.INCIDENT]
        chosen = draw.integers(5, size=2)  # drawn whether or not it is needed: the stream is everybody's
        if serious:
            kinds = {f.kind for f in serious}
            culprits = tuple(dict.fromkeys(c for f in serious for c in (*f.culprits, *(f"rank:{r}" for r in f.ranks))))
            verdict = Verdict(kind=list(VerdictKind)[int(chosen[0])], culprits=culprits, sentence="")
            situation = Situation(
                case=case_of(verdict, kinds, scaled=bool(step % 2)),
                repetition=repetition % 5,
                step_is_held=True,
                nonfinite=record.has_nonfinite,
                unavailable={Action.ROLLBACK_REPLAY: "no cursor"} if chosen[1] == 0 else {},
            )
            choice = policy.choose(situation)
            taken.append([str(choice.action), choice.reason, list(choice.passed_over)])
            repetition += 1
    return taken


def main() -> None:
    rank, streams, steps = (int(x) for x in sys.argv[1:])
    lines = []
    for stream in range(streams):
        taken = decisions(rank, stream, steps)
        text = json.dumps(taken, sort_keys=True, default=str)
        lines.append([hashlib.sha256(text.encode()).hexdigest(), len(taken)])
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
