"""RankOutlier: which rank, from 2 ranks to thousands."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.detectors import RankOutlier
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.record import SIGNAL_INDEX, StepRecord

SIGMA = 0.05


def losses_of(ranks, steps, seed=0, offset=0.1):
    rng = np.random.default_rng(seed)
    offsets = offset * rng.standard_normal(ranks)
    trend = 2.0 + 2.0 * (1 + np.arange(steps)) ** -0.3
    return trend[:, None] + offsets + SIGMA * rng.standard_normal((steps, ranks))


def feed(detector, losses, start=0, **kwargs):
    found = []
    for i, row in enumerate(losses):
        found += detector.observe(StepRecord.from_losses(start + i, row.tolist(), **kwargs))
    return found


@pytest.mark.parametrize(("ranks", "mean"), [(64, 2.594), (1024, 2.037)])
@pytest.mark.parametrize("history", [0, 3, 100])
def test_one_rank_at_40_is_named_at_that_step(ranks, mean, history):
    detector = RankOutlier()
    assert feed(detector, np.full((history, ranks), 2.0)) == []
    row = np.full((1, ranks), 2.0)
    row[0, 41] = 40.0
    [finding] = feed(detector, row, start=history)
    assert (finding.kind, finding.step, finding.ranks, finding.culprits) == (
        FindingKind.RANK_OUTLIER,
        history,
        (41,),
        ("rank:41",),
    )
    assert finding.evidence["mean"] == pytest.approx(mean, abs=5e-4)
    assert f"Rank 41 is at loss 40.0000 at step {history}" in finding.message


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("at", [6, 60])
def test_two_ranks_are_judged_against_their_own_history(bad, at):
    losses = losses_of(2, at + 1)
    losses[at, bad] = 40.0
    [finding] = feed(RankOutlier(), losses)
    assert (finding.step, finding.ranks) == (at, (bad,))


def test_two_ranks_that_rise_together_are_no_outlier():
    losses = losses_of(2, 80)
    losses[60:] += 3.0
    assert feed(RankOutlier(), losses) == []


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_with_their_own_data_raise_nothing(ranks):
    assert feed(RankOutlier(), losses_of(ranks, 3000, offset=0.3)) == []


@pytest.mark.parametrize(("height", "least"), [(5, 0.9), (10, 1.0)])
@pytest.mark.parametrize("ranks", [8, 256])
def test_a_bad_rank_is_named_within_three_steps(ranks, height, least):
    hits = 0
    for seed in range(20):
        losses = losses_of(ranks, 123, seed)
        losses[120:, 5] += height * SIGMA
        found = feed(RankOutlier(), losses)
        assert all(f.ranks == (5,) and f.step >= 120 for f in found)
        hits += bool(found)
    assert hits >= least * 20


@pytest.mark.parametrize("ranks", [4, 8])
def test_clean_starts_of_heavy_noise_name_nobody(ranks):
    """Three squared errors a rank: some rank is 10 sigma of the others' spread away in every tenth step.

    Without history, and in the 24 steps in which the history is just long enough.
    """
    rng = np.random.default_rng(0)
    named = [feed(RankOutlier(), rng.chisquare(1, (40, ranks, 3)).mean(axis=-1)) for _ in range(200)]
    assert sum(any(f.step < 16 for f in found) for found in named) <= 2
    assert sum(any(f.step >= 16 for f in found) for found in named) <= 4


@pytest.mark.parametrize(("level", "sigma"), [(2.0, 0.17), (10.8, 0.02)])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_40_on_one_of_four_ranks_is_named_without_history(level, sigma, at):
    rng = np.random.default_rng(1)
    for _ in range(30):
        losses = level + sigma * rng.standard_normal((at + 1, 4))
        losses[at, 2] = 40.0
        [finding] = feed(RankOutlier(), losses)
        assert (finding.step, finding.ranks) == (at, (2,))


def test_two_bad_ranks_at_the_start_do_not_excuse_each_other():
    losses = 2.0 + 0.1 * np.random.default_rng(2).standard_normal((1, 16))
    losses[0, [3, 9]] = 40.0, 39.0
    [finding] = feed(RankOutlier(), losses)
    assert finding.ranks == (3, 9)


def test_losses_below_zero_are_judged_once_there_is_history():
    losses = -5.0 + 0.1 * np.random.default_rng(3).standard_normal((40, 8))
    losses[3, 1] = losses[30, 1] = 40.0
    [finding] = feed(RankOutlier(), losses)
    assert (finding.step, finding.ranks) == (30, (1,))


def test_named_once_for_as_long_as_it_stays_away():
    losses = losses_of(8, 160)
    losses[120:130, 3] += 1.0
    losses[145:, 3] += 1.0
    assert [f.step for f in feed(RankOutlier(), losses)] == [120, 145]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(6)))
def test_the_order_of_the_ranks_does_not_matter(order):
    losses = losses_of(6, 60)
    losses[40:, 2] += 1.0
    [plain] = feed(RankOutlier(), losses)
    [moved] = feed(RankOutlier(), losses[:, list(order)])
    assert plain.ranks == (2,)
    assert moved.ranks == (order.index(2),)
    assert moved.score == pytest.approx(plain.score)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 79))
def test_state_round_trip_in_mid_stream(cut):
    losses = losses_of(6, 80)
    losses[50:55, 2] += 1.0
    losses[70, 4] = math.nan
    whole = RankOutlier()
    feed(whole, losses[:cut])
    state = copy.deepcopy(whole.state_dict())
    rest = feed(whole, losses[cut:], start=cut)
    other = RankOutlier()
    other.load_state_dict(state)
    assert feed(other, losses[cut:], start=cut) == rest


def test_few_tokens_excuse_noise():
    rng = np.random.default_rng(0)
    tokens = np.full(8, 1600.0)
    tokens[7] = 100.0
    losses = 2.0 + SIGMA * rng.standard_normal((400, 8)) * np.sqrt(1600.0 / tokens)
    assert feed(RankOutlier(), losses, supervised_tokens=tokens.tolist()) == []


def test_a_rank_without_tokens_is_left_out():
    losses = losses_of(4, 60)
    losses[:, 1] = 99.0
    tokens = [1.0, 0.0, 1.0, 1.0]
    assert feed(RankOutlier(), losses, supervised_tokens=tokens) == []


def times(step, busy, wait):
    record = StepRecord.from_losses(step, [2.0] * len(busy))
    record.values[:, SIGNAL_INDEX["step_seconds"]] = np.array(busy) + np.array(wait)
    record.values[:, SIGNAL_INDEX["data_seconds"]] = wait
    return record


def test_a_straggler_computes_slowly_step_after_step():
    detector = RankOutlier()
    found = []
    for step in range(40):
        slow = 0.35 if step >= 10 else 0.2
        found += detector.observe(times(step, [0.2, 0.2, slow, 0.2], [0.0, 1.0, 0.0, 0.0]))
    [finding] = found
    assert (str(finding.kind), str(finding.severity)) == ("straggler", "alarm")
    assert (finding.step, finding.since_step, finding.ranks) == (29, 10, (2,))
    assert finding.score == pytest.approx(1.75)


def test_who_waits_for_a_slow_rank_is_not_slow():
    """Four ranks that take the same wall time for each step: one computes, three wait for it."""
    detector, found = RankOutlier(), []
    for step in range(40):
        record = times(step, [0.5] * 4, [0.1] * 4)
        record.values[:, SIGNAL_INDEX["wait_seconds"]] = [0.3, 0.0, 0.3, 0.3] if step >= 10 else 0.3
        found += detector.observe(record)
    [finding] = found
    assert (str(finding.kind), finding.step, finding.ranks) == ("straggler", 29, (1,))
    assert finding.score == pytest.approx(2.5)
    assert (finding.evidence["wait_seconds"], finding.evidence["median_wait_seconds"]) == (0.0, 0.3)


def waited(step, busy, data, wait):
    record = times(step, busy, np.zeros(len(busy)))
    record.values[:, SIGNAL_INDEX["step_seconds"]] = np.array(busy) + np.array(data) + np.array(wait)
    record.values[:, SIGNAL_INDEX["data_seconds"]] = data
    record.values[:, SIGNAL_INDEX["wait_seconds"]] = wait
    return record


@pytest.mark.parametrize(
    ("busy", "data", "wait", "severity", "part"),
    [
        ([0.05, 0.1], [0.0, 0.0], [0.05, 0.0], "incident", "compute"),  # of two ranks the quicker one is the measure
        ([0.05, 0.05], [0.0, 0.1], [0.1, 0.0], "incident", "data"),  # late because its data is late
        ([0.05, 0.05], [0.0, 0.1], [0.0, 0.0], None, ""),  # nobody waits for it: no reduction in between
        ([0.05, 0.05], [0.1, 0.0], [0.0, 0.0], None, ""),
        ([0.05, 0.1], [0.0, 0.0], [0.0, 0.0], "alarm", "compute"),  # slow, but nobody was seen to wait
        ([0.005, 0.01], [0.0, 0.0], [0.005, 0.0], "alarm", "compute"),  # a few milliseconds
        ([0.05, 0.06], [0.0, 0.0], [0.01, 0.0], None, ""),
    ],
)
def test_a_rank_that_the_others_wait_for_is_an_incident(busy, data, wait, severity, part):
    detector, found = RankOutlier(), []
    for step in range(40):
        found += detector.observe(waited(step, busy, data, wait))
    assert [str(f.severity) for f in found] == [severity] * (severity is not None)
    for f in found:
        assert (f.step, f.since_step, f.culprits) == (19, 0, ("rank:1",))
        late = {k: f.evidence[f"{k}_seconds"] - f.evidence[f"median_{k}_seconds"] for k in ("compute", "data")}
        assert max(late, key=late.__getitem__) == part
        assert ("needs" in f.message) is (part == "data")


def test_the_count_of_slow_steps_goes_round():
    detector = RankOutlier()
    for step in range(19):
        assert detector.observe(waited(step, [0.05, 0.1], [0.0, 0.0], [0.05, 0.0])) == []
    again = RankOutlier()
    again.load_state_dict(detector.state_dict())
    [finding] = again.observe(waited(19, [0.05, 0.1], [0.0, 0.0], [0.05, 0.0]))
    assert (finding.since_step, str(finding.severity)) == (0, "incident")


def test_one_rank_is_silent():
    assert feed(RankOutlier(), np.array([[2.0], [90.0]])) == []
