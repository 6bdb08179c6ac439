"""Two processes; in one experiment after the other, rank 1 alone fails where it computes. Both write down what came of it.

Usage: ``python triage_one_fails.py FOLDER``. Lightning starts the second rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler
from triage_models import Net, Samples, collate, one_of_two_ranks

from lightning_sentinel import NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident
from lightning_sentinel.state.snapshot import take
from lightning_sentinel.triage import experiments, nonfinite
from lightning_sentinel.triage.causes import comparisons, computation, damage
from lightning_sentinel.triage.nonfinite import _Local, _reduces_badly
from lightning_sentinel.triage.verdict import Investigation
from lightning_sentinel.triage.window import MicroBatch

SNAPSHOT, STEP = 8, 14


class NoRoomError(RuntimeError):
    pass


def fails(*args: Any, **kwargs: Any) -> Any:
    raise NoRoomError("no room")


def others(case: Investigation) -> list[tuple[str, str, torch.Tensor]]:
    """Parts of a snapshot, as those that a cure puts back."""
    return [(n, "parameter", p) for n, p in (case.snapshots[-1].params or {}).items()]


def kept(case: Investigation) -> Any:
    case.trainer.optimizers[0].param_groups[0]["params"].pop()  # a parameter that no optimizer moves
    return case._kept_state(case.snapshots[-1], 1.0, STEP)


def reduced(case: Investigation) -> Any:
    """What the ranks' gradients give when they are reduced again."""
    grads = {"weight": torch.ones(3)}
    everyone = [_Local(None, (), True, False, None, "", "", 0.0, 1, "weight:3")] * 2
    return _reduces_badly(case.module, case.peers, everyone, grads)


# By name: what is called on every rank, and what fails in it on rank 1 (object and name of its attribute).
CALLS: dict[str, tuple[Callable[[Investigation], Any], Any, str]] = {
    "size of the update": (lambda c: c._step_size(c.snapshots[-1], STEP), experiments, "update_size"),
    "stride": (lambda c: c._step_size(c.snapshots[-1], SNAPSHOT), experiments, "stride_between"),
    "parts that moved": (lambda c: c._ranks_with_another(others(c)), damage, "local"),
    "parts that no optimizer moves": (kept, damage, "_differs"),
    "finite difference": (lambda c: c._slope("finite difference"), torch.Tensor, "square"),
    "another rank's batch": (lambda c: c._elsewhere(0), computation, "tensors"),
    "first module that has parted": (
        lambda c: c._first_parted(c.context.window, c.main, [1]),
        computation,
        "PARTED",
    ),
    "token losses": (lambda c: c.comparisons(), comparisons.Comparisons, "_token_losses"),
    "input manifest": (lambda c: c.comparisons(), comparisons, "_described"),
    "fidelity": (lambda c: c._why_inexact(), MicroBatch, "changed_in_place"),
    "the reduction again": (reduced, nonfinite, "is_bad"),
}


@contextmanager
def failing_on_rank_1(case: Investigation, owner: Any, name: str) -> Iterator[None]:
    if case.peers.rank != 1:
        yield
        return
    broken: Any = fails
    if name == "changed_in_place":
        broken = property(fails)
    if name == "PARTED":
        broken = "no number"  # the comparison itself fails
    with mock.patch.object(owner, name, broken):
        yield


class Court(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SNAPSHOT:
            context_of(trainer).snapshots.append(take(trainer))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step != STEP:
            return
        record = context_of(trainer).record
        finding = Finding(FindingKind.SPIKE, "test", STEP, 1.0, 0.0, "seen")
        results = {}
        for name, (call, owner, attribute) in CALLS.items():
            incident = Incident(1, STEP, STEP, 0, 0, findings=[finding])
            case = Investigation(trainer, pl_module, optimizer, incident, record, 100, 600.0)
            assert case.replay_step() is None
            assert case.main is not None
            if name == "first module that has parted":
                case.context.window.boundary_flags = [(i, p, 1.0) for i, p, _ in case.main.sums]
            before = len(case.experiments)
            with failing_on_rank_1(case, owner, attribute):
                answer = call(case)
            # The next exchange must be the same one on both ranks.
            met = case.peers.gather(name)
            results[name] = {
                "met": met,
                "answer": repr(answer) if not isinstance(answer, dict) else answer,
                "experiments": [e.to_dict() for e in case.experiments[before:]],
            }
        Path(sys.argv[1], f"one-{trainer.global_rank}.json").write_text(json.dumps(results, default=str))


def main() -> None:
    trainer = one_of_two_ranks(
        [NonFiniteTracer(["blocks.*"]), RankTelemetry(), Court()],
        STEP + 1,
        use_distributed_sampler=False,
    )
    sampler = DistributedSampler(Samples("", 128, 0), 2, trainer.global_rank, shuffle=False)
    trainer.fit(Net(), DataLoader(Samples("", 128, 0), batch_size=4, sampler=sampler, collate_fn=collate))


if __name__ == "__main__":
    main()
