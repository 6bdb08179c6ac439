"""The comparisons as tables of numbers: what is impossible is named, what is merely unusual is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sentinel.record import SIGNALS, StepRecord, source_signals
from lightning_sentinel.state.fingerprint import fingerprints, parted_ranks
from lightning_sentinel.triage import experiments as ex


def _rates(factors: list[float], planned: float | None = 0.1) -> list[Any]:
    return [(s, None if planned is None else (planned,), (0.1 * f,)) for s, f in enumerate(factors)]


@pytest.mark.parametrize(
    ("factors", "since", "expected"),
    [
        ([1.0] * 30, 29, None),
        ([1.0] * 20 + [50.0] * 3 + [1.0] * 2, 22, (20, 22, 50.0)),  # the loss shows it two steps later
        ([1.0] * 20 + [50.0], 20, (20, 20, 50.0)),
        ([1.0] * 20 + [1.2] * 5, 22, None),  # too little to be the cause of a jump
        ([0.5, 2.0] * 12, 23, None),  # somebody edits the rate all the time
        ([1.0] * 10 + [50.0] + [1.0] * 20, 30, None),  # long over
        ([50.0] * 5, 3, None),  # no healthy past to compare with
    ],
)
def test_rate_off_plan(factors: list[float], since: int, expected: tuple[int, int, float] | None) -> None:
    found = ex.rate_off_plan(_rates(factors), since, len(factors) - 1)
    assert (None if found is None else (found.since_step, found.last_step, pytest.approx(found.factor))) == expected


def test_a_rate_without_a_schedule_is_compared_with_its_own_past() -> None:
    found = ex.rate_off_plan(_rates([1.0] * 20 + [50.0] * 3, planned=None), 21, 22)
    assert found is not None
    assert (found.since_step, found.factor) == (20, pytest.approx(50.0))
    assert ex.rate_off_plan(_rates([1.0] * 20 + [1.5] * 3, planned=None), 21, 22) is None


class _Run:
    """AdamW on a few parameters, with a snapshot every ten steps and a record of every step."""

    def __init__(self, steps: int = 20) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), 1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        self.snapshots: list[Any] = []
        self.history: list[StepRecord] = []
        self.rates: list[Any] = []
        for step in range(steps):
            self.step(step)

    def step(self, step: int) -> None:
        if step % 10 == 0:
            self.snapshots.append(self.snapshot(step))
        self.optimizer.zero_grad()
        self.module(torch.randn(4, 8)).square().mean().backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters()]))
        self.history.append(StepRecord.from_losses(step, [1.0], grad_norm=norm))
        self.rates.append((step, (1e-2,), (1e-2,)))
        self.optimizer.step()

    def snapshot(self, step: int) -> Any:
        state = {i: {k: v.clone() for k, v in s.items()} for i, s in self.optimizer.state_dict()["state"].items()}
        params = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        return SimpleNamespace(step=step, mid_accumulation=False, params=params, optimizers=[{"state": state}])

    def moments(self, step: int = 20) -> ex.StateViolation | None:
        points = ex.state_points(self.snapshots, self.optimizer, 0, self.module, step)
        return ex.impossible_moments(points, self.optimizer, self.history)

    def weights(self, step: int = 20) -> ex.StateViolation | None:
        points = ex.state_points(self.snapshots, self.optimizer, 0, self.module, step)
        return ex.impossible_weights(points, self.optimizer, self.module, self.rates)


def test_a_healthy_optimizer_is_within_its_bounds() -> None:
    run = _Run()
    assert [p.step for p in ex.state_points(run.snapshots, run.optimizer, 0, run.module, 20)] == [0, 10, 20]
    assert run.moments() is None
    assert run.weights() is None


@pytest.mark.parametrize(
    ("key", "change", "name", "elements"),
    [
        ("exp_avg_sq", lambda v: v.fill_(1e-14), "exp_avg_sq", 64),
        ("exp_avg_sq", lambda v: v[3, 3].mul_(1e-6), "exp_avg_sq", 1),
        ("exp_avg_sq", lambda v: v[0, 0].fill_(1e6), "exp_avg_sq", 1),
        ("exp_avg_sq", lambda v: v[2].neg_(), "exp_avg_sq", 8),
        ("exp_avg", lambda m: m[0].fill_(100.0), "exp_avg", 8),
    ],
)
def test_moments_that_updates_cannot_have_made(key: str, change: Any, name: str, elements: int) -> None:
    run = _Run()
    change(run.optimizer.state[run.module.weight][key])
    found = run.moments()
    assert found is not None
    assert (found.name, found.since_step, found.elements) == (name, 10, elements)


def test_an_older_corruption_leads_to_the_snapshot_before_it() -> None:
    run = _Run(steps=20)
    run.optimizer.state[run.module.weight]["exp_avg_sq"].fill_(1e-14)
    for step in range(20, 30):
        run.step(step)
    found = run.moments(step=30)
    assert found is not None
    assert found.since_step == 10  # the snapshot of step 20 is spoilt already


def test_weights_that_were_overwritten() -> None:
    run = _Run()
    run.module.weight.data[1, 1] += 3.0
    found = run.weights()
    assert found is not None
    assert (found.name, found.since_step, found.elements) == ("weight", 10, 1)


def test_weights_that_somebody_edits_as_a_habit_accuse_nobody() -> None:
    run = _Run(steps=5)
    for step in range(5, 20):
        if step in (7, 17):
            run.module.weight.data[1, 1] += 3.0
        run.step(step)
    assert run.weights() is None


def test_replicas_by_majority_and_without_one() -> None:
    module = nn.Linear(4, 4)
    names, table = fingerprints(module.named_parameters(), torch.device("cpu"))
    module.weight.data[0, 0] = -module.weight.data[0, 0]
    _, other = fingerprints(module.named_parameters(), torch.device("cpu"))
    assert names == ["weight", "bias"]
    assert parted_ranks(torch.stack([table, table])) == ([], [])
    assert parted_ranks(torch.stack([table, table, other])) == ([2], [0])
    assert parted_ranks(torch.stack([table, other])) == ([0, 1], [0])


def test_two_exchanged_values_change_the_fingerprint() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    tables = [fingerprints([("p", t)], torch.device("cpu"))[1] for t in (a, b)]
    assert not torch.equal(*tables)


def _mixture(step: int, prose: float, code: float) -> StepRecord:
    signals = SIGNALS + source_signals(("prose", "code"))
    record = StepRecord.from_losses(step, [(prose + code) / 2])
    values = torch.zeros(1, len(signals)).numpy().astype("float64")
    values[:, : len(SIGNALS)] = record.values
    values[0, len(SIGNALS) :] = [prose, 100.0, code, 100.0]
    return StepRecord(step=step, values=values, signals=signals)


@pytest.mark.parametrize(
    ("prose", "code", "expected"),
    [(2.05, 2.05, None), (2.05, 3.15, "code"), (3.15, 2.05, "prose"), (3.15, 3.15, None), (2.05, 2.1, None)],
)
def test_the_source_that_moved_alone(prose: float, code: float, expected: str | None) -> None:
    noise = [0.02, -0.03, 0.01, -0.01, 0.03]
    records = [_mixture(s, 2.05 + noise[s % 5], 2.05 - noise[s % 5]) for s in range(40)]
    records += [_mixture(40 + i, prose + noise[i], code - noise[i]) for i in range(4)]
    lone = ex.lone_source(ex.source_shifts(records, since_step=40))
    assert (lone.source if lone else None) == expected


def test_two_values_since_are_too_few_for_a_source() -> None:
    records = [_mixture(s, 2.0, 2.0) for s in range(40)] + [_mixture(40, 2.0, 3.0), _mixture(41, 2.0, 3.0)]
    assert ex.source_shifts(records, since_step=40) == []


def test_the_level_follows_a_falling_loss() -> None:
    level, spread = ex.level_before([4.0 - 0.02 * i for i in range(48)])
    assert level == pytest.approx(4.0 - 0.02 * 47, abs=0.01)
    assert spread < 0.03
