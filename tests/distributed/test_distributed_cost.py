"""What docs/distributed.md says that one bad rank costs, counted in steps and forward passes of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
from sentinel_kit import Loader, Net, make_trainer

from lightning_sentinel import IncidentResponse, Rollback, RunJournal, default_callbacks
from lightning_sentinel.journal import read_journal

STEPS = 60
REPLAYS = 12  # forward passes of one investigation, at most
PROBATION = 20


class Counting(Net):
    forwards: ClassVar[list[int]] = []  # of the class: a replay puts back what the module holds

    def forward(self, x: Any) -> Any:
        self.forwards.append(self.trainer.global_step)
        return super().forward(x)


@pytest.mark.parametrize(
    ("answer", "every", "bad", "again"),
    [
        ("retry_step", 25, 49, 1),
        ("rollback_replay", 25, 49, 25),  # the worst of 25
        ("rollback_replay", 10, 39, 30),  # less than a probation apart: the candidate on probation is not given up
        ("skip_step", 25, 49, 0),
    ],
)
def test_what_a_bad_step_costs(answer: str, every: int, bad: int, again: int, tmp_path: Path) -> None:
    """A retry: one step again; a rollback: the steps since its restore point; a skip: one update."""
    once = answer != "skip_step"
    ladders = {"infrastructure/transient": [answer, "stop"]} if once else None
    own = {
        RunJournal: RunJournal(tmp_path, report=False),
        IncidentResponse: IncidentResponse("recover", ladders=ladders, probation_steps=PROBATION),
        Rollback: Rollback(every_n_steps=every),
    }
    L.seed_everything(2, verbose=False)
    Counting.forwards.clear()
    module = Counting(gains={bad: float("nan")}, once=once)
    trainer, _ = make_trainer([own.get(type(c), c) for c in default_callbacks()], max_steps=STEPS)
    trainer.fit(module, Loader())

    events = read_journal(tmp_path)
    steps = [e for e in events if e["event"] == "step"]
    assert len(steps) == STEPS + again
    back = [(e["action"], e["from_step"] - e["to_step"] + 1) for e in events if e["event"] == "action.rollback"]
    assert back == ([(answer, again)] if once else [])
    assert again <= max(every, every + PROBATION if every < PROBATION else 0)
    applied = {e["step"]: e["applied"] for e in steps}  # the last time counts
    assert [step for step, kept in applied.items() if not kept] == ([] if once else [bad])
    replays = len(Counting.forwards) - len(steps)
    assert 0 < replays <= REPLAYS
