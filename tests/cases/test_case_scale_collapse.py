"""Public case pytorch#40497: a permanent fp16 overflow, hundreds of steps without an update, and no error."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from sentinel_kit import make_trainer
from triage_matrix.faults import FFN, Fp16Overflow
from triage_matrix.run import suite

from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import FindingKind, VerdictKind
from lightning_sentinel.state.lightning_private import scaler_of


class Permanent(Fp16Overflow):
    """The gradient at one module leaves the range of float16 in every step."""

    duration = None


def test_a_scale_that_collapses_is_an_incident_and_the_module_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Permanent(0)
        module = case.world()
        before: dict[int, Any] = {}
        trainer, sink = make_trainer([case, *suite()], max_steps=case.at + 24, **case.options())
        trainer.fit(module, case.loader())
    incidents = context_of(trainer).incidents
    [collapse] = [f for f in incidents[0].findings if f.kind is FindingKind.SCALE_COLLAPSE][:1]
    assert case.at <= collapse.step <= case.at + 12
    assert collapse.since_step == case.at
    assert incidents[0].verdict.kind is VerdictKind.NUMERICS
    assert incidents[0].verdict.culprits == (f"module:{FFN}",)
    unapplied = [e["step"] for e in sink.steps() if not e["applied"]]
    assert unapplied == list(range(case.at, case.at + 24))
    scaler = scaler_of(trainer)
    assert scaler is not None
    assert scaler.get_scale() < 2.0**10
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert before == {}
